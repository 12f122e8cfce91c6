"""Patterns that renumber positions for an inner pattern, or limit them: a span, each document, blocks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch

from ..core import (
    CALL,
    EXACT_RUNS,
    LARGEST,
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
    Progression,
    Ranges,
    Reason,
    among,
    at_least,
    clip,
    constructor,
    parameters,
    pattern_kind,
    require_int,
    sum_phrase,
)
from ._run_time import RunTime, missing
from ._token_values import Documents, Lengths, Spans, common_runs
from ._token_values import documents as documents_pattern


@dataclass(frozen=True)
class _MethodPattern(OnePart):
    """Base of patterns that limit `part` to some positions or renumber them, and print as a method call: `p.after(4)`.

    Adjacent branches of a mixture with equal arguments of this call print as one call on a sum: `(p + q).after(4)`.
    """

    def method(self) -> str:
        raise NotImplementedError

    def phrase(self) -> Phrase:
        return self._call_phrase(self.part.phrase())

    def joint_phrase(self, branches: Sequence[Any], *, grouped: bool = False) -> Phrase | None:
        return None if grouped else self._call_phrase(sum_phrase([each.part for each in branches]))

    def _call_phrase(self, inner: Phrase) -> Phrase:
        return Phrase(f"{inner.inside(CALL)}.{self.method()}")

    def _reason_from(self, start: int, pair: Pair, where: str = "") -> tuple[bool, str, Reason]:
        """Return (allowed, text, reason of `part`) for the pair with positions counted from `start`.

        allowed: True if `part` allows this pair; the text states it.
        where: words that follow `start` in the text.
        """
        inner = pair.counted("place", pair.query - start, pair.key - start).reason_of(self.part)
        verdict = "allowed" if inner.allowed else "forbidden"
        return inner.allowed, f"counted from {start}{where}, the pair is {verdict}", inner

    def _count_from(self, start: Counts | int, head: Counts, q: Progression, k: Progression, num_heads: int) -> Bounds:
        """Return bounds on the pairs that `part` allows in each box, with positions counted from `start`.

        start: one number for all boxes, or one for each.
        head, q, k: the boxes, as in `Box`. An empty box gives 0; positions in other boxes are at least `start`.
        num_heads: number of global heads.
        """
        held = (q.count > 0) & (k.count > 0)
        # `count` needs boxes that are not empty.
        q, k = (Progression((side.first - start).clamp(min=0), side.step, side.count.clamp(min=1)) for side in (q, k))
        bounds = self.part.count(Box(head, q, k), num_heads=num_heads)
        return Bounds(torch.where(held, bounds.low, 0), torch.where(held, bounds.high, 0))


@pattern_kind("after")
class After(_MethodPattern):
    """Pattern that allows a pair iff both positions are >= `start` and `part` allows (query - start, key - start)."""

    start: int = at_least(1)

    @staticmethod
    def of(pattern: Expression, start: int) -> Any:
        if require_int("start", start, minimum=0) == 0:
            return pattern
        return Mixture.of(
            *(
                After(part.part, part.start + start) if isinstance(part, After) else After(part, start)
                for part in pattern.branches()
            )
        )

    def method(self) -> str:
        return f"after({self.start})"

    def origin(self) -> Hashable:
        return "after", self.start

    def rates(self) -> tuple[int, ...]:
        return self.part.rates()

    def spacing(self) -> int:
        return self.part.spacing()

    def row(self, query: int, keys: range) -> Ranges | None:
        counted = self._renumbered_range(keys)
        if query < self.start or not counted:
            return ()
        found = self.part.row(query - self.start, counted)
        if found is None:
            return None
        return tuple(range(each.start + self.start, each.stop + self.start, each.step) for each in found)

    def check_tokens(self, queries: range, keys: range) -> None:
        self.part.check_tokens(self._renumbered_range(queries), self._renumbered_range(keys))

    def _renumbered_range(self, positions: range) -> range:
        return range(max(0, positions.start - self.start), max(0, positions.stop - self.start))

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        inner = self.part.mask_mod(num_heads=num_heads, device=device)
        (start,) = parameters(device, self.start)

        def from_start(b, h, q, k):
            allowed = inner(b, h, (q - start).clamp(min=0), (k - start).clamp(min=0))
            return (q >= start) & (k >= start) & allowed

        return from_start

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        q, k = (clip(side, self.start, LARGEST) for side in (box.q, box.k))
        return self._count_from(self.start, box.head, q, k, num_heads)

    def reason(self, pair: Pair) -> Reason:
        if before := pair.those(lambda position: position < self.start, f"before position {self.start}"):
            return Reason(self, False, before)
        allowed, text, inner = self._reason_from(self.start, pair)
        return Reason(self, allowed, text, (inner,))


@pattern_kind("before")
class Before(_MethodPattern):
    """Pattern that allows a pair iff both positions are below `stop` and `part` allows the pair."""

    stop: int = at_least(1)

    @staticmethod
    def of(pattern: Expression, stop: int) -> Any:
        require_int("stop", stop, minimum=1)
        return Mixture.of(
            *(
                Before(part.part, min(part.stop, stop)) if isinstance(part, Before) else Before(part, stop)
                for part in pattern.branches()
            )
        )

    def method(self) -> str:
        return f"before({self.stop})"

    def origin(self) -> Hashable:
        return "before", self.stop

    def rates(self) -> tuple[int, ...]:
        return self.part.rates()

    def spacing(self) -> int:
        return self.part.spacing()

    def row(self, query: int, keys: range) -> Ranges | None:
        keys = self._limited(keys)
        return self.part.row(query, keys) if query < self.stop and keys else ()

    def check_tokens(self, queries: range, keys: range) -> None:
        self.part.check_tokens(self._limited(queries), self._limited(keys))

    def _limited(self, positions: range) -> range:
        return range(min(positions.start, self.stop), min(positions.stop, self.stop))

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        inner = self.part.mask_mod(num_heads=num_heads, device=device)
        stop, last = parameters(device, self.stop, self.stop - 1)

        def before_stop(b, h, q, k):
            # `part` may read tables that end at `stop`.
            return (q < stop) & (k < stop) & inner(b, h, torch.minimum(q, last), torch.minimum(k, last))

        return before_stop

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        q, k = (clip(side, 0, self.stop) for side in (box.q, box.k))
        return self._count_from(0, box.head, q, k, num_heads)

    def reason(self, pair: Pair) -> Reason:
        if beyond := pair.those(lambda position: position >= self.stop, f"at position {self.stop} or later"):
            return Reason(self, False, beyond)
        inner = pair.reason_of(self.part)
        verdict = "allowed" if inner.allowed else "forbidden"
        return Reason(self, inner.allowed, f"before position {self.stop}, the pair is {verdict}", (inner,))


@pattern_kind("per_document")
class PerDocument(_MethodPattern):
    """Pattern that allows a pair iff both positions are in one document and `part` allows their places in the document.

    `spans` gives the documents: a `Documents` or `Lengths` pattern, or a `Spans` table once tensor values are known.
    """

    spans: Pattern

    @staticmethod
    def of(pattern: Expression, documents: Any) -> Any:
        spans = documents if isinstance(documents, Pattern) else documents_pattern(documents)
        parts = tuple(PerDocument(part, spans) for part in pattern.branches())
        return Mixture(parts) if isinstance(pattern, Mixture) else parts[0]

    def check(self) -> None:
        if not isinstance(self.spans, Documents | Lengths | Spans):
            raise TypeError(
                f"per_document needs document ids, or a pattern of documents or lengths; got {self.spans!r}"
            )
        super().check()

    def direct_parts(self) -> tuple[Pattern, ...]:
        return (self.part, self.spans)

    def method(self) -> str:
        return f"per_document({self.spans.phrase().text})"

    def origin(self) -> Pattern:
        return self.spans

    def superset(self) -> Pattern:
        # A rule of distances does not depend on the origin.
        return And.of(self.part, self.spans.superset()) if self.part.period() == 1 else self.spans.superset()

    def map_parts(self, change: Callable[[Pattern], Pattern]) -> Any:
        return PerDocument(change(self.part), change(self.spans))

    def check_tokens(self, queries: range, keys: range) -> None:
        spans = self._require_spans()
        if spans.known:
            self.part.check_tokens(range(spans.longest), range(spans.longest))

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        inner = self.part.mask_mod(num_heads=num_heads, device=device)
        spans = self._require_spans()
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
        runs = self._require_spans().runs
        first, number = common_runs(runs, runs, box)
        low, high = torch.zeros_like(number), torch.where(number > EXACT_RUNS, box.area, 0)
        for step in range(min(int(number.max()), EXACT_RUNS) if len(number) else 0):
            here = ((step < number) & (number <= EXACT_RUNS)).nonzero().squeeze(1)
            span, some = first[here] + step, box.select(here)
            q, k = (runs.within(side, span) for side in (some.q, some.k))
            bounds = self._count_from(runs.starts[span], some.head, q, k, num_heads)
            low[here] += bounds.low
            high[here] += bounds.high
        return Bounds(low, high)

    def reason(self, pair: Pair) -> Reason:
        spans = self._require_spans()
        together = pair.reason_of(spans)
        if not together.allowed:
            return Reason(self, False, "forbidden across documents", (together,))
        start = spans.start_of(pair, pair.query)
        allowed, text, inner = self._reason_from(start, pair, ", where their document begins")
        return Reason(self, allowed, text, (together, inner))

    def _require_spans(self) -> Spans:
        if isinstance(self.spans, Spans):
            return self.spans
        assert isinstance(self.spans, RunTime)
        raise ValueError(missing(self.spans.name))


@pattern_kind("blockwise", positional=2)
class Blockwise(OnePart):
    """Pattern that allows a pair iff `part` allows (query // block, key // block); `block` is in tokens."""

    block: int = at_least(1)

    def leaves(self) -> tuple[Pattern, ...]:
        return (self,)  # its part counts blocks, and callers of `leaves` count tokens

    def map_leaves(self, change: Callable[[Pattern], Pattern]) -> Any:
        return change(self)

    def check_tokens(self, queries: range, keys: range) -> None:
        self.part.check_tokens(
            *(range(side.start // self.block, -(-side.stop // self.block)) for side in (queries, keys))
        )

    def snapped(self, q_side: int, k_side: int) -> Pattern:
        """Return the pattern with `block` rounded up to a multiple of lcm(q_side, k_side)."""
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
        return None if blocks is None else keys_in_blocks(blocks, self.block, keys)

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        inner = self.part.mask_mod(num_heads=num_heads, device=device)
        (block,) = parameters(device, self.block)
        return lambda b, h, q, k: inner(b, h, q // block, k // block)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        low, high = torch.zeros_like(box.area), torch.zeros_like(box.area)
        runs = [_blocks_with_counts(side, self.block) for side in (box.q, box.k)]
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
        """Return bounds on the allowed pairs of each box, without enumerating its blocks.

        Each block from the first to the last query is assumed to hold as many queries of the box as a block can hold;
        so are blocks of keys.
        """
        sides = [_blocks_spanned(side, self.block) for side in (box.q, box.k)]
        blocks, area = Box(box.head, *sides), box.area
        most = torch.ones_like(area)
        for side in (box.q, box.k):
            most = most * side.count.clamp(max=-(-self.block // side.step))
        allowed = self.part.count(blocks, num_heads=num_heads)
        forbidden = (blocks.area - allowed.low) * most
        return Bounds((area - forbidden).clamp(min=0), (allowed.high * most).minimum(area))


@constructor
def blockwise(pattern: Pattern, block: int) -> Pattern:
    """Pattern that allows a pair iff `pattern` allows its block numbers (query // block, key // block).

    All parameters of `pattern` then count blocks of `block` tokens: with `blockwise(local_window(left=1, right=1), 64)`
    a query sees all keys of its own block of 64 tokens, of the previous block and of the next one. Raises ValueError
    for a block below 1, and for a pattern with run-time tensors, which may be intersected with the result instead;
    TypeError for a mixture.

    >>> masks.describe(masks.blockwise(masks.causal(), 64), 128).useful_pairs  # 3 blocks of 64 x 64
    12288
    """
    return Blockwise(pattern, block)


def _blocks_with_counts(positions: Progression, block: int) -> list[tuple[Progression, Counts]]:
    """Return [(blocks, number), ...], which group the positions of n progressions by block.

    blocks: n progressions of block numbers.
    number: shape (n,); each block of progression i holds number[i] positions. If number[i] is 0, ignore the blocks.

    Each block that holds positions is in one item. Returns [] unless the step divides `block` or is a multiple of it:
    otherwise consecutive blocks would hold different numbers of positions.
    """
    if positions.step % block == 0:
        blocks = Progression(positions.first // block, positions.step // block, positions.count)
        return [(blocks, torch.ones_like(positions.count))]
    if block % positions.step:
        return []
    span, full = _blocks_spanned(positions, block), torch.full_like(positions.count, block // positions.step)
    in_first = positions.count.minimum((block - 1 - positions.first % block) // positions.step + 1)
    in_last = torch.where(span.count > 1, positions.last % block // positions.step + 1, in_first)
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


def _blocks_spanned(positions: Progression, block: int) -> Progression:
    """Return progressions of block numbers: all blocks from that of the first position to that of the last."""
    first = positions.first // block
    return Progression(first, 1, positions.last // block - first + 1)


def keys_in_blocks(numbers: Iterable[range], block: int, keys: range) -> Ranges:
    """Return the keys in `keys` whose block, of `block` tokens, has its number in one of the disjoint ranges `numbers`.

    A range of numbers gives at most one range of keys if its step is 1, else at most min(its length, block) ranges.
    """
    tokens: list[range] = []
    for some in numbers:
        if some.step == 1:
            tokens.append(range(some.start * block, some.stop * block))
        elif len(some) <= block:
            tokens += [range(each * block, (each + 1) * block) for each in some]
        else:
            tokens += [range(some.start * block + at, some.stop * block, some.step * block) for at in range(block)]
    return among(tokens, keys)
