"""Free memory, and the peak of a call: on CPU as Linux reports them, on CUDA as the allocator does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..masks.core import device_kind

_ROOT = Path("/")
_PEAK = "VmHWM"  # high-water mark of resident memory; writing 5 to clear_refs resets it to the current value
# Files of a control group: its limit, its usage, and the field of memory.stat with the droppable part.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate; on CUDA including unused memory in its allocator.

    On CPU the minimum of the machine's available memory and what the limits of its control groups leave. Raises
    ValueError if the system does not report it.
    """
    if device_kind(device).is_cuda:
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min([_field(_ROOT / "proc/meminfo", "MemAvailable"), *_left_by_groups()])


def held_bytes(device: torch.device) -> int:
    """Current bytes of this process: allocated by tensors on CUDA, resident on CPU."""
    if device_kind(device).is_cuda:
        return torch.cuda.memory_allocated(device)
    _give_back()
    return _field(_ROOT / "proc/self/status", "VmRSS")


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Peak bytes of this process during `work`, including what was held before."""
    if device_kind(device).is_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    _give_back()
    mark = _ROOT / "proc/self/clear_refs"
    try:
        mark.write_text("5", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"peaks on CPU are read from Linux's /proc, where they cannot be reset: {error}") from error
    work()
    return _field(_ROOT / "proc/self/status", _PEAK)


def _give_back() -> None:
    """Make glibc return freed pages that it keeps, which would count as held; other libraries keep few."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _field(file: Path, name: str) -> int:
    """A field of a file in /proc, in bytes."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"memory on CPU is read from Linux's {file}, which cannot be read: {error}") from error
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]
    if not found:
        raise ValueError(f"memory on CPU is read from Linux's {file}, which has no field {name} here")
    return found[0]


def _left_by_groups() -> Iterator[int]:
    """Bytes left under the limit of each control group around this process, in both versions of Linux's interface.

    Droppable pages of files count as free, as in MemAvailable.
    """
    file = _ROOT / "proc/self/cgroup"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = _ROOT / "sys/fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            top, names = _ROOT / "sys/fs/cgroup/memory", _VERSION_1
        else:
            continue
        inner = top / path.lstrip("/")
        for group in (each for each in (inner, *inner.parents) if each.is_relative_to(top)):
            yield from _left_by_group(group, *names)


def _left_by_group(group: Path, limit: str, usage: str, droppable: str) -> Iterator[int]:
    """Bytes left under the limit of `group`; nothing if it has no limit or is not visible to this process."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return
    if most != "max":
        yield max(0, int(most) - used + int(stat.get(droppable, 0)))
