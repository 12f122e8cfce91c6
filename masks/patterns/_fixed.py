"""Fixed: every query sees the last few keys of each block of tokens, its summary."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core._box import Bounds, Box, Counts
from ..core._check import require_int
from ..core._pattern import MaskMod, Pattern
from ..core._ranges import Ranges, among
from ..core._reason import Pair, Reason, span
from ..core._spelling import Phrase, call


@dataclass(frozen=True)
class Fixed(Pattern):
    """Allowed iff the key is one of the last `summary` of its block: key mod stride >= stride - summary."""

    stride: int
    summary: int

    def __post_init__(self) -> None:
        require_int("stride", self.stride, minimum=1)
        if require_int("summary", self.summary, minimum=1) > self.stride:
            raise ValueError(f"summary must not exceed the stride; got summary={self.summary}, stride={self.stride}")
        super().__post_init__()

    def to_data(self) -> dict[str, Any]:
        return {"kind": "fixed", "stride": self.stride, "summary": self.summary}

    def phrase(self) -> Phrase:
        return call("fixed", self.stride, **({"summary": self.summary} if self.summary > 1 else {}))

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        first = torch.tensor(self.stride - self.summary, device=device)
        return _ends_block(torch.tensor(self.stride, device=device), first)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        # A key is of a summary where `summary` steps further lead into the next block.
        step, number, first = box.k.step, box.k.count, box.k.first
        blocks = sum_of_quotients(number, step, first, self.stride)
        keys = sum_of_quotients(number, step, first + self.summary, self.stride) - blocks
        return Bounds(box.q.count * keys, box.q.count * keys)

    def reason(self, pair: Pair) -> Reason:
        stop = pair.key - pair.key % self.stride + self.stride
        summary = f"the summary of its block of {self.stride} is {span(stop - self.summary, stop)}"
        allowed = pair.key >= stop - self.summary
        return Reason(self, allowed, f"{pair.the_key} is {'in' if allowed else 'not in'} a summary: {summary}")

    def period(self) -> int:
        return self.stride

    def rates(self) -> tuple[int, ...]:
        # In residue-major order of this rate the summaries of all blocks stand side by side.
        return (self.stride,)

    def row(self, query: int, keys: range) -> Ranges:
        first = self.stride - self.summary
        blocks = range(keys.start // self.stride * self.stride, keys.stop, self.stride)
        if self.summary <= len(blocks):  # as few ranges as there may be
            ranges = [range(blocks.start + at, keys.stop, self.stride) for at in range(first, self.stride)]
        else:
            ranges = [range(block + first, block + self.stride) for block in blocks]
        return among(ranges, keys)


def fixed(stride: int, *, summary: int = 1) -> Pattern:
    """Each query sees the last `summary` keys of every block of `stride` tokens, before it and after.

    With the query's own block this is the fixed form of the Sparse Transformer (arXiv 1904.10509):
    `(chunked(stride) | fixed(stride)) & causal()`. Raises ValueError for values below 1 and for a summary
    longer than the stride.
    """
    return Fixed(stride, summary)


def sum_of_quotients(number: Counts, step: int, first: Counts, modulus: int) -> Counts:
    """The sum of floor((first + step * i) / modulus) over i < number, for first >= 0; by Euclid's steps."""
    total = torch.zeros_like(first)
    while True:
        total += number * (number - 1) // 2 * (step // modulus) + number * (first // modulus)
        step, first = step % modulus, first % modulus
        if step == 0:
            return total
        # Count the same lattice points along the other axis, where fewer are left.
        top = first + step * number
        number, first, step, modulus = top // modulus, top % modulus, modulus, step


def _ends_block(stride: Tensor, first: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return (k % stride >= first) & (q == q)

    return mask_mod
