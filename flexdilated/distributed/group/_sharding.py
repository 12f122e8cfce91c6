"""Sharding: which rank holds which positions of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import index
from typing import Literal, get_args

import torch
from jaxtyping import Int64
from torch import Tensor

from ...masks.core import Ranges, advises, require_choice, require_int

Order = Literal["contiguous", "zigzag"]
ORDERS: tuple[Order, ...] = get_args(Order)


@advises()
@dataclass(frozen=True)
class Sharding:
    """Assigns each of the positions 0 ... num_tokens - 1 to one of num_ranks ranks.

    A rank's tokens are in ascending order of position: its local token i is the i-th position of `ranges(rank)`.

    order: "contiguous" gives each rank one run, in the order of the ranks. "zigzag" cuts the sequence into 2 *
    num_ranks chunks, and rank r holds the chunks r and 2 * num_ranks - 1 - r. That balances the work of a causal
    pattern: a rank with an early chunk, whose queries have few keys, also has a late one.

    shard_lengths: number of tokens of each rank; may be 0. None: as equal as possible; the first runs (or chunks) have
    one token more. In zigzag order a rank's two chunks are halves of its shard; of an odd number the first half has one
    token more. After construction the field always holds the lengths, so two shardings are equal if they have one order
    and assign equal positions to all ranks.

    >>> fd.distributed.Sharding(10, 4, 'zigzag')
    Sharding(num_tokens=10, num_ranks=4, order='zigzag', shard_lengths=(3, 3, 2, 2))
    """

    num_tokens: int
    num_ranks: int
    order: Order = "contiguous"
    shard_lengths: Sequence[int] | None = None
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_int("num_tokens", self.num_tokens, minimum=1)
        require_int("num_ranks", self.num_ranks, minimum=1)
        require_choice("order", self.order, ORDERS)
        lengths = self._equal_lengths() if self.shard_lengths is None else self._checked_lengths(self.shard_lengths)
        object.__setattr__(self, "shard_lengths", lengths)
        object.__setattr__(self, "_starts", tuple(accumulate(self._chunk_lengths(), initial=0)))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Sharding:
        """The inverse of `numbers`."""
        num_tokens, order, *lengths = map(int, numbers)
        return cls(num_tokens, len(lengths), ORDERS[order], lengths)

    def numbers(self) -> tuple[int, ...]:
        """All fields as integers, for a custom op; `of` reads them."""
        return (index(self.num_tokens), ORDERS.index(self.order), *[index(length) for length in self.lengths])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        assert isinstance(self.shard_lengths, tuple)
        return self.shard_lengths

    def length(self, rank: int) -> int:
        """Number of tokens of this rank."""
        return self.lengths[self._checked(rank)]

    def ranges(self, rank: int) -> Ranges:
        """Positions of this rank: one or two ascending runs, or () for no tokens."""
        chunks = [self._chunk(self._checked(rank))]
        if self.order == "zigzag":
            chunks.append(self._chunk(2 * self.num_ranks - 1 - rank))
            if chunks[0].stop == chunks[1].start:
                chunks = [range(chunks[0].start, chunks[1].stop)]
        return tuple(chunk for chunk in chunks if chunk)

    def positions(self, rank: int, device: torch.device | str | None = None) -> Int64[Tensor, " L"]:
        """Position of each of this rank's tokens, as rotary embeddings need them."""
        runs = [torch.arange(run.start, run.stop, device=device) for run in self.ranges(rank)]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)

    def _chunk(self, index: int) -> range:
        return range(self._starts[index], self._starts[index + 1])

    def _chunk_lengths(self) -> tuple[int, ...]:
        if self.order == "contiguous":
            return self.lengths
        return (*((length + 1) // 2 for length in self.lengths), *(length // 2 for length in reversed(self.lengths)))

    def _equal_lengths(self) -> tuple[int, ...]:
        ranks = range(self.num_ranks)
        if self.order == "contiguous":
            each, longer = divmod(self.num_tokens, self.num_ranks)
            return tuple(each + (rank < longer) for rank in ranks)
        each, longer = divmod(self.num_tokens, 2 * self.num_ranks)
        return tuple(2 * each + (rank < longer) + (2 * self.num_ranks - 1 - rank < longer) for rank in ranks)

    def _checked_lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        if isinstance(lengths, str) or not isinstance(lengths, Sequence):
            raise TypeError(f"shard_lengths must be a sequence of integers or None; got {type(lengths).__name__}")
        if len(lengths) != self.num_ranks:
            raise ValueError(
                f"shard_lengths needs one entry a rank; got {len(lengths)} entries and num_ranks={self.num_ranks}"
            )
        held = tuple(require_int(f"shard_lengths[{rank}]", length, minimum=0) for rank, length in enumerate(lengths))
        if sum(held) != self.num_tokens:
            raise ValueError(
                f"shard_lengths must add up to the tokens of the sequence; got a sum of {sum(held)} "
                f"and num_tokens={self.num_tokens}"
            )
        return held

    def _checked(self, rank: int) -> int:
        return require_int("rank", rank, minimum=0, maximum=self.num_ranks - 1)
