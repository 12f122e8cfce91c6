"""What a case is made of: one call of `flex_attention` or several in turn, and how its tensors lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexdilated.flex_attention import create_block_mask

from ._functions import SIZE, Reads, Size


@dataclass(frozen=True)
class Case:
    """One call of `flex_attention`, or several in turn.

    rule: of the block mask; None for a call without one. lists: batch entries and heads with lists of their own.
    maker: makes the block mask of the rule. edit: changes it, given the size; the lists count then.
    layouts: how q, k, v and the gradient of the output lie in memory, by name; the others are contiguous.
    how: further arguments of the call.
    fixed: whichever of "q", "k", "v" and "score" needs no gradient.
    then: score functions of further calls, each of which has the output as its queries.
    steps: fields that replace those of the case in calls that follow each other.
    in_place: each step writes its values into the tensors of the first.
    around: takes the attention, and gives the function that is called, compiled or not.
    dynamic: of torch.compile.
    mask_inside: the mask is made in the compiled function.
    refused: torch answers the call by an error.
    """

    name: str
    score: Reads | None = None
    rule: Reads | None = None
    size: Size = SIZE
    dtype: torch.dtype = torch.float64
    lists: tuple[int | None, int | None] = (None, None)
    block: int | tuple[int, int] = 32
    maker: Callable[..., BlockMask] = create_block_mask
    edit: Callable[[BlockMask, Size], BlockMask] | None = None
    layouts: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    how: Mapping[str, Any] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    then: tuple[Reads, ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ({},)
    in_place: bool = False
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    dynamic: bool | None = None
    mask_inside: bool = False
    refused: bool = False

    def in_turn(self) -> Iterator[Case]:
        for step in self.steps:
            yield replace(self, steps=({},), **step)


# How tensors lie in memory: each takes a contiguous tensor and returns its values elsewhere.


def lies(*order: int) -> Callable[[Tensor], Tensor]:
    """Contiguous in this order of its axes."""
    back = tuple(sorted(range(len(order)), key=order.__getitem__))
    return lambda x: x.permute(order).contiguous().permute(back)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "at an offset": lambda x: torch.cat([x.new_zeros(97), x.flatten()])[97:].view_as(x),
    "tokens before heads": lies(0, 2, 1, 3),
    "heads before entries": lies(1, 0, 2, 3),
    "tokens first": lies(2, 0, 1, 3),
    "head dim before tokens": lies(0, 1, 3, 2),
    "longer rows": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "every other token": lambda x: torch.stack([x, x], 3).flatten(2, 3)[:, :, ::2],
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "one entry for all": lambda x: x[:1].expand_as(x),
    "one token for all": lambda x: x[:, :, :1].expand_as(x),
    "a third of a projection": lambda x: lies(0, 2, 1, 3)(torch.cat([x, x, x], 1)).chunk(3, 1)[1],
}
STRIDED: tuple[tuple[str, str, str, str], ...] = (
    ("at an offset", "at an offset", "at an offset", "at an offset"),
    ("at an offset", "at an offset", "tokens first", "tokens first"),
    ("at an offset", "tokens before heads", "longer rows", "tokens before heads"),
    ("tokens first", "longer rows", "tokens first", "at an offset"),
    ("tokens first", "tokens before heads", "longer rows", "tokens first"),
    ("tokens first", "at an offset", "at an offset", "tokens before heads"),
    ("a third of a projection", "a third of a projection", "a third of a projection", "tokens before heads"),
    ("heads before entries", "one head for all", "one head for all", "one entry for all"),
    ("longer rows", "one entry for all", "one entry for all", "one token for all"),
    ("every other token", "every other token", "head dim before tokens", "head dim before tokens"),
)
