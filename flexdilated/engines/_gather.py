"""Gathers, scatter-adds and merges between the tokens of a tensor and the slots of a term."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int32, Int64, Shaped
from torch import Tensor

from ..masks.orders import Compact, Folded, Layout, ListedOrder, Permutation, Placement
from ..masks.planning import Plan, Term

# B batch, X heads of a tensor, H heads of a term, F folds, S slots, N tokens, D head dim


@dataclass(frozen=True)
class HeadRun:
    """Heads of a term that one strided view of a tensor covers: evenly spaced heads, with equal tokens in their slots.

    The term's head i, for begin <= i < end, reads head `first + (i - begin) * step` of the tensor; with step 0 all read
    head `first`.

    start: index of the token in slot 0 of fold 0 of each head.
    """

    begin: int
    end: int
    first: int
    step: int
    start: int

    def of_head(self, place: int) -> HeadRun:
        """Return the head run of a single head: the term's head `place`, which is in this run."""
        return HeadRun(place, place + 1, self.first + (place - self.begin) * self.step, 1, self.start)


@dataclass(frozen=True)
class StridedSide:
    """Reader and writer of one side of a term whose slots are strided views of a tensor.

    layout: token in each slot.
    runs: head runs that together have all heads of the term, each once and in order.
    """

    layout: Compact
    runs: tuple[HeadRun, ...]

    def view(self, x: Shaped[Tensor, "B X N ..."], run: HeadRun) -> Shaped[Tensor, "B h F S ..."]:
        """Return the view of x that holds the slots of one head run.

        If run.step is 0, all heads share the memory of one head of x.
        """
        layout = self.layout
        rest, rest_stride = x.shape[3:], x.stride()[3:]
        batch, head, token = x.stride()[:3]
        return x.as_strided(
            (x.shape[0], run.end - run.begin, layout.folds, layout.num_slots, *rest),
            (batch, run.step * head, layout.fold_stride * token, layout.step * token, *rest_stride),
            x.storage_offset() + run.first * head + run.start * token,
        )

    def take(self, x: Shaped[Tensor, "B X N ..."]) -> Shaped[Tensor, "B H F S ..."]:
        """Return the tokens of x in all slots of the term: a view if the term is one head run and layout.step is 1.

        Otherwise the result is a copy.
        """
        if len(self.runs) == 1 and self.layout.step == 1:
            return self.view(x, self.runs[0])
        shape = (x.shape[0], len(self.layout.heads), self.layout.folds, self.layout.num_slots, *x.shape[3:])
        slots = x.new_empty(shape)
        for run in self.runs:
            slots[:, run.begin : run.end].copy_(self.view(x, run))
        return slots

    def all_tokens(self, slots: Shaped[Tensor, "B H F S ..."], heads: int, tokens: int) -> Tensor | None:
        """Return the slots as a tensor (B, heads, tokens, ...) if they are all tokens of all heads in order; else None.

        heads, tokens: sizes of the full tensor.
        """
        return slots.flatten(2, 3) if self.has_all_tokens(heads, tokens) else None

    def has_all_tokens(self, heads: int, tokens: int) -> bool:
        one_run = self.runs == (HeadRun(0, heads, 0, 1, 0),)
        return one_run and self.layout.step == 1 and self.layout.folds * self.layout.num_slots == tokens

    def add(self, x: Shaped[Tensor, "B X N ..."], slots: Shaped[Tensor, "B H F S ..."]) -> None:
        """Add the vector in each slot to the slot's token in x, in place.

        If several heads of the term read one head of x, their vectors are summed.
        """
        for run in self.runs:
            part = slots[:, run.begin : run.end]
            if run.step == 0:
                part = part.sum(1, keepdim=True)
                run = HeadRun(run.begin, run.begin + 1, run.first, 1, run.start)
            self.view(x, run).add_(part)

    def put(self, x: Shaped[Tensor, "B X N ..."], slots: Shaped[Tensor, "B H F S ..."]) -> None:
        """Write the vector in each slot to the slot's token in x, in place.

        No two heads of the term may read one head of x.
        """
        for run in self.runs:
            self.view(x, run).copy_(slots[:, run.begin : run.end])

    def claim(self, reached: Bool[Tensor, "1 X N"]) -> bool:
        """Set `reached` to True, in place, at the tokens of all slots; return True if it was False at all of them."""
        views = [self.view(reached, run) for run in self.runs]
        fresh = not any(bool(view.any()) for view in views)
        for view in views:
            view.fill_(True)
        return fresh

    def merge(
        self,
        out: Float[Tensor, "B X N D"],
        lse: Float[Tensor, "B X N"],
        part: Float[Tensor, "B H F S D"],
        part_lse: Float[Tensor, "B H F S"],
    ) -> None:
        """Merge the term's results (part, part_lse) into (out, lse) at the tokens of its slots, in place, by `merge_`.

        part, part_lse: output and natural log-sum-exp of the term.
        """
        for run in self.runs:
            chosen = slice(run.begin, run.end)
            merge_(self.view(out, run), self.view(lse, run), part[:, chosen], part_lse[:, chosen])


@dataclass(frozen=True)
class WholeSide:
    """Reader and writer of one side of a term that has all tokens of all heads of a tensor, in any order.

    layout: the term's order of tokens.
    given: order of the tokens in the tensor.
    heads: head of the tensor that each head of the term reads; slots are read and written once for each tensor head.
    """

    layout: Permutation
    given: Layout
    heads: tuple[int, ...]

    def take(self, x: Shaped[Tensor, "B X N ..."]) -> Shaped[Tensor, "B X 1 S ..."]:
        return self._to_slots(x).unsqueeze(2)

    def has_all_tokens(self, heads: int, tokens: int) -> bool:
        return True

    def all_tokens(self, slots: Shaped[Tensor, "B X 1 S ..."], heads: int, tokens: int) -> Tensor | None:
        return self._to_tokens(slots.squeeze(2))

    def add(self, x: Shaped[Tensor, "B X N ..."], slots: Shaped[Tensor, "B X 1 S ..."]) -> None:
        x.add_(self._to_tokens(slots.squeeze(2)))

    def claim(self, reached: Bool[Tensor, "1 X N"]) -> bool:
        fresh = not bool(reached.any())
        reached.fill_(True)
        return fresh

    def merge(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        merge_(out, lse, self._to_tokens(part.squeeze(2)), self._to_tokens(part_lse.squeeze(2)))

    def _to_slots(self, x: Tensor) -> Tensor:
        return x if self.layout == self.given else _select_tokens(x, self.layout.positions(x.device))

    def _to_tokens(self, x: Tensor) -> Tensor:
        return x if self.layout == self.given else _select_tokens(x, self.layout.slots(x.device))


@dataclass(frozen=True, eq=False)
class PickedSide:
    """Reader and writer of one side of a term by an index tensor of shape (heads, folds, slots).

    Slot s of fold f of the side's head h holds token index[h, f, s] of head heads[h] of a tensor. An index of a single
    head serves all heads of the side.

    heads: head of the tensor for each head of the side. The side has the heads of the term or, for some terms whose
        query heads share key/value heads, each of these key/value heads once.
    """

    heads: tuple[int, ...]
    index: Int32[Tensor, "#H F S"]

    @property
    def nbytes(self) -> int:
        return self.index.nbytes

    def take(self, x: Shaped[Tensor, "B X N ..."]) -> Shaped[Tensor, "B H F S ..."]:
        """Return the tokens of x in all slots of the side, in a new tensor."""
        taken = [few.index_select(2, index) for few, index, _ in self._head_views(x)]
        return (taken[0] if len(taken) == 1 else torch.cat(taken, dim=1)).unflatten(2, self.index.shape[1:])

    def has_all_tokens(self, heads: int, tokens: int) -> bool:
        return False

    def all_tokens(self, slots: Shaped[Tensor, "B H F S ..."], heads: int, tokens: int) -> Tensor | None:
        return None

    def add(self, x: Shaped[Tensor, "B X N ..."], slots: Shaped[Tensor, "B H F S ..."]) -> None:
        """Add the vector in each slot to the slot's token in x, in place; the vectors of one token are summed."""
        for few, index, own in self._head_views(x):
            few.index_add_(2, index, slots[:, own].flatten(2, 3))

    def put(self, x: Shaped[Tensor, "B X N ..."], slots: Shaped[Tensor, "B H F S ..."]) -> None:
        """Write the vector in each slot to the slot's token in x, in place."""
        for few, index, own in self._head_views(x):
            few.index_copy_(2, index, slots[:, own].flatten(2, 3).to(x.dtype))

    def claim(self, reached: Bool[Tensor, "1 X N"]) -> bool:
        """Set `reached` to True, in place, at the tokens of all slots; return True if it was False at all of them."""
        before = self.take(reached)
        self.put(reached, torch.ones_like(before))
        return not bool(before.any())

    def merge(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Merge the term's results (part, part_lse) into (out, lse) at the tokens of its slots, in place, by `merge_`.

        part, part_lse: output and natural log-sum-exp of the term, (B, H, F, S, D) and (B, H, F, S).
        out, lse: (B, X, N, D) and (B, X, N).
        """
        sums = self.take(out), self.take(lse)
        merge_(*sums, part, part_lse)
        self.put(out, sums[0])
        self.put(lse, sums[1])

    def _head_views(self, x: Shaped[Tensor, "B X N ..."]) -> Iterator[tuple[Tensor, Int64[Tensor, " n"], slice]]:
        """Yield (view of some heads of x, token in each slot of such a head, slice of the side's heads in the view).

        The n = F * S tokens are those of fold 0, then of fold 1, and so on, and are equal for all heads of a view. No
        view has one head of x twice, so each can be written to.
        """
        index = self.index.to(x.device, torch.int64).flatten(1)
        if len(index) > 1:
            for place, head in enumerate(self.heads):
                yield x[:, head : head + 1], index[place], slice(place, place + 1)
            return
        for run in _head_runs(self.heads, (0,) * len(self.heads)):
            # A view of repeated heads (step 0) cannot be written to.
            for few in [run] if run.step > 0 else [run.of_head(place) for place in range(run.begin, run.end)]:
                some = slice(few.first, few.first + (few.end - few.begin - 1) * few.step + 1, few.step)
                yield x[:, some], index[0], slice(few.begin, few.end)


TokenGather = StridedSide | WholeSide | PickedSide


def side_of(layout: Compact | Permutation | Folded, given: Layout, heads: tuple[int, ...]) -> TokenGather:
    """Return the reader and writer of one side of a term.

    layout: token in each slot of the term.
    given: order of the tokens in the tensor; used only if `layout` is a Permutation.
    heads: head of the tensor that each head of the term reads.

    The result is a WholeSide for an order of all tokens, StridedSide if the slots are strided views, else a PickedSide.
    """
    if isinstance(layout, Permutation):
        return WholeSide(layout, given, heads)
    if isinstance(layout, Folded):
        return PickedSide(_without_repeats(heads), layout.tokens().int())
    if layout.fold_starts is None:
        return StridedSide(layout, _head_runs(heads, layout.starts))
    if len(set(layout.starts)) > 1:
        return PickedSide(heads, layout.tokens().int())
    return PickedSide(_without_repeats(heads), layout.tokens()[:1].int())


def _without_repeats(heads: tuple[int, ...]) -> tuple[int, ...]:
    """Return each head once if all heads occur equally often and equal heads are adjacent; else return `heads`.

    E.g. (0, 0, 3, 3) -> (0, 3), but (0, 0, 3) and (0, 3, 0, 3) are returned unchanged.
    """
    # The repeated heads are key/value heads: kernels serve groups of query heads, so each is gathered once.
    distinct = tuple(dict.fromkeys(heads))
    times = len(heads) // len(distinct)
    return distinct if heads == tuple(head for head in distinct for _ in range(times)) else heads


def claim_rows(sides: Sequence[TokenGather], heads: int, tokens: int) -> tuple[tuple[bool, ...], bool]:
    """Return (fresh, complete) for query sides of terms, in the order in which the terms are computed.

    fresh[i] is True if no earlier side writes to a row of sides[i]. `complete` is True if the fresh sides together
    write to all rows: those of `heads` heads with `tokens` queries.
    """
    reached, reached_first = torch.zeros(2, 1, heads, tokens, dtype=torch.bool)
    fresh = []
    for each in sides:
        fresh.append(each.claim(reached))
        if fresh[-1]:
            each.claim(reached_first)
    return tuple(fresh), bool(reached_first.all())


def merge_(
    out: Float[Tensor, "*rows D"], lse: Float[Tensor, "*rows"], part: Float[Tensor, "*rows D"], part_lse: Tensor
) -> None:
    """Merge the attention result (part, part_lse) into (out, lse) in place: one softmax over the keys of both.

    lse, part_lse: natural log-sum-exp of the scores.

    A key that is in both counts twice. Rows with part_lse -inf do not change; rows without keys keep output 0 and lse
    -inf.

    Source: LongNet, arXiv 2307.02486, eq. 10.
    """
    share = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
    out.lerp_(part.to(out.dtype), share.unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)


def _select_tokens(x: Shaped[Tensor, "B X N ..."], index: Int64[Tensor, " S"]) -> Shaped[Tensor, "B X S ..."]:
    """Return x[:, :, index].

    If x is contiguous, its first three dims are flattened before, because PyTorch then copies whole tokens.
    """
    if not x.is_contiguous():
        return x.index_select(2, index)
    heads = torch.arange(x.shape[0] * x.shape[1], device=x.device)[:, None] * x.shape[2]
    return x.flatten(0, 2).index_select(0, (heads + index).flatten()).view(*x.shape[:2], len(index), *x.shape[3:])


def _head_runs(heads: tuple[int, ...], starts: tuple[int, ...]) -> tuple[HeadRun, ...]:
    """Return head runs, each as long as possible, that together are the heads of a term, in order.

    heads: head of the tensor that each head of the term reads.
    starts: `HeadRun.start` of each head of the term; the heads of a run have equal starts.
    """
    runs: list[HeadRun] = []
    begin = 0
    steps = [after - before for before, after in pairwise(heads)]
    for index in range(1, len(heads) + 1):
        same_start = index < len(heads) and starts[index] == starts[begin]
        if same_start and steps[index - 1] == steps[begin] and steps[index - 1] >= 0:
            continue
        step = steps[begin] if index - begin > 1 else 1
        runs.append(HeadRun(begin, index, heads[begin], step, starts[begin]))
        begin = index
    return tuple(runs)


Locate = Callable[[int, Int64[Tensor, "..."]], Int64[Tensor, "..."]]  # (head, tokens) -> their slots in a tensor


def term_sides(term: Term, plan: Plan, groups: int, placement: Placement | None) -> tuple[TokenGather, TokenGather]:
    """Return (queries, keys) of a term: readers and writers of its tokens in q and in k and v.

    groups: number of query heads for each key/value head.
    placement: positions of the tokens in q, k and v; None if they are consecutive.
    """
    if placement is not None:
        # Queries of such a term are numbered as in q.
        queries = _located_side(term.q, term.heads, term.heads, lambda head, tokens: tokens)
        return queries, _placed_key_side(term, placement, groups)
    assert not isinstance(term.q, ListedOrder)
    assert not isinstance(term.k, ListedOrder)
    kv_heads = tuple(head // groups for head in term.heads)
    key_layout = Layout(plan.bound.num_keys, plan.layout.rate)
    return side_of(term.q, plan.layout, term.heads), side_of(term.k, key_layout, kv_heads)


def _placed_key_side(term: Term, placement: Placement, groups: int) -> StridedSide | PickedSide:
    """Return the key side of a term whose keys are numbered by position: the reader and writer of its k and v tokens.

    A slot whose position has no token in k and v reads some other token; no allowed pair may have such a slot.

    placement: positions of the tokens in k and v.
    groups: number of query heads for each key/value head.

    Each key/value head is read once if the term has all query heads of its key/value heads, from head 0 on, and term.k
    has equal tokens for all heads. Else it is read once for each query head.
    """
    every = term.heads == tuple(range(len(term.heads))) and len(term.heads) % groups == 0
    alike = isinstance(term.k, ListedOrder | Folded) or (isinstance(term.k, Compact) and len(set(term.k.starts)) == 1)
    heads = term.heads[::groups] if every and alike else term.heads
    kv_heads = tuple(head // groups for head in heads)
    return _located_side(term.k, heads, kv_heads, lambda head, tokens: placement.key_slots(head).of(tokens))


def _located_side(
    layout: Compact | Permutation | ListedOrder | Folded,
    heads: tuple[int, ...],
    tensor_heads: tuple[int, ...],
    locate: Locate,
) -> StridedSide | PickedSide:
    """Return the reader and writer of one side of a term, from the places of its tokens in a tensor.

    The result is a StridedSide if these places have the form of a Compact (see `_as_compact`), else a PickedSide.

    heads: the term's heads, or one of them for each key/value head.
    tensor_heads: head of the tensor that each of `heads` reads.
    locate: function (head of the tensor, tokens of the layout) -> indices of these tokens in the tensor; any index for
        a token that the tensor lacks.
    """
    tokens = layout.tokens()
    tokens = tokens[: len(heads)] if isinstance(layout, Compact) else tokens.expand(len(heads), -1, -1)
    found: dict[tuple[int, int], Tensor] = {}
    for index, head in enumerate(tensor_heads):
        key = (head, int(tokens[index, 0, 0]))  # heads of a term differ only in their first token
        if key not in found:
            found[key] = locate(head, tokens[index])
    slots = torch.stack([found[head, int(tokens[index, 0, 0])] for index, head in enumerate(tensor_heads)])
    strided = _as_compact(slots, heads)
    if strided is None:
        return PickedSide(tensor_heads, slots.int())
    side = side_of(strided, Layout(1), tensor_heads)
    assert isinstance(side, StridedSide)
    return side


def _as_compact(slots: Int64[Tensor, "H F S"], heads: tuple[int, ...]) -> Compact | None:
    """Return token indices as a Compact: one ascending progression per head, repeated over evenly spaced folds.

    Returns None if they have another form, as for folds in descending order.
    """
    _, folds, length = slots.shape
    step = int(slots[0, 0, 1] - slots[0, 0, 0]) if length > 1 else 1
    stride = int(slots[0, 1, 0] - slots[0, 0, 0]) if folds > 1 else 0
    if step < 1 or stride < 0:
        return None
    starts = tuple(slots[:, 0, 0].tolist())
    strided = Compact(heads, starts, step, length, folds, stride)
    return strided if torch.equal(strided.tokens(), slots) else None
