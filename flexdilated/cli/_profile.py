"""`profile`: the recordings of a folder, and the operators that took most, over all of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tabulate import tabulate

from ..masks.core._bytes_text import bytes_text
from ..observe._profile import VARIABLE
from ..observe._profile_file import TABLE, Operator, Recording, read_recording
from ._sizes import seconds_text
from ._usage import UsageError

_NARROWEST = 24  # characters of a name, in whatever terminal


def print_profile(folder: Path, *, top: int, sort: str, only: str, as_json: bool) -> None:
    """Print the recordings whose names contain `only`, and their `top` operators. Raises UsageError for bad input."""
    if top < 1:
        raise UsageError(f"--top must be at least 1; got {top}")
    recordings = _recordings(folder, only)
    operators = sorted(_together(recordings), key=_keys(recordings)[sort], reverse=True)
    if as_json:
        told = [{**asdict(each), "operators": len(each.operators)} for each in recordings]
        print(json.dumps({"recordings": told, "operators": [asdict(each) for each in operators]}, indent=1))
        return
    width = shutil.get_terminal_size().columns
    print(_recordings_table(recordings, folder, width, top))
    print(f"\n{_operators_table(operators[:top], width)}")
    print(f"\n{_remark(operators, top, sort)}")


def _recordings(folder: Path, only: str) -> list[Recording]:
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(TABLE))
        found = [read_recording(path) for path in paths]
    except OSError as error:
        raise UsageError(f"DIR must be a folder that can be read; {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not found:
        raise UsageError(f"DIR must hold profiles, as {VARIABLE}={folder} has them recorded; {folder} holds none")
    chosen = [each for each in found if only in each.name]
    if not chosen:
        raise UsageError(f"--only must be part of a recording's name; got {only!r}, and there are {_names(found)}")
    return sorted(chosen, key=lambda each: -each.seconds)


def _names(recordings: Sequence[Recording], most: int = 5) -> str:
    shown = ", ".join(repr(each.name) for each in recordings[:most])
    return shown if len(recordings) <= most else f"{shown} and {len(recordings) - most} more"


def _together(recordings: Iterable[Recording]) -> Iterable[Operator]:
    """Each operator once, with what it took in all recordings."""
    sums: dict[str, Operator] = {}
    for each in (operator for recording in recordings for operator in recording.operators):
        seen = sums.get(each.name, Operator(each.name, 0, 0.0, 0.0, 0.0, 0))
        numbers = {key: value + getattr(seen, key) for key, value in asdict(each).items() if key != "name"}
        sums[each.name] = replace(seen, **numbers)
    return sums.values()


def _keys(recordings: Iterable[Recording]) -> dict[str, Callable[[Operator], tuple[float, float]]]:
    """By what to sort: time is that of the accelerator where one was used."""
    on_device = any(operator.device_us for recording in recordings for operator in recording.operators)
    return {
        "time": lambda each: (each.device_us if on_device else 0.0, each.self_us),
        "memory": lambda each: (abs(each.memory_bytes), each.self_us),
        "calls": lambda each: (each.calls, each.self_us),
    }


def _recordings_table(recordings: Sequence[Recording], folder: Path, width: int, most: int) -> str:
    total = seconds_text(sum(each.seconds for each in recordings))
    head = f"{len(recordings)} recording{'' if len(recordings) == 1 else 's'} in {folder}, {total} in all"
    shown = recordings[:most]
    rows = [
        (each.name, seconds_text(each.seconds), f"{each.events:,}{'' if each.trace else ', too many for a trace'}")
        for each in shown
    ]
    table = _table(rows, ("recording", "time", "events"), width)
    more = f"\nand {len(recordings) - most} shorter ones" if len(recordings) > most else ""
    return f"{head}\n\n{table}{more}"


def _operators_table(operators: Sequence[Operator], width: int) -> str:
    on_device = any(each.device_us for each in operators)
    rows = [
        (
            each.name,
            f"{each.calls:,}",
            seconds_text(each.self_us / 1e6),
            seconds_text(each.total_us / 1e6),
            *([seconds_text(each.device_us / 1e6)] if on_device else []),
            bytes_text(each.memory_bytes),
        )
        for each in operators
    ]
    columns = ("operator", "calls", "self", "total", *(["device"] if on_device else []), "memory")
    return _table(rows, columns, width)


def _table(rows: Sequence[Sequence[str]], columns: Sequence[str], width: int) -> str:
    """With names cut to what the other columns leave of the width; tabulate keeps two characters around a heading."""
    others = sum(
        2 + max([len(columns[index]) + 2, *(len(row[index]) for row in rows)]) for index in range(1, len(columns))
    )
    room = max(_NARROWEST, width - others)
    cut = [(_cut(row[0], room), *row[1:]) for row in rows]
    return tabulate(cut, columns, disable_numparse=True, colalign=("left", *["right"] * (len(columns) - 1)))


def _cut(name: str, room: int) -> str:
    """Without its middle: names that begin alike differ at their ends."""
    end = room // 3
    return name if len(name) <= room else f"{name[: room - end - 1]}…{name[-end:]}"


def _remark(operators: Sequence[Operator], top: int, sort: str) -> str:
    everything, shown = sum(each.self_us for each in operators), sum(each.self_us for each in operators[:top])
    share = f"; these have {shown / everything:.0%} of the host's time" if everything else ""
    return (
        f"{min(top, len(operators))} of {len(operators)} operators, by {sort}{share}\n"
        "self: without what it calls; memory: allocated less freed"
    )
