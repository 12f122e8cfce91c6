"""BlockSelector: a module that chooses from q and k the key blocks that each query block attends to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from .._validate import check_tensors, resolve_scale, run_time_tensors
from ..engines import sum_dtype
from ..masks import Pattern, causal
from ..masks.attended import RowSource, later_pair
from ..masks.core import Extent, advises, every, require_bool, require_choice, require_int
from ..masks.patterns import RunTime, blank, names, run_time_leaves
from ._boxes import SelectionCall
from ._choose import Threshold, TopK, TopP
from ._scores import LOG_SCORERS, Pools, pools_of, summaries
from ._select_op import select_blocks, selection_visibility

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim, T tables, R query blocks, C key blocks

_SCORERS = ("mean", "minmax", "antidiagonal", "mass")
_SHARES = ("all", "group", "head")  # from one table to many
_DEFAULT_STRIDE = 8
_POSITIONS_SEARCHED = 2048  # positions that `later_pair` searches
_MOST_HEADS = 256  # largest number of heads that is tried for a pattern that fits only certain numbers


class Selection(NamedTuple):
    """Result of a `BlockSelector`: tables of chosen key blocks for each query block.

    blocks: int64 (B, T, R, most), the chosen blocks of each query block in descending order of score, padded with -1.
        Table t serves the query heads h with h * T // H == t. Query block r has the call's queries at positions p
        with p // query_block == q_offset // query_block + r; block j has the keys at positions p with p // block == j.
    scores: (B, T, R, most), float32, or float64 for float64 inputs; scores of the chosen blocks, padded with -inf.
        Differentiable if q, k or a module's parameters require a gradient; the choice itself is not.
    density: shape (), the attended pairs, by choice or by `always`, divided by the pairs that `within` allows, over all
        heads and batch entries.
    cut: shape (), the share of query blocks, over all tables, whose choice was cut to `most` blocks.

    >>> q, k = torch.randn(2, 1, 4, 256, 64)
    >>> fd.BlockSelector(block=32, choose=fd.TopK(2))(q, k).blocks.shape
    torch.Size([1, 4, 256, 2])
    """

    blocks: Int64[Tensor, "B T R most"]
    scores: Float[Tensor, "B T R most"]
    density: Float[Tensor, ""]
    cut: Float[Tensor, ""]


@advises()
class BlockSelector(nn.Module):
    """Scores key blocks for each query block, and chooses some: (q, k) -> Selection.

    The attention that uses the choice is over (chosen | always) & within. A block is a candidate for a query block if
    the query block (with query_summary="first" its first query) has a pair there that `within` allows and `always` does
    not, unless a module or `coarse` excludes the block; `choose` chooses among candidates only.

    block, query_block: tokens of a key block, and of a query block, from position 0.
    scorer: name of a score, or a module. "mean": q · mean(K) of the block (MoBA, arXiv 2502.13189). "minmax": sum_d
        max(q_d min_d, q_d max_d), an upper bound of the scores of the block's keys (Quest, arXiv 2406.10774). At q_d =
        0 its gradient is the mean of min_d and max_d. "antidiagonal": log of the block's share of the query block's
        attention, estimated by sums over antidiagonals of tiles (XAttention, arXiv 2503.16428). "mass": log of the
        exact share, which costs the scores of dense attention. A module: it gets one query per query block (B, H, R, D)
        and a NamedTuple of pools (mean, least, greatest), each (B, G, C, D), and returns scores (B, H or G, R, C). With
        `takes_positions = True` it also gets the position at which each query block begins, int64 (R,). With a module,
        blocks of which a query block sees only some keys are not candidates: to attend to them, include them in
        `always`.
    choose: `TopK`, `TopP` or `Threshold`.
    within: a set pattern, the mask of the attention; scores of a query block ignore keys that `within` hides from it.
    always: a set pattern of pairs that are attended to without being chosen, such as masks.chunked(block) |
        masks.first_tokens(block).
    share: "head", one table per query head (T = H); "group", one per key/value head (T = G); "all", one table for all
        heads (T = 1). A table for several query heads chooses by the sum of their scores (NSA, arXiv 2502.11089); with
        TopP, Threshold or scores that are logarithms, by the mean of their shares. Scores (B, G, R, C) of a module
        count once per key/value head.
    coarse: a selector whose block and query_block are multiples of this one's, with at most as many tables. Only the
        blocks within its choice are scored and chosen from. It gets this selector's q and k.
    query_summary: the query that represents a query block of several queries. "mean": the mean of its queries that see
        a key, or with "mass" and "antidiagonal" the mean of their shares; the query block sees every key that one of
        them sees. "first": its first query; the query block sees the keys of this query. With a causal `within`, "mean"
        leaks later queries into the choice of earlier ones, and needs future_in_choice=True.
    future_in_choice: allow "mean" with a causal `within`. For prefill: under autograd q and k must not require a
        gradient, a choice depends on later tokens of its query block, and decoding would choose other blocks.
    stride: size of the tiles of "antidiagonal" in tokens, a divisor of block and query_block; 8 by default.

    Keys that tie for a minimum or maximum of a pool share its gradient equally.

    Raises ValueError or TypeError for other values.

    >>> q, k = torch.randn(2, 1, 4, 256, 64)
    >>> selector = fd.BlockSelector(block=32, choose=fd.TopK(2), always=masks.chunked(32))
    >>> blocks, scores, density, cut = selector(q, k)
    >>> bool((blocks[0, 0, 100] < 3).all())  # query 100 reads its own block, 3, and two blocks before
    True
    """

    def __init__(
        self,
        *,
        block: int,
        query_block: int = 1,
        scorer: str | nn.Module = "mean",
        choose: TopK | TopP | Threshold,
        within: Pattern = causal(),  # noqa: B008 (a frozen value)
        always: Pattern | None = None,
        share: str = "head",
        coarse: BlockSelector | None = None,
        query_summary: str = "mean",
        future_in_choice: bool = False,
        stride: int | None = None,
    ) -> None:
        super().__init__()
        self.block = require_int("block", block, minimum=1)
        self.query_block = require_int("query_block", query_block, minimum=1)
        if not isinstance(choose, TopK | TopP | Threshold):
            raise TypeError(f"choose must be fd.TopK(k), fd.TopP(p, most=) or fd.Threshold(t, most=); got {choose!r}")
        self.choose, self.share = choose, require_choice("share", share, _SHARES)
        self.within, self.always = _require_set_pattern("within", within), None
        if always is not None:
            self.always = _require_set_pattern("always", always)
        self.scorer = scorer if isinstance(scorer, nn.Module) else _require_scorer_name(scorer)
        self.coarse = coarse
        if coarse is not None:
            self._check_coarse(coarse)
        if choose.kind == "top_p_of_row" and (self.scorer not in LOG_SCORERS or coarse is not None):
            raise ValueError(
                "TopP(of='row') needs scorer='mass' or 'antidiagonal', whose scores give shares of a row's attention, "
                f"and no coarse; got scorer={self.scorer!r:.80} and "
                f"{'no coarse' if coarse is None else 'a coarse selector'}"
            )
        self.query_summary = require_choice("query_summary", query_summary, ("mean", "first"))
        self.future_in_choice = require_bool("future_in_choice", future_in_choice)
        self._sees_ahead = self._scores_all_queries and is_causal(self.within)
        self._check_future_in_choice()
        self.stride = self._checked_stride(stride)
        self._own_tensor_names = set(names(self.with_always(self.within)))
        self._tensor_names = self._own_tensor_names if coarse is None else self._own_tensor_names | coarse._tensor_names

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G M D"],
        *,
        scale: float | None = None,
        q_offset: int = 0,
        bindings: Mapping[str, Tensor] | None = None,
        within: Pattern | None = None,
    ) -> Selection:
        """Return a `Selection` of key blocks for each query block.

        Query i has position q_offset + i, key j position j; query head h reads key/value head h // (H / G).

        scale: factor on the scores, as in `attend`, 1 / sqrt(D) by default; a module's scores are not scaled.
        bindings: the run-time tensors that `within`, `always` and the patterns of a coarse selector name but do not
            carry.
        within: a set pattern for this call, intersected with the selector's `within`, such as the padding of a batch.

        A query block that begins before q_offset is scored by its queries in this call only: pass whole query blocks if
        chunks of a sequence must choose as the whole sequence does.

        Raises ValueError or TypeError for inputs, or scores of a module, that do not fit together, and ValueError for a
        call that `future_in_choice` rules out.
        """
        check_tensors(q, k, k, enable_gqa=True)
        require_int("q_offset", q_offset, minimum=0)
        factor = resolve_scale(scale, q.shape[-1])
        rule = self.rule(within)
        ahead = self._sees_ahead or (within is not None and self._scores_all_queries and is_causal(rule))
        if ahead and not self.future_in_choice:
            raise ValueError(_later_tokens_text(self.query_block, rule))
        if ahead and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            raise ValueError(
                "future_in_choice=True must not be used in training, as a causal model would learn from later tokens: "
                "call it under torch.no_grad(), or train with query_summary='first'; got q or k that require a gradient"
            )
        coarse, own, call = self.prepared(q, k, scale=factor, q_offset=q_offset, bindings=bindings, within=within)
        if 0 in q.shape or 0 in k.shape:
            return self._empty_selection(call, q, k)
        return self.selected(q, k, coarse, own, call)

    def rule(self, within: Pattern | None) -> Pattern:
        """Return the intersection of the selector's `within` and this `within`; None adds no restriction."""
        return self.within if within is None else self.within & _require_set_pattern("within", within)

    def with_always(self, rule: Pattern) -> Pattern:
        """Return the union of `rule` and the selector's `always`; without `always`, `rule` itself."""
        return rule if self.always is None else rule | self.always

    def prepared(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        q_offset: int,
        bindings: Mapping[str, Tensor] | None,
        within: Pattern | None,
    ) -> tuple[Int64[Tensor, "B T R most"] | None, list[Tensor], SelectionCall]:
        """Return (blocks chosen by the coarse selector, run-time tensors, other arguments) of a call.

        The blocks are None without a coarse selector. The run-time tensors are the result of `run_time_tensors` for
        this selector's patterns, not its coarse selector's.

        bindings, within: as in `forward`.
        """
        coarse = None
        if self.coarse is not None:
            of_within = set() if within is None else set(names(within))
            inner = None if bindings is None else _bindings_named(bindings, self.coarse._tensor_names | of_within)
            options = {"scale": scale, "q_offset": q_offset, "bindings": inner, "within": within}
            coarse = self.coarse(q, k, **options).blocks
            # Drop tensors that only the coarse selector names; a name unknown to both is kept and raises below.
            own = self._own_tensor_names | of_within
            bindings = (
                None if bindings is None else _bindings_named(bindings, (set(bindings) - self._tensor_names) | own)
            )
        rule = self.rule(within)
        tensors = run_time_tensors(self.with_always(rule), bindings, batch=q.shape[0], has_values=not q.is_meta)
        return coarse, tensors, self.call(rule, q_offset, scale)

    def selected(
        self, q: Tensor, k: Tensor, coarse: Tensor | None, bindings: list[Tensor], call: SelectionCall
    ) -> Selection:
        """Return the `Selection` of a call; coarse, bindings and call are the result of `prepared`."""
        given = None
        if isinstance(self.scorer, nn.Module):
            given = self.by_module(self.scorer, q, k, bindings, call)
            q, k = q.detach(), k.detach()
        blocks, _, scores, density, cut = select_blocks(q, k, given, coarse, bindings, *call.arguments)
        return Selection(blocks, scores, density.detach(), cut.detach())

    def by_module(
        self,
        scorer: nn.Module,
        q: Tensor,
        k: Tensor,
        bindings: list[Tensor],
        call: SelectionCall,
        pools: Pools | None = None,
    ) -> Float[Tensor, "B X R C"]:
        """Return scores of all blocks from the module `scorer`, for each query head (X = H) or key/value head (X = G).

        bindings, call: as `prepared` returns them.
        pools: pools of the blocks of k; None computes them, with keys that no query block sees pooled as zeros.

        Raises ValueError for scores of another shape, TypeError for scores that are not floating-point.
        """
        sees, seen = selection_visibility(q.detach(), k.detach(), bindings, *call.arguments)
        rows = call.query_blocks(q, k)
        queries = summaries(q, rows, range(rows.num_query_blocks), sees)
        if pools is None:
            pools = pools_of(k.masked_fill(~seen.unsqueeze(-1), 0.0), self.block)
        if getattr(scorer, "takes_positions", False):
            first = rows.q_offset - rows.lead
            begins = torch.arange(
                first, first + rows.num_query_blocks * self.query_block, self.query_block, device=q.device
            )
            scores = scorer(queries, pools, begins)
        else:
            scores = scorer(queries, pools)
        wanted = [
            (*queries.shape[:1], heads, rows.num_query_blocks, rows.num_key_blocks)
            for heads in (q.shape[1], k.shape[1])
        ]
        if not isinstance(scores, Tensor) or tuple(scores.shape) not in wanted:
            came = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(
                "a scorer module must return a tensor (batch, query heads or key/value heads, query blocks, key "
                f"blocks), here {wanted[0]} or {wanted[1]}; got {came}"
            )
        if not scores.is_floating_point():
            raise TypeError(f"a scorer module must return floating-point scores; got {scores.dtype}")
        return scores.to(torch.promote_types(scores.dtype, sum_dtype(q)))

    def call(self, rule: Pattern, q_offset: int, scale: float) -> SelectionCall:
        """Return the arguments of a call except tensors; rule: the pairs that it allows, from the method `rule`."""
        coarse = self.coarse
        return SelectionCall(
            rule.text,
            "" if self.always is None else self.always.text,
            self.block,
            self.query_block,
            self._scores_all_queries,
            self.scorer if isinstance(self.scorer, str) else "module",
            self.stride,
            self.choose.kind,
            float(self.choose.amount),
            self.choose.most,
            self.share,
            0 if coarse is None else coarse.block,
            0 if coarse is None else coarse.query_block,
            scale,
            q_offset,
        )

    def _empty_selection(self, call: SelectionCall, q: Tensor, k: Tensor) -> Selection:
        rows = call.query_blocks(q, k)
        shape = (q.shape[0], call.tables(q, k), rows.num_query_blocks if q.shape[2] else 0, call.most)
        scores = q.new_full(shape, -torch.inf, dtype=sum_dtype(q))
        zero = scores.new_zeros(())
        return Selection(scores.new_full(shape, -1, dtype=torch.int64), scores, zero, zero.clone())

    @property
    def largest_query_block(self) -> int:
        """Largest query_block of this selector and its coarse selectors."""
        return self.query_block if self.coarse is None else self.coarse.largest_query_block

    @property
    def _scores_all_queries(self) -> bool:
        return self.query_block > 1 and self.query_summary == "mean"

    def _check_future_in_choice(self) -> None:
        if self.future_in_choice and not self._scores_all_queries:
            raise ValueError(
                "future_in_choice=True has an effect only with query_block above 1 and query_summary='mean': leave it "
                f"out; got query_block={self.query_block} and query_summary={self.query_summary!r}"
            )
        if self._sees_ahead and not self.future_in_choice:
            raise ValueError(_later_tokens_text(self.query_block, self.within))

    def _check_coarse(self, coarse: object) -> None:
        if not isinstance(coarse, BlockSelector):
            raise TypeError(f"coarse must be a BlockSelector; got {type(coarse).__name__}")
        for name in ("block", "query_block"):
            ours, theirs = getattr(self, name), getattr(coarse, name)
            if theirs % ours:
                raise ValueError(
                    f"coarse must have a {name} that is a multiple of this selector's {name}={ours}; got "
                    f"{name}={theirs}"
                )
        if _SHARES.index(coarse.share) > _SHARES.index(self.share):
            raise ValueError(
                "coarse must share its choice among at least as many heads: give it share='all', or the same share; "
                f"got share={self.share!r} and coarse share={coarse.share!r}"
            )

    def _checked_stride(self, stride: int | None) -> int:
        if self.scorer != "antidiagonal":
            if stride is not None:
                raise ValueError(
                    f"stride is for scorer='antidiagonal' only: leave it out; got {stride=} with another scorer"
                )
            return 1
        if not self._scores_all_queries:
            raise ValueError(
                "scorer='antidiagonal' scores all queries of a query block, so it needs query_block above 1 and "
                f"query_summary='mean'; got query_block={self.query_block}, query_summary={self.query_summary!r}"
            )
        found = require_int("stride", _DEFAULT_STRIDE if stride is None else stride, minimum=1)
        if self.block % found or self.query_block % found:
            raise ValueError(
                f"stride must divide block and query_block; got stride={found}, block={self.block} and "
                f"query_block={self.query_block}"
            )
        return found

    def extra_repr(self) -> str:
        scorer = f"{self.scorer!r}, " if isinstance(self.scorer, str) else ""
        sides = f"block={self.block}, query_block={self.query_block}, {scorer}{self.choose!r}"
        look = f"query_summary={self.query_summary!r}, future_in_choice={self.future_in_choice}"
        return f"{sides}, within={self.within!r}, always={self.always!r}, share={self.share!r}, {look}"


def is_causal(pattern: Pattern) -> bool:
    """True if no query is found that sees a later key.

    Only the first 2,048 positions are searched, for the least number of heads, up to 256, that the pattern fits. Also
    True if the pattern fits none of these numbers. Run-time tensors are taken to allow as many pairs as they can.
    """
    # A table of selected blocks may have any block; other run-time tensors have one number, or one per position.
    most = pattern.map_leaves(lambda leaf: every() if isinstance(leaf, RunTime) and leaf.num_dims > 1 else leaf)
    shapes = {leaf.name: torch.zeros((_POSITIONS_SEARCHED,) * leaf.num_dims) for leaf in run_time_leaves(most)}
    most = blank(most, shapes, Extent(_POSITIONS_SEARCHED, _POSITIONS_SEARCHED))
    heads = next((number for number in range(1, _MOST_HEADS + 1) if _fits_heads(most, number)), None)
    if heads is None:
        return True
    return not any(later_pair(RowSource(most.for_head(head, heads), head, heads)) for head in range(heads))


def _later_tokens_text(query_block: int, rule: Pattern) -> str:
    return (
        "with a causal pattern and query_block above 1, the mean of a query block depends on later tokens: write "
        "query_summary='first', or for prefill without gradients future_in_choice=True; got "
        f"query_block={query_block} and query_summary='mean' within {rule!r}"
    )


def _bindings_named(bindings: Mapping[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in bindings.items() if name in wanted}


def _fits_heads(pattern: Pattern, heads: int) -> bool:
    try:
        pattern.check_heads(heads)
    except ValueError:
        return False
    return True


def _require_set_pattern(name: str, value: object) -> Pattern:
    if not isinstance(value, Pattern):
        raise TypeError(
            f"{name} must be a pattern such as masks.causal(), and not a mixture such as longnet or p + q; got "
            f"{value!r:.200}"
        )
    return value.unpadded


def _require_scorer_name(value: object) -> str:
    if type(value) is not str or value not in _SCORERS:
        listed = ", ".join(map(repr, _SCORERS))
        raise ValueError(f"scorer must be one of {listed}, or an nn.Module; got scorer={value!r:.80}")
    return value
