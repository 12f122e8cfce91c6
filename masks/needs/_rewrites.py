"""Rewrites of a key query into key queries of fewer queries, keys or rules, by the form of one rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch

from ..core import And, Every, Not, Or, Pattern, Ranges, common_period, intersect, ranges_of, union_of
from ..patterns import (
    Axis,
    Band,
    Blockwise,
    Dilated,
    GlobalTokens,
    KeySet,
    MarkedTokens,
    Neighborhood,
    PerDocument,
    Spans,
    local_window,
)
from ._key_query import KeyQuery, moved

Restore = Callable[[list[range]], list[range]]
Parts = list[tuple[KeyQuery, Restore]]  # key queries, each with the map from its answer to part of the whole answer
_Rectangle = tuple[range, ...]  # places along each axis of a grid, the outermost first

# Segments that repeat are rewritten once for all; up to these numbers, segments are rewritten one by one.
_FEW_SEGMENTS = 4
_MOST_SEGMENTS = 1 << 12
_ALL = range(1 << 62)


def rewritten(wanted: KeyQuery) -> Parts | None:
    """Key queries whose answers together are the answer; None if no rewrite fits a rule."""
    rests = [(factor, wanted.of(*(other for other in wanted.factors if other != factor))) for factor in wanted.factors]
    for rewrite in (
        _plainer,
        _one_sided,
        _one_residue,
        _near,
        _few_segments,
        _spans,
        _alternatives,
        _segments,
        _blocks,
        _grid,
    ):
        for factor, rest in rests:
            parts = rewrite(factor, rest)
            if parts is not None:
                return parts
    return None


def _plainer(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Drop `every()`, flatten `&`, resolve `~`."""
    if isinstance(factor, Every):
        return _same([rest])
    if isinstance(factor, And):
        return _same([rest.of(*rest.factors, *factor.parts)])
    if isinstance(factor, Not):
        return _complement(factor.part, rest)
    return None


def _complement(part: Pattern, rest: KeyQuery) -> Parts | None:
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


def _one_sided(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Apply a rule of the query alone, or of the key alone."""
    if isinstance(factor, KeySet):
        return [(rest, partial(_visible, factor))]
    if isinstance(factor, MarkedTokens) and factor.rows != factor.columns:
        side, narrow = (rest.queries, rest.from_queries) if factor.rows else (rest.keys, rest.to_keys)
        return _each(narrow, factor.marked(_whole(side)))
    return None


def _one_residue(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Apply a band of steps to queries that agree modulo the step: keys of their residue, in a band without steps."""
    if not isinstance(factor, Band) or factor.step == 1 or (len(rest.queries) > 1 and rest.queries.step % factor.step):
        return None
    near = rest.to_keys(range(rest.queries.start % factor.step, _ALL.stop, factor.step))
    if factor.least is None or factor.most is None:
        return _same([near])
    return _same([near.of(*near.factors, local_window(left=-factor.least, right=factor.most))])


def _near(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Causal order and windows: merge two, restrict queries and keys to their reach, drop one that excludes no key."""
    if not isinstance(factor, Band) or factor.step > 1:
        return None
    left = _ALL.stop if factor.least is None else -factor.least
    right = _ALL.stop if factor.most is None else factor.most
    for other in rest.factors:
        if isinstance(other, Band) and other.step == 1:
            joint = _joint_window(factor, other)
            return None if joint is None else _same([rest.of(*(each for each in rest.factors if each != other), joint)])
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


def _joint_window(one: Band, other: Band) -> Pattern | None:
    """Intersection of two bands if it is a window, else None."""
    least = max((side for side in (one.least, other.least) if side is not None), default=None)
    most = min((side for side in (one.most, other.most) if side is not None), default=None)
    if least is None or most is None or not least <= 0 <= most:
        return None
    return local_window(left=-least, right=most)


def _each(narrow: Callable[[range], KeyQuery], marked: Ranges) -> Parts | None:
    return _same(list(map(narrow, marked))) if len(marked) <= _MOST_SEGMENTS else None


def _whole(positions: range) -> range:
    return range(positions.start, positions.stop)


def _visible(keys: KeySet, found: list[range]) -> list[range]:
    kept: list[range] = []
    for each in found:
        positions = torch.arange(each.start, each.stop, each.step)
        kept += ranges_of(positions[keys.only_row[positions]])
    return kept


def _alternatives(factor: Pattern, rest: KeyQuery) -> Parts | None:
    if isinstance(factor, Or):
        return _same([rest.of(*rest.factors, part) for part in factor.parts])
    if isinstance(factor, Not) and isinstance(factor.part, And):
        return _same([rest.of(*rest.factors, ~part) for part in factor.part.parts])
    if isinstance(factor, MarkedTokens):  # of both sides
        queries = _each(rest.from_queries, factor.marked(_whole(rest.queries)))
        keys = _each(rest.to_keys, factor.marked(_whole(rest.keys)))
        return None if queries is None or keys is None else [*queries, *keys]
    return None


def _spans(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Restrict to each span, for a rule within spans of positions."""
    if isinstance(factor, Spans):
        return _same([rest.within(span, span) for span in _common_spans(factor, rest)])
    # Rules of distances do not depend on the origin.
    if isinstance(factor, PerDocument) and isinstance(factor.spans, Spans) and common_period(rest.factors) == 1:
        inner = rest.of(*rest.factors, factor.part)
        return [
            (inner.within(span, span).counted_from(span.start), partial(_all_moved, span.start))
            for span in _common_spans(factor.spans, rest)
        ]
    return None


def _all_moved(distance: int, keys: list[range]) -> list[range]:
    return [moved(each, distance) for each in keys]


def _common_spans(spans: Spans, wanted: KeyQuery) -> Iterator[range]:
    begin, end = _overlap(wanted)
    first = int(torch.searchsorted(spans.stops, begin, right=True))
    last = int(torch.searchsorted(spans.starts, end))
    edges = zip(spans.starts[first:last].tolist(), spans.stops[first:last].tolist(), strict=True)
    return (range(*each) for each in edges)


def _few_segments(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Restrict to each segment of a dilated rule, if few segments hold both queries and keys."""
    return _one_by_one(factor, rest, _FEW_SEGMENTS)


def _segments(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Restrict to the segments of a dilated rule; segments between the outermost two repeat and are rewritten once."""
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


def _one_by_one(factor: Pattern, rest: KeyQuery, most: int) -> Parts | None:
    if not isinstance(factor, Dilated) or len(common := _common_segments(factor, rest)) > most:
        return None
    return _same([_in_segment(factor, rest, segment) for segment in common])


def _common_segments(factor: Dilated, wanted: KeyQuery) -> range:
    """Segments in the overlap of queries and keys."""
    begin, end = _overlap(wanted)
    return range(begin // factor.segment, (end - 1) // factor.segment + 1)


def _in_segment(factor: Dilated, wanted: KeyQuery, segment: int) -> KeyQuery:
    assert isinstance(factor.offset, int), "a rule for one head has its offset resolved"
    start = segment * factor.segment
    active = range(start + factor.offset, start + factor.segment, factor.rate)
    return wanted.within(active, active)


def _repeated(times: int, stride: int, keys: list[range]) -> list[range]:
    """Copies of the ranges of one segment, `times` of them, `stride` apart."""
    ranges: list[range] = []
    for each in keys:
        if len(each) * each.step == stride:
            ranges.append(range(each.start, each.start + times * stride, each.step))
        elif len(each) < times:
            ranges += [range(key, key + times * stride, stride) for key in each]
        else:
            ranges += [moved(each, stride * index) for index in range(times)]
    return ranges


def _blocks(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Keys of a `Blockwise` rule, by its rule over block numbers.

    None unless queries reach every block or are whole blocks apart, and if other factors restrict the pairs.
    """
    if not isinstance(factor, Blockwise) or rest.factors:
        return None
    block, step = factor.block, rest.queries.step
    if step > block and step % block:
        return None
    each = max(1, step // block)
    queries = range(rest.queries.start // block, rest.queries[-1] // block + 1, each)
    keys = range(rest.keys.start // block, rest.keys[-1] // block + 1)
    wanted = replace(rest, factors=(factor.part,), queries=queries, keys=keys)
    return [(wanted, partial(_of_blocks, block, rest.keys))]


def _of_blocks(block: int, keys: range, found: list[range]) -> list[range]:
    """The given keys that are in blocks of these numbers."""
    ranges: list[range] = []
    for each in found:
        if each.step == 1:
            ranges.append(range(each.start * block, each.stop * block))
        elif len(each) < block:
            ranges += [range(number * block, (number + 1) * block) for number in each]
        else:
            ranges += [range(each.start * block + key, each.stop * block, each.step * block) for key in range(block)]
    return [both for each in ranges if (both := intersect(each, keys))]


def _grid(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Restrict the keys to the windows of a lone neighbourhood, for a run of queries; no rule remains."""
    if not isinstance(factor, Neighborhood) or rest.factors or rest.queries.step > 1:
        return None
    return _same([rest.to_keys(keys) for keys in _seen_around(factor, rest.queries)])


def _seen_around(pattern: Neighborhood, queries: range) -> list[range]:
    """Keys that some query of a run sees; the ranges of different rectangles may overlap."""
    strides = [prod(pattern.grid[axis + 1 :]) for axis in range(len(pattern.grid))]
    run = range(queries.start, min(queries.stop, prod(pattern.grid)))
    found: list[range] = []
    for rectangle in _rectangles(run, strides):
        # The rule is separable by axis, and a rectangle has every combination of its places.
        along = [_windows(places, axis) for places, axis in zip(rectangle, pattern.axes, strict=True)]
        found += _combined(along, strides)
    return found


def _rectangles(run: range, strides: Sequence[int]) -> Iterator[_Rectangle]:
    """Split a run of tokens in row-major order into rectangles: end of a row, whole rows, beginning of a row."""
    if not run:
        return
    stride, *inner = strides
    if not inner:
        yield (run,)
        return
    first, last = -(-run.start // stride), run.stop // stride
    if last < first:  # within one row
        yield from _in_row(last, range(run.start - last * stride, run.stop - last * stride), inner)
        return
    if run.start < first * stride:
        yield from _in_row(first - 1, range(run.start - (first - 1) * stride, stride), inner)
    if first < last:
        yield (range(first, last), *(range(outer // each) for outer, each in zip(strides, inner, strict=False)))
    if last * stride < run.stop:
        yield from _in_row(last, range(run.stop - last * stride), inner)


def _in_row(row: int, run: range, strides: Sequence[int]) -> Iterator[_Rectangle]:
    return ((range(row, row + 1), *rest) for rest in _rectangles(run, strides))


def _windows(places: range, axis: Axis) -> Ranges:
    """Union of the windows of these places along an axis: for each residue, from the first window to the last."""
    found = []
    for first in places[: axis.rate]:
        last = first + (places[-1] - first) // axis.rate * axis.rate
        found.append(range(axis.window(first).start, axis.window(last).stop, axis.rate))
    return union_of(found)


def _combined(along: Sequence[Ranges], strides: Sequence[int]) -> list[range]:
    """Tokens whose place along each axis is one of these."""
    *outer, found = along
    for rows, stride in zip(reversed(outer), reversed(strides[:-1]), strict=True):
        if found == (range(stride),):
            runs = (run for each in rows for run in ([each] if each.step == 1 else _ones(each)))
            found = tuple(range(run.start * stride, run.stop * stride) for run in runs)
        else:
            found = tuple(moved(each, row * stride) for run in rows for row in run for each in found)
    return [*found]


def _ones(rows: range) -> Iterator[range]:
    return (range(row, row + 1) for row in rows)


def _overlap(wanted: KeyQuery) -> tuple[int, int]:
    """[begin, end): the positions between the outermost queries and between the outermost keys."""
    queries, keys = wanted.queries, wanted.keys
    return max(queries.start, keys.start), min(queries[-1], keys[-1]) + 1


def _same(questions: list[KeyQuery]) -> Parts:
    return [(wanted, _unchanged) for wanted in questions]


def _unchanged(keys: list[range]) -> list[range]:
    return keys
