"""The receptive field of a rule that treats tokens alike by stretches, such as listed blocks: layer by layer."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from ._packed_rows import Weights, columns_from, first_column, some_at_once
from ._receptive_field_layers import TokenPair
from ._relations import Relations
from ._sections import Section
from ._spread import Spread
from ._stretches import Stretches, stretches_of

# S stretches, W bytes a row

_MOST_BYTES = 1 << 33  # of rows joined, over all layers: a few seconds of work


class StretchField:
    """One section: for each stretch the others that it has heard of after each number of layers.

    Of two stretches every token has heard of every token of the other, or none. Within one, tokens know of themselves,
    may have heard of all earlier or of all later ones, and have of both once they have from another stretch.
    """

    def __init__(self, section: Section, stretches: Stretches, row: Tensor, column: Tensor) -> None:
        """Rows and columns are the pairs of which one sees the other; each sees itself, and rows ascend."""
        self.tokens, self.times = int(stretches.sizes.sum()), len(section.copies)
        self.start = min(start for start, _ in section.copies)
        self._sizes = stretches.sizes
        self._firsts = stretches.firsts - stretches.firsts[0] + self.start
        self._spread = Spread(row, column, len(stretches))
        self._pairs = [self.tokens]  # after each number of layers
        self._inside = torch.zeros(2, len(stretches), dtype=torch.bool)  # who knows all earlier, all later ones inside
        self._late: list[TokenPair] = []  # the first pairs of the last layer

    @classmethod
    def of(cls, relations: Relations, section: Section) -> StretchField | None:
        """None where a rule does not treat tokens alike by stretches, or following them takes too long."""
        if section.queries != section.keys:
            return None
        heads = relations.bound.num_heads_global
        rules = {
            rule: group.heads[0] + relations.bound.head_offset for group in section.groups for rule, _ in group.rules
        }
        stretches = stretches_of(rules, section.queries)
        seen = None if stretches is None else stretches.seen(rules, heads)
        if stretches is None or seen is None:
            return None
        field = cls(section, stretches, *seen)
        return field if field._follow(*stretches.inside(rules, heads)) else None

    def _follow(self, before: Tensor, after: Tensor) -> bool:
        """Layer by layer, as long as that brings more; whether that came to its end."""
        inside = torch.stack([before, after])
        while self._spread.news.any() or not torch.equal(inside, self._inside):
            if self._spread.work > _MOST_BYTES:
                return False
            self._note(inside & ~self._inside)
            self._inside = inside
            returned = self._spread.step() & (self._sizes > 1)
            inside = inside | returned
        return True

    def _note(self, inside: Bool[Tensor, "2 S"]) -> None:
        """What a layer brought: the news, and what tokens have come to know inside of their stretches."""
        news = self._spread.news
        pairs = news.weighed(self._sizes) + int((inside.sum(0) * self._halves).sum())
        self._pairs.append(self._pairs[-1] + pairs)
        found = [self._first_inside(*inside)]
        if news.any():
            row, column = news.first()
            found.append((int(self._firsts[row]), int(self._firsts[column])))
        self._late = [pair for pair in found if pair is not None]

    @property
    def _halves(self) -> Int64[Tensor, " S"]:
        """Pairs of a token with an earlier one of its stretch."""
        return self._sizes * (self._sizes - 1) // 2

    @property
    def layers(self) -> int:
        return len(self._pairs) - 1

    @property
    def earlier(self) -> int:
        """Pairs that ever meet, of a token with an earlier one."""
        known, size, weights = self._spread.known, len(self._sizes), Weights(self._sizes)
        width, pairs = known.shape[1], int(self._halves[self._inside[0]].sum())
        for rows in some_at_once(size, width):
            index = torch.arange(size)[rows]
            below = known[rows] & columns_from(torch.zeros_like(index), index, width)
            pairs += int((weights.of(below) * self._sizes[rows]).sum())
        return pairs * self.times

    def pairs_after(self, layers: int) -> int:
        return self._pairs[min(layers, self.layers)] * self.times

    def slowest(self) -> TokenPair | None:
        """The first pair that needs all layers."""
        return min(self._late, default=None)

    def first_missing(self, *, earlier: bool) -> TokenPair | None:
        """The first pair that never meets, with an earlier token or with a later one."""
        several, size, known = self._sizes > 1, len(self._sizes), self._spread.known
        width = known.shape[1]
        never = several & ~self._inside[0 if earlier else 1]
        none = torch.zeros_like(several)
        candidates = [self._first_inside(never, none) if earlier else self._first_inside(none, never)]
        for rows in some_at_once(size, width):
            index = torch.arange(size)[rows]
            sides = (torch.zeros_like(index), index) if earlier else (index + 1, torch.full_like(index, size))
            found = self._first(columns_from(*sides, width) & ~known[rows], rows.start)
            if found is not None:
                candidates.append(found)
                break
        return min((pair for pair in candidates if pair is not None), default=None)

    def _first(self, pairs: UInt8[Tensor, "R W"], begin: int = 0) -> TokenPair | None:
        """The first tokens of the first pair of stretches; the first row is that of stretch `begin`."""
        rows = pairs.any(1).nonzero()
        if not len(rows):
            return None
        row = int(rows[0])
        return int(self._firsts[begin + row]), int(self._firsts[first_column(pairs[row])])

    def _first_inside(self, before: Tensor, after: Tensor) -> TokenPair | None:
        """The first pair within a stretch, of those of which such with an earlier, or a later token are asked."""
        pairs = []
        for asked, (token, other) in ((before, (1, 0)), (after, (0, 1))):
            where = asked.nonzero()
            if len(where):
                first = int(self._firsts[where[0]])
                pairs.append((first + token, first + other))
        return min(pairs, default=None)
