"""Narrowed: a question about keys as the same question about fewer queries and keys, by fewer rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from ..core import And, Every, Not, Or, Pattern, Ranges, common_period, intersect, ranges_of
from ..patterns import Band, Blockwise, Dilated, GlobalTokens, KeySet, MarkedTokens, Neighborhood, PerDocument, Spans
from ._asked import Asked, moved
from ._grid_reach import seen_around

Restore = Callable[[list[range]], list[range]]
Parts = list[tuple[Asked, Restore]]  # questions, and what makes of their answers some of the answer

# Segments that repeat are asked about once; others, one by one, up to so many.
_FEW_SEGMENTS = 4
_MOST_SEGMENTS = 1 << 12
_ALL = range(1 << 62)


def narrowed(asked: Asked) -> Parts | None:
    """Questions whose answers together are the answer; None where no rule has a form that helps."""
    rests = [(factor, asked.of(*(other for other in asked.factors if other != factor))) for factor in asked.factors]
    for narrow in (_plainer, _one_sided, _near, _few_segments, _spans, _alternatives, _segments, _blocks, _grid):
        for factor, rest in rests:
            parts = narrow(factor, rest)
            if parts is not None:
                return parts
    return None


def _plainer(factor: Pattern, rest: Asked) -> Parts | None:
    """Rules that are intersections by another name."""
    if isinstance(factor, Every):
        return _same([rest])
    if isinstance(factor, And):
        return _same([rest.of(*rest.factors, *factor.parts)])
    if isinstance(factor, Not):
        return _complement(factor.part, rest)
    return None


def _complement(part: Pattern, rest: Asked) -> Parts | None:
    if isinstance(part, Every):
        return []
    if isinstance(part, Not):
        return _same([rest.of(*rest.factors, part.part)])
    if isinstance(part, Or):
        return _same([rest.of(*rest.factors, *(~each for each in part.parts))])
    if isinstance(part, GlobalTokens):
        later = range(part.tokens, _ALL.stop)
        return _same([rest.within(later if part.rows else _ALL, later if part.columns else _ALL)])
    return None


def _one_sided(factor: Pattern, rest: Asked) -> Parts | None:
    """Rules of the query alone, or of the key alone."""
    if isinstance(factor, KeySet):
        return [(rest, partial(_visible, factor))]
    if isinstance(factor, MarkedTokens) and factor.rows != factor.columns:
        side, narrow = (rest.queries, rest.from_queries) if factor.rows else (rest.keys, rest.to_keys)
        return _each(narrow, factor.marked(_whole(side)))
    return None


def _near(factor: Pattern, rest: Asked) -> Parts | None:
    """Causal order and windows: where not all queries and keys are near enough, or all are, or nothing else counts."""
    if not isinstance(factor, Band) or factor.step > 1:
        return None
    left = _ALL.stop if factor.least is None else -factor.least
    right = _ALL.stop if factor.most is None else factor.most
    queries, keys = rest.queries, rest.keys
    near = rest.within(
        range(max(0, keys.start - right), keys[-1] + left + 1),
        range(max(0, queries.start - left), queries[-1] + right + 1),
    )
    if near.is_empty:
        return []
    furthest = max(near.queries[-1] - near.keys.start - left, near.keys[-1] - near.queries.start - right)
    gapless = not rest.factors and near.queries.step <= left + right + 1
    if furthest <= 0 or gapless:
        return _same([near])
    return None if near == rest else _same([near.of(*near.factors, factor)])


def _each(narrow: Callable[[range], Asked], marked: Ranges) -> Parts | None:
    return _same(list(map(narrow, marked))) if len(marked) <= _MOST_SEGMENTS else None


def _whole(positions: range) -> range:
    return range(positions.start, positions.stop)


def _visible(keys: KeySet, found: list[range]) -> list[range]:
    kept: list[range] = []
    for each in found:
        positions = torch.arange(each.start, each.stop, each.step)
        kept += ranges_of(positions[keys.only_row[positions]])
    return kept


def _alternatives(factor: Pattern, rest: Asked) -> Parts | None:
    """Rules that are unions."""
    if isinstance(factor, Or):
        return _same([rest.of(*rest.factors, part) for part in factor.parts])
    if isinstance(factor, Not) and isinstance(factor.part, And):
        return _same([rest.of(*rest.factors, ~part) for part in factor.part.parts])
    if isinstance(factor, MarkedTokens):  # of both sides
        queries = _each(rest.from_queries, factor.marked(_whole(rest.queries)))
        keys = _each(rest.to_keys, factor.marked(_whole(rest.keys)))
        return None if queries is None or keys is None else [*queries, *keys]
    return None


def _spans(factor: Pattern, rest: Asked) -> Parts | None:
    """Rules that hold within spans of positions."""
    if isinstance(factor, Spans):
        return _same([rest.within(span, span) for span in _common_spans(factor, rest)])
    # Rules of distances are the same counted from anywhere.
    if isinstance(factor, PerDocument) and isinstance(factor.spans, Spans) and common_period(rest.factors) == 1:
        inner = rest.of(*rest.factors, factor.part)
        return [
            (inner.within(span, span).counted_from(span.start), partial(_all_moved, span.start))
            for span in _common_spans(factor.spans, rest)
        ]
    return None


def _all_moved(distance: int, keys: list[range]) -> list[range]:
    return [moved(each, distance) for each in keys]


def _common_spans(spans: Spans, asked: Asked) -> Iterator[range]:
    """The spans that may hold both a query and a key."""
    begin, end = _overlap(asked)
    first = int(torch.searchsorted(spans.stops, begin, right=True))
    last = int(torch.searchsorted(spans.starts, end))
    edges = zip(spans.starts[first:last].tolist(), spans.stops[first:last].tolist(), strict=True)
    return (range(*each) for each in edges)


def _few_segments(factor: Pattern, rest: Asked) -> Parts | None:
    """A dilated rule of which few segments hold both queries and keys."""
    return _one_by_one(factor, rest, _FEW_SEGMENTS)


def _segments(factor: Pattern, rest: Asked) -> Parts | None:
    """A dilated rule of which many segments hold both queries and keys; those between the outermost two repeat."""
    if not isinstance(factor, Dilated):
        return None
    period = common_period(rest.factors) if rest.factors else 1
    steps = (period, rest.queries.step, rest.keys.step)
    if not all(step is not None and factor.segment % step == 0 for step in steps):
        return _one_by_one(factor, rest, _MOST_SEGMENTS)
    common = _common_segments(factor, rest)
    repeated = partial(_repeated, len(common) - 2, factor.segment)
    edges = _same([_in_segment(factor, rest, common[0]), _in_segment(factor, rest, common[-1])])
    return [*edges, (_in_segment(factor, rest, common[1]), repeated)]


def _one_by_one(factor: Pattern, rest: Asked, most: int) -> Parts | None:
    if not isinstance(factor, Dilated) or len(common := _common_segments(factor, rest)) > most:
        return None
    return _same([_in_segment(factor, rest, segment) for segment in common])


def _common_segments(factor: Dilated, asked: Asked) -> range:
    """The segments that lie between the outermost queries as well as between the outermost keys."""
    begin, end = _overlap(asked)
    return range(begin // factor.segment, (end - 1) // factor.segment + 1)


def _in_segment(factor: Dilated, asked: Asked, segment: int) -> Asked:
    assert isinstance(factor.offset, int), "a rule for one head has its offset resolved"
    start = segment * factor.segment
    active = range(start + factor.offset, start + factor.segment, factor.rate)
    return asked.within(active, active)


def _repeated(times: int, stride: int, keys: list[range]) -> list[range]:
    """The ranges of one segment in each of so many."""
    ranges: list[range] = []
    for each in keys:
        if len(each) * each.step == stride:
            ranges.append(range(each.start, each.start + times * stride, each.step))
        elif len(each) < times:
            ranges += [range(key, key + times * stride, stride) for key in each]
        else:
            ranges += [moved(each, stride * index) for index in range(times)]
    return ranges


def _blocks(factor: Pattern, rest: Asked) -> Parts | None:
    """A rule over blocks, alone: queries leave out no block between their outermost two, or meet each once."""
    if not isinstance(factor, Blockwise) or rest.factors:
        return None
    block, step = factor.block, rest.queries.step
    if step > block and step % block:
        return None
    each = max(1, step // block)
    queries = range(rest.queries.start // block, rest.queries[-1] // block + 1, each)
    keys = range(rest.keys.start // block, rest.keys[-1] // block + 1)
    asked = replace(rest, factors=(factor.part,), queries=queries, keys=keys)
    return [(asked, partial(_of_blocks, block, rest.keys))]


def _of_blocks(block: int, keys: range, found: list[range]) -> list[range]:
    """Those of the keys that lie in blocks of these numbers."""
    ranges: list[range] = []
    for each in found:
        if each.step == 1:
            ranges.append(range(each.start * block, each.stop * block))
        elif len(each) < block:
            ranges += [range(number * block, (number + 1) * block) for number in each]
        else:
            ranges += [range(each.start * block + key, each.stop * block, each.step * block) for key in range(block)]
    return [both for each in ranges if (both := intersect(each, keys))]


def _grid(factor: Pattern, rest: Asked) -> Parts | None:
    """A neighbourhood alone, around a run of queries: then all that is left is the keys."""
    if not isinstance(factor, Neighborhood) or rest.factors or rest.queries.step > 1:
        return None
    return _same([rest.to_keys(keys) for keys in seen_around(factor, rest.queries)])


def _overlap(asked: Asked) -> tuple[int, int]:
    """The positions that lie between the outermost queries as well as between the outermost keys."""
    queries, keys = asked.queries, asked.keys
    return max(queries.start, keys.start), min(queries[-1], keys[-1]) + 1


def _same(questions: list[Asked]) -> Parts:
    return [(asked, _unchanged) for asked in questions]


def _unchanged(keys: list[range]) -> list[range]:
    return keys
