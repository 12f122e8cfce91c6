"""Profiles: with FLEXDILATED_PROFILE=folder, a process that imports flexdilated writes a profile of torch's work."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from ..masks.core import bytes_text

VARIABLE = "FLEXDILATED_PROFILE"
_ROWS = 50  # of each table


def folder_from_environment() -> Path | None:
    """Return the folder that FLEXDILATED_PROFILE names, which may not exist yet; None for an empty or unset variable.

    Raises ValueError for a path that is no folder, or that cannot be made or written to.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named)
    there = next((each for each in (folder, *folder.absolute().parents) if each.exists()), folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{VARIABLE} must name a folder that can be written; got {named!r}")
    return folder


def profile_process() -> None:
    """If FLEXDILATED_PROFILE names a folder, profile the process from now to its end, and write the profile there.

    Records the work of the calling thread and its backward passes. torch allows one profiler per process. Raises
    ValueError for a folder that cannot be made or written to.
    """
    folder = folder_from_environment()
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    device = torch.accelerator.current_accelerator(check_available=True)
    activities = [ProfilerActivity.CPU, *([kinds[device.type]] if device is not None and device.type in kinds else [])]
    profiler, began = profile(activities=activities, profile_memory=True, acc_events=True), perf_counter()
    profiler.start()
    atexit.register(lambda: _stop_and_write(folder, profiler, perf_counter() - began))


def _stop_and_write(folder: Path, profiler: profile, seconds: float) -> None:
    """Stop the profiler, and write a trace and a text file to `folder`.

    `PID.trace.json.gz` is the trace; `PID.txt` has memory peaks and tables of operators by time and memory.

    seconds: duration of the profile.
    """
    profiler.stop()
    profiler.export_chrome_trace(str(folder / f"{os.getpid()}.trace.json.gz"))
    operators, on_device = profiler.key_averages(), torch.accelerator.is_available()
    orders = ["self_cpu_time_total", "self_cpu_memory_usage"]
    orders += ["self_device_time_total", "self_device_memory_usage"] if on_device else []
    tables = [f"By {order}\n{operators.table(sort_by=order, row_limit=_ROWS)}" for order in orders]
    head = (
        f"{seconds:.1f} s, {len(profiler.events() or ()):,} events, torch {torch.__version__}\n{_peak_lines(on_device)}"
    )
    (folder / f"{os.getpid()}.txt").write_text("\n".join([head, *tables]), encoding="utf-8")


def _peak_lines(on_device: bool) -> str:
    """Return text, a line for each known peak: resident memory (on Linux) and, with on_device, accelerator memory."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    peaks = [("resident", 1024 * int(line.split()[1])) for line in lines if line.startswith("VmHWM:")]
    peaks += [("allocated on the accelerator", torch.accelerator.max_memory_allocated())] if on_device else []
    return "".join(f"peak memory, {name}: {bytes_text(size)}\n" for name, size in peaks)
