"""Profiles: with FLEXDILATED_PROFILE=folder, tests, demo and bench record what torch does, with memory, into files."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ._profile_file import write_recording

VARIABLE = "FLEXDILATED_PROFILE"
_RECORDED_STEPS = 3  # after one that is not: files stay small, and the first step is unlike all others
_log = logging.getLogger("flexdilated")

_prefix: ContextVar[str] = ContextVar("prefix", default="")
_lock = Lock()  # torch has one profiler a process
_names: Counter[str] = Counter()


def folder_from_environment() -> Path | None:
    """The folder that FLEXDILATED_PROFILE names, which need not be there yet; None where it names none.

    Raises ValueError for what is no folder, and for one that cannot be made or written to.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named)
    there = next((each for each in (folder, *folder.absolute().parents) if each.exists()), folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{VARIABLE} must name a folder that can be written; got {named!r}")
    return folder


@contextmanager
def named_under(name: str) -> Iterator[None]:
    """What is recorded within has a name that begins with this."""
    before = _prefix.set(f"{_prefix.get()}{name} ")
    try:
        yield
    finally:
        _prefix.reset(before)


@contextmanager
def recorded(name: str) -> Iterator[None]:
    """Record what runs within, in one recording of this name; nothing, and at no cost, where the variable is not set.

    Of recordings within each other, or in threads side by side, only that which began first is made. A name that comes
    again in one process is numbered. What ends with an error leaves none. Raises ValueError, before anything runs,
    where the folder cannot be used.
    """
    folder = folder_from_environment()
    if folder is None or not _lock.acquire(blocking=False):
        yield
        return
    try:
        begin, profiler = perf_counter(), _profiler()
        with profiler:
            yield
        _write(folder, name, profiler, perf_counter() - begin)
    finally:
        _lock.release()


@contextmanager
def recorded_steps(name: str) -> Iterator[Callable[[], None]]:
    """Record a few of many steps; call what it gives at the end of each.

    The second to the fourth step are recorded, or as many of them as there are. As `recorded` otherwise.
    """
    folder = folder_from_environment()
    if folder is None or not _lock.acquire(blocking=False):
        yield _no_step
        return
    clock = [perf_counter()]

    def write(profiler: Any) -> None:
        if len(clock) > 2:
            _write(folder, name, profiler, clock[-1] - clock[1])
        else:
            _log.warning("nothing of %r was recorded: the first step never is, and there was no other", name)

    def step() -> None:
        clock.append(perf_counter())
        profiler.step()

    plan = schedule(wait=0, warmup=1, active=_RECORDED_STEPS, repeat=1)
    try:
        profiler = _profiler(schedule=plan, on_trace_ready=write)
        with profiler:
            yield step
    finally:
        _lock.release()


def _no_step() -> None:
    pass


def _profiler(**options: Any) -> profile:
    kinds = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    activities = [ProfilerActivity.CPU, *([kinds[device.type]] if device is not None and device.type in kinds else [])]
    return profile(activities=activities, profile_memory=True, acc_events=True, **options)


def _write(folder: Path, name: str, profiler: profile, seconds: float) -> None:
    whole = f"{_prefix.get()}{name}"
    _names[whole] += 1
    numbered = whole if _names[whole] == 1 else f"{whole} {_names[whole]}"
    try:
        write_recording(folder, numbered, profiler, seconds)
    except OSError as error:
        raise ValueError(
            f"{VARIABLE} must name a folder that can be written; {folder}: {error.strerror or error}"
        ) from error
