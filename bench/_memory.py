"""Peak memory of a piece of work, from the kernel's own high-water mark of a fresh process (Linux)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._apart import run_apart

_PROC = Path("/proc/self")


def peak_bytes(prepare: Callable[..., Callable[[], object]], *args: Any) -> int:
    """Most resident bytes at once that `prepare(*args)()` adds over what `prepare(*args)` left resident.

    `prepare` must be importable and should run the work once at a tiny size, so that one-off set-up (thread
    pools, kernels' tables) is not counted. The mark is VmHWM, not ru_maxrss: a child starts with its parent's
    ru_maxrss.
    """
    return run_apart(_peak, prepare, args)


def _peak(prepare: Callable[..., Callable[[], object]], args: tuple[Any, ...]) -> int:
    return peak_here(prepare(*args))


def peak_here(work: Callable[[], object]) -> int:
    """The same of work in this process, which should be a fresh one."""
    (_PROC / "clear_refs").write_text("5")  # resets the mark to what is resident now
    before = status_bytes("VmRSS")
    work()
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    """A field of the kernel's account of this process, such as VmRSS: what is resident now."""
    for line in (_PROC / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_PROC / 'status'} has no field {field}")
