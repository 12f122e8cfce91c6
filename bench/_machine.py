"""Where and with what a result was measured."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention

import flexdilated

_CHECKOUT = Path(__file__).resolve().parent.parent
_READ_OUT = {
    "driver": "driver_version",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "largest_sm_clock": "clocks.max.sm",
    "power_limit": "power.limit",
}


def machine(device: str = "cpu") -> dict[str, Any]:
    """The processor and the memory, and the accelerator if that is meant; nothing that names the host."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        **(_accelerator(device) if torch.device(device).type == "cuda" else {}),
    }


def versions(device: str = "cpu") -> dict[str, str]:
    """Python, torch and the library; on an accelerator also what torch was built with and what it finds."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flexdilated": flexdilated.__version__,
        **(_accelerator_versions() if torch.device(device).type == "cuda" else {}),
    }


def commit() -> str | None:
    """The checkout's commit, with "+changes" if files beside the results differ from it; None without git."""
    try:
        head = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", ":!bench/results")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None  # no git, no repository, or no commit yet
    return f"{head}+changes" if changes else head


def conditions(device: str = "cpu") -> dict[str, Any]:
    """With what, at which commit and when something is measured, as files of results hold it."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"machine": machine(device), "versions": versions(device), "commit": commit(), "date": now}


def _accelerator(device: str) -> dict[str, Any]:
    """Name, size and, where its own tool tells, driver, clocks and power limit as they stand."""
    found = torch.cuda.get_device_properties(device)
    return {
        "gpu": found.name,
        "gpu_memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
        "compute_capability": f"{found.major}.{found.minor}",
        "l2_cache_mib": round(found.L2_cache_size / 2**20, 1),
        **driver_and_clocks(),
    }


def driver_and_clocks() -> dict[str, str]:
    """As they stand at this moment, from the accelerator's own tool, if it is there. Nothing is set."""
    query = f"--query-gpu={','.join(_READ_OUT.values())}"
    try:
        command = ("nvidia-smi", query, "--format=csv,noheader")
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}  # no such tool, or one that does not answer
    first_line = done.stdout.partition("\n")[0]
    return dict(zip(_READ_OUT, (value.strip() for value in first_line.split(",")), strict=False))


def _accelerator_versions() -> dict[str, str]:
    names = {"triton": "triton", "flash_attn_4": "flash-attn-4", "flash_attn_3": "flash-attn-3"}
    found = {key: _package_version(name) for key, name in names.items()}
    cudnn = torch.backends.cudnn.version()
    return {
        "cuda": torch.version.cuda or "none",
        "cudnn": "none" if cudnn is None else str(cudnn),
        **{key: version for key, version in found.items() if version is not None},
        "flash_attention": getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)() or "FA2",
    }


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
