"""What a panel of a picture shows: the share of allowed pairs of each cell, by branch, and the state of each block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from ..core._bound import EMPTY, FULL, PARTIAL
from ..core._pattern import Expression, Pattern
from ..planning._block_mask import layout
from ._cells import CellCounts, count_cells
from ._plot import BY_BLOCK, Picture
from ._plot_window import runs, whole_blocks

# R rows, C columns of cells; U, V rows and columns of blocks; B distinct branches


@dataclass(frozen=True)
class Blocks:
    """The blocks that a window touches: EMPTY, PARTIAL or FULL, and how many of their pairs are allowed.

    As in block lists, a block that ends with the sequence before its side is full is never FULL.
    """

    state: Int64[Tensor, "U V"]
    area: Int64[Tensor, "U V"]
    pairs: Float64[Tensor, "U V"]
    sides: tuple[int, int]
    first: tuple[int, int]  # block row and column of state[0, 0]
    exact: bool

    @property
    def computed(self) -> Bool[Tensor, "U V"]:
        return self.state != EMPTY

    @property
    def useful(self) -> float:
        """The part of the computed blocks' pairs that is allowed."""
        return float(self.pairs.sum()) / max(1, int(self.area[self.computed].sum()))


@dataclass(frozen=True)
class Panel:
    """One head in one order; `shares[b]` counts a pair once for each time its branch is in the pattern."""

    head: int
    order: str
    rate: int
    shares: Float64[Tensor, "B R C"]
    blocks: Blocks | None

    @property
    def most(self) -> int:
        """How many branches allow a pair, at most, on the average of a cell."""
        return int(torch.round(self.shares.sum(0).max()))


def drawn_branches(picture: Picture) -> dict[Pattern, int]:
    """What has a colour of its own, and how often it is in the pattern: distinct branches, or their union."""
    branches = picture.pattern.branches()
    return {picture.pattern.union: 1} if picture.color_by == BY_BLOCK else dict(Counter(branches))


def panel_of(picture: Picture, head: int, order: str) -> Panel:
    """Count what the panel shows. Raises ValueError where the pattern has no answer for some of the window."""
    window, residue = picture.window, layout(picture.pattern, picture.num_tokens)
    rate = residue.rate if order == "residue" else 1
    count = partial(
        _count,
        num_tokens=picture.num_tokens,
        num_keys=picture.num_keys,
        num_heads=picture.num_heads,
        head=head,
        batch=picture.batch,
        order=residue if rate > 1 else None,
    )
    slots, sides = (window.queries.slots, window.keys.slots), (window.queries.cell, window.keys.cell)
    shares = []
    for branch, times in drawn_branches(picture).items():
        counts, area = count(branch, slots=slots, sides=sides)
        shares.append(times * counts.likely / area)
    blocks = None
    if picture.block is not None:
        sizes = (picture.num_tokens, picture.num_keys)
        wider = tuple(whole_blocks(*each) for each in zip(slots, picture.block, sizes, strict=True))
        counts, area = count(picture.pattern.union, slots=wider, sides=picture.block)
        blocks = _blocks(counts, area, picture.block, (wider[0].start, wider[1].start))
    return Panel(head, order, rate, torch.stack(shares), blocks)


def _blocks(counts: CellCounts, area: Tensor, sides: tuple[int, int], starts: tuple[int, int]) -> Blocks:
    state = torch.full_like(area, PARTIAL)
    state[counts.likely == 0] = EMPTY
    state[counts.low == sides[0] * sides[1]] = FULL
    first = (starts[0] // sides[0], starts[1] // sides[1])
    return Blocks(state, area, counts.likely, sides, first, torch.equal(counts.low, counts.high))


def _count(
    pattern: Expression, *, slots: tuple[range, ...], sides: tuple[int, int], **given
) -> tuple[CellCounts, Int64[Tensor, "R C"]]:
    """Counts and areas of cells that begin at multiples of their sides, those at the borders of the slots cut there."""
    queries, keys = (list(runs(each, side)) for each, side in zip(slots, sides, strict=True))
    parts = [
        [count_cells(pattern, queries=q, keys=k, shape=(rows, columns), **given) for k, columns in keys]
        for q, rows in queries
    ]
    counts = [[(*part.total, part.area) for part in row] for row in parts]
    *total, area = (torch.cat([torch.cat([part[which] for part in row], 1) for row in counts]) for which in range(4))
    return CellCounts(*total), area
