"""Attention over sequences that lie on many ranks, on torch.distributed."""

from ._attend import attend
from .group import Sharding, Traffic, shard, traffic, unshard
from .wire import BufferPool
from .wire import pool_for as pool

__all__ = ["BufferPool", "Sharding", "Traffic", "attend", "pool", "shard", "traffic", "unshard"]
