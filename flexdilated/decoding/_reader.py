"""Reader: attention from new tokens over cached keys: computed directly for few queries, by an engine for many."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .._engine_choice import check_engine, choose_engine
from .._validate import resolve_scale
from ..engines import (
    MOST_ROWS,
    Call,
    Features,
    HeadGroup,
    RuleHeads,
    ScoreMod,
    at_offsets,
    branch_rules,
    fixed_score_mod,
    group_heads,
    merge,
    row_program,
    run,
    sum_dtype,
    through,
)
from ..masks import Bound, Mixture, Pattern
from ..masks.attended import FOREVER, Ends, RowSource, ends_after, regular_ends, seen_ahead
from ..masks.core import common_period, require_expression, require_int
from ..masks.patterns import names
from ._held_keys import HeldKeys

# B batch, H query heads, G key/value heads, N new tokens, S slots, D head dim of queries and keys, E of values


class Reader:
    """Attention from consecutive queries over the keys of a `HeldKeys` buffer, by a pattern that `KVCache` accepts.

    num_heads, scale, engine, head_offset, num_heads_global: as in `KVCache`; scale is a number or None.

    Attribute `sources` is a list of the distinct rules of each branch's heads, for `HeldKeys`. Attribute `ends` has the
    positions at which chunks end.

    Raises ValueError or TypeError for a pattern that has run-time tensors or padding='zeros', or whose look-ahead is
    not limited to chunks, and for invalid other arguments.
    """

    def __init__(
        self,
        pattern: Pattern | Mixture,
        *,
        num_heads: int,
        scale: float | None = None,
        engine: str | None = None,
        head_offset: int = 0,
        num_heads_global: int | None = None,
    ) -> None:
        _check_pattern(pattern)
        check_engine(engine)
        require_int("num_heads", num_heads, minimum=1)
        require_int("head_offset", head_offset, minimum=0)
        total = head_offset + num_heads if num_heads_global is None else num_heads_global
        # Checks the head counts; `bind` would also check a number of tokens, which is unknown yet.
        Bound(pattern, 1, 1, num_heads, head_offset, total, 0, 0, 1)
        self.num_heads, self.engine = num_heads, engine
        self.head_offset, self.num_heads_global = head_offset, total
        self.scale = None if scale is None else resolve_scale(scale, head_dim=1)

        def rules(pattern: Pattern | Mixture) -> tuple[tuple[RuleHeads, ...], ...]:
            return branch_rules(pattern, num_heads=num_heads, head_offset=head_offset, num_heads_global=total)

        self.ends = _ends_of(pattern, _sources(rules(pattern)))
        # The search covers a limited number of positions. The intersection excludes look-ahead beyond them.
        proven = all(map(self.ends.by_form, pattern.branches()))
        self.pattern: Pattern | Mixture = pattern if proven else pattern & self.ends.rule()
        self._branches = rules(self.pattern)
        self.sources = _sources(self._branches)
        self._period = common_period(self.pattern.branches())
        self._leaves_with_limits = [
            leaf for leaf in pattern.leaves() if type(leaf).check_tokens is not Pattern.check_tokens
        ]
        self._groups: dict[tuple[int, torch.device], tuple[tuple[HeadGroup, ...], ...]] = {}

    def check_tokens(self, queries: range) -> None:
        """Raise ValueError if the pattern rejects queries at these positions, both with and without later keys."""
        for leaf in self._leaves_with_limits:
            # A rule may need keys that are appended later: it is an error only if no number of keys is accepted.
            if not _accepts(leaf, queries, range(FOREVER)):
                leaf.check_tokens(queries, range(queries.stop))

    def _pair_across(self, first: int, end: int) -> tuple[int, int] | None:
        """Return an allowed pair (query, key) with first <= query < end <= key; None if there is none."""
        limit = self.ends.next(end)
        return None if limit == end else seen_ahead(self.sources, range(first, end), range(end, limit))

    def check_end(self, first: int, number: int) -> None:
        """Raise ValueError if one of the `number` queries from position `first` on sees a key after the last query."""
        pair = self._pair_across(first, end := first + number)
        if pair is not None:
            found = ends_after(self.sources, self.ends, first, end)
            fitting = " or ".join(str(next(found) - first) for _ in range(2))
            raise ValueError(
                f"the new tokens must end where none of them sees a later key, such as with a chunk of "
                f"{self.ends.chunk} tokens; here query {pair[0]} sees key {pair[1]}: bring {fitting} tokens, or write "
                f"pattern & masks.causal() to hide later keys; got {number} tokens from position {first} on"
            )

    def check_crop(self, num_tokens: int) -> None:
        """Raise ValueError if one of the first `num_tokens` tokens sees a key at position `num_tokens` or later."""
        pair = self._pair_across(max(0, self.ends.next(num_tokens) - self.ends.chunk), num_tokens)
        if pair is not None:
            raise ValueError(
                f"a crop must end where no query sees a later key, such as with a chunk of {self.ends.chunk} tokens; "
                f"here query {pair[0]} sees key {pair[1]}; got {num_tokens} tokens to keep"
            )

    def attend(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G S D"],
        v: Float[Tensor, "B G S E"],
        *,
        first: int,
        held: HeldKeys,
        score_mod: ScoreMod | None = None,
    ) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
        """Return (output, natural log-sum-exp of the scores) of the queries q; the output is in q's dtype or wider.

        first: position of the first query; the queries are at consecutive positions.
        k, v: the buffers of `held`, which maps a position to the slot with its key and value.
        score_mod: as in `KVCache.attend`.

        No query may see a key after the last query: see `check_end`.
        """
        scale = resolve_scale(self.scale, q.shape[-1])
        features = Features(scale, fixed_score_mod(score_mod, sum_dtype(q), q.device))
        compute = self._attend_directly if q.shape[2] <= MOST_ROWS else self._attend_by_engine
        return compute(q, k, v, first, held, features)

    def _attend_directly(
        self, q: Tensor, k: Tensor, v: Tensor, first: int, held: HeldKeys, features: Features
    ) -> tuple[Tensor, Tensor]:
        """Return (output, lse), computed without an engine for MOST_ROWS queries at a time."""
        found, score_mod, end = [], features.score_mod, first + q.shape[2]
        for few in q.split(MOST_ROWS, dim=2):
            queries = range(first, first + few.shape[2])
            keys = range(min(end, self.ends.next(queries.stop)))
            program = row_program(self._head_groups(k), queries, keys, held)
            rule = None if score_mod is None else self._score_mod_of_call(score_mod, first, q.device)
            found.append(program.forward(few, k, v, features.scale, rule))
            first = queries.stop
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)

    def _score_mod_of_call(self, score_mod: ScoreMod, first: int, device: torch.device) -> ScoreMod:
        """Return a function (score, b, h, q_idx, k_idx) that calls score_mod with global heads and positions.

        Its h and q_idx are the indices of a head and of a query in one call; its k_idx is already a position.

        first: position of the query with index 0.
        """
        heads = torch.arange(self.head_offset, self.head_offset + self.num_heads, device=device)
        return through(score_mod, at_offsets, heads, *(torch.full((), offset, device=device) for offset in (first, 0)))

    def _head_groups(self, k: Tensor) -> tuple[tuple[HeadGroup, ...], ...]:
        where = k.shape[1], k.device
        if where not in self._groups:
            self._groups[where] = group_heads(
                self._branches, num_heads=self.num_heads, num_kv_heads=k.shape[1], device=k.device
            )
        return self._groups[where]

    def _attend_by_engine(
        self, q: Tensor, k: Tensor, v: Tensor, first: int, held: HeldKeys, features: Features
    ) -> tuple[Tensor, Tensor]:
        """Return (output, lse): an engine computes each range of visible keys, then results are merged by their lse.

        If the pattern refuses one of these ranges, the queries are computed without an engine.
        """
        queries = range(first, first + q.shape[2])
        visible = held.visible(queries.start, len(queries), self.sources)
        if not all(_accepts(self.pattern, queries, keys) for keys in visible):
            # Some patterns refuse runs without all keys that they name.
            return self._attend_directly(q, k, v, first, held, features)
        if not visible:
            rows = q.shape[:3]
            return v.new_zeros(*rows, v.shape[3]), q.new_full(rows, -torch.inf, dtype=sum_dtype(q))
        out, lse = self._attend_to_range(q, k, v, first, visible[0], held, features)
        for keys in visible[1:]:
            out, lse = merge([(out.to(lse.dtype), lse), self._attend_to_range(q, k, v, first, keys, held, features)])
        return out, lse

    def _attend_to_range(
        self, q: Tensor, k: Tensor, v: Tensor, first: int, keys: range, held: HeldKeys, features: Features
    ) -> tuple[Tensor, Tensor]:
        (slots,) = held.slices(keys)
        # Positions are shifted by a multiple of the pattern's period, so that equal calls share one plan.
        earliest = min(keys.start, first)
        shift = earliest - earliest % self._period if self._period else 0
        k, v = k[:, :, slots], v[:, :, slots]
        call = Call.at(
            q,
            k,
            self.pattern.text,
            q_offset=first - shift,
            k_offset=keys.start - shift,
            head_offset=self.head_offset,
            num_heads_global=self.num_heads_global,
        )
        if features.score_mod is not None:
            shifts = torch.full((), shift, device=q.device)
            features = features._replace(score_mod=through(features.score_mod, _with_shift, shifts))
        out, lse = run(choose_engine(self.engine, q, k, v, self.pattern, features), q, k, v, [], call, features)
        assert lse is not None
        return out, lse


def _with_shift(score_mod: ScoreMod, shift: Int64[Tensor, ""]) -> ScoreMod:
    """Return a function that adds `shift` to the positions with which it calls score_mod."""
    return lambda score, b, h, q, k: score_mod(score, b, h, q + shift, k + shift)


def _check_pattern(pattern: Pattern | Mixture) -> None:
    require_expression(pattern)
    if names(pattern):
        raise ValueError(
            "a cache needs a pattern without run-time tensors, as these cover the tokens of one call only: for batch "
            "entries of different lengths write cache.attend(q, k, v, lengths=lengths), and for other rules keep k and "
            "v of all tokens, and write fd.attend(q, k, v, pattern, q_offset=number of earlier tokens); "
            f"got one with {', '.join(map(repr, names(pattern)))}"
        )
    if pattern.pads:
        raise ValueError(
            "a cache needs a pattern without padding='zeros', whose zero keys depend on the number of all tokens; "
            f"write pattern & masks.causal(), which hides them; got {pattern!r}"
        )


def _sources(branches: tuple[tuple[RuleHeads, ...], ...]) -> list[RowSource]:
    return [rule.source for rules in branches for rule in rules]


def _ends_of(pattern: Pattern | Mixture, sources: list[RowSource]) -> Ends:
    ends = regular_ends(sources)
    if not isinstance(ends, Ends):
        query, key = ends
        raise ValueError(
            "a cache needs a causal pattern, or one in which queries see later keys of their own chunk of tokens only; "
            f"here query {query} sees key {key}, and no chunk ends this: write pattern & masks.causal() to hide later "
            "keys, or pattern & masks.blockwise(masks.causal(), 8) to see those of a query's own chunk of 8 tokens; "
            f"got {pattern!r}"
        )
    return ends


def _accepts(pattern: Pattern | Mixture, queries: range, keys: range) -> bool:
    """True if the pattern's `check_tokens` raises no ValueError for queries and keys at these positions."""
    try:
        pattern.check_tokens(queries, keys)
    except ValueError:
        return False
    return True
