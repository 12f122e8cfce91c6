"""Attention over sequences that lie on many ranks, on torch.distributed."""

from ._attend import attend
from ._pool import BufferPool
from ._pools import pool_for as pool
from ._shard import shard, unshard
from ._sharding import Sharding
from ._traffic import Traffic, traffic

__all__ = ["BufferPool", "Sharding", "Traffic", "attend", "pool", "shard", "traffic", "unshard"]
