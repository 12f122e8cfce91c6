"""What does each pattern of the catalogue cost: computed for useful pairs at 64K tokens, its tables at a million?"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from flexdilated import masks
from flexdilated.masks import Mixture, Pattern

from ._apart import run_apart
from ._catalogue import ENTRIES, MILLION, Entry
from ._catalogue_check import check, order
from ._memory import peak_bytes
from ._problem import tokens_text
from ._result import Result, Row, Target, at_most
from ._timing import say

_BLOCK = 128
_TIME_ENOUGH_S = 1.0
WASTE, BUILD_S, BUILD_MB = at_most(1.25), at_most(2, "s"), at_most(512, "MB")


@dataclass(frozen=True)
class Config:
    """The entries; tokens at which pairs are counted, tables are built at most, and both are checked densely."""

    entries: tuple[Entry, ...]
    num_tokens: int
    most: int
    checked: int
    repeats: int


_FEW = ("dilated_window", "strided", "random_blocks", "neighborhood, 2-D", "per_document", "custom", "longformer")

FULL = Config(ENTRIES, num_tokens=65536, most=MILLION, checked=4096, repeats=3)
SMALL = Config(tuple(entry for entry in ENTRIES if entry.name in _FEW), 2048, most=4096, checked=1024, repeats=1)


def run(config: Config) -> Result:
    """The worst of the patterns that can meet a target; all figures, and the reasons of the others, as detail."""
    figures = {entry.name: _measure(entry, config) for entry in config.entries}
    size, most = tokens_text(config.num_tokens), tokens_text(config.most)
    waste_whys = {entry.name: entry.waste_why for entry in config.entries if entry.waste_why}
    build_whys = {entry.name: entry.build_why for entry in config.entries if entry.build_why}
    rows = (
        _row(f"{size}: computed over useful pairs", "waste", WASTE, figures, waste_whys),
        _row(f"{most}: time to build the BlockMask", "build_s", BUILD_S, figures, build_whys),
        _row(f"{most}: peak memory of that", "build_mb", BUILD_MB, figures, build_whys),
    )
    return Result(rows)


def _row(measure: str, field: str, target: Target, figures: Mapping[str, Any], whys: Mapping[str, str]) -> Row:
    can = {name: figure for name, figure in figures.items() if name not in whys}
    worst = max(can, key=lambda name: can[name][field])
    name = f"{measure}, worst of the {len(can)} of {len(figures)} patterns that can"
    detail = {"worst": worst, "beyond": dict(whys), "patterns": dict(figures)}
    return Row(name, target, can[worst][field], detail=detail)


def _measure(entry: Entry, config: Config) -> dict[str, Any]:
    """The figures of one entry, by plain names."""
    check(entry, config.checked)
    described = masks.describe(entry.pattern(config.num_tokens), config.num_tokens, num_heads=entry.num_heads)
    num_tokens = min(entry.largest, config.most)
    # Found here: what has run in a process leaves memory there that its work would use again.
    layout = order(entry.pattern(num_tokens), num_tokens, entry.num_heads)
    rate = 1 if layout is None else layout.rate
    build, plan = partial(_block_mask, rate), _plan
    figures = {
        "density": described.density,
        "block_density": described.block_density,
        "waste": described.waste,
        "layout": ", ".join(dict.fromkeys(branch.options[0].layout for branch in described.branches)),
        "built_tokens": num_tokens,
        "build_rate": rate,
        "build_s": run_apart(_seconds, build, entry, num_tokens, config.repeats),
        "build_mb": peak_bytes(_prepared, build, entry, num_tokens) / 1e6,
        "plan_s": run_apart(_seconds, plan, entry, num_tokens, config.repeats),
        "plan_mb": peak_bytes(_prepared, plan, entry, num_tokens) / 1e6,
    }
    say(f"{entry.name}: {', '.join(f'{key} {value}' for key, value in figures.items())}")
    masks.cache().clear()
    return figures


def _block_mask(rate: int, pattern: Pattern | Mixture, num_tokens: int, num_heads: int) -> object:
    """What a user of FlexAttention calls."""
    layout = None if rate == 1 else masks.Layout(num_tokens, rate)
    return masks.block_mask(pattern, num_tokens, num_heads=num_heads, block_size=_BLOCK, layout=layout)


def _plan(pattern: Pattern | Mixture, num_tokens: int, num_heads: int) -> object:
    """The planner's search and the lists of its choice, and the count of their pairs besides."""
    return masks.describe(pattern, num_tokens, num_heads=num_heads)


def _prepared(work: Callable[..., object], entry: Entry, num_tokens: int) -> Callable[[], object]:
    """The work ready to run from scratch, after a run at a small size."""
    small = min(num_tokens, 4096)
    work(entry.pattern(small), small, entry.num_heads)
    pattern = entry.pattern(num_tokens)
    masks.cache().clear()
    return lambda: work(pattern, num_tokens, entry.num_heads)


def _seconds(work: Callable[..., object], entry: Entry, num_tokens: int, repeats: int) -> float:
    """Median of a few runs from scratch; of one where that takes long."""
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < _TIME_ENOUGH_S:
        ready = _prepared(work, entry, num_tokens)
        start = perf_counter()
        ready()
        seconds.append(perf_counter() - start)
    return median(seconds)
