"""Peak memory of a piece of work, from the kernel's own high-water mark of a fresh process (Linux)."""

from collections.abc import Callable
from typing import Any

from . import _resident_memory
from ._apart import run_apart


def peak_bytes(prepare: Callable[..., Callable[[], object]], *args: Any) -> int:
    """Most resident bytes at once that `prepare(*args)()` adds over what `prepare(*args)` left resident.

    `prepare` must be importable and should run the work once at a tiny size, so that one-off set-up (thread
    pools, kernels' tables) is not counted.
    """
    return run_apart(_peak, prepare, args)


def _peak(prepare: Callable[..., Callable[[], object]], args: tuple[Any, ...]) -> int:
    return peak_here(prepare(*args))


def peak_here(work: Callable[[], object]) -> int:
    """The same of work in this process, which should be a fresh one."""
    before = _resident_memory.begin_peak()
    work()
    return _resident_memory.peak_bytes() - before
