"""What this machine and installation have: optional packages, devices, threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

# package -> the extra that installs it, and what its absence costs
EXTRAS = {
    "tqdm": ("testing", "plain lines instead of a progress bar"),
    "matplotlib": ("plot", "no pictures"),
    "platformdirs": ("tune", "no measured constants are kept for the next run"),
}


def find(package: str) -> ModuleType | None:
    """The imported package, or None where it is not installed.

    Copies that setuptools brings for itself do not count: torch puts them on the path when it looks for a compiler, and
    other processes do not have them.
    """
    try:
        found = import_module(package)
    except ImportError:
        return None
    return None if "_vendor" in Path(found.__file__ or "").parts else found


def missing_line(package: str) -> str:
    """What is lost without the package, and the command that installs it."""
    extra, cost = EXTRAS[package]
    return f'{package} is not installed: {cost} (pip install "flexdilated[{extra}]")'


def available_devices() -> tuple[str, ...]:
    """Kinds of device that this machine and this build of torch can compute on, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@contextmanager
def one_thread() -> Iterator[None]:
    """Until the end of the block torch computes on one thread: more wait for each other in small calls."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
