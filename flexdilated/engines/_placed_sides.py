"""Where the operands of a placed term lie in tensors that hold some positions of a sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int64
from torch import Tensor

from ..masks.orders import Compact, Layout, Listed, Permutation, Placement
from ..masks.planning import Term
from ._gather import Picked, Strands, side

# H heads of a term, F folds, S slots

Locate = Callable[[int, Int64[Tensor, "..."]], Int64[Tensor, "..."]]  # (head, tokens) -> where they stand in a tensor


def query_side(term: Term) -> Strands | Picked:
    """The side of a term's queries, which are counted as q holds them."""
    return _side(term.q, term.heads, term.heads, lambda head, tokens: tokens)


def key_side(term: Term, placement: Placement, groups: int) -> Strands | Picked:
    """The side of a term's keys, which are counted by position; `groups` query heads share a key/value head.

    Where all query heads of all key/value heads see the same slots, each of these is there once.
    """
    every = term.heads == tuple(range(len(term.heads))) and len(term.heads) % groups == 0
    alike = isinstance(term.k, Listed) or (isinstance(term.k, Compact) and len(set(term.k.starts)) == 1)
    heads = term.heads[::groups] if every and alike else term.heads
    kv_heads = tuple(head // groups for head in heads)
    return _side(term.k, heads, kv_heads, lambda head, tokens: placement.key_slots(head).of(tokens))


def _side(
    layout: Compact | Permutation | Listed, heads: tuple[int, ...], tensor_heads: tuple[int, ...], locate: Locate
) -> Strands | Picked:
    """Strided views where the tokens of all heads stand at one stride, else an index."""
    if isinstance(layout, Compact):
        tokens = layout.tokens()[: len(heads)]
    else:
        assert isinstance(layout, Listed)
        tokens = layout.positions().expand(len(heads), 1, -1)
    found: dict[tuple[int, int], Tensor] = {}
    for index, head in enumerate(tensor_heads):
        key = (head, int(tokens[index, 0, 0]))  # heads of a term differ in where they start alone
        if key not in found:
            found[key] = locate(head, tokens[index])
    slots = torch.stack([found[head, int(tokens[index, 0, 0])] for index, head in enumerate(tensor_heads)])
    strided = _strided(slots, heads)
    if strided is None:
        return Picked(tensor_heads, slots.int())
    strands = side(strided, Layout(1), tensor_heads)
    assert isinstance(strands, Strands)
    return strands


def _strided(slots: Int64[Tensor, "H F S"], heads: tuple[int, ...]) -> Compact | None:
    """The same as one progression a head, folded; None where it is none."""
    _, folds, length = slots.shape
    step = int(slots[0, 0, 1] - slots[0, 0, 0]) if length > 1 else 1
    stride = int(slots[0, 1, 0] - slots[0, 0, 0]) if folds > 1 else 0
    if step < 1 or stride < 0:
        return None
    starts = tuple(slots[:, 0, 0].tolist())
    strided = Compact(heads, starts, step, length, folds, stride)
    return strided if torch.equal(strided.tokens(), slots) else None
