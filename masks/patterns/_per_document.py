"""Per document: a pattern whose positions restart in each document, so that packed equals separate attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core import (
    CALL,
    EXACT_RUNS,
    And,
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
    Reason,
    parameters,
    pattern_kind,
    sum_phrase,
)
from ._after import count_from
from .run_time._documents import Documents, Lengths, Spans
from .run_time._documents import documents as documents_pattern


@pattern_kind("per_document")
class PerDocument(OnePart):
    """Allowed iff both positions are in one span and `part` allows them counted from the span's start.

    `spans` is a run-time pattern of documents or lengths, and Spans once its values are known.
    """

    spans: Pattern

    @staticmethod
    def of(pattern: Expression, documents: Any) -> Any:
        """See `Expression.per_document`."""
        spans = documents if isinstance(documents, Pattern) else documents_pattern(documents)
        parts = tuple(PerDocument(part, spans) for part in pattern.branches())
        return Mixture(parts) if isinstance(pattern, Mixture) else parts[0]

    def __post_init__(self) -> None:
        if not isinstance(self.spans, Documents | Lengths | Spans):
            raise TypeError(
                f"per_document needs document ids, or a pattern of documents or lengths; got {self.spans!r}"
            )
        super().__post_init__()

    def direct_parts(self) -> tuple[Pattern, ...]:
        return (self.part, self.spans)

    def phrase(self) -> Phrase:
        return self._phrase_of(self.part.phrase())

    def origin(self) -> Pattern:
        return self.spans

    def joint_phrase(self, branches: Sequence[Any], *, grouped: bool = False) -> Phrase | None:
        return None if grouped else self._phrase_of(sum_phrase([each.part for each in branches]))

    def _phrase_of(self, inner: Phrase) -> Phrase:
        return Phrase(f"{inner.inside(CALL)}.per_document({self.spans.phrase().text})")

    def superset(self) -> Pattern:
        # A rule of distances does not depend on the origin.
        return And.of(self.part, self.spans.superset()) if self.part.period() == 1 else self.spans.superset()

    def map_parts(self, change: Callable[[Pattern], Pattern]) -> Any:
        return PerDocument(change(self.part), change(self.spans))

    def check_tokens(self, queries: range, keys: range) -> None:
        spans = self._resolved()
        if spans.known:
            self.part.check_tokens(range(spans.longest), range(spans.longest))

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        inner = self.part.mask_mod(num_heads=num_heads, device=device)
        spans = self._resolved()
        held, step = spans.on(device), spans.batch_step(device)
        (length,) = parameters(device, spans.rows.shape[1])

        def from_start(b, h, q, k):
            starts, row = held.rows, b * step
            q_start, k_start = starts[row, q], starts[row, k + length]  # padding differs between them
            # Count each side from its own start: another document's start could give a negative position.
            allowed = inner(b, h, q - q_start.clamp(min=0), k - k_start.clamp(min=0))
            return (q_start == k_start) & allowed

        return from_start

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        spans = self._resolved()
        first, number = spans.common(box)
        low, high = torch.zeros_like(number), torch.where(number > EXACT_RUNS, box.area, 0)
        for step in range(min(int(number.max()), EXACT_RUNS) if len(number) else 0):
            here = ((step < number) & (number <= EXACT_RUNS)).nonzero().squeeze(1)
            bounds = self._count_within(spans, box.select(here), first[here] + step, num_heads)
            low[here] += bounds.low
            high[here] += bounds.high
        return Bounds(low, high)

    def reason(self, pair: Pair) -> Reason:
        spans = self._resolved()
        together = pair.reason_of(spans)
        if not together.allowed:
            return Reason(self, False, "forbidden across documents", (together,))
        start = spans.start_of(pair, pair.query)
        inner = pair.counted("place", pair.query - start, pair.key - start).reason_of(self.part)
        says = f"counted from {start}, where their document begins, the pair is"
        return Reason(self, inner.allowed, f"{says} {'allowed' if inner.allowed else 'forbidden'}", (together, inner))

    def _count_within(self, spans: Spans, box: Box, span: Counts, num_heads: int) -> Bounds:
        """Bounds on the pairs within one span of each box, counted from its start."""
        start = spans.starts[span]
        sides = (spans.within(side, span) for side in (box.q, box.k))
        return count_from(self.part, box.head, *sides, start=start, num_heads=num_heads)

    def _resolved(self) -> Spans:
        if not isinstance(self.spans, Spans):
            # Raises the usual error of a run-time pattern without values.
            self.spans.mask_mod(num_heads=1, device=torch.device("cpu"))
        assert isinstance(self.spans, Spans)
        return self.spans
