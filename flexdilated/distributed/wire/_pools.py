"""The pool of each device, which leases from the size where that was measured to pay."""

from __future__ import annotations

import sys
from functools import cache
from statistics import median
from threading import Lock
from time import perf_counter
from typing import Literal

import torch

from ...masks.plan_cache import DeferredLog
from ._pool import BufferPool, lease_from, named, with_index

_PAGE = 4096
_lock = Lock()
_deferred = DeferredLog()

PoolChoice = BufferPool | Literal["auto"] | None


def name_of(pool: PoolChoice) -> str:
    """The argument `pool` of a call as a custom op can take it. Raises TypeError for anything else."""
    if isinstance(pool, BufferPool):
        return pool.name
    if pool is not None and pool != "auto":
        raise TypeError(f'pool must be None, a BufferPool or "auto"; got {pool!r}')
    return pool or ""


def pool_named(name: str, device: torch.device) -> BufferPool | None:
    """What `name_of` named. Raises RuntimeError where that pool is no more, as in a graph that has outlived it."""
    if name in ("", "auto"):
        return pool_for(device) if name else None
    pool = named.get(name)
    if pool is None:
        raise RuntimeError(f"a BufferPool must live as long as what was compiled with it; {name!r} is no more")
    return pool


def pool_for(device: torch.device | str) -> BufferPool:
    """The one pool of this device in this process. It leases from the size where that was measured to pay.

    >>> pool = fd.distributed.pool('cpu')
    """
    with _lock:  # two threads that ask at once get the same one
        pool = _pool_for(with_index(device))
    _deferred.emit()
    return pool


@cache
def _pool_for(device: torch.device) -> BufferPool:
    pool = BufferPool(device, threshold_bytes=break_even_bytes(device))
    _deferred.queue("made %r, the pool of its device: from that size a lease was measured to be quicker", pool)
    return pool


@cache
def break_even_bytes(device: torch.device) -> int:
    """The size, a power of two from 64 KiB to 64 MiB, from which a lease takes less time than a new tensor.

    By a tenth, with one write to each page, in the median of three; sys.maxsize if 64 MiB do not pay. It is measured
    when first asked for, from the largest size down, and remembered.
    """
    pool, answer = BufferPool(device, threshold_bytes=0), sys.maxsize
    for size in reversed([1 << power for power in range(16, 27)]):
        rounds = [[_seconds(lessor, size, device) for lessor in (pool, None)] for _ in range(4)]
        leased, made = (median(times) for times in zip(*rounds[1:], strict=True))
        if leased > 0.9 * made:
            break
        answer = size
    return answer


def _seconds(pool: BufferPool | None, num_bytes: int, device: torch.device) -> float:
    start = perf_counter()
    with lease_from(pool, (num_bytes,), torch.uint8, device, role="keys") as buffer:
        buffer[::_PAGE].zero_()
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
    del buffer
    return perf_counter() - start
