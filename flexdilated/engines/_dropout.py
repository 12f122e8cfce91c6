"""Attention dropout: a pair is kept or dropped by a hash of a seed, branch, batch entry, head and positions.

The dropped pairs therefore depend on no engine, layout or chunk, and a backward finds them again without a stored mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int32, Shaped
from torch import Tensor

from ._score_mod import ScoreMod

# Multipliers of the 32-bit hash "lowbias32", https://nullprogram.com/blog/2018/07/31/, as signed integers.
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = 0x7FEB352D, 0x846CA68B - (1 << 32)
_BRANCH_STEP = 0x9E3779B9  # 2^32 over the golden ratio


class Dropout(NamedTuple):
    """Dropout of attention weights with probability p; a kept weight is multiplied by 1 / (1 - p).

    seed: two random 32-bit numbers, on the device of q.
    """

    p: float
    seed: Int32[Tensor, "2"]

    @classmethod
    def drawn(cls, p: float, device: torch.device) -> Dropout:
        """Return a Dropout with a random seed from torch's default generator of the device."""
        return cls(p, torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, device=device))

    def kept(self, place: int, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        """Return a mask, True for each pair that dropout keeps in one branch of the pattern.

        place: index of the branch.
        b, h, q, k: batch entry, global head, and positions of query and key, of any shapes that broadcast; the result
            has the broadcast shape.
        """
        # The numbers of a row and of a key are hashed well; of a pair, of which there are many more, in few operations.
        row = _hash(self.seed[0] + _as_int32(place * _BRANCH_STEP))
        for x in (b, h, q):
            row = _hash(row ^ x.to(torch.int32))
        # Odd factors are invertible modulo 2^32: no row or key maps all its pairs to one number.
        pair = (row | 1) * (_hash(self.seed[1] ^ k.to(torch.int32)) | 1)
        pair = (pair ^ _shift_right(pair, 15)) * _SECOND_MULTIPLIER
        # Uniform signed 32-bit numbers are below -2^31 + p * 2^32 with probability p.
        return pair >= round(self.p * (1 << 32)) - (1 << 31)

    def kept_counter(self, places: tuple[int, ...]) -> ScoreMod:
        """Return a function of (score, b, h, q, k) that counts the branches in which dropout keeps the pair.

        places: indices of the branches.

        The count is int32, or bool for a single branch. The function ignores the score.
        """

        def num_kept(score, b, h, q, k):
            kept = [self.kept(place, b, h, q, k) for place in places]
            return kept[0] if len(kept) == 1 else torch.stack(kept).sum(0, dtype=torch.int32)

        return num_kept

    def dropping_score_mod(self, places: tuple[int, ...], score_mod: ScoreMod | None) -> ScoreMod:
        """Return a score_mod that applies score_mod and dropout to n equal branches, computed as one.

        If dropout keeps a pair in m of the n branches, log(m / n) is added to score_mod(score), or to the score if
        score_mod is None; if m is 0, the score becomes -inf. The factor 1 / (1 - p) is left to the caller.

        places: indices of the n branches.
        """
        num_kept = self.kept_counter(places)

        def new_score(score, b, h, q, k):
            kept = num_kept(score, b, h, q, k)
            score = score if score_mod is None else score_mod(score, b, h, q, k)
            if len(places) > 1:
                score = score + (kept.to(score.dtype) / len(places)).clamp(min=1 / len(places)).log()
            return torch.where(kept > 0, score, -torch.inf)

        return new_score


def with_seed(tensors: Sequence[Tensor], dropout: Dropout | None) -> tuple[list[Tensor], float]:
    """Return (tensors, p), arguments of a custom op: with dropout, the last tensor is its seed, and p its probability.

    Without dropout the tensors are unchanged, and p is 0.
    """
    return ([*tensors], 0.0) if dropout is None else ([*tensors, dropout.seed], dropout.p)


def without_seed(tensors: Sequence[Tensor], p: float) -> tuple[list[Tensor], Dropout | None]:
    """Return (tensors without the seed, dropout or None), from the results of `with_seed`."""
    return ([*tensors], None) if not p else ([*tensors[:-1]], Dropout(p, tensors[-1]))


def _hash(x: Int32[Tensor, "..."]) -> Int32[Tensor, "..."]:
    x = (x ^ _shift_right(x, 16)) * _FIRST_MULTIPLIER
    x = (x ^ _shift_right(x, 15)) * _SECOND_MULTIPLIER
    return x ^ _shift_right(x, 16)


def _as_int32(number: int) -> int:
    """Return the signed 32-bit integer that is congruent to the number modulo 2^32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _shift_right(x: Shaped[Tensor, "..."], by: int) -> Shaped[Tensor, "..."]:
    """Return 32-bit integers with their bits shifted to the right, filled with zeros also for negative numbers."""
    return (x >> by) & ((1 << (32 - by)) - 1)
