"""Exact counts of boxes on whose diagonals a rule allows all pairs or none: one evaluation per diagonal."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core import Bounds, Box, Composite, Counts, MaskMod, Not, Pattern

_LOOKS = 1 << 21  # diagonals evaluated together: bounds the memory


def settle_by_diagonals(pattern: Pattern, box: Box, bounds: Bounds, *, num_heads: int, where: Tensor) -> Bounds:
    """Make the bounds exact for the undecided boxes of `where` on which the pattern repeats along diagonals."""
    doubtful = (where & (bounds.low < bounds.high)).nonzero().squeeze(1)
    if not len(doubtful) or box.q.step != box.k.step or not _any_repeats(pattern, box.k.step):
        return bounds
    doubtful = doubtful[_repeats(pattern, box.select(doubtful), num_heads)]
    if not len(doubtful):
        return bounds
    mask_mod = pattern.mask_mod(num_heads=num_heads, device=torch.device("cpu"))
    counts = count_by_lag(mask_mod, box.select(doubtful))
    return Bounds(bounds.low.index_copy(0, doubtful, counts), bounds.high.index_copy(0, doubtful, counts))


def count_by_lag(mask_mod: MaskMod, box: Box) -> Counts:
    """Number of allowed pairs of each box of equal steps, for a rule that repeats along the box's diagonals.

    A diagonal is the pairs of one lag, key index - query index.
    """
    assert box.q.step == box.k.step
    lag = torch.arange(1 - int(box.q.count.max()), int(box.k.count.max()))
    parts = torch.arange(len(box.head)).split(max(1, _LOOKS // len(lag)))
    return torch.cat([_look(mask_mod, box.select(part), lag) for part in parts])


def _look(mask_mod: MaskMod, box: Box, lag: Tensor) -> Counts:
    rows, columns, head = box.q.count[:, None], box.k.count[:, None], box.head[:, None]
    row = (-lag).clamp(min=0)  # where the diagonal begins
    length = (torch.minimum(rows, columns - lag) - row).clamp(min=0)
    row, column = torch.where(length > 0, row, 0), torch.where(length > 0, row + lag, 0)
    query, key = box.q.first[:, None] + box.q.step * row, box.k.first[:, None] + box.k.step * column
    return (length * mask_mod(torch.zeros_like(head), head, query, key)).sum(1)


def _any_repeats(pattern: Pattern, step: int) -> bool:
    """True if a part repeats along diagonals; without one, diagonals settle nothing that bounds leave undecided."""
    periods = (part.period() for part in _atoms(pattern))
    return any(period is not None and step % period == 0 for period in periods)


def _repeats(pattern: Pattern, box: Box, num_heads: int) -> Tensor:
    """True for boxes on which each part repeats along diagonals, or allows all pairs or none."""
    repeats = torch.ones_like(box.head, dtype=torch.bool)
    for part in dict.fromkeys(_atoms(pattern)):
        period = part.period()
        if period is None or box.k.step % period:
            bounds = part.count(box, num_heads=num_heads)
            repeats &= (bounds.high == 0) | (bounds.low == box.area)
    return repeats


def _atoms(pattern: Pattern) -> Iterator[Pattern]:
    """Yield the patterns that `&`, `|` and `~` combine; a pattern that renumbers its part's positions is one atom."""
    if isinstance(pattern, Composite):
        for part in pattern.parts:
            yield from _atoms(part)
    elif isinstance(pattern, Not):
        yield from _atoms(pattern.part)
    else:
        yield pattern
