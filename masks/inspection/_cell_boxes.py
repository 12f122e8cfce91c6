"""The boxes of a window's cells: products of progressions of positions, in any order of the slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from ..core._box import Box, Progression
from ..core._box_parts import Owned
from ..core._pattern import Pattern
from ..orders._layout import Layout

# P parts of cells

_BOXES_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Side:
    """The queries or the keys of a window: the slots at which cells begin, and their positions as progressions."""

    window: range
    edges: Int64[Tensor, " cells+1"]
    layout: Layout

    @property
    def cells(self) -> int:
        return len(self.edges) - 1

    @property
    def sizes(self) -> Int64[Tensor, " cells"]:
        return self.edges.diff()

    def positions_at(self, cell: Tensor, share: Tensor) -> Tensor:
        """Positions of the slots at these shares of cells."""
        size = self.sizes[cell, None]
        slot = self.edges[cell, None] + (size * share).long().minimum(size - 1)
        return self.layout.pieces(0).position(torch.zeros_like(slot), slot)

    def parts(self) -> tuple[Int64[Tensor, " P"], Progression]:
        """Parts of cells whose positions are progressions of one step, and the cell of each."""
        pieces = self.layout.pieces(0)
        inner = pieces.starts[(pieces.starts > self.window.start) & (pieces.starts < self.window.stop)]
        cuts = torch.cat([self.edges, inner]).unique()
        start, cell = cuts[:-1], torch.searchsorted(self.edges, cuts[:-1], right=True) - 1
        first = pieces.position(torch.zeros_like(start), start)
        return cell, Progression(first, pieces.step, cuts.diff())


class Pairings(NamedTuple):
    """Which parts of keys each part of queries meets: number[i] of them, order[begin[i]] and what follows it there."""

    queries: tuple[Tensor, Progression]
    keys: tuple[Tensor, Progression]
    order: Tensor
    begin: Tensor
    partners: Tensor

    @classmethod
    def of(cls, rule: Pattern, queries: tuple[Tensor, Progression], keys: tuple[Tensor, Progression]) -> Pairings:
        """All but those that the rule's spacing rules out.

        Positions of a part agree modulo its step, and those of a pair modulo the spacing: so parts agree modulo
        what divides both.
        """
        classes = gcd(queries[1].step, rule.spacing())
        residue = keys[1].first.remainder(classes)
        order = residue.argsort(stable=True)
        own, theirs = queries[1].first.remainder(classes), residue[order]
        begin = torch.searchsorted(theirs, own)
        return cls(queries, keys, order, begin, torch.searchsorted(theirs, own, right=True) - begin)

    @property
    def number(self) -> int:
        return int(self.partners.sum())

    def boxes(self, columns: int) -> Iterator[Owned]:
        """Each as a box, with the number of its cell."""
        (row, q), (column, k) = self.queries, self.keys
        last = (self.partners.cumsum(0) - self.partners) // _BOXES_AT_ONCE
        for some in torch.arange(len(self.partners)).split(last.unique_consecutive(return_counts=True)[1].tolist()):
            each = torch.repeat_interleave(self.partners[some])
            nth = torch.arange(len(each)) - (self.partners[some].cumsum(0) - self.partners[some])[each]
            mine, other = some[each], self.order[self.begin[some][each] + nth]
            box = Box(torch.zeros_like(mine), q.select(mine), k.select(other))
            yield Owned(row[mine] * columns + column[other], box)
