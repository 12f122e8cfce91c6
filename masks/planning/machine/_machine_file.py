"""Files of machine constants: JSON with what they were measured on, when, and how far the runs lay apart."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...text import read_json
from ._machine import NUMBERS, BlockRates, Machine
from ._machine_key import MachineKey

FORMAT, VERSION = "flexdilated machine constants", 1
_FIELDS = {"format", "version", "measured_on", "date", "versions", "constants", "spread"}
_BLOCK_FIELDS = {"side", "runs_flops_per_s", "plain_flops_per_s", "masked_flops_per_s"}


@dataclass(frozen=True)
class Measured:
    """Constants with their story. `spread` is, for each, the slowest run over the fastest."""

    key: MachineKey
    machine: Machine
    date: str
    versions: Mapping[str, str]
    spread: Mapping[str, float]

    def to_data(self) -> dict[str, Any]:
        """As plain data, in the order in which people read it."""
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
    """Where this device's constants are stored, in the user's cache directory; None without platformdirs."""
    try:
        from platformdirs import user_cache_path
    except ImportError:
        return None
    digest = hashlib.sha256(json.dumps(key.to_data(), sort_keys=True).encode()).hexdigest()[:16]
    return user_cache_path("flexdilated", appauthor=False) / f"machine-{key.kind}-{digest}.json"


def read_machine(path: Path) -> tuple[MachineKey, Machine]:
    """(what they were measured on, the constants). Raises ValueError where the file does not hold exactly that."""
    try:
        data = read_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path} holds no JSON: {error}") from None
    try:
        return _parse(data, str(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds no constants of this version: {error}") from None


def write_json(path: Path, data: object) -> None:
    """Write the file in one piece: whoever reads meanwhile sees the old one or the new one."""
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
    _require_fields("the file", data, _FIELDS)
    if (data["format"], data["version"]) != (FORMAT, VERSION):
        raise ValueError(
            f"needed {FORMAT!r}, version {VERSION}; got {data['format']!r:.80}, version {data['version']!r:.80}"
        )
    _require_fields("measured_on", data["measured_on"], {"kind", "name", "capability", "torch", "threads"})
    constants = data["constants"]
    _require_fields("constants", constants, {*NUMBERS, "blocks"})
    if not isinstance(constants["blocks"], list):
        raise ValueError(f"blocks must be a list; got {constants['blocks']!r:.80}")
    for each in constants["blocks"]:
        _require_fields("each of blocks", each, _BLOCK_FIELDS)
    blocks = tuple(BlockRates(**each) for each in constants["blocks"])
    machine = Machine(**{name: constants[name] for name in NUMBERS}, blocks=blocks)
    return MachineKey(**data["measured_on"]), replace(machine, source=source)


def _require_fields(name: str, value: Any, wanted: set[str]) -> None:
    if not isinstance(value, dict) or set(value) != wanted:
        got = sorted(value) if isinstance(value, dict) else repr(value)
        raise ValueError(f"{name} must have the fields {', '.join(sorted(wanted))}; got {got!s:.200}")
