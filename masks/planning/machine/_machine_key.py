"""MachineKey: what constants were measured on. On another device, torch or number of threads they say nothing."""

from __future__ import annotations

import platform
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class MachineKey:
    """A device type with its name and capability, torch's version, and the CPU threads (0 on accelerators)."""

    kind: str
    name: str
    capability: str
    torch: str
    threads: int

    def __post_init__(self) -> None:
        for each in fields(self):
            value, wanted = getattr(self, each.name), int if each.name == "threads" else str
            if type(value) is not wanted:
                raise ValueError(f"{each.name} must be of type {wanted.__name__}; got {value!r}")

    @classmethod
    def of(cls, kind: str) -> MachineKey:
        """This machine's: the CPU with its present number of threads, or the present CUDA device."""
        if kind == "cpu":
            capability = torch.backends.cpu.get_cpu_capability()
            return cls(kind, _cpu_name(), capability, str(torch.__version__), torch.get_num_threads())
        if kind == "cuda":
            major, minor = torch.cuda.get_device_capability()
            return cls(kind, torch.cuda.get_device_name(), f"{major}.{minor}", str(torch.__version__), 0)
        raise ValueError(f"constants can be measured on cpu and cuda; got a device of type {kind!r}")

    def to_data(self) -> dict[str, Any]:
        """As plain data."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads else ""
        return f"{self.name} ({self.kind}, {self.capability}), torch {self.torch}{threads}"


@cache
def _cpu_name() -> str:
    """The model name, from /proc/cpuinfo where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()
