"""A recording on disk: a small file of JSON, with a row an operator, beside a trace that Perfetto and Chrome open."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import profile

from ..masks.text._plain_json import read_json

FORMAT, VERSION = "flexdilated profile", 1
TABLE, TRACE = ".profile.json", ".trace.json.gz"
_MOST_EVENTS = 200_000  # in a trace: more than that no viewer opens with ease
_LARGEST = 2**63  # of any number of a recording
_LONGEST = 120  # characters of a file's name


@dataclass(frozen=True)
class Operator:
    """All calls of one operator. Times are in microseconds.

    self_us and total_us: on the host, without and with what it calls. device_us: on the accelerator, its own kernels.
    memory_bytes: allocated less freed, by itself, on host and accelerator.
    """

    name: str
    calls: int
    self_us: float
    total_us: float
    device_us: float
    memory_bytes: int


@dataclass(frozen=True)
class Recording:
    """What was recorded under one name. seconds: by the clock. trace: the file beside, None where it was too long."""

    name: str
    seconds: float
    torch: str
    events: int
    trace: str | None
    operators: tuple[Operator, ...]


def write_recording(folder: Path, name: str, profiler: profile, seconds: float) -> Path:
    """Write what a profiler has recorded, in place of an earlier recording of that name; returns the table's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, events = file_stem(name), len(profiler.events() or ())
    trace = f"{stem}{TRACE}" if events <= _MOST_EVENTS else None
    if trace is not None:
        _write_trace(profiler, folder / trace)
    recording = Recording(name, seconds, torch.__version__, events, trace, tuple(_operators(profiler)))
    data = {"format": FORMAT, "version": VERSION, **asdict(recording)}
    path = folder / f"{stem}{TABLE}"
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(data, separators=(",", ":"), ensure_ascii=False), encoding="utf-8")
    partial.replace(path)
    return path


def read_recording(path: Path) -> Recording:
    """What `write_recording` wrote. Raises ValueError for anything else, and OSError where it cannot be read."""
    try:
        data = read_json(path.read_bytes())
        if (data.pop("format"), data.pop("version")) != (FORMAT, VERSION):
            raise ValueError(f"needed {FORMAT!r}, version {VERSION}")
        operators = tuple(_operator(each) for each in data.pop("operators"))
        _require(data, {"name": str, "seconds": float, "torch": str, "events": int})
        if not isinstance(data["trace"], str | None):
            raise TypeError(f"trace must be a file's name or null; got {data['trace']!r:.80}")
        recording = Recording(**data, operators=operators)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} holds no profile of this version: {error}") from error
    return recording


def file_stem(name: str) -> str:
    """The name as far as files can have it; where that is not all of it, with digits that tell it from others."""
    plain = re.sub(r"[^\w.=+-]+", "-", name, flags=re.ASCII).strip("-.")[:_LONGEST]
    return plain if plain == name else f"{plain}-{sha256(name.encode()).hexdigest()[:8]}"


def _operators(profiler: profile) -> Iterable[Operator]:
    for each in profiler.key_averages():
        memory = each.self_cpu_memory_usage + each.self_device_memory_usage
        own, total, device = each.self_cpu_time_total, each.cpu_time_total, each.self_device_time_total
        yield Operator(each.key, each.count, round(own, 3), round(total, 3), round(device, 3), memory)


def _operator(data: dict[str, Any]) -> Operator:
    times = dict.fromkeys(("self_us", "total_us", "device_us"), float)
    _require(data, {"name": str, "calls": int, "memory_bytes": int, **times})
    return Operator(**data)


def _require(data: dict[str, Any], kinds: dict[str, type]) -> None:
    """Raises TypeError unless each of these fields is of its kind, a whole number for a float as well.

    Raises ValueError for numbers beyond 2**63, whose sums floats would not hold, and for negative ones but of memory.
    """
    for name, kind in kinds.items():
        value = data[name]
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise TypeError(f"{name} must be a {kind.__name__}; got {value!r:.80}")
        least = -_LARGEST if name == "memory_bytes" else 0
        if kind is not str and not least <= value <= _LARGEST:
            raise ValueError(f"{name} must be from {least} to {_LARGEST}; got {value!r:.40}")


def _write_trace(profiler: profile, path: Path) -> None:
    """Beside the place first: whoever looks there meanwhile finds the earlier trace, or none."""
    with TemporaryDirectory(dir=path.parent, prefix=".trace-") as scratch:
        plain, packed = Path(scratch, "trace.json"), Path(scratch, "trace.json.gz")
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        packed.replace(path)
