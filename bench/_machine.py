"""The conditions of a result: machine, versions, commit, date."""

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


def conditions(device: str = "cpu") -> dict[str, Any]:
    """As files of results hold them."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"machine": machine(device), "versions": versions(device), "commit": commit(), "date": now}


def machine(device: str = "cpu") -> dict[str, Any]:
    """The processor and the memory, and the accelerator if that is meant; nothing that names the host."""
    found = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
    }
    if torch.device(device).type != "cuda":
        return found
    gpu = torch.cuda.get_device_properties(device)
    return found | {
        "gpu": gpu.name,
        "gpu_memory_gib": round(gpu.total_memory / 2**30, 1),
        "multiprocessors": gpu.multi_processor_count,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "l2_cache_mib": round(gpu.L2_cache_size / 2**20, 1),
        **driver_and_clocks(),
    }


def versions(device: str = "cpu") -> dict[str, str]:
    """Python, torch and the library; on an accelerator also what torch was built with and what it finds."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "flexdilated": flexdilated.__version__}
    if torch.device(device).type != "cuda":
        return found
    found |= {"cuda": torch.version.cuda or "none", "cudnn": str(torch.backends.cudnn.version() or "none")}
    for name in ("triton", "flash-attn-4", "flash-attn-3"):
        try:
            found[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return found | {"flash_attention": active or "FA2"}


def commit() -> str | None:
    """The checkout's commit, with "+changes" if files beside the results differ from it; None without git."""
    git = ("git", "-C", str(_CHECKOUT))
    asked = ("rev-parse", "HEAD"), ("status", "--porcelain", "--", ".", ":!bench/results")
    try:
        head, changes = (_printed(*git, *each).strip() for each in asked)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None  # no git, no repository, or no commit yet
    return f"{head}+changes" if changes else head


def driver_and_clocks() -> dict[str, str]:
    """As they are now, from the accelerator's own tool, if it is there. Nothing is set."""
    query = f"--query-gpu={','.join(_READ_OUT.values())}"
    try:
        first_line, *_ = _printed("nvidia-smi", query, "--format=csv,noheader", timeout=20).split("\n")
    except (OSError, subprocess.SubprocessError):
        return {}  # no such tool, or one that does not answer
    return dict(zip(_READ_OUT, (value.strip() for value in first_line.split(",")), strict=False))


def _printed(*command: str, timeout: float | None = None) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout).stdout


def _cpu_model() -> str:
    """The model name, from /proc/cpuinfo where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
