"""Attention to chosen blocks, as calls of `attend` with a table of blocks; and a KVCache that chooses at each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from .._attend import attend
from .._validate import resolve_scale, run_time_tensors
from ..decoding import Cohort, KVCache
from ..engines import ScoreMod, merge
from ..masks import Pattern, causal, selected_blocks
from ..masks.attended import RowSource
from ..masks.core import require_int
from ..masks.patterns import names
from ._boxes import SelectionRule
from ._scores import Pools, pools_for, pools_of
from ._select_op import choose_blocks, selection_pairs
from ._selector import BlockSelector, is_causal

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim, T tables, R query blocks, C key blocks,
# and in `select` C selected batch entries


class TableAttention(NamedTuple):
    """Attention to the blocks in a table, for one call: builds patterns that read the table, and calls `attend`.

    rule: pairs that the call allows.
    selector: the selector that made the table.
    not_always: complement of the selector's `always`; None without `always`.
    table: name of the table among the run-time tensors.
    bindings: the other run-time tensors, by name.
    options: keyword arguments of `attend`.
    """

    rule: Pattern
    selector: BlockSelector
    not_always: Pattern | None
    table: str
    bindings: dict[str, Tensor]
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        selector: BlockSelector,
        not_always: Pattern | None,
        rule: Pattern,
        bindings: Mapping[str, Tensor] | None,
        **options: Any,
    ) -> TableAttention:
        """Make an instance for one call; the name of its table differs from the names of all run-time tensors.

        selector, not_always, rule: the fields of these names.
        bindings: run-time tensors of the call by name, None for none; tensors that only a coarse selector needs are
            dropped.
        options: scale, q_offset and engine of `attend`.
        """
        table = "chosen"
        needed = names(selector.with_always(rule))
        while table in needed:
            table += "_"
        given = {} if bindings is None else {name: x for name, x in bindings.items() if name in needed}
        return cls(rule, selector, not_always, table, given, {**options, "enable_gqa": True})

    @property
    def always(self) -> Pattern:
        """Pattern always & rule: pairs attended to without being chosen. The selector must have an `always`."""
        assert self.selector.always is not None
        return self.selector.always & self.rule

    @property
    def attended(self) -> Pattern:
        """Pattern of all attended pairs, (chosen | always) & rule; chosen are the pairs in the blocks of the table."""
        chosen = self._chosen(self.selector.choose.most)
        return (chosen if self.selector.always is None else chosen | self.selector.always) & self.rule

    def chosen_only(self, most: int) -> Pattern:
        """Return the pattern chosen & ~always & rule: pairs attended to only because the table has their block.

        most: width of the table, in blocks per query block.
        """
        chosen = self._chosen(most) & self.rule
        return chosen if self.not_always is None else chosen & self.not_always

    def _chosen(self, most: int) -> Pattern:
        return selected_blocks(self.table, block=(self.selector.query_block, self.selector.block), most=most)

    def num_pairs(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"]) -> Int64[Tensor, ""]:
        """Return the number of pairs that `rule` allows, over all heads and batch entries: a density's denominator."""
        call = self.selector.call(self.rule, self.options["q_offset"], 1.0)
        both = self.selector.with_always(self.rule)
        return selection_pairs(
            q, k, run_time_tensors(both, self.bindings, batch=q.shape[0], has_values=not q.is_meta), *call.arguments
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, blocks: Int64[Tensor, "B T R most"] | None = None
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
        """Return (output, lse) of attention to the pairs of a pattern, both in the dtype of the lse.

        blocks: the table of chosen blocks; None for a pattern without a table.
        """
        known = names(pattern)
        bindings = {name: x for name, x in self.bindings.items() if name in known}
        bindings |= {} if blocks is None else {self.table: blocks}
        out, lse = attend(q, k, v, pattern, bindings=bindings or None, return_lse=True, **self.options)
        return out.to(lse.dtype), lse

    def attend_to_chosen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Int64[Tensor, "B T R most"],
        scores: Float[Tensor, "B T R most"] | None,
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
        """Return (output, lse) of attention to the pairs of `chosen_only`, both in the dtype of the lse.

        blocks: the table.
        scores: score of each block in the table, added to the logits of the block's keys; None adds nothing.
        """
        if scores is None:
            return self.attend(q, k, v, self.chosen_only(blocks.shape[-1]), blocks)
        biases = self._scores_of_queries(scores.masked_fill(blocks < 0, 0.0), q)
        one, found = self.chosen_only(1), []
        for place in range(blocks.shape[-1]):
            out, lse = self.attend(q, k, v, one, blocks[..., place : place + 1])
            found.append((out, lse + biases[..., place].to(lse.dtype)))
        return merge(found)

    def _scores_of_queries(self, scores: Float[Tensor, "B T R most"], q: Tensor) -> Float[Tensor, "B H N most"]:
        """Return the scores of each query's query block, repeated for the heads that share a table."""
        side, first = self.selector.query_block, self.options["q_offset"]
        row = (torch.arange(q.shape[2], device=q.device) + first % side) // side
        return scores.repeat_interleave(q.shape[1] // scores.shape[1], 1)[:, :, row]


class SelectorState(NamedTuple):
    """State of a selector in decoding, after `tokens` keys.

    pools: the pools that the scorer needs: (mean,), (minimum, maximum), all three for a module, or (). After `cropped`
        they may still include removed keys.
    query_block: number of the last query block with a choice; query block 0 begins at position 0.
    blocks, scores: chosen blocks of this query block and their scores.
    coarse: state of the coarse selector; None without one.
    """

    tokens: int
    pools: tuple[Float[Tensor, "B G C D"], ...]
    query_block: int
    blocks: Int64[Tensor, "B T 1 most"]
    scores: Float[Tensor, "B T 1 most"]
    coarse: SelectorState | None

    @property
    def nbytes(self) -> int:
        own = sum(x.nbytes for x in (*self.pools, self.blocks, self.scores))
        return own + (0 if self.coarse is None else self.coarse.nbytes)

    def cropped(self, tokens: int) -> SelectorState:
        """Return the state for only the first `tokens` keys; pools and the last query block's choice are unchanged."""
        coarse = None if self.coarse is None else self.coarse.cropped(tokens)
        return self._replace(tokens=min(tokens, self.tokens), coarse=coarse)

    def select(self, entries: Int64[Tensor, " C"]) -> SelectorState:
        """Return the state with only these batch entries (indices), in this order."""
        at = entries.to(self.blocks.device)
        pools = tuple(pool.index_select(0, at) for pool in self.pools)
        coarse = None if self.coarse is None else self.coarse.select(entries)
        blocks, scores = (x.index_select(0, at) for x in (self.blocks, self.scores))
        return self._replace(pools=pools, blocks=blocks, scores=scores, coarse=coarse)


def refusing_query_block(selector: BlockSelector, known: SelectorState | None, position: int) -> int | None:
    """Return None if decoding can continue at the position: it begins a query block, or the block's choice is known.

    Otherwise return the query_block of the selector, this one or a coarse one, for which that is not true.

    known: state of the selector; None before the first token.
    """
    begun = position % selector.query_block
    if begun and (known is None or known.query_block != position // selector.query_block):
        return selector.query_block
    inner = None if known is None else known.coarse
    return None if selector.coarse is None else refusing_query_block(selector.coarse, inner, position)


def advance(
    selector: BlockSelector,
    known: SelectorState | None,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    scale: float,
) -> tuple[Int64[Tensor, "B T R most"], Float[Tensor, "B T R most"], SelectorState]:
    """Return (chosen blocks, their scores, new state) for the next queries in decoding.

    q: at least one query; `refusing_query_block` must be None at the position of the first.
    known: state before these queries; None before the first token.
    k: keys of all tokens so far, including the tokens of q.
    """
    first = k.shape[2] - q.shape[2]
    coarse = inner = None
    if selector.coarse is not None:
        coarse, _, inner = advance(selector.coarse, None if known is None else known.coarse, q, k, scale)
    pools = _pools(selector, known, k)
    side = selector.query_block
    begun = min(-first % side, q.shape[2])  # queries of a query block that earlier tokens began, with a known choice
    assert not begun or known is not None
    found = [] if not begun or known is None else [(known.blocks, known.scores)]
    if begun < q.shape[2]:
        if selector.coarse is not None and coarse is not None:
            coarse_block = selector.coarse.query_block
            coarse = coarse[:, :, (first + begun) // coarse_block - first // coarse_block :]
        found.append(_choice(selector, q[:, :, begun:], k, coarse, pools, first + begun, scale))
    blocks, scores = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    row = (k.shape[2] - 1) // side
    return blocks, scores, SelectorState(k.shape[2], pools, row, blocks[:, :, -1:], scores[:, :, -1:], inner)


def _choice(
    selector: BlockSelector,
    q: Tensor,
    k: Tensor,
    coarse: Tensor | None,
    pools: tuple[Tensor, ...],
    q_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    call, given = selector.call(selector.within, q_offset, scale), None
    if isinstance(selector.scorer, nn.Module):
        given = selector.by_module(selector.scorer, q, k, [], call, Pools(*pools))
    blocks, _, scores, *_ = choose_blocks(q, k, given, coarse, [], call, pools)
    return blocks, scores


def _pools(
    selector: BlockSelector, known: SelectorState | None, k: Float[Tensor, "B G M D"]
) -> tuple[Float[Tensor, "B G C D"], ...]:
    """Return the pooled keys of all blocks of k: from `known` for blocks that were complete in it, else computed."""
    done = 0 if known is None else known.tokens // selector.block
    new = k[:, :, done * selector.block :]
    if isinstance(selector.scorer, nn.Module):
        made = tuple(pools_of(new, selector.block))
    else:
        made = pools_for(selector.scorer, new, selector.block)
    if known is None or not done:
        return made
    return tuple(torch.cat([old[:, :, :done], more], 2) for old, more in zip(known.pools, made, strict=True))


_POSITIONS_TESTED = 2048  # positions that `_always_covers_own_blocks` checks


class SelectedCache(KVCache):
    """KVCache that chooses blocks of its keys and attends to them; made and described by `SelectedAttention.cache`.

    Its `pattern` is the selector's always & within, or `within` if there is no `always`. Attention to chosen blocks is
    computed separately and merged by lse.
    """

    def __init__(
        self, selector: BlockSelector, not_always: Pattern | None, *, biased: bool, num_heads: int, **options: Any
    ) -> None:
        require_int("num_heads", num_heads, minimum=1)
        _check_decodable(selector, num_heads)
        always = selector.always
        super().__init__(
            selector.within if always is None else always & selector.within, num_heads=num_heads, **options
        )
        self._sources = [RowSource(causal(), 0, 1)]
        self.selector, self._not_always, self._biased = selector, not_always, biased

    def _check_crop(self, cohort: Cohort, num_tokens: int) -> None:
        """Raise ValueError as `KVCache` does, and for a position at which `refusing_query_block` is not None."""
        self._require_continuable(cohort, num_tokens, "crop to where a query block begins, or within the last one")
        super()._check_crop(cohort, num_tokens)

    def _constructor_arguments(self) -> dict[str, Any]:
        return super()._constructor_arguments() | {"selector": self.selector, "gradient": self._biased}

    def _require_continuable(self, cohort: Cohort, position: int, instead: str) -> None:
        refusing = refusing_query_block(self.selector, _selector_state(cohort), position)
        if refusing is not None:
            raise ValueError(
                "queries of a query block use the selection of its first query, which a cache keeps for the last block "
                f"only: {instead}; got position {position}, query_block={refusing}"
            )

    def _attend_held(self, q: Tensor, cohort: Cohort, score_mod: ScoreMod | None) -> tuple[Tensor, Tensor]:
        if score_mod is not None:
            raise ValueError("a cache of selected blocks takes no score_mod: write fd.KVCache for a pattern")
        self._require_continuable(cohort, cohort.seen, "append whole query blocks")
        tokens = slice(0, cohort.held.num_used)
        k, v = cohort.held.keys[:, :, tokens], cohort.held.values[:, :, tokens]
        scale = resolve_scale(self._reader.scale, q.shape[-1])
        with torch.no_grad():
            blocks, scores, cohort.state = advance(self.selector, _selector_state(cohort), q, k, scale)
            options = {"scale": scale, "q_offset": cohort.seen, "engine": self.engine}
            reading = TableAttention.of(self.selector, self._not_always, self.selector.within, None, **options)
            out, lse = reading.attend_to_chosen(q, k, v, blocks, scores if self._biased else None)
            if self.selector.always is not None:
                kept, kept_lse = super()._attend_held(q, cohort, None)
                out, lse = merge([(out, lse), (kept.to(lse.dtype), kept_lse)])
        return out, lse


def _selector_state(cohort: Cohort) -> SelectorState | None:
    """Return the selector's state that the cohort keeps; None before the first call of `attend`."""
    assert cohort.state is None or isinstance(cohort.state, SelectorState)
    return cohort.state


def _check_decodable(selector: BlockSelector, num_heads: int) -> None:
    """Raise ValueError for a selector that cannot choose in decoding, or whose coarse selector cannot.

    It cannot if it sees later tokens, needs run-time tensors, or has a module that would score incomplete blocks.
    """
    if selector.future_in_choice:
        raise ValueError(
            "a cache cannot use future_in_choice=True, as it selects before later tokens exist: give the selector "
            f"query_summary='first'; got query_block={selector.query_block}"
        )
    if not is_causal(selector.within):
        raise ValueError(
            "`within` must be causal for a cache, so that no query sees a later key: write within & masks.causal(); "
            f"got within={selector.within!r}"
        )
    if selector._tensor_names:
        raise ValueError(
            "a cache needs a selector without run-time tensors, as these cover the tokens of one call only; got one "
            f"with {', '.join(map(repr, sorted(selector._tensor_names)))}"
        )
    if isinstance(selector.scorer, torch.nn.Module) and not _always_covers_own_blocks(selector, num_heads):
        raise ValueError(
            "a cache with a scorer module needs `always` to cover the query's own block, which is incomplete and has "
            f"no score: write always=masks.chunked({selector.block}); got always={selector.always!r}"
        )
    if selector.coarse is not None:
        _check_decodable(selector.coarse, num_heads)


def _always_covers_own_blocks(selector: BlockSelector, num_heads: int) -> bool:
    """True if `always` allows every pair of `within` whose key is in the query's own block, not after the query.

    Only positions below 2,048 are tested.
    """
    at = torch.arange(_POSITIONS_TESTED)
    q, k = at[:, None], at[None, :]
    own = (q // selector.block == k // selector.block) & (k <= q)
    q, k = q.expand_as(own)[own], k.expand_as(own)[own]
    rules = (SelectionRule(selector.within, selector.always, head, num_heads) for head in range(num_heads))
    return not any(bool(rule.without_always(q, k, rule.sees(q, k)).any()) for rule in rules)
