"""After: a pattern over the tokens from one position on, as behind a class token or registers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
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
from .run_time._run_time import run_time_leaves


@pattern_kind("after")
class After(Pattern):
    """Allowed iff neither position lies before `start` and `part` allows them counted from there."""

    part: Pattern
    start: int

    @staticmethod
    def of(pattern: Expression, start: int) -> Any:
        """See `Expression.after`."""
        if require_int("start", start, minimum=0) == 0:
            return pattern
        return Mixture.of(*(_after(part, start) for part in pattern.branches()))

    def __post_init__(self) -> None:
        if not isinstance(self.part, Pattern):
            raise TypeError(f"after needs a set pattern; got {self.part!r}")
        require_int("start", self.start, minimum=1)
        if run_time_leaves(self.part):
            raise ValueError(
                f"after counts positions from {self.start} on, where a run-time tensor inside has no meaning: "
                f"intersect with it outside, p.after({self.start}) & it; got {self.part!r}"
            )
        super().__post_init__()

    def direct_parts(self) -> tuple[Pattern, ...]:
        return (self.part,)

    def map_parts(self, change: Callable[[Pattern], Pattern]) -> Any:
        return replace(self, part=change(self.part))

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
        counted = range(max(0, keys.start - self.start), max(0, keys.stop - self.start))
        if query < self.start or not counted:
            return ()
        found = self.part.row(query - self.start, counted)
        shift = self.start
        return (
            None if found is None else tuple(range(each.start + shift, each.stop + shift, each.step) for each in found)
        )

    def check_tokens(self, queries: range, keys: range) -> None:
        counted = (range(max(0, each.start - self.start), max(0, each.stop - self.start)) for each in (queries, keys))
        self.part.check_tokens(*counted)

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
        inner = self.part.reason(pair.counted("place", pair.query - self.start, pair.key - self.start))
        says = f"counted from {self.start}, the pair is {'allowed' if inner.allowed else 'forbidden'}"
        return Reason(self, inner.allowed, says, (inner,))


def _after(part: Pattern, start: int) -> Pattern:
    return After(part.part, part.start + start) if isinstance(part, After) else After(part, start)


def count_from(
    part: Pattern, head: Counts, q: Progression, k: Progression, *, start: Counts | int, num_heads: int
) -> Bounds:
    """Bounds on the pairs of boxes, some of them empty, of a rule that is counted from `start` on."""
    held = (q.count > 0) & (k.count > 0)
    # A part's bounds hold for boxes that are not empty.
    q, k = (Progression((side.first - start).clamp(min=0), side.step, side.count.clamp(min=1)) for side in (q, k))
    bounds = part.count(Box(head, q, k), num_heads=num_heads)
    return Bounds(torch.where(held, bounds.low, 0), torch.where(held, bounds.high, 0))
