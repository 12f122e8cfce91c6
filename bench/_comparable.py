"""What two sets of results have in common: each figure and each time by its name, with its noise.

The noise of a time is half its spread over its median, 10 % if it ran once. That of a row's figure is the sum over
the row's times. Neither is taken to be below 5 %.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._problem import tokens_text

Document = Mapping[str, Any]
Key = tuple[str, str, str]  # question, measure, what of it

LEAST_NOISE = 0.05
_NOISE_OF_ONE_RUN = 0.10
_FIELDS = ("name", "small", "config", "rows", "points", "machine", "versions")
_TIME = re.compile(r"s|ms|µs|us|ns|min|.*/s")
_PEERS = re.compile(r"dense|SDPA|create_block_mask|FlexAttention|loop over|plain", re.IGNORECASE)


@dataclass(frozen=True)
class Value:
    """One number of a result. A `peer`'s time is not the library's; `is_time` means nothing on another machine."""

    number: float
    noise: float
    less_is_better: bool = True
    is_time: bool = False
    peer: bool = False


def read_results(path: Path) -> tuple[dict[str, Document], list[str]]:
    """(results by question, files of a folder that are none). Raises ValueError if there is no result."""
    if not path.exists():
        raise ValueError(f"results must be a file or a folder; there is no {path}")
    if not path.is_dir():
        document = _read(path)
        return {document["name"]: document}, []
    found, others = {}, []
    for file in sorted(path.glob("*.json")):
        try:
            document = _read(file)
        except ValueError:
            others.append(str(file))
            continue
        if document["name"] in found:
            raise ValueError(f"a folder must hold one result a question; {path} has two of {document['name']}")
        found[document["name"]] = document
    if not found:
        raise ValueError(f"a folder of results must hold at least one; {path} has none")
    return found, others


def _read(path: Path) -> Document:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"a result must be JSON; {path} is not: {error}") from error
    missing = [name for name in _FIELDS if not isinstance(document, dict) or name not in document]
    if missing:
        raise ValueError(f"a result must be as `python -m bench` writes it; {path} lacks {', '.join(missing)}")
    try:
        _check(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        kind = type(error).__name__
        raise ValueError(f"a result must be as `python -m bench` writes it; {path}: {kind}: {error}") from error
    return document


def _check(document: Document) -> None:
    """Raise an error of some kind unless everything that is compared is there."""
    for name, kind in (("machine", dict), ("versions", dict), ("config", dict), ("rows", list), ("points", list)):
        if not isinstance(document[name], kind):
            raise TypeError(f"{name} must be a {kind.__name__}; got {type(document[name]).__name__}")
    for row in document["rows"]:
        if row["met"] not in (True, False, None):
            raise ValueError(f"met must be true, false or null; got {row['met']!r}")
    values(document)


def values(document: Document) -> dict[Key, Value]:
    """Every number of a result that can be set beside another's. A name met twice is told apart by its number."""
    found: dict[Key, Value] = {}
    for measure, what, value in (*_of_rows(document["rows"]), *_of_points(document["points"])):
        key, times = (document["name"], measure, what), 1
        while key in found:
            times += 1
            key = (document["name"], f"{measure} ({times})", what)
        found[key] = value
    return found


def _of_rows(rows: list[Document]) -> Iterator[tuple[str, str, Value]]:
    for row in rows:
        timings = row["timings"]
        if row["measured"] is not None:
            yield row["measure"], "figure", _figure(row, max(LEAST_NOISE, sum(map(_noise, timings))))
        for timing in timings:
            yield row["measure"], f"time of {timing['name']}", _time(timing)


def _figure(row: Document, noise: float) -> Value:
    sense, _, bound = row["target"].partition(" ")
    if sense not in ("≥", "≤"):
        raise ValueError(f"a target must begin with ≥ or ≤; got {row['target']!r}")
    is_time = _TIME.fullmatch(bound.partition(" ")[2]) is not None
    return Value(float(row["measured"]), noise, less_is_better=sense == "≤", is_time=is_time)


def _of_points(points: list[Document]) -> Iterator[tuple[str, str, Value]]:
    for point in points:
        measure = f"{point['attention']}, {tokens_text(point['num_tokens'])}"
        for what in ("forward", "backward"):
            yield measure, f"time of {what}", _time(point[what])
        peer = _PEERS.search(point["attention"]) is not None
        yield measure, "peak bytes", Value(float(point["peak_bytes"]), LEAST_NOISE, peer=peer)


def _time(timing: Document) -> Value:
    peer = _PEERS.search(timing["name"]) is not None
    return Value(float(timing["median_s"]), max(LEAST_NOISE, _noise(timing)), is_time=True, peer=peer)


def _noise(timing: Document) -> float:
    if timing["repeats"] < 2:
        return _NOISE_OF_ONE_RUN
    return timing["spread_s"] / 2 / timing["median_s"] if timing["median_s"] > 0 else 0.0
