"""Term: pairs that one kernel computes, with an order of queries, an order of keys, and weights of the pairs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Literal

import torch
from jaxtyping import Float, Int16, Int64, Shaped
from torch import Tensor

from ...blocks import Blocks, ListedBlocks, Rule, allowed_pairs, build_blocks, estimate_blocks, repeat_blocks
from ...core import TILE, Bound, MaskMod, Pattern, index_dtype, outside_torch_modes
from ...orders import Compact, Folded, Layout, Order, Pieces
from ...patterns import tables
from ...plan_cache import cache

_LARGEST_SIDE = 1 << 15  # of a block
_MANY_CLASSES = 1 << 8  # residue classes of an order: from here on, pairs of classes may outnumber blocks
Shape = Literal["dense", "causal", "strip", "masked", "blocks", "table"]

# H heads, Q query slots, K key slots

_Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class KeyWeights:
    """Integer weights of pairs, by head and key slot.

    For the i-th head of the term, the weight is periods[i][k slot % n], where n is the length of each of the periods.
    """

    periods: tuple[tuple[int, ...], ...]

    def of_heads(self, some: slice) -> KeyWeights:
        return KeyWeights(self.periods[some])

    def counted(self, num_queries: int, num_keys: int, num_heads: int) -> int:
        """Return the sum of the weights over all pairs of the num_heads heads of the term."""
        return num_queries * int(_repeat_periods(torch.tensor(self.periods), num_keys).sum())

    def bias(self, num_queries: int, num_keys: int, dtype: torch.dtype) -> Float[Tensor, "H 1 K"]:
        """Return the log of the weights, to be added to attention scores."""
        return _repeat_periods(torch.tensor(self.periods, dtype=dtype).log(), num_keys)[:, None]


@dataclass(frozen=True)
class PairWeights:
    """Periodic integer weight of a pair (q slot, k slot), equal for all heads: table[q % period][k % period].

    A term with these weights is causal, and its queries are the tokens of the last key slots. The period is the number
    of rows of the square table; the key slot that holds the first query's token is a multiple of it.
    """

    table: _Table

    def of_heads(self, some: slice) -> PairWeights:
        return self

    def counted(self, num_queries: int, num_keys: int, num_heads: int) -> int:
        """Return the sum of the weights over all causal pairs of the num_heads heads of the term."""
        table, (q, k) = torch.tensor(self.table), _slots_of_strip(num_queries, num_keys - num_queries, num_queries)
        return int((table[q % len(table)][:, k % len(table)] * (k <= q[:, None])).sum()) * num_heads

    def bias(self, num_queries: int, num_keys: int, dtype: torch.dtype) -> Float[Tensor, "1 Q K"]:
        """Return the log of the weights, to be added to attention scores; -inf for keys after the query.

        The result is a view of a cached tensor: do not modify it.
        """
        period, lead = len(self.table), num_keys - num_queries
        table, shift = self._least_cyclic_shift
        rows, before = _next_power_of_two(num_queries), _next_power_of_two(lead) if lead else 0
        strip = cache().get(
            ("pair weights", table, rows, before, dtype),
            lambda: _bias_of_strip(torch.tensor(table), rows + period, before, rows + period, dtype),
            lambda strip: strip.nbytes,
        )
        # Entry (q, k) of the weights is entry (q + shift, k + shift) of the least table: the strip is read from slot
        # `shift` on, and has `period` more rows for it. Its column 0 is key slot -before.
        first = before - lead + shift
        return strip[None, shift : shift + num_queries, first : first + num_keys]

    @cached_property
    def _least_cyclic_shift(self) -> tuple[_Table, int]:
        """(table, shift): the cyclic shift of `table` that compares least as a tuple, as `_shifted_table` gives it."""
        # Tables that differ only by a cyclic shift have equal least tables, and so share a cached bias.
        return min((_shifted_table(self.table, shift), shift) for shift in range(len(self.table)))


@dataclass(frozen=True)
class CountedPairs:
    """Weights as a dense tensor, for few tokens: a pair's weight is the number of branches of `bound` that allow it."""

    bound: Bound

    def of_heads(self, some: slice) -> CountedPairs:
        heads = range(self.bound.num_heads)[some]
        first = self.bound.head_offset + heads.start
        return CountedPairs(replace(self.bound, num_heads=len(heads), head_offset=first))

    def counts(self) -> Int16[Tensor, "#H Q K"]:
        """Return the number of branches that allow each pair, by head; of one head if all heads have equal rules.

        The result is a view of a cached tensor: do not modify it.
        """
        return self._cached_tensor("pair counts", self._count_branches)

    def _cached_tensor(self, name: str, build: Callable[[], Tensor], *more: Hashable) -> Shaped[Tensor, "#H Q K"]:
        """Return the tensor that `build` makes for `bound`, or the equal part of a cached tensor for more tokens.

        A pair's head and positions determine its value. A cached tensor therefore serves all calls with no more
        queries, if pattern, heads, first positions and num_keys - num_queries are equal.

        name, more: parts of the key in the cache, beside those of `bound`.
        """
        bound = self.bound
        first = replace(bound, num_queries=1, num_keys=1).key()
        found = cache().get(
            (name, first, bound.num_keys - bound.num_queries, *more),
            build,
            lambda x: x.nbytes,
            pattern=bound.pattern,
            suffices=lambda x: x.shape[1] >= bound.num_queries,
        )
        return found[:, : bound.num_queries, : bound.num_keys]

    @outside_torch_modes
    def _count_branches(self) -> Int16[Tensor, "#H Q K"]:
        bound = self.bound
        heads = torch.tensor(bound.masked_heads)[:, None, None]
        q, k = torch.arange(bound.num_queries)[:, None] + bound.q_offset, torch.arange(bound.num_keys) + bound.k_offset
        total = torch.zeros(len(heads), bound.num_queries, bound.num_keys, dtype=torch.int16)
        for branch in bound.pattern.branches():
            total += allowed_pairs(branch, bound.num_heads_global, heads, q, k)
        return total

    @cached_property
    @outside_torch_modes
    def is_causal(self) -> bool:
        """True if no allowed pair has its key slot after its query slot."""
        return not bool(self.counts().triu(1).any())

    def counted(self, num_queries: int, num_keys: int, num_heads: int) -> int:
        """Return the sum of the counts over all pairs of the num_heads heads of the term."""
        counts = self.counts()
        return int(counts.sum()) * (num_heads // len(counts))

    def bias(self, num_queries: int, num_keys: int, dtype: torch.dtype) -> Float[Tensor, "#H Q K"]:
        """Return the log of `counts()`, of equal shape, to be added to attention scores; -inf for a count of 0.

        The result is a view of a cached tensor: do not modify it.
        """
        return self._cached_tensor("counted pairs", lambda: self.counts().to(dtype).log(), dtype)


Weights = KeyWeights | PairWeights | CountedPairs


def _repeat_periods(periods: Tensor, slots: int) -> Tensor:
    return periods.repeat(1, -(-slots // periods.shape[1]))[:, :slots]


def _slots_of_strip(rows: int, before: int, columns: int) -> tuple[Int64[Tensor, " rows"], Int64[Tensor, " all"]]:
    """Return (0 to rows - 1, -before to columns - 1): query and key slots; key slot 0 has the token of query slot 0."""
    return torch.arange(rows), torch.arange(-before, columns)


def _bias_of_strip(table: Tensor, rows: int, before: int, columns: int, dtype: torch.dtype) -> Tensor:
    q, k = _slots_of_strip(rows, before, columns)
    logs = table.to(dtype).log()[q % len(table)][:, k % len(table)]
    return logs.masked_fill_(k > q[:, None], -torch.inf)


def _shifted_table(table: _Table, shift: int) -> _Table:
    """Return the table shifted cyclically by `shift` rows and columns: entry (q, k) moves to (q + shift, k + shift)."""
    rows = table[-shift:] + table[:-shift] if shift else table
    return tuple(row[-shift:] + row[:-shift] if shift else row for row in rows)


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Term:
    """Pairs that one kernel computes for some heads: pairs of one branch, or of several branches together.

    q, k: orders of the queries and keys: the tokens of the term, and the slot of each. Every fold has the allowed pairs
        of fold 0.
    rule: allowed pairs among these tokens.
    shape: structure that a kernel can use: "dense", all pairs; "causal", slots k <= q; "strip", causal with the queries
        at the last of the key slots; "masked", all pairs with weights as a bias; "blocks", a block list of side
        `block_side`; "table", a table of keys or blocks.
    heads: query heads, numbered on this device; global numbers are head_offset larger.

    The rule is evaluated at fold 0, with query token i at position q_offset + i and key token j at k_offset + j. In a
    term inside windows, such as documents, these positions count from a window's origin, less whole periods of the
    rule: q_offset may be negative. A pair counts `multiplicity` times, multiplied by its weight if there are `weights`.
    """

    rule: Pattern
    shape: Shape
    multiplicity: int
    heads: tuple[int, ...]
    head_offset: int
    num_heads_global: int
    q: Order
    k: Order
    q_offset: int
    k_offset: int
    weights: Weights | None = None
    block_side: int = TILE

    @classmethod
    def of(
        cls,
        bound: Bound,
        rule: Pattern,
        shape: Shape,
        multiplicity: int,
        q: Order,
        k: Order,
        *,
        heads: tuple[int, ...],
        weights: Weights | None = None,
    ) -> Term:
        """Return a term whose head and position offsets, and global number of heads, are those of `bound`."""
        numbers = multiplicity, heads, bound.head_offset, bound.num_heads_global
        return cls(rule, shape, *numbers, q, k, bound.q_offset, bound.k_offset, weights)

    @property
    def folds(self) -> int:
        return self.q.folds

    def in_blocks_of(self, q_block: int, k_block: int) -> Term:
        """Return self, whose orders need no padding for blocks of any size.

        `PaddedTerm` and `IntervalTerm` return a copy whose orders are padded to whole blocks of these sizes.
        """
        return self

    def portions(self, most_slots: int) -> tuple[Term, ...]:
        """Return terms over fewer heads and folds that together make up this one.

        Each has at most `most_slots` query slots and at most `most_slots` key slots over its heads and folds, unless it
        has a single head and fold. Returns (self,) if the term is small enough, or has orders other than `Compact`.
        """
        if not isinstance(self.q, Compact) or not isinstance(self.k, Compact):
            return (self,)
        slots = max(self.q.num_slots, self.k.num_slots)
        folds = max(1, min(self.folds, most_slots // slots))
        heads = max(1, most_slots // (folds * slots))
        if folds == self.folds and heads >= len(self.heads):
            return (self,)
        return tuple(
            replace(
                self,
                heads=self.heads[some],
                q=self.q.portion(some, few),
                k=self.k.portion(some, few),
                weights=self.weights and self.weights.of_heads(some),
            )
            for some in (slice(begin, begin + heads) for begin in range(0, len(self.heads), heads))
            for few in (range(begin, min(begin + folds, self.folds)) for begin in range(0, self.folds, folds))
        )

    def bias(self, dtype: torch.dtype) -> Float[Tensor, "#H #Q K"] | None:
        """Return the log of the weights, to add to the scores of each fold; None without weights.

        It is -inf for pairs of weight 0, and with `PairWeights` for keys after the query: no further mask is needed.
        """
        return None if self.weights is None else self.weights.bias(self.q.num_slots, self.k.num_slots, dtype)

    def counted_pairs(self) -> int:
        """Return the sum of multiplicity * weight over allowed pairs of all heads and folds.

        The term must not have block lists.
        """
        queries, keys, heads = self.q.num_slots, self.k.num_slots, len(self.heads)
        if self.weights is not None:
            pairs = self.weights.counted(queries, keys, heads)
        elif self.shape == "dense":
            pairs = queries * keys * heads
        else:
            lead = keys - queries if self.shape == "strip" else 0
            seen = min(queries, keys - lead)
            pairs = (seen * (seen + 1) // 2 + queries * lead + (queries - seen) * (keys - lead)) * heads
        return self.multiplicity * pairs * self.folds

    @cached_property
    def listed_blocks(self) -> ListedBlocks:
        """Number of computed blocks over all heads and folds, by kind of row of blocks as in `ListedBlocks`.

        For block lists it is an estimate. All blocks of a term without lists count as `plain`. If run-time tensors
        differ by batch entry, only the first entry is counted.
        """
        problems = len(self.heads) * self.folds
        rows, columns = (-(-side.num_slots // self.block_side) for side in (self.q, self.k))
        if self.shape in ("dense", "strip", "masked"):
            return ListedBlocks(0, rows * columns * problems, 0)
        if self.shape == "causal":
            return ListedBlocks(0, sum(min(row + 1, columns) for row in range(rows)) * problems, 0)
        one = replace(self, rule=self.rule.entry(0)) if tables(self.rule) else self
        found = estimate_blocks(one.table_rule(), q_block=self.block_side, k_block=self.block_side)
        return ListedBlocks(*(blocks * problems for blocks in found))

    def tables(self) -> tuple[int, ...]:
        """Return the index of the block table of each head; heads that share a table have equal rules over slots."""
        seen: dict[object, int] = {}
        return tuple(seen.setdefault(self._rule_key(index), len(seen)) for index in range(len(self.heads)))

    def _rule_key(self, index: int) -> object:
        """Return a hashable value for the head at this index; equal values mean equal rules over slots."""
        starts = [side.start_of(index) for side in (self.q, self.k)]
        if self.rule.period() == 1:  # only the distance counts
            starts = [starts[1] - starts[0], 0]
        return (self.rule.for_head(self.heads[index] + self.head_offset, self.num_heads_global), *starts)

    def table_rule(self) -> Rule:
        """Return the rule over slots, with one head for each distinct block table."""
        tables = self.tables()
        return self._slot_rule(tuple(tables.index(table) for table in range(max(tables) + 1)))

    def _slot_rule(self, distinct: tuple[int, ...]) -> Rule:
        """Return the rule over slots of the heads at the indices `distinct` among the term's heads."""
        heads = tuple(self.heads[index] + self.head_offset for index in distinct)
        pattern, q = self.q.in_pieces(self.rule, self.q_offset)
        pattern_by_keys, k = self.k.in_pieces(self.rule, self.k_offset)
        assert pattern == pattern_by_keys, "the orders of queries and keys rewrite the rule alike"
        rule = Rule(pattern, self.num_heads_global, heads, _select_tables(q, distinct), _select_tables(k, distinct))
        if not isinstance(self.q, Layout) or not isinstance(self.k, Layout) or self.q.rate < _MANY_CLASSES:
            return rule
        q, k = self.q.rows(self.q_offset), self.k.rows(self.k_offset)
        return replace(rule, rows=replace(rule, q=_select_tables(q, distinct), k=_select_tables(k, distinct)))

    def repeated(self, q_tokens: Int64[Tensor, " n"], k_tokens: Int64[Tensor, " n"]) -> Term:
        """Return one term whose folds are n copies of this term's folds, each copy over other tokens.

        In copy i, indices of query tokens are larger by q_tokens[i], and those of key tokens by k_tokens[i]. Each
        copy has the pairs that the rule allows at the positions of this term.
        """
        offsets = self.q_offset - int(q_tokens[0]), self.k_offset - int(k_tokens[0])
        moved = {"q": self.q.repeated(self.heads, q_tokens), "k": self.k.repeated(self.heads, k_tokens)}
        found = replace(self, **moved, q_offset=offsets[0], k_offset=offsets[1])
        if "listed_blocks" in vars(self):  # counting blocks is the slow part of planning
            vars(found)["listed_blocks"] = ListedBlocks(*(number * len(q_tokens) for number in self.listed_blocks))
        return found

    def moved(self, q_tokens: int, k_tokens: int) -> Term:
        """Return the term with token indices increased by these numbers; positions are unchanged."""
        return self.repeated(torch.tensor([q_tokens]), torch.tensor([k_tokens]))

    def at_origin(self) -> Term:
        """Return fold 0 alone, with multiplicity 1, shifted by whole periods of the rule to the lowest positions.

        It has no weights, and block lists equal to those of the term. Terms that differ only by such a shift, by their
        folds and by multiplicity become equal, and so share cached kernel calls. Returns self unless both orders are
        `Compact` or both are `Folded`.
        """
        if isinstance(self.q, Folded) and isinstance(self.k, Folded):
            offsets = self.q_offset + self.q.first, self.k_offset + self.k.first
            shift = self._round_down_to_period(min(offsets))
            sides = {"q": self.q.order, "k": self.k.order}
            return replace(self, **sides, multiplicity=1, q_offset=offsets[0] - shift, k_offset=offsets[1] - shift)
        if not isinstance(self.q, Compact) or not isinstance(self.k, Compact):
            return self
        least = min(min(self.q.starts) + self.q_offset, min(self.k.starts) + self.k_offset)
        shift = self._round_down_to_period(least)
        q, k = self.q.alone(self.q_offset - shift), self.k.alone(self.k_offset - shift)
        return replace(self, multiplicity=1, q=q, k=k, q_offset=0, k_offset=0, weights=None)

    def _round_down_to_period(self, position: int) -> int:
        """Return the largest multiple of the rule's period that is at most `position`; 0 without a period."""
        period = self.rule.period()
        return 0 if period is None else position // period * period

    def blocks(self, q_block: int, k_block: int, *, settle: bool = True) -> Blocks:
        """Return the block list over the slots of one fold, with the tables to which `tables` assigns the heads.

        settle: True to evaluate, pair by pair, the blocks that bounds on their number of allowed pairs leave undecided.
            If False, a listed block may have no allowed pair, and a full one may be listed as partial.
        """
        square = self._term_of_one_period(q_block, k_block)
        if square is not None:
            return repeat_blocks(
                square.blocks(q_block, k_block, settle=settle),
                classes=self.q.rate if isinstance(self.q, Layout) else 1,
                times=self.q.num_slots // square.q.num_slots,
            )
        built = build_blocks(self.table_rule(), q_block=q_block, k_block=k_block, settle=settle)
        return built.with_heads(self.tables())

    def _term_of_one_period(self, q_block: int, k_block: int) -> Term | None:
        """Return a term over one period of the rule; copies of its block list along the diagonal are this term's list.

        None unless queries and keys have equal `Layout`s and positions from 0 on, the tokens are several whole periods,
        each residue class of a period fills whole blocks, and the rule allows no pair across periods.
        """
        period = self.rule.period()
        if not isinstance(self.q, Layout) or self.q != self.k or period is None:
            return None
        if self.q_offset or self.k_offset:
            return None
        rate, tokens = self.q.rate, self.q.num_tokens
        whole = tokens % period == 0 and tokens > period and period % (rate * lcm(q_block, k_block)) == 0
        if not whole or not self.rule.confined():
            return None
        return replace(self, q=Layout(period, rate), k=Layout(period, rate))

    def mask_mod(self, device: torch.device) -> MaskMod:
        """Return a FlexAttention mask_mod (b, h, q slot, k slot) -> bool over the slots of one fold.

        h is an index into the term's heads.
        """
        inner = self.rule.mask_mod(num_heads=self.num_heads_global, device=device)
        ends = self.q_offset + self.q.end(_LARGEST_SIDE), self.k_offset + self.k.end(_LARGEST_SIDE)
        dtype = index_dtype(device, 0, max(*ends, self.num_heads_global))
        heads = torch.tensor(self.heads, dtype=dtype, device=device) + self.head_offset
        if isinstance(self.q, Compact) and isinstance(self.k, Compact):
            q = torch.tensor(self.q.starts, dtype=dtype, device=device) + self.q_offset
            k = torch.tensor(self.k.starts, dtype=dtype, device=device) + self.k_offset
            steps = (torch.tensor(side.step, dtype=dtype, device=device) for side in (self.q, self.k))
            return _mask_mod_on_progressions(inner, heads, q, k, *steps)
        if self.q.is_natural and self.k.is_natural:
            offsets = (torch.tensor(offset, dtype=dtype, device=device) for offset in (self.q_offset, self.k_offset))
            return _shifted_mask_mod(inner, heads, *offsets)
        q_positions, k_positions = (side.tokens(device)[0, 0].to(dtype) for side in (self.q, self.k))
        return _mask_mod_on_positions(inner, heads, q_positions + self.q_offset, k_positions + self.k_offset)


def _select_tables(pieces: Pieces, indices: tuple[int, ...]) -> Pieces:
    """Return the pieces with rows indices[0], indices[1], ... of `firsts`; a single row, of all heads, is repeated."""
    shared = len(pieces.firsts) == 1
    firsts = pieces.firsts.expand(len(indices), -1) if shared else pieces.firsts[list(indices)]
    return replace(pieces, firsts=firsts)


def _mask_mod_on_progressions(
    inner: MaskMod, heads: Tensor, q_firsts: Tensor, k_firsts: Tensor, q_step: Tensor, k_step: Tensor
) -> MaskMod:
    def mask_mod(b, h, q, k):
        return inner(b, heads[h], q_firsts[h] + q * q_step, k_firsts[h] + k * k_step)

    return mask_mod


def _shifted_mask_mod(inner: MaskMod, heads: Tensor, q_offset: Tensor, k_offset: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return inner(b, heads[h], q + q_offset, k + k_offset)

    return mask_mod


def _mask_mod_on_positions(inner: MaskMod, heads: Tensor, q_positions: Tensor, k_positions: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return inner(b, heads[h], q_positions[q], k_positions[k])

    return mask_mod
