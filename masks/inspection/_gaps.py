"""Gaps: queries without a key, and keys that no query sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ._relations import Relations


@dataclass(frozen=True)
class Gap:
    """Tokens of one side without a pair: in every head, in at least one head, and the first such token of each."""

    in_every_head: int
    in_some_head: int
    first_in_every_head: int | None
    first_in_some_head: int | None


@dataclass(frozen=True)
class Gaps:
    """Queries without any key, whose output is 0, and keys that no query sees; tokens by their index."""

    queries: Gap
    keys: Gap


def gaps_of(relations: Relations) -> Gaps:
    """Raises TooManySquaresError where a pattern repeats too little."""
    sizes = relations.bound.num_queries, relations.bound.num_keys
    # The tokens of each side that have a pair in any head, and in every head.
    in_any, in_all = ([torch.zeros(size, dtype=torch.bool) for size in sizes] for _ in range(2))
    for section in relations.sections:
        lines = [relations.lines(section, group) for group in section.groups]
        for side, held in enumerate(zip(*lines, strict=True)):
            starts = torch.tensor([copy[side] for copy in section.copies])[:, None]
            in_any[side][(starts + _places(reduce(int.__or__, held))).flatten()] = True
            in_all[side][(starts + _places(reduce(int.__and__, held))).flatten()] = True
    return Gaps(*(_gap(*each) for each in zip(in_any, in_all, strict=True)))


def _places(bits: int) -> Int64[Tensor, " n"]:
    """The places of the bits that are set, from the lowest on."""
    held = torch.frombuffer(bytearray(bits.to_bytes(bits.bit_length() // 8 + 1, "little")), dtype=torch.uint8)
    return (held[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().nonzero().squeeze(1)


def _gap(in_any: Bool[Tensor, " N"], in_all: Bool[Tensor, " N"]) -> Gap:
    lacking = [(~held).nonzero().squeeze(1) for held in (in_any, in_all)]
    firsts = [int(tokens[0]) if len(tokens) else None for tokens in lacking]
    return Gap(len(lacking[0]), len(lacking[1]), *firsts)
