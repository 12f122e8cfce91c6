"""Two sets of results side by side: `python -m bench compare A B`, files or folders. What got worse, what better?

The rule. B/A is taken of every figure and every time that both hold. A change counts if it is larger than the noise of
both together, and is a failure if it is for the worse by more than the bound. The noise of a time is half its spread
over its median, 10 % if it ran once; that of a row's figure is the sum over the row's times; neither is below 5 %.
Times are compared on the same machine alone, and after division by the drift: the median change of the peers' times
(dense attention and the like), which comes from the machine and torch. Peers never fail.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from ._jobs import tokens_text

Document = Mapping[str, Any]
Key = tuple[str, str, str]  # measure, its row, its number

LEAST_NOISE, _NOISE_OF_ONE_RUN, BOUND = 0.05, 0.10, 1.2
_FIELDS = {"name", "small", "config", "rows", "points", "machine", "versions"}
_TIME = re.compile(r"s|ms|µs|us|ns|min|.*/s")
_PEERS = re.compile(r"dense|SDPA|create_block_mask|FlexAttention|loop over|plain", re.IGNORECASE)
_NOT_THE_MACHINE = ("memory_gib", "sm_clock", "memory_clock")  # room is no speed; clocks are those of one moment


@dataclass(frozen=True)
class Value:
    """One number of a result. `is_time`: compared only on equal machines; `peer`: not the library's."""

    number: float
    noise: float
    less_is_better: bool = True
    is_time: bool = False
    peer: bool = False


@dataclass(frozen=True)
class Change:
    """One number before and after; times are divided by `drift`."""

    key: Key
    before: Value
    after: Value
    drift: float = 1.0

    @property
    def noise(self) -> float:
        return self.before.noise + self.after.noise

    @property
    def worse_by(self) -> float:
        """The factor by which it got worse, below 1 where it got better; NaN after a number is infinitely worse."""
        before, after = self.before.number, self.after.number
        if math.isnan(before) or math.isnan(after):
            return 1.0 if math.isnan(before) else math.inf
        if not self.before.less_is_better:
            before, after = after, before
        if before <= 0 or after <= 0:
            return 1.0 if before <= 0 and after <= 0 else math.inf if before <= 0 else 0.0
        return after / before / (self.drift if self.before.is_time else 1.0)

    def verdict(self, bound: float) -> str:
        """same, better, worse, WORSE if it is a failure; with "peer" before it for a peer."""
        worse = self.worse_by
        if max(worse, 1 / worse if worse else math.inf) <= 1 + self.noise:
            return "same"
        if self.before.peer:
            return "peer better" if worse < 1 else "peer worse"
        return "better" if worse < 1 else "WORSE" if worse > bound else "worse"


def read_results(path: Path) -> dict[str, Document]:
    """Results by measure, of a file or of a folder, whose other files are skipped; ValueError if there is none."""
    found = {}
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(document, dict) or not set(document) >= _FIELDS:
                raise ValueError(f"it has no {', '.join(sorted(_FIELDS - set(document)))}")
            values(document)
        except (OSError, KeyError, TypeError, ValueError) as error:
            if not path.is_dir():
                raise ValueError(f"a result must be as `python -m bench` writes it; {path}: {error!r}") from error
        else:
            found[document["name"]] = document
    if not found:
        raise ValueError(f"a folder of results must hold at least one; {path} has none")
    return found


def values(document: Document) -> dict[Key, Value]:
    """Every number of a result that can be compared. A second one of the same name has its number in the key."""
    found: dict[Key, Value] = {}
    for measure, what, value in _numbers(document):
        key, times = (document["name"], measure, what), 1
        while key in found:
            times += 1
            key = (document["name"], f"{measure} ({times})", what)
        found[key] = value
    return found


def _numbers(document: Document) -> Iterator[tuple[str, str, Value]]:
    for row in document["rows"]:
        if row["measured"] is not None:
            sense, _, bound = row["target"].partition(" ")
            if sense not in ("≥", "≤"):
                raise ValueError(f"a target must begin with ≥ or ≤; got {row['target']!r}")
            is_time = _TIME.fullmatch(bound.partition(" ")[2]) is not None
            noise = max(LEAST_NOISE, sum(map(_noise, row["timings"])))
            yield row["measure"], "figure", Value(float(row["measured"]), noise, sense == "≤", is_time)
        for timing in row["timings"]:
            yield row["measure"], f"time of {timing['name']}", _time(timing)
    for point in document["points"]:
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


def compare(before: Mapping[str, Document], after: Mapping[str, Document]) -> tuple[list[Change], list[str]]:
    """All changes, worst first, and notes. Raises ValueError if they have no measure in common."""
    names = [name for name in before if name in after]
    if not names:
        raise ValueError(f"the two need a measure in common; got {', '.join(before)} and {', '.join(after)}")
    notes = [f"{name}: only in {'A' if name in before else 'B'}" for name in {**before, **after} if name not in names]
    changes = []
    for name in names:
        a, b = before[name], after[name]
        if a["small"] != b["small"]:
            notes.append(f"{name}: not compared, one of them was measured at tiny sizes")
            continue
        ours, theirs = values(a), values(b)
        same = not _unequal(
            *({k: v for k, v in each["machine"].items() if k not in _NOT_THE_MACHINE} for each in (a, b))
        )
        changes += [Change(k, ours[k], theirs[k]) for k in ours if k in theirs and (same or not ours[k].is_time)]
        notes += [f"{name}: {text}" for text in _differences(a, b, same)]
        notes += [f"{', '.join(key)}: only in {'A' if key in ours else 'B'}" for key in {**ours, **theirs}
                  if key not in ours or key not in theirs]  # fmt: skip
    peers = [change.worse_by for change in changes if change.before.peer and change.before.is_time]
    changes = [replace(change, drift=median(peers) if peers else 1.0) for change in changes]
    return sorted(changes, key=lambda change: -change.worse_by), notes


def _differences(before: Document, after: Document, same_machine: bool) -> Iterator[str]:
    if not same_machine:
        yield f"different machines, so times are not compared: {_unequal(before['machine'], after['machine'])}"
    for what in ("versions", "config"):
        if text := _unequal(before[what], after[what]):
            yield f"different {what}: {text}"
    earlier = {row["measure"]: row for row in before["rows"]}
    words = {True: "met", False: "missed", None: "not measured"}
    for row in after["rows"]:
        if row.get("not_verified"):
            yield f"{row['measure']}: not verified in B: {', '.join(row['not_verified'])}"
        was = earlier.get(row["measure"])
        if was is not None and was["met"] != row["met"]:
            yield f"{row['measure']}: the target {row['target']} was {words[was['met']]}, now {words[row['met']]}"


def _unequal(before: Document, after: Document) -> str:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return "; ".join(f"{name} {before.get(name)} → {after.get(name)}" for name in names)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, 1 if something got worse beyond the bound, or 2 for a call or a file that is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, metavar="A", help="a file or a folder of results")
    parser.add_argument("after", type=Path, metavar="B", help="those to compare with it")
    most = f"most that anything may get worse ({BOUND})"
    parser.add_argument("--bound", type=at_least_one, default=BOUND, metavar="FACTOR", help=most)
    parser.add_argument("--all", action="store_true", help="print what stayed the same, too")
    options = parser.parse_args(arguments)
    try:
        changes, notes = compare(read_results(options.before), read_results(options.after))
    except ValueError as error:
        parser.error(str(error))
    lines, verdicts = [], [change.verdict(options.bound) for change in changes]
    for change, verdict in zip(changes, verdicts, strict=True):
        before, after = change.before.number, change.after.number
        numbers = f"{before:.4g}", f"{after:.4g}", f"{after / before:.3g}" if before else "—", f"± {change.noise:.0%}"
        if options.all or verdict != "same":
            lines.append((*change.key, *numbers, verdict))
    headers = ("measure", "row", "of it", "A", "B", "B / A", "noise", "")
    print(tabulate(lines, headers, disable_numparse=True, maxcolwidths=[None, 60, 32, *[None] * 5]), end="\n\n")
    drift = changes[0].drift if changes else 1.0
    print(f"{verdicts.count('same')} of {len(verdicts)} numbers are the same within their noise.")
    print(f"The bound is {options.bound:g}; times are divided by the drift of the peers, {drift:.2f}.")
    for note in notes:
        print(f"- {note}")
    return 1 if "WORSE" in verdicts else 0


def at_least_one(text: str) -> float:
    """A bound of the command line."""
    try:
        bound = float(text)
    except ValueError:
        bound = 0.0
    if not 1.0 <= bound < math.inf:
        raise argparse.ArgumentTypeError(f"a bound must be a number of at least 1; got {text!r}")
    return bound
