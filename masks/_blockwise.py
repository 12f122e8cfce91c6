"""Blockwise: a pattern over blocks of tokens instead of tokens."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._box import Bounds, Box, Counts, Progression
from ._check import require_int
from ._pattern import MaskMod, Pattern
from ._ranges import Ranges, within
from ._run_time import run_time_leaves
from ._spelling import Phrase, call


@dataclass(frozen=True)
class Blockwise(Pattern):
    """Allowed iff `part` allows the query's block and the key's block: position t lies in block floor(t / block)."""

    part: Pattern
    block: int

    def __post_init__(self) -> None:
        if not isinstance(self.part, Pattern):
            raise TypeError(f"blockwise needs a set pattern; got {self.part!r}")
        if run_time_leaves(self.part):
            raise ValueError(
                f"blockwise needs a pattern without run-time tensors, which go by token; got {self.part!r}"
            )
        require_int("block", self.block, minimum=1)
        super().__post_init__()

    def to_data(self) -> dict[str, Any]:
        return {"kind": "blockwise", "part": self.part.to_data(), "block": self.block}

    def phrase(self) -> Phrase:
        return call("blockwise", self.part, self.block)

    def check_heads(self, num_heads: int) -> None:
        self.part.check_heads(num_heads)

    def check_tokens(self, queries: range, keys: range) -> None:
        self.part.check_tokens(
            *(range(side.start // self.block, -(-side.stop // self.block)) for side in (queries, keys))
        )

    def for_head(self, head: int, num_heads: int) -> Pattern:
        return replace(self, part=self.part.for_head(head, num_heads))

    def period(self) -> int | None:
        shift = self.part.period()
        return None if shift is None else shift * self.block

    def confined(self) -> bool:
        return self.part.confined()

    def row(self, query: int, stop: int) -> Ranges | None:
        blocks = self.part.row(query // self.block, -(-stop // self.block))
        if blocks is None:
            return None
        runs = [run for each in blocks for run in ([each] if each.step == 1 else map(_alone, each))]
        return tuple(within(range(run.start * self.block, run.stop * self.block), 0, stop) for run in runs)

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        inner = self.part.mask_mod(num_heads=num_heads, device=device)
        return _by_block(inner, torch.tensor(self.block, device=device))

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        (q, most_q), (k, most_k) = self._blocks(box.q), self._blocks(box.k)
        blocks = Box(box.head, q, k)
        allowed = self.part.count(blocks, num_heads=num_heads)
        # So many pairs of the box lie in a pair of blocks at most: exactly, where the box ends where blocks do.
        most, area = most_q * most_k, box.area
        forbidden = (blocks.area - allowed.low) * most
        return Bounds((area - forbidden).clamp(min=0), (allowed.high * most).minimum(area))

    def _blocks(self, progression: Progression) -> tuple[Progression, Counts]:
        """The blocks that each progression meets, and how many of its terms one of them holds at most."""
        first, step = progression.first // self.block, progression.step
        if step % self.block == 0:
            return Progression(first, step // self.block, progression.count), torch.ones_like(first)
        number = progression.last // self.block - first + 1
        return Progression(first, 1, number), progression.count.clamp(max=-(-self.block // step))


def blockwise(pattern: Pattern, block: int) -> Pattern:
    """The pattern over blocks of `block` tokens: a pair is allowed where the pattern allows its blocks' numbers.

    All parameters of the pattern count blocks then: `blockwise(local_window(left=1, right=1), 64)` sees the
    query's own block of 64 tokens, the one before and the one after, whole. Raises ValueError for a block below
    1, and for a pattern with run-time tensors, which may be intersected with the result instead.
    """
    return Blockwise(pattern, block)


def _alone(block: int) -> range:
    return range(block, block + 1)


def _by_block(inner: MaskMod, block: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return inner(b, h, q // block, k // block)

    return mask_mod
