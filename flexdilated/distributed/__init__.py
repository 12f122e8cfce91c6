"""Attention over sequences that lie on many ranks, on torch.distributed."""

from ._pool import BufferPool
from ._pools import pool_for as pool
from ._sharding import Sharding
from ._traffic import Traffic, traffic

__all__ = ["BufferPool", "Sharding", "Traffic", "pool", "traffic"]
