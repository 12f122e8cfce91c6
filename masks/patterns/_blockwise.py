"""Blockwise: a pattern over blocks of tokens instead of tokens."""

from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import Any

import torch

from ..core import (
    LARGEST,
    Bounds,
    Box,
    Counts,
    MaskMod,
    OnePart,
    Pair,
    Pattern,
    Progression,
    Ranges,
    Reason,
    among,
    constructor,
    parameters,
    pattern_kind,
    require_int,
)


@pattern_kind("blockwise", positional=2)
class Blockwise(OnePart):
    """Allowed iff `part` allows the query's block and the key's block: position t is in block floor(t / block)."""

    block: int

    def __post_init__(self) -> None:
        require_int("block", self.block, minimum=1)
        super().__post_init__()

    def leaves(self) -> tuple[Pattern, ...]:
        return (self,)  # its part counts blocks, and callers of `leaves` count tokens

    def map_leaves(self, change: Callable[[Pattern], Pattern]) -> Any:
        return change(self)

    def check_tokens(self, queries: range, keys: range) -> None:
        self.part.check_tokens(
            *(range(side.start // self.block, -(-side.stop // self.block)) for side in (queries, keys))
        )

    def snapped(self, q_side: int, k_side: int) -> Pattern:
        """Round the block up to a multiple of both sides."""
        whole = lcm(q_side, k_side)
        return replace(self, block=-(-self.block // whole) * whole)

    def period(self) -> int | None:
        shift = self.part.period()
        # A longer period exceeds every sequence.
        return None if shift is None or shift * self.block > LARGEST else shift * self.block

    def confined(self) -> bool:
        return self.part.confined()

    def row(self, query: int, keys: range) -> Ranges | None:
        blocks = self.part.row(query // self.block, range(keys.start // self.block, -(-keys.stop // self.block)))
        return None if blocks is None else among((each for run in blocks for each in _tokens(run, self.block)), keys)

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        inner = self.part.mask_mod(num_heads=num_heads, device=device)
        (block,) = parameters(device, self.block)
        return lambda b, h, q, k: inner(b, h, q // block, k // block)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        low, high = torch.zeros_like(box.area), torch.zeros_like(box.area)
        runs = [_runs(side, self.block) for side in (box.q, box.k)]
        if not all(runs):
            return self._count_coarsely(box, num_heads)
        for q, each_q in runs[0]:
            for k, each_k in runs[1]:
                each = each_q * each_k
                held = each.nonzero().squeeze(1)
                if not len(held):
                    continue
                part = self.part.count(Box(box.head, q, k).select(held), num_heads=num_heads)
                low[held] += part.low * each[held]
                high[held] += part.high * each[held]
        return Bounds(low, high)

    def reason(self, pair: Pair) -> Reason:
        row, column = pair.query // self.block, pair.key // self.block
        inner = pair.counted("block", row, column).reason_of(self.part)
        where = f"{pair.the_query} is in block {row} of {self.block}, {pair.the_key} in block {column}"
        return Reason(self, inner.allowed, where, (inner,))

    def _count_coarsely(self, box: Box, num_heads: int) -> Bounds:
        """Bounds on the allowed pairs of a box, without enumerating its blocks.

        Every block between the ends of the box counts, each block pair with the most pairs of the box that it can have.
        """
        sides = [_span(side, self.block) for side in (box.q, box.k)]
        blocks, area = Box(box.head, *sides), box.area
        most = torch.ones_like(area)
        for side in (box.q, box.k):
            most = most * side.count.clamp(max=-(-self.block // side.step))
        allowed = self.part.count(blocks, num_heads=num_heads)
        forbidden = (blocks.area - allowed.low) * most
        return Bounds((area - forbidden).clamp(min=0), (allowed.high * most).minimum(area))


@constructor
def blockwise(pattern: Pattern, block: int) -> Pattern:
    """The pattern over blocks of `block` tokens: a pair is allowed where the pattern allows its blocks' numbers.

    All parameters of the pattern then count blocks: with `blockwise(local_window(left=1, right=1), 64)` a query sees
    all of its block of 64 tokens, the previous one and the next one. Raises ValueError for a block below
    1, and for a pattern with run-time tensors, which may be intersected with the result instead.

    >>> masks.describe(masks.blockwise(masks.causal(), 64), 128).useful_pairs  # 3 blocks of 64 x 64
    12288
    """
    return Blockwise(pattern, block)


def _runs(terms: Progression, block: int) -> list[tuple[Progression, Counts]]:
    """Blocks of each progression as runs, with the number of terms in each block of a run.

    Where that number is 0, the blocks of a run have no meaning. No runs unless the step divides the block or is a
    multiple of it: consecutive blocks would hold different numbers of terms.
    """
    if terms.step % block == 0:
        blocks = Progression(terms.first // block, terms.step // block, terms.count)
        return [(blocks, torch.ones_like(terms.count))]
    if block % terms.step:
        return []
    span, full = _span(terms, block), torch.full_like(terms.count, block // terms.step)
    in_first = terms.count.minimum((block - 1 - terms.first % block) // terms.step + 1)
    in_last = torch.where(span.count > 1, terms.last % block // terms.step + 1, in_first)
    # Most boxes begin and end at block boundaries and are one run. Partial first and last blocks are separate runs.
    cut_first, cut_last = in_first < full, (in_last < full) & (span.count > 1)
    number = span.count - cut_first.long() - cut_last.long()
    whole = Progression(span.first + cut_first, 1, number.clamp(min=1))
    one = torch.ones_like(number)
    return [
        (whole, torch.where(number > 0, full, 0)),
        (Progression(span.first, 1, one), torch.where(cut_first, in_first, 0)),
        (Progression(span.last, 1, one), torch.where(cut_last, in_last, 0)),
    ]


def _span(terms: Progression, block: int) -> Progression:
    """All blocks from the first term's to the last term's."""
    first = terms.first // block
    return Progression(first, 1, terms.last // block - first + 1)


def _tokens(blocks: range, block: int) -> list[range]:
    """Tokens of these blocks, in as few ranges as possible."""
    if blocks.step == 1:
        return [range(blocks.start * block, blocks.stop * block)]
    if len(blocks) <= block:
        return [range(each * block, (each + 1) * block) for each in blocks]
    return [range(blocks.start * block + at, blocks.stop * block, blocks.step * block) for at in range(block)]
