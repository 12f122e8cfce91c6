"""Files of machine constants: JSON with the device measured, the date, and the spread of the runs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...core import device_kind
from ...text import read_json
from ._machine import NUMBERS, BlockRates, Machine

FORMAT, VERSION = "flexdilated machine constants", 1
_FIELDS = {"format", "version", "measured_on", "date", "versions", "constants", "spread"}


@dataclass(frozen=True)
class MachineKey:
    """Device, torch and threads for which constants were measured; they are not valid for others.

    kind, name, capability: of the device. torch: version. threads: CPU threads, 0 on accelerators.
    """

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
        """Key of this machine: the CPU with its present number of threads, or the present CUDA device."""
        if device_kind(kind).on_host:
            capability = torch.backends.cpu.get_cpu_capability()
            return cls(kind, _cpu_name(), capability, str(torch.__version__), torch.get_num_threads())
        if device_kind(kind).is_cuda:
            major, minor = torch.cuda.get_device_capability()
            return cls(kind, torch.cuda.get_device_name(), f"{major}.{minor}", str(torch.__version__), 0)
        raise ValueError(f"constants can be measured on cpu and cuda; got a device of type {kind!r}")

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads else ""
        return f"{self.name} ({self.kind}, {self.capability}), torch {self.torch}{threads}"


@dataclass(frozen=True)
class Measured:
    """Constants with the key, date and versions of their measurement; `spread`: slowest run over fastest."""

    key: MachineKey
    machine: Machine
    date: str
    versions: Mapping[str, str]
    spread: Mapping[str, float]

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON, in reading order."""
        constants: dict[str, Any] = {name: getattr(self.machine, name) for name in NUMBERS}
        constants["blocks"] = [asdict(rates) for rates in self.machine.blocks]
        return {
            "format": FORMAT,
            "version": VERSION,
            "measured_on": self.key.to_data(),
            "date": self.date,
            "versions": dict(self.versions),
            "constants": constants,
            "spread": dict(self.spread),
        }


def stored_path(key: MachineKey) -> Path | None:
    """Path of this device's constants in the user's cache directory; None without platformdirs."""
    try:
        from platformdirs import user_cache_path
    except ImportError:
        return None
    digest = hashlib.sha256(json.dumps(key.to_data(), sort_keys=True).encode()).hexdigest()[:16]
    return user_cache_path("flexdilated", appauthor=False) / f"machine-{key.kind}-{digest}.json"


def read_machine(path: Path) -> tuple[MachineKey, Machine]:
    """(key of the measurement, constants). Raises ValueError if the file cannot be read or has another content."""
    try:
        data = read_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path} holds no JSON: {error}") from None
    try:
        return _parse(data, str(path))
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # also of fields that are missing or unknown
        raise ValueError(f"{path} holds no constants of this version: {error}") from None


def write_json(path: Path, data: object) -> None:
    """Write the file atomically: a concurrent reader sees the old or the new version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, ensure_ascii=False)
            file.write("\n")
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)


def _parse(data: Any, source: str) -> tuple[MachineKey, Machine]:
    if not isinstance(data, dict) or set(data) != _FIELDS:
        got = sorted(data) if isinstance(data, dict) else repr(data)
        raise ValueError(f"it must have the fields {', '.join(sorted(_FIELDS))}; got {got!s:.200}")
    if (data["format"], data["version"]) != (FORMAT, VERSION):
        raise ValueError(
            f"needed {FORMAT!r}, version {VERSION}; got {data['format']!r:.80}, version {data['version']!r:.80}"
        )
    blocks = tuple(BlockRates(**each) for each in data["constants"]["blocks"])
    machine = Machine(**data["constants"] | {"blocks": blocks}, source=source)
    return MachineKey(**data["measured_on"]), machine


@cache
def _cpu_name() -> str:
    """Model name from /proc/cpuinfo, else from `platform`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()
