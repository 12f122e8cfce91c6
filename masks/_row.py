"""The keys of one query at a time, in the order of queries: what a decoding step gathers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ._ambient import plans
from ._blocks import Blocks, build_blocks, evaluate
from ._layout import Layout
from ._lower import residue_rate
from ._pattern import Pattern
from ._ranges import Ranges
from ._rule import Rule

Keys = Ranges | Int64[Tensor, " n"]  # ranges in closed form, or single positions in any order

_KEY_BLOCK = 64  # keys whose bounds are asked together where a row has no closed form
_ROWS_AHEAD = 64  # rows found together there: their queries come next
_PAIRS_AHEAD = 1 << 20  # and at most about this many keys of them all


@dataclass
class RowSource:
    """Rows of one head's rule, which is causal, asked for at growing queries."""

    rule: Pattern
    head: int
    num_heads: int
    _ahead: dict[int, Tensor] = field(default_factory=dict)
    _rows_ahead: int = 1

    @plans
    def keys(self, query: int, oldest: int = 0) -> Keys:
        """The keys that a query sees: a rule's closed form, or a search by bounds for some rows at once.

        No query sees a key before `oldest` any more.
        """
        ranges = self.rule.row(query, query + 1)
        if ranges is not None:
            return ranges
        if query not in self._ahead:
            self._ahead = self._search(query, oldest)
            found = sum(map(len, self._ahead.values())) // len(self._ahead)
            self._rows_ahead = max(1, min(_ROWS_AHEAD, _PAIRS_AHEAD // (found + 1)))
        return self._ahead.pop(query)

    def _search(self, first: int, oldest: int) -> dict[int, Tensor]:
        rows = self._rows_ahead
        # In residue-major order the keys of a dilated rule stand in runs, if those are as long as what bounds are for.
        held = first + rows - oldest
        keys = Layout(held, residue_rate(self.rule, max(1, held // _KEY_BLOCK))).pieces(oldest)
        rule = Rule(self.rule, self.num_heads, (self.head,), Layout(rows).pieces(first), keys)
        blocks = build_blocks(rule, q_block=1, k_block=_KEY_BLOCK, settle=False)
        listed, place = _pairs(rule, blocks).nonzero().unbind(1)
        row, slot = blocks.row.long()[listed], blocks.column.long()[listed] * _KEY_BLOCK + place
        position = rule.k.position(torch.zeros_like(slot), slot)
        seen = position <= row + first  # a rule that is no intersection with causal() may be asked beyond the query
        per_row = torch.bincount(row[seen], minlength=rows).tolist()
        return dict(enumerate(position[seen].split(per_row), start=first))


def _pairs(rule: Rule, blocks: Blocks) -> Bool[Tensor, "E k_block"]:
    """Which keys of each listed block its one query sees: bounds decide where they can."""
    slots = blocks.column[:, None].long() * blocks.k_block + torch.arange(blocks.k_block)
    pairs = slots < blocks.num_k_slots
    doubtful = (~blocks.full).nonzero().squeeze(1)
    if len(doubtful):
        pairs[doubtful] = torch.cat(list(evaluate(rule, blocks.places(doubtful), blocks.shape)))[:, 0]
    return pairs
