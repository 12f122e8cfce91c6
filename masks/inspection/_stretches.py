"""Stretches: runs of tokens that a rule treats alike, and which stretch sees which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ..core._algebra import And, Every, Not, Or
from ..core._pattern import Pattern
from ..patterns._band import Causal
from ..patterns._block_list import BlockList
from ..patterns._blockwise import Blockwise
from ..patterns._dilated import Dilated
from ..patterns._marked_tokens import GlobalTokens
from ..patterns._per_document import PerDocument
from ..patterns._random_blocks import RandomBlocks
from ..patterns.run_time._spans import Spans
from ..patterns.run_time._visible_keys import KeySet

# S stretches, R of them as rows

_MOST_STRETCHES = 1 << 14
_MOST_SEEN = 1 << 24
_PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Stretches:
    """Tokens of one stretch see the same tokens of other stretches, and are seen by the same.

    Within a stretch a rule may tell earlier from later tokens. A position `edges[i]` is the first of stretch i, the
    last entry follows the last token.
    """

    edges: Int64[Tensor, " S+1"]

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def firsts(self) -> Int64[Tensor, " S"]:
        return self.edges[:-1]

    @property
    def sizes(self) -> Int64[Tensor, " S"]:
        return self.edges.diff()

    def seen(self, rules: Mapping[Pattern, int], num_heads: int) -> tuple[Tensor, Tensor] | None:
        """(row, column) of all pairs of stretches of which one sees the other by any rule; each sees itself.

        `rules` say for which head each of them is. Rows ascend. None where these are too many.
        """
        found: list[Tensor] = []
        for rows in torch.arange(len(self)).split(max(1, _PAIRS_AT_ONCE // len(self))):
            allowed = reduce(torch.logical_or, (self._allowed(*rule, num_heads, rows) for rule in rules.items()))
            allowed = allowed.expand(len(rows), len(self)) | (rows[:, None] == torch.arange(len(self)))
            pairs = allowed.nonzero()
            found.append(pairs + torch.stack([rows[0], rows.new_zeros(())]))
            if sum(map(len, found)) > _MOST_SEEN:
                return None
        row, column = torch.cat(found).unbind(1)
        return row, column

    def inside(self, rules: Mapping[Pattern, int], num_heads: int) -> tuple[Tensor, Tensor]:
        """Of each stretch, whether its tokens see earlier ones of it by any rule, and whether they see later ones."""
        first, several = self.firsts, self.sizes > 1
        second = torch.where(several, first + 1, first)
        found = [torch.zeros_like(several), torch.zeros_like(several)]
        for rule, head in rules.items():
            for allowed, pair in zip(found, ((second, first), (first, second)), strict=True):
                allowed |= several & _looked(rule, head, num_heads, *pair)
        return found[0], found[1]

    def _allowed(self, rule: Pattern, head: int, num_heads: int, rows: Tensor) -> Bool[Tensor, "R S"]:
        """Which stretches each of some sees, by their first tokens."""
        parts = (self._allowed(part, head, num_heads, rows) for part in getattr(rule, "parts", ()))
        if isinstance(rule, And):
            return reduce(torch.logical_and, parts)
        if isinstance(rule, Or):
            return reduce(torch.logical_or, parts)
        if isinstance(rule, Not):
            return ~self._allowed(rule.part, head, num_heads, rows)
        if isinstance(rule, RandomBlocks | BlockList):
            return self._listed(rule, head, num_heads, rows)
        return _looked(rule, head, num_heads, self.firsts[rows, None], self.firsts[None, :])

    def _listed(self, rule: RandomBlocks | BlockList, head: int, num_heads: int, rows: Tensor) -> Bool[Tensor, "R S"]:
        """The same of a rule that lists blocks, without a search for each pair."""
        listed = rule.squares(head, num_heads)
        row, column = listed.q_first // rule.block, listed.k_first // rule.block
        block = self.firsts // rule.block
        first = int(block[rows[0]])
        here = (row >= first) & (row <= int(block[rows[-1]]))
        blocks = torch.zeros(int(block[rows[-1]]) + 1 - first, int(block[-1]) + 1, dtype=torch.bool)
        here &= column < blocks.shape[1]
        blocks[row[here] - first, column[here]] = True
        allowed = blocks[block[rows] - first].index_select(1, block)
        if isinstance(rule, RandomBlocks):
            held = self.firsts < rule.num_tokens
            allowed &= held[rows, None] & held
        return allowed


def _looked(rule: Pattern, head: int, num_heads: int, q: Tensor, k: Tensor) -> Tensor:
    nothing = torch.zeros((), dtype=torch.int64)
    return rule.mask_mod(num_heads=num_heads, device=torch.device("cpu"))(nothing, nothing + head, q, k)


def stretches_of(rules: Iterable[Pattern], tokens: range) -> Stretches | None:
    """The stretches of tokens that all these rules treat alike; None where that is not known, or they are too many."""
    cuts = [torch.tensor([tokens.start, tokens.stop])]
    for rule in rules:
        own = _cuts(rule, tokens)
        if own is None or sum(map(len, cuts)) + len(own) > 8 * _MOST_STRETCHES:
            return None
        cuts.append(own)
    edges = torch.cat(cuts).unique()
    return Stretches(edges) if len(edges) <= _MOST_STRETCHES + 1 else None


def _cuts(rule: Pattern, tokens: range) -> Int64[Tensor, " c"] | None:
    """Positions among the tokens at which a rule for one head may change; between them only the order counts."""
    if isinstance(rule, And | Or | Not):
        parts = [_cuts(part, tokens) for part in (rule.parts if isinstance(rule, And | Or) else (rule.part,))]
        known = [part for part in parts if part is not None]
        return torch.cat(known).unique() if len(known) == len(parts) else None
    if isinstance(rule, PerDocument):
        within = _cuts(rule.part, range(tokens.stop))
        return None if within is None or len(within) else _cuts(rule.spans, tokens)
    found = _edges(rule, tokens)
    return None if found is None else found[(found > tokens.start) & (found < tokens.stop)]


def _edges(rule: Pattern, tokens: range) -> Int64[Tensor, " c"] | None:
    if isinstance(rule, Every | Causal):
        return torch.zeros(0, dtype=torch.int64)
    if isinstance(rule, RandomBlocks):
        drawn = range(tokens.start, min(tokens.stop, rule.num_tokens))
        return torch.cat([_multiples(rule.block, drawn), torch.tensor([rule.num_tokens])])
    if isinstance(rule, BlockList | Blockwise):
        return _multiples(rule.block, tokens)
    if isinstance(rule, Dilated) and rule.rate == 1:
        return _multiples(rule.segment, tokens)
    if isinstance(rule, GlobalTokens):
        return torch.tensor([rule.tokens])
    if isinstance(rule, Spans):
        return torch.cat([rule.starts, rule.stops])
    if isinstance(rule, KeySet):
        return rule.only_row.int().diff().nonzero().squeeze(1) + 1
    return None


def _multiples(side: int, tokens: range) -> Int64[Tensor, " c"]:
    first = -(-tokens.start // side) * side
    return torch.arange(first, max(first, tokens.stop), side)
