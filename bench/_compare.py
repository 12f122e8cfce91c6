"""Two sets of results side by side: `python -m bench compare A B`, files or folders. What got worse, what better?

The rule. B/A is taken of every figure and every time that both hold. A change counts if it is larger than the
noise of both together, and is a failure if it is for the worse by more than the bound. The noise of a time is half its
spread over its median, 10 % if it ran once. That of a row's figure is the sum over the row's times. Neither is taken
to be below 5 %. Times are compared on the same machine alone, and after division by the drift: the median change of
the peers' times (dense attention and the like), which tells of the machine and of torch rather than of the library.
Peers never fail. On different machines only figures that are no times are compared.
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
from ._run import CODES

Document = Mapping[str, Any]
Key = tuple[str, str, str]  # measure, its row, what of it

LEAST_NOISE = 0.05
_NOISE_OF_ONE_RUN = 0.10
_FIELDS = {"small": bool, "config": dict, "rows": list, "points": list, "machine": dict, "versions": dict}
_TIME = re.compile(r"s|ms|µs|us|ns|min|.*/s")
_PEERS = re.compile(r"dense|SDPA|create_block_mask|FlexAttention|loop over|plain", re.IGNORECASE)
BOUND = 1.2
_NOT_THE_MACHINE = ("memory_gib", "sm_clock", "memory_clock")  # room is no speed; clocks are those of one moment


@dataclass(frozen=True)
class Value:
    """One number of a result. A `peer`'s time is not the library's; `is_time` means nothing on another machine."""

    number: float
    noise: float
    less_is_better: bool = True
    is_time: bool = False
    peer: bool = False


def read_results(path: Path) -> tuple[dict[str, Document], list[str]]:
    """(results by measure, files of a folder that are none). Raises ValueError if there is no result."""
    if not path.exists():
        raise ValueError(f"results must be a file or a folder; there is no {path}")
    if not path.is_dir():
        document = _read(path)
        return {document["name"]: document}, []
    found: dict[str, Document] = {}
    others: list[str] = []
    for file in sorted(path.glob("*.json")):
        try:
            document = _read(file)
        except ValueError:
            others.append(str(file))
            continue
        if document["name"] in found:
            raise ValueError(f"a folder must hold one result a measure; {path} has two of {document['name']}")
        found[document["name"]] = document
    if not found:
        raise ValueError(f"a folder of results must hold at least one; {path} has none")
    return found, others


def _read(path: Path) -> Document:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"a result must be JSON; {path} is not: {error}") from error
    try:
        document["name"] = CODES.get(document["name"], document["name"])  # measures had codes before
        for name, kind in _FIELDS.items():
            if not isinstance(document[name], kind):
                raise TypeError(f"{name} must be a {kind.__name__}; got {type(document[name]).__name__}")
        values(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        kind = type(error).__name__
        raise ValueError(f"a result must be as `python -m bench` writes it; {path}: {kind}: {error}") from error
    return document


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


@dataclass(frozen=True)
class Change:
    """One number before and after. `drift` is what times are divided by."""

    key: Key
    before: Value
    after: Value
    drift: float = 1.0

    @property
    def noise(self) -> float:
        return self.before.noise + self.after.noise

    @property
    def worse_by(self) -> float:
        """The factor by which it got worse; below 1 where it got better. What is no number is worse than any."""
        before, after = self.before.number, self.after.number
        if math.isnan(before) or math.isnan(after):
            return 1.0 if math.isnan(before) else math.inf
        if not self.before.less_is_better:
            before, after = after, before
        if before <= 0 or after <= 0:
            return 1.0 if before <= 0 and after <= 0 else math.inf if before <= 0 else 0.0
        return after / before / (self.drift if self.before.is_time else 1.0)

    @property
    def counts(self) -> bool:
        """Whether it is larger than the noise."""
        return max(self.worse_by, 1 / self.worse_by if self.worse_by else math.inf) > 1 + self.noise

    def fails(self, bound: float) -> bool:
        return self.counts and self.worse_by > bound and not self.before.peer

    def verdict(self, bound: float) -> str:
        if not self.counts:
            return "same"
        better = "better" if self.worse_by < 1 else "worse"
        return f"peer {better}" if self.before.peer else "WORSE" if self.fails(bound) else better


@dataclass(frozen=True)
class Comparison:
    """All changes, worst first, and what else is to be said."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    drift: float | None


def compare(before: Mapping[str, Document], after: Mapping[str, Document]) -> Comparison:
    """Results by measure, before and after. Raises ValueError if they have no measure in common."""
    names = [name for name in before if name in after]
    if not names:
        raise ValueError(f"the two need a measure in common; got {', '.join(before)} and {', '.join(after)}")
    notes = [f"{name}: only in {'A' if name in before else 'B'}" for name in {**before, **after} if name not in names]
    changes, conditions = [], {}
    for name in names:
        if before[name]["small"] != after[name]["small"]:
            notes.append(f"{name}: not compared, one of them was measured at tiny sizes")
            continue
        changes += _changes(before[name], after[name])
        notes += [f"{name}: {text}" for text in _differences(before[name], after[name])]
        for text in _conditions(before[name], after[name]):
            conditions.setdefault(text, []).append(name)
    peers = [change.worse_by for change in changes if change.before.peer and change.before.is_time]
    drift = median(peers) if peers else None
    changes = [replace(change, drift=drift or 1.0) for change in changes]
    changes.sort(key=lambda change: -change.worse_by)
    notes = [f"{', '.join(shared)}: {text}" for text, shared in conditions.items()] + notes
    return Comparison(tuple(changes), tuple(notes), drift)


def _changes(before: Document, after: Document) -> list[Change]:
    """What can be compared: on different machines no times."""
    same = _machine(before) == _machine(after)
    ours, theirs = values(before), values(after)
    shared = [key for key in ours if key in theirs and (same or not ours[key].is_time)]
    return [Change(key, ours[key], theirs[key]) for key in shared]


def _differences(before: Document, after: Document) -> Iterator[str]:
    """Other configurations, rows and targets."""
    names = _unequal(before["config"], after["config"])
    if names:
        yield f"configured differently in {', '.join(names)}; rows of equal names are compared"
    ours, theirs = values(before), values(after)
    for key in {**ours, **theirs}:
        if key not in ours or key not in theirs:
            yield f"{key[1]}, {key[2]}: only in {'A' if key in ours else 'B'}"
    earlier = {row["measure"]: row for row in before["rows"]}
    words = {True: "met", False: "missed", None: "not measured"}
    for row in after["rows"]:
        if row.get("not_verified"):
            yield f"{row['measure']}: not verified in B: {', '.join(row['not_verified'])}"
        was = earlier.get(row["measure"])
        if was is not None and was["met"] != row["met"]:
            yield f"{row['measure']}: the target {row['target']} was {words[was['met']]}, now {words[row['met']]}"


def _conditions(before: Document, after: Document) -> Iterator[str]:
    """What several measures share, and is said once."""
    machines = _machine(before), _machine(after)
    if machines[0] != machines[1]:
        yield f"different machines, so times are not compared: {_listed(*machines)}"
    if before["versions"] != after["versions"]:
        yield f"different versions: {_listed(before['versions'], after['versions'])}"


def _machine(document: Document) -> Document:
    return {name: value for name, value in document["machine"].items() if name not in _NOT_THE_MACHINE}


def _listed(before: Document, after: Document) -> str:
    return "; ".join(f"{name} {before.get(name)} → {after.get(name)}" for name in _unequal(before, after))


def _unequal(before: Document, after: Document) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, 1 if something got worse beyond the bound, or 2 for a call or a file that is wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        (before, others), (after, more) = read_results(options.before), read_results(options.after)
        comparison = compare(before, after)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"A: {options.before}, {_measured(before)}\nB: {options.after}, {_measured(after)}\n")
    _print(comparison, options.bound, everything=options.all)
    for note in (*comparison.notes, *(f"{file}: no result" for file in (*others, *more))):
        print(f"- {note}")
    return 1 if any(change.fails(options.bound) for change in comparison.changes) else 0


def _measured(documents: Mapping[str, Document]) -> str:
    """Commits and dates, each once."""
    places = dict.fromkeys(
        f"commit {str(each.get('commit'))[:12]}, {str(each.get('date'))[:10]}" for each in documents.values()
    )
    return "; ".join(places)


def _print(comparison: Comparison, bound: float, *, everything: bool) -> None:
    verdicts = [(change, change.verdict(bound)) for change in comparison.changes]
    lines = [_line(change, verdict) for change, verdict in verdicts if everything or verdict != "same"]
    if lines:
        headers = ("#", "measure", "of it", "A", "B", "B / A", "noise", "")
        print(tabulate(lines, headers, disable_numparse=True, maxcolwidths=[None, 60, 32, *[None] * 5]), end="\n\n")
    same = sum(verdict == "same" for _, verdict in verdicts)
    print(f"{same} of {len(verdicts)} numbers are the same within their noise; the bound is {bound:g}.")
    if comparison.drift is not None:
        print(f"Peers took {comparison.drift:.2f} times as long: times are judged after division by that.")


def _line(change: Change, verdict: str) -> tuple[str, ...]:
    before, after = change.before.number, change.after.number
    ratio = f"{after / before:.3g}" if before else "—"
    return *change.key, f"{before:.4g}", f"{after:.4g}", ratio, f"± {change.noise:.0%}", verdict


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, metavar="A", help="a file or a folder of results")
    parser.add_argument("after", type=Path, metavar="B", help="those to compare with it")
    parser.add_argument(
        "--bound",
        type=at_least_one,
        default=BOUND,
        metavar="FACTOR",
        help=f"most that anything may get worse ({BOUND})",
    )
    parser.add_argument("--all", action="store_true", help="print what stayed the same, too")
    return parser


def at_least_one(text: str) -> float:
    """A bound of the command line."""
    try:
        bound = float(text)
    except ValueError:
        bound = 0.0
    if not 1.0 <= bound < math.inf:
        raise argparse.ArgumentTypeError(f"a bound must be a number of at least 1; got {text!r}")
    return bound
