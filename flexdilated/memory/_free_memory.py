"""How much memory is free, and the most that a call holds: on CPU as Linux tells it, on CUDA as the allocator does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..masks.core import device_kind

_ROOT = Path("/")
_PEAK = "VmHWM"  # the mark that writing 5 to clear_refs sets back to what is resident now
# Of a control group: its limit, what it uses, and how much of that can be dropped.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still take: on CUDA with what its allocator holds unused.

    On CPU the least of what the machine has available and what each limit of its control groups leaves. Raises
    ValueError where the system does not tell.
    """
    if device_kind(device).is_cuda:
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min([_field(_ROOT / "proc/meminfo", "MemAvailable"), *_left_by_groups()])


def held_bytes(device: torch.device) -> int:
    """Bytes that this process holds now: allocated by tensors on CUDA, resident in memory on CPU."""
    if device_kind(device).is_cuda:
        return torch.cuda.memory_allocated(device)
    _give_back()
    return _field(_ROOT / "proc/self/status", "VmRSS")


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that this process holds at once while it works, what it held before included."""
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
    """Make glibc return pages that it keeps for later, which would count as held; other libraries keep few."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _field(file: Path, name: str) -> int:
    """A field of a file of /proc, in bytes."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"memory on CPU is read from Linux's {file}, which cannot be read: {error}") from error
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]
    if not found:
        raise ValueError(f"memory on CPU is read from Linux's {file}, which has no field {name} here")
    return found[0]


def _left_by_groups() -> Iterator[int]:
    """What the limit of each control group around this process leaves, of both versions of Linux's interface.

    Pages of files that can be dropped count as free, as they do in MemAvailable.
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
    """Nothing where the group has no limit, or is not shown to this process."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return
    if most != "max":
        yield max(0, int(most) - used + int(stat.get(droppable, 0)))
