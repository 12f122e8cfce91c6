"""Gathers between tokens of a tensor and slots of a term, by index arithmetic or by an index tensor.

A token of a head has at most one slot in a term, so the gradient of a gather is the gather by the inverse, never a
scatter. All operations are plain torch. Numbers of a pattern are graph constants; lengths are dynamic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from ... import _torch_private
from ...masks.core import device_kind, index_dtype
from ...masks.orders import Layout, Order, Padded, Placement
from ...masks.planning import IntervalTerm, PaddedTerm, Plan, Term
from .._merge import sum_dtype

# B batch, X heads of a tensor, H heads of a term, S slots, N tokens, D head dim; `groups` term heads per tensor head

_Numbers = tuple[int, ...]


class SlotIndex(NamedTuple):
    """Index tensors by which a `SlotRule` gathers one side of a term, between its slots and the tokens of a tensor.

    A field is None if a rule of this kind does not read it.

    heads: for each head of the term, its query head; None if the term has all query heads in order.
    places: for each query head, its head in the term, -1 for none; None if the term has all query heads in order.
    offsets: for each head of the term, the index of its first token in a segment, for kind "segments".
    token_of_slot: token in each slot, -1 for none, for kind "index".
    slot_of_token: slot of each token of every query head, -1 for none, for kind "index".

    In a term with all query heads, those that share a key/value head are gathered once if their slots hold equal
    tokens. They then count as one head, here and in `SlotRule`.
    """

    heads: Int32[Tensor, " H"] | None = None
    places: Int32[Tensor, " X"] | None = None
    offsets: Int32[Tensor, " H"] | None = None
    token_of_slot: Int32[Tensor, "#H S"] | None = None
    slot_of_token: Int32[Tensor, "#X N"] | None = None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self if each is not None)


class SlotRule(torch.nn.Module):  # the numbers of modules are constants of compiled graphs
    """Rule that gathers one side of a term into its slots.

    kind: "all": the slots are the tensor itself. "heads": slot i holds token i, for some of the heads. "segments": slot
        i holds, of segment i // width, token i % width * step + the head's offset; it is empty if the segment, of
        `segment` tokens, or the tensor has no such token. "index": index tensors have the token of each slot.
    numbers: (groups, step, segment, width) for "segments", else (groups,); `groups` consecutive query heads read one
        head of the tensor.
    """

    def __init__(self, kind: str, *numbers: int) -> None:
        super().__init__()
        self.kind, self.numbers = kind, numbers

    def take(
        self, x: Shaped[Tensor, "B X N ..."], rows: SlotIndex, start: int, slots: int
    ) -> Shaped[Tensor, "B H S ..."]:
        """Return the S slots of each of a term's H heads, gathered from the tokens of x; empty slots are 0.

        For kind "all", x itself is returned.

        rows: index tensors.
        start: token at which segment 0 begins.
        slots: number of slots, for kind "segments".
        """
        if self.kind == "index":
            assert rows.token_of_slot is not None
            slots = rows.token_of_slot.shape[1]
        if self.kind == "heads":
            slots = x.shape[2]
        return x if self.kind == "all" else take_or_put(x, True, self.kind, self.numbers, start, slots, 0.0, *rows)

    def put(self, x: Shaped[Tensor, "B H S ..."], rows: SlotIndex, start: int, tokens: int, empty: float) -> Tensor:
        """Return x with tokens in place of slots, (B, query heads, tokens, ...): the inverse of `take`.

        rows: index tensors.
        start: token at which segment 0 begins.
        tokens: number of tokens.

        Tokens without a slot, and heads that the term does not have, are filled with `empty`. For kind "all", x itself
        is returned.
        """
        return x if self.kind == "all" else take_or_put(x, False, self.kind, self.numbers, start, tokens, empty, *rows)


class SideGather(NamedTuple):
    """Gather of one side of a term: rule, index tensors and the token at which segment 0 begins."""

    slots: SlotRule
    rows: SlotIndex
    start: int


@dataclass(frozen=True)
class _SlotMap:
    """Index maps between slots of one side of a term and tokens of a tensor.

    kind, numbers: as in `SlotRule`.
    start: token at which segment 0 begins.
    """

    kind: str
    numbers: _Numbers
    start: int
    rows: SlotIndex

    def tokens(self, head: Tensor, slot: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (token in each slot of each head of the term, mask of the slots that hold a token; None for "heads").

        For kind "segments", the mask is also True for slots whose token would be outside the tensor.

        head, slot: indices of all heads of the term, (H, 1), and of all slots, (S,).
        """
        if self.kind == "heads":
            return slot, None
        if self.kind == "index":
            assert self.rows.token_of_slot is not None
            return self.rows.token_of_slot, self.rows.token_of_slot >= 0
        _, step, segment, width = self.numbers
        assert self.rows.offsets is not None
        place = slot % width * step + self.rows.offsets[head]
        return self.start + slot // width * segment + place, place < segment

    def slots(self, head: Tensor, token: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (slot of each token of each query head, mask of the tokens that have a slot; None for "heads").

        Both are arbitrary for query heads that are not in the term. For kind "segments", the mask is also True for
        tokens whose slot would be after the last one.

        head, token: indices of all query heads, (H, 1), and of all tokens, (N,).
        """
        if self.kind == "heads":
            return token, None
        if self.kind == "index":
            assert self.rows.slot_of_token is not None
            return self.rows.slot_of_token, self.rows.slot_of_token >= 0
        _, step, segment, width = self.numbers
        assert self.rows.offsets is not None
        ahead = token - self.start
        place = ahead % segment - self.rows.offsets[self.place(head)[0]]
        active = (place >= 0) & (place % step == 0) & (ahead >= 0)
        return ahead // segment * width + place // step, active

    def source(self, head: Tensor) -> Tensor:
        """Return the head of the tensor that each of these heads of the term reads."""
        groups = self.numbers[0]
        head = head if self.rows.heads is None else self.rows.heads[head]
        return head if groups == 1 else head // groups

    def place(self, head: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (the term's head for each of these query heads, mask of those in the term; None if all are).

        A query head that is not in the term gets head 0.
        """
        if self.rows.places is None:
            return head, None
        place = self.rows.places[head]
        return place.clamp(min=0), place >= 0


def _index_ranges(x: Tensor, heads: int, length: int, begin: int) -> tuple[Tensor, Tensor]:
    """Return (0 to heads - 1 of shape (heads, 1), 0 to length - 1 of shape (length,)).

    begin: 0 in the forward and 1 in the backward; the result does not depend on it.
    """
    # Equal expressions of forward and backward would be merged in the joint graph, saved to memory and read again,
    # where arithmetic in registers is cheaper; `begin` makes them unequal.
    dtype = index_dtype(x.device, 0, 0)
    head = torch.arange(begin, heads + begin, device=x.device, dtype=dtype) - begin
    return head[:, None], torch.arange(begin, length + begin, device=x.device, dtype=dtype) - begin


def _to_slots(x: Tensor, at: _SlotMap, slots: int, begin: int) -> Tensor:
    num_heads = x.shape[1] * at.numbers[0] if at.rows.heads is None else len(at.rows.heads)
    head, slot = _index_ranges(x, num_heads, slots, begin)
    token, held = at.tokens(head, slot)
    if at.kind == "segments":
        inside = (token >= 0) & (token < x.shape[2])
        held = inside if held is None else held & inside
    return _take_or_fill(x, at.source(head), token, held, 0.0)


def _to_tokens(x: Tensor, at: _SlotMap, tokens: int, empty: float, begin: int) -> Tensor:
    num_heads = x.shape[1] if at.rows.places is None else len(at.rows.places)
    head, token = _index_ranges(x, num_heads, tokens, begin)
    slot, active = at.slots(head, token)
    place, is_here = at.place(head)
    if is_here is not None:
        active = is_here if active is None else active & is_here
    if at.kind == "segments":
        inside = slot < x.shape[2]
        active = inside if active is None else active & inside
    return _take_or_fill(x, place, slot, active, empty)


def _take_or_fill(x: Tensor, head: Tensor, index: Tensor, there: Tensor | None, empty: float) -> Tensor:
    if there is None:
        return x[:, head, index]
    found = x[:, head, torch.where(there, index, 0)]
    there = there.expand(found.shape[1:3])
    return torch.where(there[..., None] if x.dim() == 4 else there, found, empty)


class _TakeOrPut(torch.autograd.Function):
    """Autograd function that gathers a term's slots from a tensor's tokens or, if not `to_slots`, tokens from slots.

    The gradient is the inverse gather, summed over the query heads that read one head of the tensor.

    length: number of slots or tokens of the result.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, to_slots: bool, kind: str, numbers: _Numbers, start: int, length: int, empty: float,
        *rows: Any,
    ) -> Tensor:  # fmt: skip
        ctx.to_slots, ctx.side, ctx.length = to_slots, (kind, numbers, start), x.shape[2]
        ctx.save_for_backward(*rows)
        at = _SlotMap(kind, numbers, start, SlotIndex(*rows))
        return _to_slots(x, at, length, 0) if to_slots else _to_tokens(x, at, length, empty, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (kind, numbers, start) = grads, ctx.side
        at = _SlotMap(kind, numbers, start, SlotIndex(*ctx.saved_tensors))
        if ctx.to_slots:
            grad, groups = _to_tokens(grad, at, ctx.length, 0.0, 1), at.numbers[0]
            if groups > 1:
                grad = grad.unflatten(1, (-1, groups)).sum(2, dtype=sum_dtype(grad)).to(grad.dtype)
        else:
            grad = _to_slots(grad, at, ctx.length, 1)
        return grad, *([None] * (6 + len(SlotIndex._fields)))


def take_or_put(x, to_slots, kind, numbers, start, length, empty, *rows):
    return _TakeOrPut.apply(x, to_slots, kind, numbers, start, length, empty, *rows)


def sides_of(
    term: Term, plan: Plan, groups: int, placement: Placement | None, device: torch.device
) -> tuple[SideGather, SideGather]:
    """Return (gather of a term's queries from q, gather of its keys and values from k and v).

    groups: number of query heads for each key/value head.
    placement: positions of the tokens in the tensors; None if they are consecutive.
    """
    num_heads, (num_queries, num_keys) = plan.bound.num_heads, (plan.bound.num_queries, plan.bound.num_keys)
    heads = None if term.heads == tuple(range(num_heads)) else term.heads
    if placement is not None:
        kv_heads = [head // groups for head in term.heads]
        q_index = term.q.tokens()[:, 0]
        if isinstance(term, IntervalTerm):
            q_index = torch.where(q_index < 0, -1, placement.query_slots().of(q_index))
        k_index = _token_indices(term.k.tokens()[:, 0].expand(len(kv_heads), -1), kv_heads, placement)
        q = _gather_by_index(q_index, heads, num_heads, 1, num_queries, device)
        return q, _gather_by_index(k_index, heads, num_heads, groups, num_keys, device)
    if isinstance(term, PaddedTerm):
        q = _gather_of_segments(term.q, heads, num_heads, 1, device)
        return q, _gather_of_segments(term.k, heads, num_heads, groups, device)
    keys = Layout(num_keys, plan.layout.rate)
    q = _gather_of_order(term.q, plan.layout, heads, num_heads, 1, device)
    return q, _gather_of_order(term.k, keys, heads, num_heads, groups, device)


def natural_order_gather(given: Layout, device: torch.device) -> SideGather:
    """Return the gather that brings tokens from the order `given` into natural order."""
    rows = SlotIndex(token_of_slot=given.slots(device)[None].int(), slot_of_token=given.positions(device)[None].int())
    return SideGather(SlotRule("index", 1), rows, 0)


def _gather_of_segments(
    order: Padded, heads: tuple[int, ...] | None, num_heads: int, groups: int, device: torch.device
) -> SideGather:
    offsets = torch.tensor(order.offsets, dtype=torch.int32)
    if heads is None and groups > 1 and bool((offsets.view(-1, groups) == offsets[::groups, None]).all()):
        offsets, groups = offsets[::groups], 1
    offsets = offsets.to(device)
    _mark_static(offsets)
    rows = _slot_index(heads, num_heads, device, offsets=offsets)
    return SideGather(SlotRule("segments", groups, order.step, order.segment, order.width), rows, order.start)


def _gather_of_order(
    order: Order, given: Layout, heads: tuple[int, ...] | None, num_heads: int, groups: int, device: torch.device
) -> SideGather:
    if order != given:
        return _gather_by_index(order.tokens()[:, 0], heads, num_heads, groups, given.num_tokens, device)
    if heads is None:
        return SideGather(SlotRule("all", 1), SlotIndex(), 0)
    return SideGather(SlotRule("heads", groups), _slot_index(heads, num_heads, device), 0)


def _gather_by_index(
    index: Int64[Tensor, "#H S"],
    heads: tuple[int, ...] | None,
    num_heads: int,
    groups: int,
    num_tokens: int,
    device: torch.device,
) -> SideGather:
    """Return the gather of one side by index tensors, or of kind "all" if all query heads have all tokens in order.

    index: token in each slot, -1 for none.
    heads: query heads of the term, None for all.
    groups: number of query heads for each head of the tensor.

    If the term has all query heads, and the heads that share a head of the tensor have equal tokens in their slots,
    each head of the tensor is gathered once.
    """
    token_of_slot = index[:1] if bool((index == index[:1]).all()) else index  # one row if all heads have equal tokens
    if heads is None and groups > 1:
        of_group = token_of_slot.unflatten(0, (-1, groups)) if len(token_of_slot) > 1 else token_of_slot[None]
        if bool((of_group == of_group[:, :1]).all()):
            token_of_slot, groups = of_group[:, 0], 1
    if heads is None and groups == 1 and torch.equal(token_of_slot, torch.arange(num_tokens)[None]):
        return SideGather(SlotRule("all", 1), SlotIndex(), 0)
    inverse = torch.full((len(token_of_slot), num_tokens + 1), -1, dtype=torch.int32)
    slot = torch.arange(token_of_slot.shape[1], dtype=torch.int32)
    inverse.scatter_(1, torch.where(token_of_slot < 0, num_tokens, token_of_slot), slot.expand_as(token_of_slot))
    inverse = inverse[:, :num_tokens]
    if heads is not None and len(inverse) > 1:
        inverse = torch.full((num_heads, num_tokens), -1, dtype=torch.int32).index_copy_(
            0, torch.tensor(heads), inverse
        )
    rows = _slot_index(
        heads, num_heads, device, token_of_slot=token_of_slot.int().to(device), slot_of_token=inverse.to(device)
    )
    return SideGather(SlotRule("index", groups), rows, 0)


def _slot_index(heads: tuple[int, ...] | None, num_heads: int, device: torch.device, **tables: Tensor) -> SlotIndex:
    if heads is None:
        return SlotIndex(**tables)
    places = torch.full((num_heads,), -1, dtype=torch.int32)
    places[list(heads)] = torch.arange(len(heads), dtype=torch.int32)
    both = torch.tensor(heads, dtype=torch.int32, device=device), places.to(device)
    for each in both:
        _mark_static(each)
    return SlotIndex(*both, **tables)


def _mark_static(x: Tensor) -> None:
    """On accelerators, mark the sizes of x, which do not depend on sequence lengths, as static for torch.compile."""
    if device_kind(x.device).flex_trains:
        _torch_private.mark_static(x)


def _token_indices(
    positions: Int64[Tensor, "H S"], kv_heads: Sequence[int], placement: Placement
) -> Int64[Tensor, "H S"]:
    """Return, for each head of a term, the indices in the key tensor of the keys at `positions`.

    The index is -1 for a position at which the placement has no key, such as the -1 of an empty slot.

    kv_heads: key/value head of each head of the term.
    """
    found: dict[tuple[int, int], Tensor] = {}
    for row, head in zip(positions, kv_heads, strict=True):
        # The heads of one key/value head differ at most in their offset: with equal first positions, rows are equal.
        key = (head, int(row[0]))
        if key not in found:
            held = placement.key_slots(head)
            found[key] = torch.where(torch.isin(row, held.position), held.of(row), -1)
    return torch.stack([found[head, int(row[0])] for row, head in zip(positions, kv_heads, strict=True)])
