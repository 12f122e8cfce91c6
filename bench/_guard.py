"""The guard: is anything twice as slow as it was? Ratios to plain jobs, on one thread, within seconds.

The rule. Each case runs the library and a plain job in turns. Its figure is the fastest run of the library over
the fastest plain run, in processor time: that leaves out the wait for a turn on a busy machine, and whatever else
the machine does only ever adds to it, so both end near their true cost. A case fails if its figure is above `bound`
times the recorded one in each of up to three tries, a second apart, whose runs are pooled. That forgives noise,
while what really takes twice as long stays above the bound.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import torch
from tabulate import tabulate

from flexdilated.cli._terminal import one_thread

from ._compare import at_least_one
from ._guard_cases import CASES, Pair
from ._machine import conditions

RECORDED = Path("bench/guard.json")
BOUND = 1.7

_TRIES = 3
_ROUNDS_A_TRY = 8  # at least
_SECONDS_A_TRY = 0.6  # at least, and more where rounds take longer
_SECONDS_BETWEEN = 1.0
_HEAP_BYTES = 31 << 20  # glibc takes blocks above 32 MiB from the system each time, whatever was freed before


@dataclass
class Runs:
    """Seconds of all runs of a case so far."""

    library: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Fastest over fastest."""
        return min(self.library) / min(self.plain)

    def add(self, pair: Pair) -> None:
        """One more try: rounds in which both take turns."""
        start, rounds = perf_counter(), 0
        while rounds < _ROUNDS_A_TRY or perf_counter() - start < _SECONDS_A_TRY:
            self.plain.append(pair.plain.seconds(process_time))
            self.library.append(pair.library.seconds(process_time))
            rounds += 1


@dataclass(frozen=True)
class Verdict:
    """A case's figure beside the recorded one."""

    name: str
    recorded: float
    ratio: float
    tries: int
    bound: float

    @property
    def failed(self) -> bool:
        return self.ratio > self.bound * self.recorded

    @property
    def text(self) -> str:
        if self.failed:
            return "SLOWER"
        return "faster: record it anew" if self.ratio * self.bound < self.recorded else "ok"


def check(name: str, case: Callable[[], Pair], *, recorded: float, bound: float = BOUND) -> Verdict:
    """Measure a case until it is within the bound, in at most three tries."""
    pair, runs, tries = case(), Runs(), 0
    while True:
        tries += 1
        runs.add(pair)
        verdict = Verdict(name, recorded, runs.ratio, tries, bound)
        if not verdict.failed or tries == _TRIES:
            return verdict
        sleep(_SECONDS_BETWEEN)


def record(names: Iterable[str], path: Path) -> None:
    """Measure the cases, in as many tries as a failure would take, and write their figures; others stay."""
    ratios = dict(read(path)) if path.exists() else {}
    for name in names:
        pair, runs = CASES[name](), Runs()
        for _ in range(_TRIES):
            runs.add(pair)
        ratios[name] = round(runs.ratio, 3)
        print(f"{name}: {ratios[name]}")
    document = {"ratios": {name: ratios[name] for name in CASES if name in ratios}, **conditions()}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def read(path: Path) -> Mapping[str, float]:
    """The recorded figures. Raises ValueError for a file that holds none."""
    try:
        document: Any = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"the guard needs recorded ratios, which `--record` writes; there is no {path}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"recorded ratios must be JSON; {path} is not: {error}") from error
    ratios = document.get("ratios") if isinstance(document, dict) else None
    if not isinstance(ratios, dict) or not all(_is_ratio(value) for value in ratios.values()):
        raise ValueError(f"{path} must hold positive numbers under 'ratios'; got {ratios!r:.80}")
    return ratios


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, 1 if a case is slower than the bound allows, or 2 for a call or a file that is wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.cases or list(CASES)
    with _alone():
        if options.record:
            record(names, options.file)
            return 0
        try:
            recorded = read(options.file)
        except ValueError as error:
            parser.error(str(error))
        missing = [name for name in names if name not in recorded]
        if missing:
            parser.error(f"{options.file} has no ratio of {', '.join(missing)}; `--record` measures it")
        verdicts = [check(name, CASES[name], recorded=recorded[name], bound=options.bound) for name in names]
    print(_table(verdicts))
    failed = [verdict.name for verdict in verdicts if verdict.failed]
    if failed:
        print(f"slower than {options.bound} times the recorded ratio: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench guard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", type=_case, help=f"all, or some of {', '.join(CASES)}")
    parser.add_argument("--record", action="store_true", help="measure, and write the ratios down as those to hold")
    parser.add_argument(
        "--bound", type=at_least_one, default=BOUND, metavar="FACTOR", help=f"times the recorded ratio ({BOUND})"
    )
    parser.add_argument("--file", type=Path, default=RECORDED, metavar="FILE", help=f"recorded ratios ({RECORDED})")
    return parser


def _case(text: str) -> str:
    if text not in CASES:
        raise argparse.ArgumentTypeError(f"a case must be one of {', '.join(CASES)}; got {text!r}")
    return text


def _is_ratio(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _table(verdicts: Sequence[Verdict]) -> str:
    headers = ("case", "recorded", "now", "now / recorded", "tries", "")
    lines = [
        (
            *(each.name, f"{each.recorded:.3g}", f"{each.ratio:.3g}"),
            *(f"{each.ratio / each.recorded:.2f}", each.tries, each.text),
        )
        for each in verdicts
    ]
    return tabulate(lines, headers, disable_numparse=True)


@contextmanager
def _alone() -> Iterator[None]:
    """On one thread: more would wait for each other on a shared machine. And with a heap that stays.

    Left to itself, glibc gives freed memory back to the system or does not, as the heap happens to lie, and then
    one job or the other pays for fresh pages in every run: up to half its time. It learns from a freed block of
    this size that blocks up to it come and go.
    """
    torch.empty(_HEAP_BYTES, dtype=torch.uint8)
    with one_thread():
        yield
