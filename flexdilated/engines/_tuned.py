"""Fastest measured Choice of each call: kept for the process, and stored in a file next to the device's constants."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..masks.planning import BUILTIN, Choice, machine_of, write_json
from ..masks.text import read_json
from ._call import Call

FORMAT, VERSION = "flexdilated choices", 1
_MOST_STORED = 1000
_log = logging.getLogger("flexdilated")


class TuningKey(NamedTuple):
    """Key of a measurement: the call, the kind of device, the dtype and the head dim."""

    call: Call
    kind: str
    dtype: str
    head_dim: int

    @classmethod
    def of(cls, call: Call, q: Tensor) -> TuningKey:
        return cls(call, q.device.type, str(q.dtype), int(q.shape[-1]))  # symbolic in a trace


class TuningResult(NamedTuple):
    """Fastest choice; `backward`: the measurement included the backward."""

    choice: Choice
    backward: bool


_lock = threading.Lock()
_results: dict[TuningKey, TuningResult] = {}
_sources: set[str] = set()


def chosen(call: Call, q: Tensor) -> Choice | None:
    """The fastest measured choice for a call; None if it was not measured."""
    source = machine_of(q.device.type).source
    if source not in _sources:
        _load(source)
    result = result_of(TuningKey.of(call, q)) if _results else None
    return None if result is None else result.choice


def result_of(key: TuningKey) -> TuningResult | None:
    """The measured or stored result, or None."""
    return _results.get(key)


def remember(key: TuningKey, result: TuningResult) -> Path | None:
    """Use this result for the call from now on; returns the path of the stored choices, or None if not stored."""
    with _lock:
        _results[key] = result
    path = choices_path(machine_of(key.kind).source)
    if path is not None:
        try:
            write_json(path, _to_data())
        except OSError as error:
            _log.warning("what autotune found is kept for this process only: %s: %s", path, error.strerror)
            return None
    return path


def forget_choices() -> None:
    """Forget every result; stored choices are read again when needed."""
    with _lock:
        _results.clear()
        _sources.clear()


def num_measured() -> int:
    """Number of calls with a result, including the stored results read so far."""
    return len(_results)


def choices_path(source: str) -> Path | None:
    """Path of the choices, next to the file of constants in use; None for built-in constants."""
    path = Path(source)
    return path.with_suffix(".choices.json") if source != BUILTIN and path.is_file() else None


def _load(source: str) -> None:
    """Read the choices stored with a file of constants, once; an invalid file is logged and ignored."""
    path, read = choices_path(source), {}
    if path is not None and path.is_file():
        try:
            read = _from_data(read_json(path.read_bytes()))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            _log.warning("stored choices are not used: %s holds none of this version (%s)", path, error)
    with _lock:
        for key, result in read.items():
            _results.setdefault(key, result)
        _sources.add(source)


def _to_data() -> dict[str, Any]:
    with _lock:
        latest = list(_results.items())[-_MOST_STORED:]
    choices = [
        {
            "call": list(key.call),
            "at": list(key[1:]),
            "together": result.choice.together,
            "ways": result.choice.ways,
            "backward": result.backward,
        }
        for key, result in latest
    ]
    return {"format": FORMAT, "version": VERSION, "choices": choices}


def _from_data(data: Any) -> dict[TuningKey, TuningResult]:
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"needed {FORMAT!r}, version {VERSION}")
    read = {}
    for each in data["choices"]:
        kind, dtype, head_dim = each["at"]
        pattern, *numbers, block_size, placement = each["call"]
        ways = tuple((str(layout), tuple(map(int, sides))) for layout, sides in each["ways"])
        choice = Choice(bool(each["together"]), ways)
        call = Call._make((str(pattern), *map(int, numbers), tuple(map(int, block_size)), str(placement)))
        key = TuningKey(call, str(kind), str(dtype), int(head_dim))
        read[key] = TuningResult(choice, bool(each["backward"]))
    return read
