"""BufferPool: memory for messages between ranks, reused from step to step; and the argument `pool` of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import prod
from sys import maxsize
from threading import Lock
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from ...masks.core import bytes_text, device_kind

_Buffer = tuple[int, torch.device, Any, torch.UntypedStorage]  # bytes, device, stream that orders its uses, storage
_AUTO_THRESHOLD_BYTES = {"cpu": 1 << 24}  # from this size a lease saves a tenth of the time: bench/results/pool.json
_pool_ids = count()
_device_pools: dict[torch.device, BufferPool] = {}
pools_by_name: WeakValueDictionary[str, BufferPool] = WeakValueDictionary()


@dataclass
class PoolStatistics:
    """Statistics of a `BufferPool`: current and peak bytes, and counts; peaks and counts are since its last `reset`.

    Only leases with a buffer of the pool count as leases. `num_plain` counts the others, for which torch allocated.

    allocated_bytes: of all buffers, leased and idle.
    leased_bytes: requested by open leases; their buffers may be larger.
    peak_bytes: largest allocated_bytes.
    num_allocations: number of leases that needed a new buffer.
    reuse_rate: share of leases without a new buffer; 0 for no leases.
    """

    allocated_bytes: int = 0
    idle_bytes: int = 0
    leased_bytes: int = 0
    peak_bytes: int = 0
    peak_leased_bytes: int = 0
    num_leases: int = 0
    num_allocations: int = 0
    num_plain: int = 0

    @property
    def reuse_rate(self) -> float:
        return 1 - self.num_allocations / self.num_leases if self.num_leases else 0.0


class Lease:
    """A tensor that the caller may use until `release`, or until the end of a `with` block, which yields the tensor.

    After that, `tensor` raises RuntimeError.

    If a lease is garbage-collected before its release, its buffer leaves the pool, as its tensor may still be in use.
    """

    def __init__(self, tensor: Tensor, pool: BufferPool | None = None) -> None:
        self._tensor: Tensor | None = tensor
        self._pool, self._num_bytes = pool, tensor.nbytes

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            raise RuntimeError("a leased tensor may be used until its lease ends; this lease has ended")
        return self._tensor

    def release(self) -> None:
        """End the lease and give the buffer back to its pool; later calls do nothing.

        On devices with streams, the current stream must wait for all uses of the tensor: the next lease of the buffer
        waits for no other stream.
        """
        if self._pool is not None:
            self._pool._take_back(self)
        self._tensor = None

    def __repr__(self) -> str:
        whose, x = self._pool.name if self._pool else "torch", self._tensor
        return f"Lease(of {whose}, which has ended)" if x is None else f"Lease({tuple(x.shape)}, {x.dtype}, of {whose})"

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *_: object) -> None:
        self.release()


class BufferPool:
    """Pool of reusable buffers, whose sizes in bytes are powers of two. Thread-safe; no memory before the first lease.

    device: of all buffers; None serves any device.
    threshold_bytes: smaller tensors are allocated by torch, outside the pool.
    budget_bytes: bound on the memory of all buffers; None: no bound. Above it idle buffers are freed, least recently
        returned first; leases are always served, and a buffer that exceeds the budget is freed on return.

    Raises ValueError for a number of bytes that is negative or no integer.

    >>> pool = fd.distributed.BufferPool('cpu', threshold_bytes=1 << 16)
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        threshold_bytes: int = 1 << 20,
        budget_bytes: int | None = None,
    ) -> None:
        given = {"threshold_bytes": threshold_bytes} | ({} if budget_bytes is None else {"budget_bytes": budget_bytes})
        for name, number in given.items():
            if not isinstance(number, int) or number < 0:
                raise ValueError(f"{name} must be an integer, at least 0; got {number!r}")
        self.device = None if device is None else torch.empty(0, device=device).device  # resolves the device index
        self.threshold_bytes, self.budget_bytes, self.name = threshold_bytes, budget_bytes, f"pool {next(_pool_ids)}"
        self._lock, self._counts = Lock(), PoolStatistics()
        self._idle: list[_Buffer] = []  # in order of return
        self._open: WeakKeyDictionary[Lease, _Buffer] = WeakKeyDictionary()
        pools_by_name[self.name] = self

    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None) -> Lease:
        """Return a lease of a contiguous uninitialised tensor; device=None: the pool's device, or torch's default.

        Raises ValueError for a device that is not the pool's.
        """
        tensor: Any = torch.empty(0, dtype=dtype, device=device or self.device)
        if self.device not in (None, tensor.device):
            raise ValueError(f"a pool leases tensors on its own device only, {self.device}; got {tensor.device}")
        num_bytes = prod(shape) * dtype.itemsize
        with self._lock:
            if num_bytes < max(self.threshold_bytes, 1) or _is_capturing(tensor.device):
                self._counts.num_plain += 1
                return Lease(torch.empty(tuple(shape), dtype=dtype, device=tensor.device))
            buffer = self._take_buffer(1 << (num_bytes - 1).bit_length(), tensor.device)
            lease = Lease(tensor.set_(buffer[-1], 0, torch.Size(shape)), self)  # a new Tensor object for each lease
            self._open[lease] = buffer
            self._counts.num_leases += 1
            self._update_bytes()
        return lease

    def release(self) -> None:
        """Free all idle buffers."""
        with self._lock:
            self._idle.clear()

    def reset(self) -> None:
        """Restart the counts at 0 and the peaks at the bytes held and leased now. Keeps the buffers."""
        with self._lock:
            self._counts = PoolStatistics()
            self._update_bytes()

    @property
    def statistics(self) -> PoolStatistics:
        """A copy of the current statistics."""
        with self._lock:
            return replace(self._update_bytes())

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how `copy` and `pickle` make a copy: an empty pool with equal settings."""
        return partial(BufferPool, threshold_bytes=self.threshold_bytes, budget_bytes=self.budget_bytes), (self.device,)

    def __repr__(self) -> str:
        least = "never leases" if self.threshold_bytes == maxsize else f"leases from {bytes_text(self.threshold_bytes)}"
        budget = "" if self.budget_bytes is None else f", budget {bytes_text(self.budget_bytes)}"
        where, now = self.device or "any device", self.statistics
        held, leased = bytes_text(now.allocated_bytes), bytes_text(now.leased_bytes)
        return f"BufferPool({self.name}, {where}, {least}{budget}: holds {held}, of which {leased} are leased)"

    def _update_bytes(self) -> PoolStatistics:
        now, leased = self._counts, list(self._open.items())
        now.idle_bytes = sum(num_bytes for num_bytes, *_ in self._idle)
        now.allocated_bytes = now.idle_bytes + sum(num_bytes for _, (num_bytes, *_) in leased)
        now.leased_bytes = sum(lease._num_bytes for lease, _ in leased)
        now.peak_bytes = max(now.peak_bytes, now.allocated_bytes)
        now.peak_leased_bytes = max(now.peak_leased_bytes, now.leased_bytes)
        return now

    def _take_buffer(self, num_bytes: int, device: torch.device) -> _Buffer:
        bucket = (num_bytes, device, _current_stream(device))
        for index in reversed(range(len(self._idle))):  # the latest return is the most likely to be in the CPU's cache
            if self._idle[index][:3] == bucket:
                return self._idle.pop(index)
        self._shrink(num_bytes)
        buffer = (*bucket, torch.UntypedStorage(num_bytes, device=device))
        self._counts.num_allocations += 1
        return buffer

    def _take_back(self, lease: Lease) -> None:
        with self._lock:
            buffer = self._open.pop(lease, None)
            if buffer is not None:  # else it has been returned already
                _, device, own, _ = buffer
                if own != (stream := _current_stream(device)):
                    own.wait_stream(stream)
                self._idle.append(buffer)
                self._shrink(0)

    def _shrink(self, coming_bytes: int) -> None:
        """Free idle buffers until allocated plus `coming_bytes` fit the budget, or no idle buffer is left."""
        limit = self.budget_bytes
        while limit is not None and self._idle and self._update_bytes().allocated_bytes + coming_bytes > limit:
            del self._idle[0]


def _current_stream(device: torch.device) -> Any:
    return torch.accelerator.current_stream(device) if device_kind(device).has_streams else None


def _is_capturing(device: torch.device) -> bool:
    """Return True if `device` is a CUDA device and the current stream is being captured into a CUDA graph."""
    # A graph replays on its captured addresses, which a pool must not reuse.
    return device_kind(device).is_cuda and torch.cuda.is_current_stream_capturing()


PoolChoice = BufferPool | Literal["auto"] | None


def name_of(pool: PoolChoice) -> str:
    """Return the argument `pool` as text for a custom op: the name of a pool, "auto", or "" for None.

    Raises TypeError for any other argument.
    """
    if isinstance(pool, BufferPool):
        return pool.name
    if pool is not None and pool != "auto":
        raise TypeError(f'pool must be None, a BufferPool or "auto"; got {pool!r}')
    return pool or ""


def pool_named(name: str, device: torch.device) -> BufferPool | None:
    """Return the pool of this name: for "auto" the shared pool of the device, for "" None.

    name: text from `name_of`.

    Raises RuntimeError if the pool no longer exists, as in a compiled graph that outlives it.
    """
    if name in ("", "auto"):
        return pool_for(device) if name else None
    pool = pools_by_name.get(name)
    if pool is None:
        raise RuntimeError(f"a BufferPool must live as long as what was compiled with it; {name!r} no longer exists")
    return pool


def pool_for(device: torch.device | str) -> BufferPool:
    """Return the shared `BufferPool` of this device in this process, made at the first call.

    On CPU it lends buffers for tensors of at least 16 MiB; on other devices torch allocates all tensors.

    >>> pool = fd.distributed.pool('cpu')
    """
    where = torch.empty(0, device=device).device
    threshold = _AUTO_THRESHOLD_BYTES.get(where.type, maxsize)
    return _device_pools.get(where) or _device_pools.setdefault(where, BufferPool(where, threshold_bytes=threshold))


def lease_from(pool: BufferPool | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Lease:
    """Return a lease of a tensor from the pool, or of a newly allocated tensor if `pool` is None."""
    return pool.lease(shape, dtype, device) if pool else Lease(torch.empty(tuple(shape), dtype=dtype, device=device))
