"""The catalogue's patterns: the cost of each, and their pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor

from flexdilated import masks
from flexdilated.masks import Mixture, Pattern

from ._catalogue import ENTRIES, MILLION, PICTURED, Entry, dense
from ._jobs import peak_bytes, say, tokens_text
from ._measures import Row, Target, at_most, measure
from ._processes import run_apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# H heads, N tokens

_BLOCK = 128
_TIME_ENOUGH_S = 1.0
WASTE, BUILD_S, BUILD_MB = at_most(1.25), at_most(2, "s"), at_most(512, "MB")
_FEW = ("strided", "random_blocks", "per_document")


@measure(
    entries=tuple(entry for entry in ENTRIES if entry.name in _FEW), num_tokens=1024, most=2048, checked=512, repeats=1
)
def catalogue(
    entries: tuple[Entry, ...] = ENTRIES,
    num_tokens: int = 65536,
    most: int = MILLION,
    checked: int = 4096,
    repeats: int = 3,
) -> Iterator[Row]:
    """What does each pattern of the catalogue cost: computed for useful pairs at 64K tokens, its tables at a million?

    The worst of the patterns that can meet a target; all figures, and the reasons of the others, as detail. Pairs are
    counted at `num_tokens`, tables are built at `most` at most, and both are checked densely at `checked` tokens.
    """
    figures = {entry.name: _measured(entry, num_tokens, most, checked, repeats) for entry in entries}
    size, largest = tokens_text(num_tokens), tokens_text(most)
    waste_whys = {entry.name: entry.waste_why for entry in entries if entry.waste_why}
    build_whys = {entry.name: entry.build_why for entry in entries if entry.build_why}
    yield _worst(f"{size}: computed over useful pairs", "waste", WASTE, figures, waste_whys)
    yield _worst(f"{largest}: time to build the BlockMask", "build_s", BUILD_S, figures, build_whys)
    yield _worst(f"{largest}: peak memory of that", "build_mb", BUILD_MB, figures, build_whys)


def _worst(measure: str, field: str, target: Target, figures: Mapping[str, Any], whys: Mapping[str, str]) -> Row:
    can = {name: figure for name, figure in figures.items() if name not in whys}
    worst = max(can, key=lambda name: can[name][field])
    name = f"{measure}, worst of the {len(can)} of {len(figures)} patterns that can"
    detail = {"worst": worst, "beyond": dict(whys), "patterns": dict(figures)}
    return Row(name, target, can[worst][field], detail=detail)


def _measured(entry: Entry, num_tokens: int, most: int, checked: int, repeats: int) -> dict[str, Any]:
    """The figures of one entry, by plain names."""
    check(entry, checked)
    described = masks.describe(entry.pattern(num_tokens), num_tokens, num_heads=entry.num_heads)
    built = min(entry.largest, most)
    # Found here: what has run in a process leaves memory there that its work would use again.
    layout = order(entry.pattern(built), built, entry.num_heads)
    rate = 1 if layout is None else layout.rate
    build, plan = partial(_block_mask, rate), masks.describe
    figures = {
        "density": described.density,
        "block_density": described.block_density,
        "waste": described.waste,
        "layout": ", ".join(dict.fromkeys(branch.options[0].layout for branch in described.branches)),
        "built_tokens": built,
        "build_rate": rate,
        "build_s": run_apart(_seconds, build, entry, built, repeats),
        "build_mb": peak_bytes(_prepared, build, entry, built) / 1e6,
        "plan_s": run_apart(_seconds, plan, entry, built, repeats),
        "plan_mb": peak_bytes(_prepared, plan, entry, built) / 1e6,
    }
    say(f"{entry.name}: {', '.join(f'{key} {value}' for key, value in figures.items())}")
    masks.cache().clear()
    return figures


def _block_mask(rate: int, pattern: Pattern | Mixture, num_tokens: int, *, num_heads: int) -> object:
    """What a user of FlexAttention calls."""
    layout = None if rate == 1 else masks.Layout(num_tokens, rate)
    return masks.block_mask(pattern, num_tokens, num_heads=num_heads, block_size=_BLOCK, layout=layout)


def _prepared(work: Callable[..., object], entry: Entry, num_tokens: int) -> Callable[[], object]:
    """The work ready to run from scratch, after a run at a small size."""
    small = min(num_tokens, 4096)
    work(entry.pattern(small), small, num_heads=entry.num_heads)
    pattern = entry.pattern(num_tokens)
    masks.cache().clear()
    return lambda: work(pattern, num_tokens, num_heads=entry.num_heads)


def _seconds(work: Callable[..., object], entry: Entry, num_tokens: int, repeats: int) -> float:
    """Median of a few runs from scratch; of one where that takes long."""
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < _TIME_ENOUGH_S:
        ready = _prepared(work, entry, num_tokens)
        start = perf_counter()
        ready()
        seconds.append(perf_counter() - start)
    return median(seconds)


def order(pattern: Pattern | Mixture, num_tokens: int, num_heads: int) -> masks.Layout | None:
    """The one order of all tokens that comes nearest to the plan; None for the natural one."""
    described = masks.describe(pattern, num_tokens, num_heads=num_heads)
    chosen = {branch.options[0].layout for branch in described.branches}
    layout = masks.layout(pattern, num_tokens)
    return None if chosen & {"natural", "windows"} or layout.rate == 1 else layout


def check(entry: Entry, num_tokens: int) -> None:
    """AssertionError unless both are exact at this size, a multiple of the block."""
    pattern = entry.pattern(num_tokens)
    layout = order(pattern, num_tokens, entry.num_heads)
    listed = (
        masks.block_mask(pattern, num_tokens, num_heads=entry.num_heads, block_size=_BLOCK, layout=layout)
        .to_dense()[0]
        .bool()
    )
    useful = 0
    for head in range(entry.num_heads):
        branches = [dense(branch, head, entry.num_heads, num_tokens) for branch in pattern.branches()]
        useful += sum(int(mask.sum()) for mask in branches)
        anywhere = torch.stack(branches).any(0)
        slots = torch.arange(num_tokens) if layout is None else layout.positions()
        ordered = anywhere[slots][:, slots]
        touched = ordered.unflatten(0, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK)).any(3).any(1)
        assert torch.equal(listed[head], touched), f"{entry.name}, head {head}: the block list is not that of its mask"
    counted = masks.describe(pattern, num_tokens, num_heads=entry.num_heads).useful_pairs
    assert counted == useful, f"{entry.name}: {useful} useful pairs; describe counts {counted}"


# Pictures: every pattern over 64 tokens, pair by pair, and all of them on one sheet.

SIDE = 8  # tokens a block, in pictures
OVERVIEW = "overview.png"
_PANEL = 256  # pixels: a token is 4 x 4 of them
_FRAME, _DPI = "#999999", 100
_COLUMNS = 8


def draw_all(folder: Path, entries: Sequence[Entry] = ENTRIES) -> list[Path]:
    """Write a PNG for each entry, and the sheet; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {file_name(entry): picture(entry, shown_heads(entry)) for entry in entries} | {OVERVIEW: _sheet(entries)}
    for name, figure in figures.items():
        figure.savefig(folder / name, metadata={"Software": None})
    return [folder / name for name in figures]


def file_name(entry: Entry) -> str:
    """As `neighborhood_2-d.png`."""
    return entry.name.lower().replace(", ", "_").replace(" ", "_") + ".png"


def shown_heads(entry: Entry) -> tuple[int, ...]:
    """Head 0, and the first head that sees otherwise, if one does."""
    others = range(1, entry.num_heads)
    return (0, *[head for head in others if not torch.equal(_allowed(entry, head), _allowed(entry, 0))][:1])


def picture(entry: Entry, heads: tuple[int, ...]) -> Figure:
    """The pairs of these heads, and the state of their blocks; of a mixture the pairs of any branch."""
    given = {"block_size": SIDE, "size": _PANEL, "title": "", "legend": False}
    return masks.plot(entry.pictured(), PICTURED, num_heads=entry.num_heads, head=heads, **given)


def _allowed(entry: Entry, head: int) -> Bool[Tensor, "N N"]:
    branches: tuple[Pattern, ...] = entry.pictured().branches()
    return torch.stack([dense(branch, head, entry.num_heads, PICTURED) for branch in branches]).any(0)


def _sheet(entries: Sequence[Entry]) -> Figure:
    """A thumbnail for each entry, with its name: the image of its picture, of the last head that is shown."""
    from matplotlib.figure import Figure

    rows = -(-len(entries) // _COLUMNS)
    size, across, down = 1.28, 1.56, 1.66
    width, height = _COLUMNS * across, rows * down
    figure = Figure(figsize=(width, height), dpi=_DPI)
    for place, entry in enumerate(entries):
        row, column = divmod(place, _COLUMNS)
        corner = (column * across + (across - size) / 2, height - (row + 1) * down + 0.06)
        axes = figure.add_axes((corner[0] / width, corner[1] / height, size / width, size / height))
        (drawn,) = picture(entry, shown_heads(entry)[-1:]).axes[0].images
        cells = drawn.get_array()
        assert cells is not None
        axes.imshow(cells, interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(entry.name, fontsize=7.5, pad=3)
        axes.spines[:].set_color(_FRAME)
        axes.spines[:].set_linewidth(0.6)
    return figure
