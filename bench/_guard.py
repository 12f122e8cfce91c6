"""The guard: is anything twice as slow as it was? Ratios to plain jobs, on one thread, within seconds.

The rule. Each case runs the library and a plain job in turns. Its figure is the fastest run of the library over
the fastest plain run, in processor time: that leaves out the wait for a turn on a busy machine, and whatever else
the machine does only ever adds to it, so both end near their true cost. A case fails if its figure is above `bound`
times the recorded one in each of up to three tries, a second apart, whose runs are pooled. That forgives noise,
while what really takes twice as long stays above the bound.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from time import perf_counter, process_time, sleep
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.cli._terminal import one_thread

from ._jobs import Attention, Job, Part, Problem, Size, attention_job
from ._machine import conditions
from ._rules import LONGNET_4, LongNet, attention_by
from .peers import block_rows, branch_loop, dense_attention
from .planning import planned_call

RECORDED = Path("bench/guard.json")
BOUND = 1.7

_TRIES = 3
_ROUNDS_A_TRY = 8  # at least
_SECONDS_A_TRY = 0.6  # at least, and more where rounds take longer
_SECONDS_BETWEEN = 1.0
_HEAP_BYTES = 31 << 20  # glibc takes blocks above 32 MiB from the system each time, whatever was freed before


@dataclass
class Pair:
    """The library's job and a plain one, with the seconds of all their runs so far."""

    library: Job
    plain: Job
    runs: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    @property
    def ratio(self) -> float:
        """Fastest run of the library over the fastest plain run."""
        return min(self.runs[0]) / min(self.runs[1])

    def run(self) -> None:
        """One more try: rounds in which both take turns."""
        start, rounds = perf_counter(), 0
        while rounds < _ROUNDS_A_TRY or perf_counter() - start < _SECONDS_A_TRY:
            for seconds, job in zip(self.runs, (self.library, self.plain), strict=True):
                seconds.append(job.seconds(process_time))
            rounds += 1


@dataclass(frozen=True)
class Verdict:
    """A case's figure and the recorded one."""

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
    pair, tries = case(), 0
    while True:
        tries += 1
        pair.run()
        verdict = Verdict(name, recorded, pair.ratio, tries, bound)
        if not verdict.failed or tries == _TRIES:
            return verdict
        sleep(_SECONDS_BETWEEN)


def record(names: Iterable[str], path: Path) -> None:
    """Measure the cases, in as many tries as a failure would take, and write their figures; others stay."""
    ratios = dict(read(path)) if path.exists() else {}
    for name in names:
        pair = CASES[name]()
        for _ in range(_TRIES):
            pair.run()
        ratios[name] = round(pair.ratio, 3)
        print(f"{name}: {ratios[name]}")
    document = {"ratios": {name: ratios[name] for name in CASES if name in ratios}, **conditions()}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def read(path: Path) -> Mapping[str, float]:
    """The recorded figures. Raises ValueError for a file that holds none."""
    try:
        ratios = json.loads(path.read_text())["ratios"]
        if not all(0 < ratio < float("inf") for ratio in ratios.values()):
            raise ValueError(f"ratios must be positive; got {ratios}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the guard needs recorded ratios, which `--record` writes; {path}: {error!r}") from error
    return ratios


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, 1 if a case is slower than the bound allows, or 2 for a call or a file that is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench guard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all, or some of {', '.join(CASES)}")
    parser.add_argument("--record", action="store_true", help="measure, and write the ratios down as those to hold")
    times = f"times the recorded ratio ({BOUND})"
    parser.add_argument("--bound", type=_bound, default=BOUND, metavar="FACTOR", help=times)
    parser.add_argument("--file", type=Path, default=RECORDED, metavar="FILE", help=f"recorded ratios ({RECORDED})")
    options = parser.parse_args(arguments)
    names = options.cases or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"a case must be one of {', '.join(CASES)}; got {unknown[0]!r}")
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
    lines = [
        (v.name, f"{v.recorded:.3g}", f"{v.ratio:.3g}", f"{v.ratio / v.recorded:.2f}", v.tries, v.text)
        for v in verdicts
    ]
    print(tabulate(lines, ("case", "recorded", "now", "now / recorded", "tries", ""), disable_numparse=True))
    failed = [verdict.name for verdict in verdicts if verdict.failed]
    if failed:
        print(f"slower than {options.bound} times the recorded ratio: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _bound(text: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = 0.0
    if not 1.0 <= bound < math.inf:
        raise argparse.ArgumentTypeError(f"a bound must be a number of at least 1; got {text!r}")
    return bound


@contextmanager
def _alone() -> Iterator[None]:
    """On one thread: more would wait for each other on a shared machine. And with a heap that stays.

    By default glibc may or may not return freed memory to the system, and then one of the jobs pays for fresh pages in
    every run: up to half its time. After a freed block of this size it keeps blocks of up to that size.
    """
    torch.empty(_HEAP_BYTES, dtype=torch.uint8)
    with one_thread():
        yield


# The cases. The plain jobs use torch and Python alone, and the library's kernels where it has any: the ratio to them
# hardly depends on the machine, and nothing in them changes when the library does.


_BLOCK = 128
_STEPS = 16
_TRAIN: Part = "forward + backward"


def longnet_training() -> Pair:
    """A causal LongNet, forward and backward, against a loop over its branches."""
    spec, problem = _small_longnet(), Problem.draw(Size(1024, num_heads=2, head_dim=32))
    return _attention_pair(spec.attention(), branch_loop(spec), problem, _TRAIN)


def window_training() -> Pair:
    """A local window, forward and backward, against one masked call on gathered keys."""
    radius, problem = 2 * _BLOCK, Problem.draw(Size(1024, num_heads=1, head_dim=32))
    rows = problem.q.shape[2] // _BLOCK
    columns = (torch.arange(rows) - 2).clamp(0, rows - 5)[:, None] + torch.arange(5)
    keys = (columns[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    queries = torch.arange(rows * _BLOCK).view(rows, _BLOCK)
    allowed = (queries[:, :, None] - keys[:, None, :]).abs() <= radius
    theirs = block_rows(columns, block=_BLOCK, allowed=allowed)
    return _attention_pair(attention_by(masks.local_window(left=radius, right=radius)), theirs, problem, _TRAIN)


def block_list_forward() -> Pair:
    """A list of drawn blocks, forward, against a call on the gathered blocks."""
    problem = Problem.draw(Size(2048, num_heads=2, head_dim=32))
    rows = problem.q.shape[2] // _BLOCK
    columns = torch.rand(rows, rows, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :6]
    ours = attention_by(masks.block_list(columns, block=_BLOCK))
    return _attention_pair(ours, block_rows(columns, block=_BLOCK), problem)


def small_call() -> Pair:
    """Calls so small that overhead dominates, against dense ones."""
    problem = Problem.draw(Size(64, num_heads=2, head_dim=16))
    return _attention_pair(attention_by(masks.causal()), dense_attention(causal=True), problem, calls=100)


def plan_look_up() -> Pair:
    """The look-up of a cached plan, against look-ups in a dictionary under a lock."""
    pattern, lock = _small_longnet().pattern(), Lock()
    text, numbers = pattern.text, (8, 8, 2048, 2048, 0, 0, 0, 8, 1)

    def look_up() -> object:
        return planned_call(pattern, 8, 2048)

    stored = {(text, *map(int, numbers), (_BLOCK, _BLOCK)): object()}

    def plain() -> object:
        with lock:
            return stored.get((text, *map(int, numbers), (_BLOCK, _BLOCK)))

    assert look_up() is look_up()
    return Pair(_loop("library", look_up, 2000), _loop("plain", plain, 2000))


def mask_build() -> Pair:
    """A block mask with nothing cached, against a fixed series of small tensor operations."""
    pattern = _small_longnet().pattern()

    def build(_: None) -> None:
        masks.cache().clear()
        masks.block_mask(pattern, 2048, num_heads=4)

    return Pair(Job("library", build), _loop("plain", _small_operations, 2))


def planning() -> Pair:
    """Plan, block lists and calls with nothing cached, against the series of `mask_build`."""
    window = masks.causal() & masks.local_window(left=255, right=0)
    pattern = window | masks.global_tokens(16)

    def build(_: None) -> None:
        masks.cache().clear()
        planned_call(pattern, 4, 2048)

    return Pair(Job("library", build), _loop("plain", _small_operations, 2))


@torch.no_grad()
def decoding() -> Pair:
    """Cached decoding steps of a LongNet, against dense steps over a buffer of keys and values."""
    spec, past = _small_longnet(), 1000
    problem = Problem.draw(Size(past + _STEPS, num_heads=4))

    def filled() -> fd.KVCache:
        cache = fd.KVCache(spec.pattern(), num_heads=4, capacity=2048)
        cache.append(problem.k[:, :, :past], problem.v[:, :, :past])
        return cache

    def steps(cache: fd.KVCache) -> list[Tensor]:
        tokens = (x[:, :, past:].split(1, dim=2) for x in problem.qkv)
        return [cache.attend(*token) for token in zip(*tokens, strict=True)]

    def dense_steps(_: None) -> None:
        keys, values = torch.empty_like(problem.k), torch.empty_like(problem.v)
        keys[:, :, :past], values[:, :, :past] = problem.k[:, :, :past], problem.v[:, :, :past]
        for place in range(past, past + _STEPS):
            keys[:, :, place], values[:, :, place] = problem.k[:, :, place], problem.v[:, :, place]
            seen = slice(place + 1)
            scaled_dot_product_attention(problem.q[:, :, place : place + 1], keys[:, :, seen], values[:, :, seen])

    whole = spec.attention()(*problem.qkv)
    assert_close(torch.cat(steps(filled()), dim=2), whole[:, :, past:], rtol=1e-4, atol=1e-5)
    return Pair(Job("library", steps, prepare=filled), Job("plain", dense_steps))


_ALL = longnet_training, window_training, block_list_forward, small_call, plan_look_up, mask_build, planning, decoding
CASES: dict[str, Callable[[], Pair]] = {case.__name__: case for case in _ALL}


def _small_longnet() -> LongNet:
    return LongNet("small", LONGNET_4.segment_lengths[:3], LONGNET_4.dilation_rates[:3], causal=True).shrunk(4)


def _loop(name: str, function: Callable[[], object], number: int) -> Job:
    def many(given: None) -> None:
        for _ in range(number):
            function()

    return Job(name, many)


def _attention_pair(
    ours: Attention, theirs: Attention, problem: Problem, part: Part = "forward", calls: int = 1
) -> Pair:
    """Jobs of the two attentions, after a check that their outputs agree; `calls`: calls in a run of a forward."""
    assert_close(ours(*problem.qkv), theirs(*problem.qkv), rtol=1e-4, atol=1e-5)
    ways: dict[str, Any] = {"library": ours, "plain": theirs}
    if calls > 1:
        ways = {name: lambda q, k, v, way=way: [way(q, k, v) for _ in range(calls)] for name, way in ways.items()}
    ours_job, theirs_job = (attention_job(name, way, problem, part) for name, way in ways.items())
    return Pair(ours_job, theirs_job)


def _small_operations() -> Tensor:
    """Comparisons, searches and sorts of small tables, as building has them: about two hundred operations."""
    total = torch.zeros((), dtype=torch.int64)
    for rate in range(1, 21):
        q, k = torch.arange(0, 64 * rate, rate), torch.arange(0, 64 * rate, rate)
        allowed = (q[:, None] // 64 == k[None, :] // 64) & (k[None, :] <= q[:, None])
        row, column = allowed.nonzero().unbind(1)
        kinds, counts = (row - column).unique(return_counts=True)
        total = total + counts[kinds.argsort()].cumsum(0)[-1] + allowed.sum(1).max()
    return total
