"""Attention of a few queries, as in decoding, without a plan: computed directly over the keys that they see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from ..masks import Pattern, cache
from ..masks.attended import Keys, RowSource, SeenKeys, positions
from ..masks.core import Expression, device_kind, outside_torch_modes
from ..masks.text import read_text
from ._call import Call
from ._merge import WholeRows, shares_of, sum_dtype
from ._score_mod import ScoreMod, apply_score_mod
from .kernels._kernel import flash_forward

# B batch, H query heads, G key/value heads, N queries, S slots, D head dim of queries and keys, E of values
# in a part: g key/value heads, R rows per key/value head (query heads × queries), n keys

Index = slice | Int64[Tensor, " n"]


@dataclass(frozen=True)
class HeadGroup:
    """Query heads with one rule that are computed together, and the key/value heads they read.

    source: the rule.
    query_heads: indices of the query heads, sorted by key/value head.
    key_heads: the key/value heads, each read by `per_key_head` of the query heads.

    A pair counts exp(log_weight) times.
    """

    source: RowSource
    query_heads: Index
    key_heads: slice
    per_key_head: int
    log_weight: float


@dataclass(frozen=True)
class RowPart:
    """Attention of some queries of a head group over some keys.

    rows: slice of the call's queries.
    slots: token indices of the n keys in the key tensor.
    seen: all keys that the head group sees; `keys` is the slice of the n keys among them.
    pairs: True where a query sees a key; None if every query sees every key.
    blind: True for queries that see no key of the part; None if every query sees one.
    level: index of the output buffer; parts of one level have no query head in common, so they share a buffer.
    """

    group: HeadGroup
    rows: slice
    slots: Index
    seen: SeenKeys
    keys: slice
    pairs: Bool[Tensor, "rows n"] | None
    blind: Bool[Tensor, " rows"] | None
    level: int

    def of_rows(self, x: Shaped[Tensor, "B H N ..."], *, empty: float = 0.0) -> Shaped[Tensor, "B g R ..."]:
        """Return the part's rows of x (queries, or numbers for each query), grouped by key/value head.

        The R rows of a key/value head are the part's queries in its first query head, then in its second, and so on.
        Blind rows, which see no key of the part, are filled with `empty`, as their values could be NaN.
        """
        heads = x[:, self.group.query_heads, self.rows]
        if self.blind is not None:
            heads = heads.masked_fill(self.blind.to(x.device).view(-1, *[1] * (x.dim() - 3)), empty)
        return heads.unflatten(1, (-1, self.group.per_key_head)).flatten(2, 3)

    def to_heads(self, x: Shaped[Tensor, "B g R ..."]) -> Shaped[Tensor, "B h rows ..."]:
        """Return x by query head instead of by key/value head: the inverse of the grouping by `of_rows`."""
        return x.unflatten(2, (self.group.per_key_head, -1)).flatten(1, 2)

    def of_keys(self, x: Float[Tensor, "B G S D"]) -> Float[Tensor, "B g n D"]:
        heads = x[:, self.group.key_heads]
        return (
            heads[:, :, self.slots] if isinstance(self.slots, slice) else heads.index_select(2, self.slots.to(x.device))
        )

    def add_to_keys(self, total: Float[Tensor, "B G S D"], grad: Float[Tensor, "B g n D"]) -> None:
        heads = total[:, self.group.key_heads]
        if isinstance(self.slots, slice):
            heads[:, :, self.slots] += grad
        else:
            heads.index_add_(2, self.slots.to(grad.device), grad)

    def bias(self, like: Tensor) -> Float[Tensor, "R n"] | None:
        """Return an additive mask of the scores: 0 for allowed pairs, -inf for others; None if every pair is allowed.

        The mask is the same for all key/value heads, each of which has R rows.

        like: tensor on the mask's device; the mask has its dtype, but at least float32.
        """
        if self.pairs is None:
            return None
        shown = torch.zeros(self.pairs.shape, dtype=sum_dtype(like), device=like.device)
        return shown.masked_fill_(~self.pairs.to(like.device), -torch.inf).repeat(self.group.per_key_head, 1)

    def modified_scores(
        self, scores: Float[Tensor, "B g R n"], score_mod: ScoreMod, num_heads: int
    ) -> Float[Tensor, "B g R n"]:
        """Return the scores after score_mod, with -inf for pairs that are not allowed.

        score_mod: called with indices (not positions) of batch entry, query head and query, and with positions of keys.
        num_heads: number of query heads of the call.
        """
        device, seen = scores.device, self.seen
        by_head = self.to_heads(scores)
        heads = torch.arange(num_heads, device=device)[self.group.query_heads]
        b = torch.arange(len(scores), device=device).repeat_interleave(len(heads))
        queries = torch.arange(self.rows.start, self.rows.stop, self.rows.step, device=device)
        keys = (seen.keys if isinstance(seen.keys, Tensor) else positions(seen.keys))[self.keys].to(device)
        where = b[:, None], heads.repeat(len(scores))[:, None], queries[None], keys[None]
        hidden = None if self.pairs is None else ~self.pairs.to(device)[None, None]
        found = apply_score_mod(score_mod, by_head.flatten(0, 1)[:, None], *where, hidden)
        found = found if hidden is None else found.masked_fill(hidden, -torch.inf)
        return found.reshape(scores.shape)


@dataclass(frozen=True)
class RowProgram:
    """Attention of a call of few queries, as parts (some queries over some keys) whose results are merged by lse."""

    parts: tuple[RowPart, ...]

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G S D"],
        v: Float[Tensor, "B G S E"],
        scale: float,
        score_mod: ScoreMod | None = None,
    ) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
        """Return (out, natural lse) of the attention in float32 or wider; rows without keys have output 0 and lse -inf.

        score_mod: called with indices (not positions) of batch entry, query head and query, and with positions of keys.
        """
        levels = 1 + max((part.level for part in self.parts), default=0)
        outs = torch.zeros(levels, *q.shape[:3], v.shape[3], dtype=sum_dtype(q), device=q.device)
        lses = torch.full(outs.shape[:-1], -torch.inf, dtype=sum_dtype(q), device=q.device)
        for part in self.parts:
            out, lse = _attend_part(part, q, k, v, scale, score_mod)
            outs[part.level][:, part.group.query_heads, part.rows] = part.to_heads(out).to(outs.dtype)
            lses[part.level][:, part.group.query_heads, part.rows] = part.to_heads(lse)
        if levels == 1:
            return outs[0], lses[0]
        shares, lse = shares_of(lses, 0)
        return (shares.unsqueeze(-1) * outs).sum(0), lse

    def backward(
        self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G S D"], v: Float[Tensor, "B G S E"], whole: WholeRows,
        scale: float,
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G S D"], Float[Tensor, "B G S E"]]:  # fmt: skip
        """Return (dq, dk, dv), the gradients through the pairs of the parts, in float32 or wider.

        whole: out, lse and their gradients, of rows that may have more keys than the parts, or a sink.
        """
        delta, lse = whole.delta(), whole.lse
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row without keys has no weights
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for part in self.parts:
            queries, grad, share = (part.of_rows(x) for x in (q, whole.grad_out, delta))
            sums = part.of_rows(lse - part.group.log_weight, empty=torch.inf)
            keys, values = part.of_keys(k), part.of_keys(v)
            grads = matrix_backward(queries, grad, share, sums, keys, values, scale=scale, bias=part.bias(q))
            dq[:, part.group.query_heads, part.rows] += part.to_heads(grads[0])
            part.add_to_keys(dk, grads[1])
            part.add_to_keys(dv, grads[2])
        return dq, dk, dv


def _attend_part(
    part: RowPart, q: Tensor, k: Tensor, v: Tensor, scale: float, score_mod: ScoreMod | None
) -> tuple[Tensor, Tensor]:
    rows, keys, values, bias = part.of_rows(q), part.of_keys(k), part.of_keys(v), part.bias(q)
    if score_mod is not None:
        out, lse = _out_and_lse(part.modified_scores(_scores(rows, keys, scale, None), score_mod, q.shape[1]), values)
    elif device_kind(q.device).on_host and q.shape[3] == v.shape[3]:
        out, lse = flash_forward(rows, keys, values, scale=scale, mask=None if bias is None else bias[None, None])
        if bias is not None:  # the kernel gives 0 as the lse of a row without keys
            lse = lse.masked_fill(bias.amax(1) == -torch.inf, -torch.inf)
    else:
        out, lse = matrix_forward(rows, keys, values, scale=scale, bias=bias)
    if part.group.log_weight:
        lse = lse + part.group.log_weight
    return out, lse


def matrix_forward(
    q: Float[Tensor, "B g R D"],
    k: Float[Tensor, "B g n D"],
    v: Float[Tensor, "B g n E"],
    *,
    scale: float,
    bias: Float[Tensor, "R n"] | None = None,
) -> tuple[Float[Tensor, "B g R E"], Float[Tensor, "B g R"]]:
    """Return (out, natural lse) of attention in float32 or wider, by two matrix products: for a few rows on any device.

    A row whose scores are all -inf has output 0 and lse -inf. The R rows are in the order of `RowPart.of_rows`.

    bias: added to the scores; -inf for pairs that are not allowed.
    """
    return _out_and_lse(_scores(q, k, scale, bias), v)


def _out_and_lse(
    scores: Float[Tensor, "B g R n"], v: Float[Tensor, "B g n E"]
) -> tuple[Float[Tensor, "B g R E"], Float[Tensor, "B g R"]]:
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
    return weights @ v.to(weights.dtype), lse


def matrix_backward(
    q: Float[Tensor, "B g R D"],
    grad_out: Float[Tensor, "B g R E"],
    delta: Float[Tensor, "B g R"],
    lse: Float[Tensor, "B g R"],
    k: Float[Tensor, "B g n D"],
    v: Float[Tensor, "B g n E"],
    *,
    scale: float,
    bias: Float[Tensor, "R n"] | None = None,
) -> tuple[Float[Tensor, "B g R D"], Float[Tensor, "B g n D"], Float[Tensor, "B g n E"]]:
    """Return (dq, dk, dv) of `matrix_forward` in the dtype of the lse.

    lse, delta: of each row over all its keys, which may be more than these n; delta is grad_out · out - grad_lse. A row
        without keys must have lse +inf, so that all its weights are 0.
    bias: added to the scores.

    A score's gradient is weight * (grad_out · value - delta).
    """
    q, grad_out, k, v = (x.to(lse.dtype) for x in (q, grad_out, k, v))
    weights = (_scores(q, k, scale, bias) - lse.unsqueeze(-1)).exp_()
    of_scores = (grad_out @ v.mT - delta.unsqueeze(-1)).mul_(weights).mul_(scale)
    return of_scores @ k, of_scores.mT @ q, weights.mT @ grad_out


def _scores(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Float[Tensor, "B g R n"]:
    scores = (q.to(sum_dtype(q)) @ k.to(sum_dtype(k)).mT) * scale  # rounded as in the kernel that computed the lse
    return scores if bias is None else scores + bias


@dataclass(frozen=True)
class RuleHeads:
    """One rule and the query heads of this device that have it.

    heads: indices among the query heads of this device.

    A pair counts exp(log_weight) times.
    """

    source: RowSource
    heads: tuple[int, ...]
    log_weight: float


def branch_rules(
    pattern: Expression, *, num_heads: int, head_offset: int, num_heads_global: int
) -> tuple[tuple[RuleHeads, ...], ...]:
    """Return, for each distinct branch of a pattern, its rules, each with the heads of this device that have it.

    In a branch, each head of this device has one rule.

    num_heads: number of query heads of this device.
    head_offset: index of the first of these heads among the num_heads_global heads of all devices.

    A branch that occurs m times has log_weight log(m).
    """
    branches = []
    for branch, times in Counter(pattern.branches()).items():
        members: dict[Pattern, list[int]] = {}
        for head in range(num_heads):
            members.setdefault(branch.for_head(head + head_offset, num_heads_global), []).append(head)
        rules = (
            RuleHeads(RowSource(rule, heads[0] + head_offset, num_heads_global), tuple(heads), log(times))
            for rule, heads in members.items()
        )
        branches.append(tuple(rules))
    return tuple(branches)


def group_heads(
    branches: Sequence[Sequence[RuleHeads]], *, num_heads: int, num_kv_heads: int, device: torch.device
) -> tuple[tuple[HeadGroup, ...], ...]:
    """Return, for each branch, groups of query heads that are computed together.

    The heads of a group have one rule, with equally many query heads for each key/value head.

    branches: the rules of each branch, from `branch_rules`.
    device: of index tensors, `HeadGroup.query_heads`.
    """
    return tuple(
        tuple(group for rule in rules for group in _groups_of_rule(rule, num_heads, num_kv_heads, device))
        for rules in branches
    )


def _groups_of_rule(rule: RuleHeads, num_heads: int, num_kv_heads: int, device: torch.device) -> Iterator[HeadGroup]:
    """Yield the head groups of a rule.

    The key/value heads of a group are evenly spaced, and each serves equally many of the rule's query heads.
    """
    shared = num_heads // num_kv_heads
    queries: dict[int, list[int]] = {}
    for head in rule.heads:
        queries.setdefault(head // shared, []).append(head)
    by_size: dict[int, list[int]] = {}
    for key_head, heads in queries.items():
        by_size.setdefault(len(heads), []).append(key_head)
    for size, key_heads in by_size.items():
        for run in _progressions(key_heads):
            heads = [head for key_head in run for head in queries[key_head]]
            yield HeadGroup(rule.source, _head_index(heads, device), _slice(run), size, rule.log_weight)


def _progressions(numbers: list[int]) -> list[range]:
    """Return ascending numbers as one range if they are evenly spaced, else as one range for each number."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    whole = range(numbers[0], numbers[-1] + 1, step)
    return [whole] if list(whole) == numbers else [range(number, number + 1) for number in numbers]


def _head_index(heads: list[int], device: torch.device) -> Index:
    runs = _progressions(heads)
    return _slice(runs[0]) if len(runs) == 1 else torch.tensor(heads, device=device)


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)


MOST_ROWS = 16  # most queries (of each head) of a call that is computed without a plan
_MOST_VIEWS = 4  # most ranges of keys that are read as views; more are gathered by index
_GROUP_BYTES = 1000  # assumed size of a head group in the cache


def needs_no_plan(call: Call) -> bool:
    """Return True for a call of at most MOST_ROWS queries in natural order, unless it is self-attention.

    The result is False for a call with a placement or a requested block size. In self-attention, queries and keys are
    at equal positions.
    """
    # Calls of self-attention repeat their sizes, so their plan is in the cache, and a cached plan is faster than none.
    few = call.num_queries <= MOST_ROWS and call.rate == 1 and not call.block_size and not call.placement
    return few and (call.num_queries, call.q_offset) != (call.num_keys, call.k_offset)


def row_program_of_call(call: Call, rule: Expression | None, device: torch.device) -> RowProgram:
    """Return the RowProgram of a call of few queries: the parts of its attention, computed without a plan.

    rule: the pattern with the values of its run-time tensors; None for the call's pattern, if it has no such tensors.

    Head groups of the call's pattern are cached for all offsets and lengths; those of a `rule` are not.
    """

    def build() -> tuple[Expression, tuple[tuple[HeadGroup, ...], ...]]:
        read = read_text(call.pattern) if rule is None else rule
        where = {"head_offset": call.head_offset, "num_heads_global": call.num_heads_global}
        # From the unbound rule: a bound one draws random numbers only up to the last position of its call.
        branches = branch_rules(read, num_heads=call.num_heads, **where)
        return read, group_heads(branches, num_heads=call.num_heads, num_kv_heads=call.num_kv_heads, device=device)

    if rule is None:
        heads = (call.num_heads, call.num_kv_heads, call.head_offset, call.num_heads_global)
        name = ("rows", call.pattern, *heads, device)
        read, branches = cache().get(name, build, _head_groups_bytes, pattern=call.pattern)
    else:
        read, branches = build()
    bound = call.bound(read)
    queries = range(bound.q_offset, bound.q_offset + bound.num_queries)
    keys = range(bound.k_offset, bound.k_offset + bound.num_keys)
    return row_program(branches, queries, keys, _ConsecutiveKeys(keys.start))


def _head_groups_bytes(rules: tuple[Expression, tuple[tuple[HeadGroup, ...], ...]]) -> int:
    return _GROUP_BYTES * sum(map(len, rules[1]))


@runtime_checkable
class KeySlots(Protocol):
    """Map from positions of stored keys to slots: token indices in the tensors that hold keys and values."""

    def slices(self, positions: range) -> list[slice]:
        """Return slices of the slots with the keys at these ascending positions, in order; all must be stored."""
        ...

    def slots(self, positions: Tensor) -> Tensor:
        """Return the slot of the key at each position; positions are on the CPU, and all must be stored."""
        ...


@dataclass(frozen=True)
class _ConsecutiveKeys:
    """Map of key positions to token indices, for a tensor whose token i is the key at position first + i."""

    first: int

    def slices(self, positions: range) -> list[slice]:
        return [slice(positions.start - self.first, positions.stop - self.first, positions.step)]

    def slots(self, positions: Tensor) -> Tensor:
        return positions - self.first


@outside_torch_modes
def row_program(branches: Sequence[Sequence[HeadGroup]], queries: range, keys: range, store: KeySlots) -> RowProgram:
    """Return the RowProgram of the attention of a few queries over keys, at these positions.

    branches: groups of heads with one rule, for each branch of the pattern.
    store: maps each key's position to its token index; it must have every visible key.
    """
    parts: list[RowPart] = []
    level = 0
    for branch in branches:
        deepest = level
        for group in branch:
            seen = group.source.seen(queries, keys)
            if seen is not None:
                own = _parts_of_group(group, seen, store, level)
                parts += own
                deepest = max(deepest, level + len(own))
        level = deepest
    return RowProgram(tuple(parts))


def _parts_of_group(group: HeadGroup, seen: SeenKeys, store: KeySlots, level: int) -> list[RowPart]:
    """Return a head group's attention in parts: one for each view of the keys, or one that gathers the keys by index.

    seen: the queries, the keys that they see, and the mask.

    The keys are gathered if they are a tensor of positions or would take more than a few views. The parts have
    consecutive levels (output buffers) from `level` on.
    """
    slots, lengths = _key_indices(seen.keys, store)
    rows, stops = slice(seen.rows.start, seen.rows.stop, seen.rows.step), [*accumulate(lengths)]
    parts = []
    for at, (each, length, stop) in enumerate(zip(slots, lengths, stops, strict=True), start=level):
        keys = slice(stop - length, stop)
        pairs = None if seen.pairs is None else seen.pairs[:, keys]
        parts.append(RowPart(group, rows, each, seen, keys, pairs, _blind_rows(pairs), at))
    return parts


def _blind_rows(pairs: Bool[Tensor, "rows n"] | None) -> Bool[Tensor, " rows"] | None:
    """Return a mask of the queries that see no key; None if every query sees one. pairs: as in `RowPart`."""
    blind = None if pairs is None else ~pairs.any(1)
    return None if blind is None or not bool(blind.any()) else blind


def _key_indices(keys: Keys, store: KeySlots) -> tuple[list[Index], list[int]]:
    """Return (indices of the keys' slots in the store, number of keys of each index).

    The indices are a few slices, each a view of the tensor; or one index tensor, if `keys` is a tensor or would need
    many slices.
    """
    if isinstance(keys, Tensor):
        return [store.slots(keys)], [len(keys)]
    views = [view for each in keys for view in store.slices(each)]
    lengths = [len(range(view.start, view.stop, view.step)) for view in views]
    assert sum(lengths) == sum(map(len, keys)), "key evicted"
    if len(views) > _MOST_VIEWS:
        return [positions([range(view.start, view.stop, view.step) for view in views])], [sum(lengths)]
    # A slice of one key gets step 1: a large step could overflow as a memory stride.
    return [slice(x.start, x.start + 1) if n == 1 else x for x, n in zip(views, lengths, strict=True)], lengths
