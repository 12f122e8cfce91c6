"""Optional packages: used where they are installed, named where they are missing."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# package -> the extra that installs it, and what its absence costs
EXTRAS = {
    "tqdm": ("demo", "plain lines instead of a progress bar"),
    "matplotlib": ("plot", "no pictures"),
    "platformdirs": ("tune", "no measured constants are kept for the next run"),
}


def find(package: str) -> ModuleType | None:
    """The imported package, or None where it is not installed."""
    try:
        return import_module(package)
    except ImportError:
        return None


def missing_line(package: str) -> str:
    """What is lost without the package, and the command that installs it."""
    extra, cost = EXTRAS[package]
    return f'{package} is not installed: {cost} (pip install "flexdilated[{extra}]")'
