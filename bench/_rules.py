"""The rules that are measured, written a second time from the paper: LongNet, arXiv 2307.02486.

Output, gradients and counts of pairs are held against what is written here.
"""

from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from operator import or_
from typing import Protocol

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

import flexdilated as fd
from flexdilated import masks

from ._jobs import Attention

# H heads, N tokens, R sampled query rows; the batch is 1

FORWARD_FLOPS = 4  # a useful pair, times the head dim: one multiply-add in q.k and one in p.v


def attention_by(pattern: masks.Pattern | masks.Mixture) -> Attention:
    """The library's attention with a pattern."""
    return lambda q, k, v: fd.attend(q, k, v, pattern)


class Rule(Protocol):
    """Who attends to whom, written here rather than in the library."""

    def masks(self, rows: Int64[Tensor, " R"], *, num_tokens: int, num_heads: int) -> list[Bool[Tensor, "H R N"]]:
        """The pairs of the sampled query rows that each branch allows."""
        ...


@dataclass(frozen=True)
class LongNet:
    """Segment lengths and dilation rates, one each a branch; head h starts at h mod rate."""

    name: str
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, {'causal' if self.causal else 'full'}"

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def pattern(self) -> masks.Pattern | masks.Mixture:
        branches = masks.longnet(segment_lengths=self.segment_lengths, dilation_rates=self.dilation_rates)
        return branches & masks.causal() if self.causal else branches

    def attention(self) -> Attention:
        return attention_by(self.pattern())

    def as_causal(self) -> "LongNet":
        return replace(self, causal=True)

    def shrunk(self, factor: int) -> "LongNet":
        """Every segment length divided by `factor`."""
        lengths = tuple(length // factor for length in self.segment_lengths)
        return replace(self, name=f"{self.name} / {factor}", segment_lengths=lengths)

    def pairs(self, *, num_tokens: int, num_heads: int) -> int:
        """Useful (query, key) pairs of all heads, each counted once for every branch that allows it."""
        total = 0
        for (length, rate), head in product(self.branches, range(num_heads)):
            for segment, times in ((length, num_tokens // length), (num_tokens % length, 1)):
                active = max(0, -(-(segment - head % rate) // rate))
                total += times * (active * (active + 1) // 2 if self.causal else active * active)
        return total

    def masks(self, rows: Int64[Tensor, " R"], *, num_tokens: int, num_heads: int) -> list[Bool[Tensor, "H R N"]]:
        h = torch.arange(num_heads, device=rows.device)[:, None, None]
        q, k = rows[None, :, None], torch.arange(num_tokens, device=rows.device)[None, None, :]
        allowed = [same_branch(h, q, k, length=length, rate=rate) for length, rate in self.branches]
        return [mask & (k <= q) for mask in allowed] if self.causal else allowed


@dataclass(frozen=True)
class Union:
    """The branches of a LongNet as a set: a pair that several of them allow counts once."""

    spec: LongNet

    def attention(self) -> Attention:
        return attention_by(reduce(or_, self.spec.pattern().branches()))

    def masks(self, rows: Int64[Tensor, " R"], *, num_tokens: int, num_heads: int) -> list[Bool[Tensor, "H R N"]]:
        return [reduce(or_, self.spec.masks(rows, num_tokens=num_tokens, num_heads=num_heads))]


@dataclass(frozen=True)
class LibraryRule:
    """A pattern's own rule, pair by pair: for patterns that are written nowhere else."""

    pattern: masks.Pattern | masks.Mixture

    def masks(self, rows: Int64[Tensor, " R"], *, num_tokens: int, num_heads: int) -> list[Bool[Tensor, "H R N"]]:
        h, q, k = torch.arange(num_heads)[:, None, None], rows[None, :, None], torch.arange(num_tokens)[None, None]
        sizes = {"num_heads": num_heads, "num_queries": num_tokens, "num_keys": num_tokens}
        rules = [branch.bind(**sizes).mask_mod() for branch in self.pattern.branches()]
        return [rule(torch.tensor(0), h, q, k).expand(num_heads, len(rows), num_tokens) for rule in rules]


@dataclass(frozen=True)
class Window:
    """Each block of tokens sees `left` blocks before and `right` after its own; a block of 1 is a token."""

    label: str
    left: int
    right: int
    block: int = 1

    @property
    def causal(self) -> bool:
        return self.right == 0 and self.block == 1

    def pattern(self) -> masks.Pattern:
        window = masks.local_window(left=self.left, right=self.right)
        return window if self.block == 1 else masks.blockwise(window, self.block)

    def attention(self) -> Attention:
        return attention_by(self.pattern())

    def masks(self, rows: Int64[Tensor, " R"], *, num_tokens: int, num_heads: int) -> list[Bool[Tensor, "H R N"]]:
        keys = torch.arange(num_tokens, device=rows.device) // self.block
        queries = (rows // self.block)[:, None]
        allowed = (keys >= queries - self.left) & (keys <= queries + self.right)
        return [allowed.expand(num_heads, -1, -1)]

    def pairs(self, *, num_tokens: int, num_heads: int) -> int:
        """Pairs of all heads; num_tokens is a multiple of the block."""
        blocks = num_tokens // self.block
        lists = sum(min(block + self.right, blocks - 1) - max(block - self.left, 0) + 1 for block in range(blocks))
        return num_heads * lists * self.block**2


def same_branch(h: Tensor, q: Tensor, k: Tensor, *, length: int, rate: int) -> Bool[Tensor, "..."]:
    """Both positions active for the head, in one segment: eqs. 3 to 6 with the head offset of eq. 13."""
    offset = h % rate
    active = (q % length % rate == offset) & (k % length % rate == offset)
    return active & (q // length == k // length)


def dense(num_tokens: int, *, causal: bool) -> LongNet:
    """Dense attention is one branch whose segment is the sequence."""
    return LongNet("dense", (num_tokens,), (1,), causal)


def longnet_n(num_tokens: int) -> LongNet:
    """LongNet-N: segments that double from 2048 to the sequence, each with 2048 active tokens."""
    lengths = [2048]
    while lengths[-1] < num_tokens:
        lengths.append(2 * lengths[-1])
    return LongNet("LongNet-N", tuple(lengths), tuple(length // 2048 for length in lengths))


LONGNET_4 = LongNet("LongNet-4", (2048, 4096, 8192, 16384), (1, 2, 4, 8))
LONGNET_5 = LongNet("LongNet-5", (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
PAPER_5 = LongNet("paper-5", (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
GIGAPATH_5 = LongNet("GigaPath-5", (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16))
