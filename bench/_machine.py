"""Where and with what a result was measured."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import flexdilated

_CHECKOUT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, Any]:
    """The processor and the memory; nothing that names the host."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Python, torch and the library."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flexdilated": flexdilated.__version__,
    }


def commit() -> str | None:
    """The checkout's commit, with "+changes" if files beside the results differ from it; None without git."""
    try:
        head = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", ":!bench/results")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None  # no git, no repository, or no commit yet
    return f"{head}+changes" if changes else head


def _git(*args: str) -> str:
    done = subprocess.run(("git", "-C", str(_CHECKOUT), *args), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    """The model name, from /proc/cpuinfo where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
