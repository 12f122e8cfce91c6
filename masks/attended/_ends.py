"""Ends of chunks: positions where decoding can cut a sequence, as no query before one sees a key at or after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ..blocks import Blocks, Rule, build_blocks
from ..core import And, Or, Pattern, outside_torch_modes
from ..orders import Layout
from ..patterns import Band, Blockwise, Causal, blockwise, causal, first_tokens
from ._rewrites import KeyQuery
from ._row import RowSource
from ._search import keys_of_any

# P positions, n pairs

# Positions searched for keys after their queries, if the form of the rule does not decide.
_LEAST_TRIED, _MOST_TRIED = 1 << 11, 1 << 15
_BLOCK = 64
_BLOCKS_AT_ONCE = 1 << 10  # blocks evaluated together: bounds the memory


@dataclass(frozen=True)
class Ends:
    """The positions first, first + chunk, first + 2 * chunk, ...: ends of chunks, with 0 <= first < chunk.

    A rule has these ends if no query before an end sees a key at or after that end. A causal rule has every position as
    an end, with chunk 1.
    """

    first: int
    chunk: int

    def next(self, position: int) -> int:
        """Return the least end that is at least `position`."""
        return position + (self.first - position) % self.chunk

    def rule(self) -> Pattern:
        """Return the pattern that allows a pair iff no end is above the query and at or below the key."""
        if self.chunk == 1:
            return causal()
        chunks = blockwise(causal(), self.chunk)
        return chunks.after(self.first) | first_tokens(self.first) if self.first else chunks

    def by_form(self, rule: Pattern) -> bool:
        """True if the form of a rule shows that it has these ends; False is not conclusive.

        The recognized rules are

        * causal order and windows without keys after the query;
        * rules over blocks whose size divides the chunk, if the inner rule is recognized with the chunk counted in
          blocks;
        * rules without pairs across segments whose length divides the chunk;
        * intersections of which some part is recognized, and unions of which every part is.

        Blocks and segments are recognized only if `first` is 0.
        """
        if isinstance(rule, And):
            return any(map(self.by_form, rule.parts))
        if isinstance(rule, Or):
            return all(map(self.by_form, rule.parts))
        if isinstance(rule, Band):
            return rule.most is not None and rule.most <= 0
        if isinstance(rule, Blockwise):
            return self._chunk_is_multiple_of(rule.block) and Ends(0, self.chunk // rule.block).by_form(rule.part)
        period = rule.period()
        return rule.confined() and period is not None and self._chunk_is_multiple_of(period)

    def _chunk_is_multiple_of(self, block: int) -> bool:
        return self.first == 0 and self.chunk % block == 0


_CAUSAL = Ends(0, 1)


def causal_by_form(rule: Pattern) -> bool:
    """True if the form of a rule shows that no query sees a later key; False is not conclusive."""
    return _CAUSAL.by_form(rule)


@outside_torch_modes
def later_pair(source: RowSource) -> tuple[int, int] | None:
    """Return positions (query, key) of an allowed pair whose key is after its query; None if none is found.

    A rule that is causal by its form is not searched; another rule is searched among the first 2048 positions.
    """
    return None if causal_by_form(source.rule) else _first_pair_ahead(source, _LEAST_TRIED)


def _first_pair_ahead(source: RowSource, tried: int) -> tuple[int, int] | None:
    ahead, blocks = _blocks_ahead(source, tried)
    if len(blocks.row) == 0:
        return None
    q = int(blocks.row[0]) * _BLOCK + torch.arange(_BLOCK)[:, None]
    k = int(blocks.column[0]) * _BLOCK + torch.arange(_BLOCK)
    query, key = ahead.allowed(torch.zeros_like(q), q, k).nonzero()[0].tolist()
    return int(q[query]), int(k[key])


@outside_torch_modes
def regular_ends(sources: Sequence[RowSource]) -> Ends | tuple[int, int]:
    """Return the common ends of all these rules, with the shortest chunk; or else a pair whose key is after its query.

    If no ends are found, the result is such a pair, (query, key), that a rule allows. Rules that are causal by their
    form are not searched. Other rules are searched over the first 2048 positions, or over about twice the longest
    period in any of them if that is more, but at most over 32,768. Chunks of half the searched positions or more are
    not found, and later positions are assumed to repeat the chunks.
    """
    periods = {source: _longest_period(source.rule) for source in sources if not causal_by_form(source.rule)}
    tried = min(max(_LEAST_TRIED, 2 * max(periods.values(), default=0) + _BLOCK), _MOST_TRIED) // _BLOCK * _BLOCK
    is_end = torch.ones(tried, dtype=torch.bool)
    for source in sorted(periods, key=lambda source: -periods[source]):
        is_end &= ~_crossed_positions(source, tried)
        if not bool(is_end[1 : tried // 2].any()):  # the first end after 0 is at most a chunk away
            break
    if bool(is_end.all()):
        return _CAUSAL
    for chunk in range(2, tried // 2):
        # Column j holds the positions j, j + chunk, j + 2 * chunk, ...; positions that were not searched count as ends.
        columns = torch.nn.functional.pad(is_end, (0, -tried % chunk), value=True).view(-1, chunk)
        firsts = columns.all(0).nonzero()
        if len(firsts):
            return Ends(int(firsts[0]), chunk)
    return next(pair for source in periods if (pair := _first_pair_ahead(source, tried)) is not None)


def _longest_period(rule: Pattern) -> int:
    return max([rule.period() or 1, *map(_longest_period, rule.direct_parts())])


def _blocks_ahead(source: RowSource, tried: int) -> tuple[Rule, Blocks]:
    """Return (the rule, cut to pairs whose key is after the query; its non-empty 64 x 64 blocks below `tried`)."""
    tokens = Layout(tried).pieces(0)
    ahead = Rule(And.of(source.rule, ~Causal()), source.num_heads, (source.head,), tokens, tokens)
    return ahead, build_blocks(ahead, q_block=_BLOCK, k_block=_BLOCK)


def _crossed_positions(source: RowSource, tried: int) -> Bool[Tensor, " P"]:
    """Return, for each position p below `tried`, True if a query before p sees a key in [p, tried)."""
    ahead, blocks = _blocks_ahead(source, tried)
    row, column = blocks.row.long(), blocks.column.long()
    # Any pair of a block crosses all positions from the end of its queries to the first of its keys.
    crossed = _covered_positions(_BLOCK * row + _BLOCK - 1, _BLOCK * column, tried)
    is_open = ~crossed.view(-1, _BLOCK).all(1)
    for few in (is_open[row] | is_open[column]).nonzero().squeeze(1).split(_BLOCKS_AT_ONCE):
        q, k = (_BLOCK * side[few, None] + torch.arange(_BLOCK) for side in (row, column))
        shown = ahead.allowed(torch.zeros_like(q[:, :, None]), q[:, :, None], k[:, None, :])
        crossed |= _covered_positions(q.flatten(), torch.where(shown, k[:, None, :], -1).amax(2).flatten(), tried)
    return crossed


def _covered_positions(query: Int64[Tensor, " n"], key: Int64[Tensor, " n"], number: int) -> Bool[Tensor, " P"]:
    """Return, for each of `number` positions, True if query[i] < position <= key[i] for some i."""
    later = (query < key).long()
    # Each pair adds 1 after its query and subtracts it after its key; pairs with key <= query add nothing.
    steps = torch.zeros(number + 1, dtype=torch.int64)
    steps.index_add_(0, query + 1, later).index_add_(0, key.maximum(query) + 1, -later)
    return steps.cumsum(0)[:number] > 0


@outside_torch_modes
def seen_ahead(sources: Sequence[RowSource], queries: range, keys: range) -> tuple[int, int] | None:
    """Return a pair (query, key) with the largest of `keys` that any of `queries` sees by any of the rules.

    None if no rule allows a pair of them.

    sources: the rules.
    queries, keys: ranges of consecutive positions.
    """
    pairs = []
    for source in sources:
        wanted = KeyQuery((source.rule,), queries, keys, source.head, source.num_heads)
        if found := keys_of_any([wanted]):
            key, places = max(part[-1] for part in found), torch.arange(queries.start, queries.stop)
            pairs.append((key, int(places[wanted.allows(places, torch.full_like(places, key))][0])))
    return max(pairs)[::-1] if pairs else None


def ends_after(sources: Sequence[RowSource], ends: Ends, first: int, position: int) -> Iterator[int]:
    """Yield, ascending and endlessly, each p >= `position` such that no query in [first, p) sees a key at or after p.

    sources: the rules by which queries see keys.
    ends: common ends of the rules. Keys are searched only up to the next of these; p need not be one.
    first: first query that counts, below `position`.
    """
    while True:
        while pair := seen_ahead(sources, range(first, position), range(position, ends.next(position))):
            position = pair[1] + 1
        yield position
        position += 1
