"""After: a pattern over the tokens from one position on, for example after a class token or registers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ..core import (
    CALL,
    LARGEST,
    Bounds,
    Box,
    Counts,
    Expression,
    MaskMod,
    Mixture,
    OnePart,
    Pair,
    Pattern,
    Phrase,
    Progression,
    Ranges,
    Reason,
    clip,
    parameters,
    pattern_kind,
    require_int,
    sum_phrase,
)


@pattern_kind("after")
class After(OnePart):
    """Allowed iff both positions are at least `start` and `part` allows them counted from `start`."""

    start: int

    @staticmethod
    def of(pattern: Expression, start: int) -> Any:
        """See `Expression.after`."""
        if require_int("start", start, minimum=0) == 0:
            return pattern
        return Mixture.of(*(_after(part, start) for part in pattern.branches()))

    def __post_init__(self) -> None:
        require_int("start", self.start, minimum=1)
        super().__post_init__()

    def phrase(self) -> Phrase:
        return self._phrase_of(self.part.phrase())

    def origin(self) -> Hashable:
        return "after", self.start

    def joint_phrase(self, branches: Sequence[Any], *, grouped: bool = False) -> Phrase | None:
        return None if grouped else self._phrase_of(sum_phrase([each.part for each in branches]))

    def _phrase_of(self, inner: Phrase) -> Phrase:
        return Phrase(f"{inner.inside(CALL)}.after({self.start})")

    def rates(self) -> tuple[int, ...]:
        return self.part.rates()

    def spacing(self) -> int:
        return self.part.spacing()

    def row(self, query: int, keys: range) -> Ranges | None:
        counted = self._counted(keys)
        if query < self.start or not counted:
            return ()
        found = self.part.row(query - self.start, counted)
        if found is None:
            return None
        return tuple(range(each.start + self.start, each.stop + self.start, each.step) for each in found)

    def check_tokens(self, queries: range, keys: range) -> None:
        self.part.check_tokens(self._counted(queries), self._counted(keys))

    def _counted(self, positions: range) -> range:
        return range(max(0, positions.start - self.start), max(0, positions.stop - self.start))

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        inner = self.part.mask_mod(num_heads=num_heads, device=device)
        (start,) = parameters(device, self.start)

        def from_start(b, h, q, k):
            allowed = inner(b, h, (q - start).clamp(min=0), (k - start).clamp(min=0))
            return (q >= start) & (k >= start) & allowed

        return from_start

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        sides = (clip(side, self.start, LARGEST) for side in (box.q, box.k))
        return count_from(self.part, box.head, *sides, start=self.start, num_heads=num_heads)

    def reason(self, pair: Pair) -> Reason:
        if before := pair.those(lambda position: position < self.start, f"before position {self.start}"):
            return Reason(self, False, before)
        inner = pair.counted("place", pair.query - self.start, pair.key - self.start).reason_of(self.part)
        says = f"counted from {self.start}, the pair is {'allowed' if inner.allowed else 'forbidden'}"
        return Reason(self, inner.allowed, says, (inner,))


def _after(part: Pattern, start: int) -> Pattern:
    return After(part.part, part.start + start) if isinstance(part, After) else After(part, start)


def count_from(
    part: Pattern, head: Counts, q: Progression, k: Progression, *, start: Counts | int, num_heads: int
) -> Bounds:
    """Bounds on the pairs of boxes, some of them empty, of a rule that counts positions from `start`."""
    held = (q.count > 0) & (k.count > 0)
    # `count` needs boxes that are not empty.
    q, k = (Progression((side.first - start).clamp(min=0), side.step, side.count.clamp(min=1)) for side in (q, k))
    bounds = part.count(Box(head, q, k), num_heads=num_heads)
    return Bounds(torch.where(held, bounds.low, 0), torch.where(held, bounds.high, 0))
