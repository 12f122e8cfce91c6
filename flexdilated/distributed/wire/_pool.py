"""BufferPool: memory for what is sent and received, kept from step to step instead of asked for anew.

And the pool of each device, which leases from the size where that was measured to pay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from math import prod
from statistics import median
from sys import maxsize
from threading import Lock
from time import perf_counter
from typing import Any, Literal, get_args
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from ...masks.core import bytes_text, require_choice
from ...masks.plan_cache import ByteSize, DeferredLog
from ..group import Role

_numbers = count()
named: WeakValueDictionary[str, BufferPool] = WeakValueDictionary()
_POISON = 0xFF  # in every byte: NaN in each floating type, and in the scale of a coded row; -1 in signed integers


@dataclass
class PoolStatistics:
    """Bytes are those of now, except the peaks; counts and peaks begin with the pool, or at its last `reset`.

    allocated_bytes: held by the pool, leased and idle. idle_bytes: of these. leased_bytes: what open leases asked for.
    num_leases: those that the pool served; num_allocations: for how many of them it asked torch for memory; num_plain:
    tensors that torch made instead. By role: leases, and bytes they asked for.
    """

    allocated_bytes: int = 0
    idle_bytes: int = 0
    leased_bytes: int = 0
    peak_bytes: int = 0
    peak_leased_bytes: int = 0
    num_leases: int = 0
    num_allocations: int = 0
    num_plain: int = 0
    leases_by_role: Counter[Role] = field(default_factory=Counter)
    bytes_by_role: Counter[Role] = field(default_factory=Counter)

    @property
    def reuse_rate(self) -> float:
        """The share of leases that got a buffer which was there already; 0 before the first."""
        return 1 - self.num_allocations / self.num_leases if self.num_leases else 0.0

    @property
    def fragmentation(self) -> float:
        """Bytes held for each byte leased now: 1 where nothing is held, infinite where all of it is idle."""
        if self.leased_bytes:
            return self.allocated_bytes / self.leased_bytes
        return float("inf") if self.allocated_bytes else 1.0


@dataclass(eq=False)
class _Buffer:
    """One bucket. It stays on one stream: as work there is done in order, it can go from use to use without waiting."""

    storage: torch.UntypedStorage
    num_bytes: int
    device: torch.device
    stream: Any
    read: Any = None  # an event: until then, a copy to an accelerator may read this pinned buffer

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """No view: nothing of the graph of an earlier lease comes with it."""
        empty: Any = torch.empty(0, dtype=dtype, device=self.device)  # its stubs ask for strides, too
        return empty.set_(self.storage, 0, torch.Size(shape))


class Lease:
    """A tensor that is the caller's until `release`, or until the end of a `with` block, which gives the tensor.

    To release again does nothing. Raises RuntimeError where the tensor is asked for after the end. A lease that is lost
    without an end takes its buffer out of the pool: somebody may hold the tensor.
    """

    def __init__(self, tensor: Tensor, pool: BufferPool | None = None, buffer: _Buffer | None = None) -> None:
        self._tensor: Tensor | None = tensor
        self._pool, self._buffer, self._num_bytes = pool, buffer, tensor.nbytes

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            raise RuntimeError("a leased tensor may be used until its lease ends; this lease has ended")
        return self._tensor

    def release(self) -> None:
        """Hand the buffer back. What still uses it must be ordered before what comes next on the current stream."""
        if self._pool is not None:
            self._pool._take_back(self)
        self._tensor = None

    def __repr__(self) -> str:
        whose = "torch" if self._pool is None else self._pool.name
        if self._tensor is None:
            return f"Lease(of {whose}, which has ended)"
        return f"Lease({tuple(self._tensor.shape)}, {self._tensor.dtype}, of {whose})"

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *_: object) -> None:
        self.release()


class BufferPool:
    """Leases of buffers in buckets of powers of two bytes; thread-safe; it holds nothing until the first lease.

    device: of all its buffers; None serves any. Tensors under `threshold_bytes` torch makes, as without a pool.
    `budget_bytes` bounds what is held: idle buffers go, those returned longest ago first; a lease is always served, and
    its buffer not kept where it is over the budget. Where an accelerator's memory is full, all idle buffers go and the
    lease tries again, once. pinned: page-locked memory of the host. debug: buffers are NaN (all bits set) when leased
    and once returned, and one written to after its return raises RuntimeError at its next lease.

    >>> pool = fd.distributed.BufferPool('cpu', threshold_bytes=1 << 16)
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        threshold_bytes: int = 1 << 20,
        budget_bytes: int | None = None,
        pinned: bool = False,
        debug: bool = False,
    ) -> None:
        for name, number in (("threshold_bytes", threshold_bytes), ("budget_bytes", budget_bytes)):
            if number is not None and (not isinstance(number, int) or number < 0):
                raise ValueError(f"{name} must be an integer, at least 0; got {number!r}")
        self.device = None if device is None else with_index(device)
        if pinned and self.device != torch.device("cpu"):
            raise ValueError(f'pinned memory is the host\'s: device must be "cpu"; got {device!r}')
        if pinned and not torch.accelerator.is_available():
            raise RuntimeError("pinned memory serves copies to an accelerator; torch finds none here")
        self.threshold_bytes, self.budget_bytes, self.pinned, self.debug = threshold_bytes, budget_bytes, pinned, debug
        self.name = f"pool {next(_numbers)}"  # for custom ops, which take text and no objects
        named[self.name] = self
        self._lock = Lock()
        self._idle: list[_Buffer] = []  # in the order of their return
        self._open: WeakSet[Lease] = WeakSet()
        self._counts = PoolStatistics()
        self._deferred = DeferredLog()

    def lease(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None, *, role: Role = "keys"
    ) -> Lease:
        """A contiguous tensor of whatever values its memory has; device=None: the pool's, or torch's default.

        Raises ValueError for a device that is not the pool's, and for a role that does not exist.
        """
        where = with_index(device or self.device or torch.get_default_device())
        if self.device not in (None, where):
            raise ValueError(f"this pool serves {self.device}; got a lease on {where}")
        require_choice("role", role, get_args(Role))
        num_bytes = prod(shape) * dtype.itemsize
        with self._lock:
            if num_bytes < max(self.threshold_bytes, 1) or _is_capturing(where):
                self._counts.num_plain += 1
                return Lease(torch.empty(tuple(shape), dtype=dtype, device=where, pin_memory=self.pinned))
            buffer = self._buffer(1 << (num_bytes - 1).bit_length(), where)
            lease = Lease(buffer.tensor(shape, dtype), self, buffer)
            self._open.add(lease)
            self._count(num_bytes, role)
        self._deferred.emit()
        return lease

    def release(self) -> None:
        """Give all idle buffers back to torch."""
        with self._lock:
            self._let_go(len(self._idle), "as asked to release them")
        self._deferred.emit()

    def reset(self) -> None:
        """Count from 0 again; peaks begin at what is held and leased now. Buffers stay."""
        with self._lock:
            self._counts = PoolStatistics(peak_bytes=self._held, peak_leased_bytes=self._leased)

    @property
    def statistics(self) -> PoolStatistics:
        """As of now; what comes later does not change it."""
        with self._lock:
            return replace(
                self._counts,
                allocated_bytes=self._held,
                idle_bytes=sum(buffer.num_bytes for buffer in self._idle),
                leased_bytes=self._leased,
                leases_by_role=self._counts.leases_by_role.copy(),
                bytes_by_role=self._counts.bytes_by_role.copy(),
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as of a module that has a pool, is an empty pool with the same settings."""
        sizes = {"threshold_bytes": self.threshold_bytes, "budget_bytes": self.budget_bytes}
        return partial(BufferPool, self.device, **sizes, pinned=self.pinned, debug=self.debug), ()

    def __repr__(self) -> str:
        """Its name, which the log has too, its settings where they are not the usual ones, and what it holds."""
        where = "any device" if self.device is None else self.device
        least = "never leases" if self.threshold_bytes == maxsize else f"leases from {bytes_text(self.threshold_bytes)}"
        budget = "" if self.budget_bytes is None else f", budget {bytes_text(self.budget_bytes)}"
        traits = "".join(f", {name}" for name in ("pinned", "debug") if getattr(self, name))
        now = self.statistics
        held = f"holds {bytes_text(now.allocated_bytes)}, of which {bytes_text(now.leased_bytes)} are leased"
        return f"BufferPool({self.name}, {where}, {least}{budget}{traits}: {held})"

    @property
    def _held(self) -> int:
        leased = (lease._buffer for lease in self._open)
        return sum(buffer.num_bytes for buffer in (*self._idle, *leased) if buffer is not None)

    @property
    def _leased(self) -> int:
        return sum(lease._num_bytes for lease in self._open)

    def _count(self, num_bytes: int, role: Role) -> None:
        counts = self._counts
        counts.num_leases += 1
        counts.leases_by_role[role] += 1
        counts.bytes_by_role[role] += num_bytes
        counts.peak_bytes = max(counts.peak_bytes, self._held)
        counts.peak_leased_bytes = max(counts.peak_leased_bytes, self._leased)

    def _buffer(self, num_bytes: int, device: torch.device) -> _Buffer:
        wanted = (num_bytes, device, _current_stream(device))
        for index in reversed(range(len(self._idle))):  # the latest return is the likeliest to be in the cache
            buffer = self._idle[index]
            if (buffer.num_bytes, buffer.device, buffer.stream) == wanted:
                return self._ready(self._idle.pop(index))
        self._shrink(num_bytes)
        try:
            storage = _allocate(num_bytes, device, self.pinned)
        except torch.OutOfMemoryError:
            self._let_go(len(self._idle), "as the device's memory is full")
            storage = _allocate(num_bytes, device, self.pinned)
        buffer = _Buffer(storage, *wanted)
        if self.debug:
            buffer.tensor((num_bytes,), torch.uint8).fill_(_POISON)
        self._counts.num_allocations += 1
        self._deferred.queue(
            "%s allocated %s on %s: no idle buffer has that size", self.name, ByteSize(num_bytes), device
        )
        return buffer

    def _ready(self, buffer: _Buffer) -> _Buffer:
        if buffer.read is not None:
            buffer.read.synchronize()
        if self.debug and bool((buffer.tensor((buffer.num_bytes,), torch.uint8) != _POISON).any()):
            raise RuntimeError("a leased tensor may be used until its lease ends; one was written to after that")
        return buffer

    def _take_back(self, lease: Lease) -> None:
        with self._lock:
            buffer, lease._buffer = lease._buffer, None
            if buffer is None:  # it has come back already
                return
            stream = _current_stream(buffer.device)
            if stream != buffer.stream:
                buffer.stream.wait_stream(stream)
            if self.pinned:
                buffer.read = torch.accelerator.current_stream().record_event()
            if self.debug:
                # Through the leased tensor: if a backward has saved it, autograd sees that it has changed.
                lease.tensor.detach().reshape(-1).view(torch.uint8).fill_(_POISON)
            self._open.discard(lease)
            self._idle.append(buffer)
            self._shrink(0)
        self._deferred.emit()

    def _shrink(self, coming_bytes: int) -> None:
        """Let idle buffers go until the budget holds what there is and what comes, as far as they reach."""
        while self.budget_bytes is not None and self._idle and self._held + coming_bytes > self.budget_bytes:
            self._let_go(1, "as its budget was exceeded")

    def _let_go(self, count: int, why: str) -> None:
        """Let this many idle buffers go, those returned longest ago."""
        gone, self._idle = self._idle[:count], self._idle[count:]
        for buffer in gone:
            self._deferred.queue("%s released %s on %s, %s", self.name, ByteSize(buffer.num_bytes), buffer.device, why)


def with_index(device: torch.device | str) -> torch.device:
    """As tensors name their device: an accelerator's has an index."""
    return torch.empty(0, device=device).device


def lease_from(
    pool: BufferPool | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, role: Role
) -> Lease:
    """A lease of the pool, or, without one, of a tensor that torch makes."""
    if pool is None:
        return Lease(torch.empty(tuple(shape), dtype=dtype, device=device))
    return pool.lease(shape, dtype, device, role=role)


def _allocate(num_bytes: int, device: torch.device, pinned: bool) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned).untyped_storage()


def _current_stream(device: torch.device) -> Any:
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


def _is_capturing(device: torch.device) -> bool:
    """A captured graph replays on the addresses it has seen: they must be its own, never a pool's."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_PAGE = 4096
_of_devices, _deferred = Lock(), DeferredLog()

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
    with _of_devices:  # two threads that ask at once get the same one
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

    By a tenth, with one write to each page, in the median of three; maxsize if 64 MiB do not pay. It is measured
    when first asked for, from the largest size down, and remembered.
    """
    pool, answer = BufferPool(device, threshold_bytes=0), maxsize
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
