"""Spans: runs of positions that see only themselves, known when the rule runs; documents and padding become these."""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from ...core import Bounds, Box, Counts, MaskMod, Pair, Progression, Reason, clip, span
from ._run_time import Rows, Table
from ._window_list import Windows

# B batch entries, L positions, S spans

PADDING = -1
# A box over more spans than this is bounded by its area: the builder splits it anyway.
EXACT_SPANS = 8


class Spans(Table):
    """Allowed iff both positions lie in one span. Row b, entry t: where the span of position t starts, or PADDING."""

    kind = "spans table"

    rows: Int64[Tensor, "B L"]

    def _told(self) -> str:
        if len(self.rows) != 1:
            return f"documents of {len(self.rows)} batch entries"
        return "1 document" if len(self.starts) == 1 else f"{len(self.starts)} documents"

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return _same_span(self.on(device), self.batch_step(device))

    def batch_step(self, device: torch.device) -> Tensor:
        """1 where each batch entry has a row, 0 where all share one: row = b * step."""
        return torch.tensor(int(len(self.rows) > 1), device=device)

    @cached_property
    def starts(self) -> Int64[Tensor, " S"]:
        """The first position of each span of a single row."""
        return self._edges[0]

    @cached_property
    def stops(self) -> Int64[Tensor, " S"]:
        """One past the last position of each span."""
        return self._edges[1]

    @cached_property
    def _edges(self) -> tuple[Tensor, Tensor]:
        starts, sizes = self.only_row.unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0)
        real = starts != PADDING
        return (ends - sizes)[real], ends[real]

    @cached_property
    def longest(self) -> int:
        """Positions of the longest span of any row."""
        length = torch.arange(self.rows.shape[1]) + 1 - self.rows
        return int(length.masked_fill(self.rows == PADDING, 0).max())

    def reached(self, progression: Progression) -> tuple[Counts, Counts]:
        """(first, last) span that each progression may touch; first > last where it lies between two."""
        first = torch.searchsorted(self.stops, progression.first, right=True)
        return first, torch.searchsorted(self.starts, progression.last, right=True) - 1

    def common(self, box: Box) -> tuple[Counts, Counts]:
        """(first, number) of the spans that both sides of each box may touch."""
        (q_first, q_last), (k_first, k_last) = self.reached(box.q), self.reached(box.k)
        first = torch.maximum(q_first, k_first)
        return first, (torch.minimum(q_last, k_last) + 1 - first).clamp(min=0)

    def within(self, progression: Progression, span: Counts) -> Progression:
        """The terms that lie in the span of each progression; spans beyond the last hold nothing."""
        if not len(self.starts):
            return Progression(progression.first, progression.step, torch.zeros_like(progression.count))
        known = span.clamp(max=len(self.starts) - 1)
        inside = clip(progression, self.starts[known], self.stops[known])
        return Progression(inside.first, inside.step, torch.where(span == known, inside.count, 0))

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        first, number = self.common(box)
        pairs = torch.zeros_like(number)
        for step in range(min(int(number.max()), EXACT_SPANS) if len(number) else 0):
            both = self.within(box.q, first + step).count * self.within(box.k, first + step).count
            pairs += torch.where(step < number, both, 0)
        exact = number <= EXACT_SPANS
        return Bounds(torch.where(exact, pairs, 0), torch.where(exact, pairs, box.area))

    def reason(self, pair: Pair) -> Reason:
        sides = ((pair.the_query, pair.query), (pair.the_key, pair.key))
        padding = [name for name, position in sides if self.only_row[position] == PADDING]
        if padding:
            return Reason(self, False, f"{' and '.join(padding)} {'are' if len(padding) > 1 else 'is'} padding")
        of_query, of_key = (int(torch.searchsorted(self.stops, at, right=True)) for _, at in sides)
        if of_query == of_key:
            return Reason(self, True, f"both are in {self._named(of_query)}")
        where = f"{pair.the_query} is in {self._named(of_query)}, {pair.the_key} in {self._named(of_key)}"
        return Reason(self, False, f"{where}: different documents")

    def _named(self, index: int) -> str:
        return f"document {index} ({span(int(self.starts[index]), int(self.stops[index]))})"

    def windows(self, num_positions: int) -> Windows:
        return Windows.squares(self.starts, self.stops)


def _same_span(held: Rows, batch_step: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        starts, row = held.rows, b * batch_step
        return (starts[row, q] == starts[row, k]) & (starts[row, q] >= 0)

    return mask_mod
