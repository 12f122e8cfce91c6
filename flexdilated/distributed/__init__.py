"""Attention over sequences whose tokens are distributed over ranks, on torch.distributed."""

from typing import NoReturn as _NoReturn

from ..masks.core import no_such_name as _no_such_name
from ._attend import attend
from .group import Sharding, Traffic, shard, traffic, unshard
from .wire import BufferPool
from .wire import pool_for as pool

__all__ = ["BufferPool", "Sharding", "Traffic", "attend", "pool", "shard", "traffic", "unshard"]


def __getattr__(name: str) -> _NoReturn:
    """Raise AttributeError; its text names what to write instead, if that is known."""
    elsewhere: dict[str, str] = dict.fromkeys(
        ("ring_attention", "context_parallel", "ulysses"), "attend(q, k, v, pattern, mesh=)"
    )
    raise AttributeError(_no_such_name(__name__, name, __all__, elsewhere, "fd.distributed."))
