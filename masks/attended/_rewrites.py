"""KeyQuery, the search for the keys that some queries attend to, and its rewrites into simpler searches.

Each rewrite takes one factor of a KeyQuery and the KeyQuery of the other factors, and returns the simpler searches; or
None if it does not apply to this factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from ..blocks import allowed_pairs
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
    keys_in_blocks,
    local_window,
)

# Up to these numbers of segments, each has its own search: of any segments, and of segments that do not repeat.
_FEW_SEGMENTS = 4
_MOST_SEGMENTS = 1 << 12
_ALL_POSITIONS = range(1 << 62)


@dataclass(frozen=True)
class KeyQuery:
    """A search for the positions in `keys` to which at least one position of `queries` attends.

    factors: rules for one head; a pair is allowed if all of them allow it.
    head: global index of a head that has these rules.
    num_heads: number of global heads.
    """

    factors: tuple[Pattern, ...]
    queries: range
    keys: range
    head: int
    num_heads: int

    @property
    def is_empty(self) -> bool:
        return not (self.queries and self.keys)

    @property
    def rule(self) -> Pattern:
        return And.of(*self.factors)

    def with_factors(self, factors: Iterable[Pattern]) -> KeyQuery:
        return KeyQuery(tuple(dict.fromkeys(factors)), self.queries, self.keys, self.head, self.num_heads)

    def adding(self, *factors: Pattern) -> KeyQuery:
        return self.with_factors((*self.factors, *factors))

    def within(self, queries: range = _ALL_POSITIONS, keys: range = _ALL_POSITIONS) -> KeyQuery:
        both = intersect(self.queries, queries), intersect(self.keys, keys)
        return KeyQuery(self.factors, *both, self.head, self.num_heads)

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """Return a bool tensor over broadcast query and key positions, True for pairs that all factors allow.

        Raises ValueError if a run-time table of a factor is too short.
        """
        return allowed_pairs(self.rule, self.num_heads, torch.tensor(self.head), q, k)


Restore = Callable[[list[range]], Iterable[range]]
Parts = list[tuple[KeyQuery, Restore]]  # smaller key queries, each with the map of its keys to keys of the whole


def moved(positions: range, distance: int) -> range:
    return range(positions.start + distance, positions.stop + distance, positions.step)


def simpler_searches(wanted: KeyQuery) -> Parts | None:
    """Return searches that together replace `wanted`, as a list of (search, map); None if no rewrite applies.

    A map turns the ranges that its search finds into ranges of keys of `wanted`. The union of these over all searches
    is the set of keys that `wanted` searches for.
    """
    rests = [
        (factor, wanted.with_factors(other for other in wanted.factors if other != factor)) for factor in wanted.factors
    ]
    # Every rewrite is exact, so the order matters for speed only; but _rewrite_many_segments must come after
    # _rewrite_few_segments, which takes all dilated factors with few segments.
    for rewrite in (
        _rewrite_trivial_factor,
        _rewrite_one_sided_factor,
        _rewrite_dilated_band,
        _rewrite_window,
        _rewrite_few_segments,
        _rewrite_spans,
        _rewrite_union,
        _rewrite_many_segments,
        _rewrite_blockwise,
        _rewrite_neighborhood,
        _rewrite_single_query,
    ):
        for factor, rest in rests:
            parts = rewrite(factor, rest)
            if parts is not None:
                return parts
    return None


def _with_same_keys(parts: Iterable[KeyQuery]) -> Parts:
    return [(part, list) for part in parts]


def _rewrite_trivial_factor(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Return smaller searches for the keys allowed by `rest` and `factor` if `factor` is trivial; None otherwise.

    Trivial factors are `every()`, `&`, and `~` of `every()` (no search is left), of `|` and of global tokens.
    """
    match factor:
        case Every():
            return _with_same_keys([rest])
        case And():
            return _with_same_keys([rest.adding(*factor.parts)])
        case Not(part=Every()):
            return []
        case Not(part=Or(parts=parts)):
            return _with_same_keys([rest.adding(*(~part for part in parts))])
        case Not(part=GlobalTokens() as part):
            later = range(part.tokens, _ALL_POSITIONS.stop)
            return _with_same_keys(
                [rest.within(later if part.rows else _ALL_POSITIONS, later if part.columns else _ALL_POSITIONS)]
            )
    return None


def _rewrite_one_sided_factor(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Return searches for the keys allowed by `rest` and a factor that depends on the query or on the key alone.

    None unless the factor is a `KeySet`, or `MarkedTokens` that mark only queries or only keys. None also for more than
    2**12 runs of marked tokens.
    """
    if isinstance(factor, KeySet):
        return [(rest, partial(_visible_ranges, factor))]
    return (
        _searches_of_marked_runs(factor, rest)
        if isinstance(factor, MarkedTokens) and factor.rows != factor.columns
        else None
    )


def _visible_ranges(keys: KeySet, found: list[range]) -> Iterator[range]:
    for each in found:
        positions = torch.arange(each.start, each.stop, each.step)
        yield from ranges_of(positions[keys.only_row[positions]])


def _searches_of_marked_runs(factor: MarkedTokens, rest: KeyQuery) -> Parts | None:
    """Return searches for the keys allowed by `rest` and by `factor`, which allows the pairs with a marked token.

    There is one search for each run of marked queries, and one for each run of marked keys. The result is None for more
    than 2**12 runs of queries or of keys.
    """
    queries, keys = (
        factor.marked(range(side.start, side.stop)) if sees else ()
        for side, sees in ((rest.queries, factor.rows), (rest.keys, factor.columns))
    )
    if max(len(queries), len(keys)) > _MOST_SEGMENTS:
        return None
    return _with_same_keys([*(rest.within(queries=run) for run in queries), *(rest.within(keys=run) for run in keys)])


def _rewrite_dilated_band(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Return a search for the keys allowed by `rest` and a dilated band, with keys of the queries' residue class only.

    In that class the band is a window without dilation; a band without limits allows all pairs there. None if the
    factor is not a dilated band, or if the queries are not congruent modulo its step.
    """
    if not isinstance(factor, Band) or factor.step == 1 or (len(rest.queries) > 1 and rest.queries.step % factor.step):
        return None
    near = rest.within(keys=range(rest.queries.start % factor.step, _ALL_POSITIONS.stop, factor.step))
    if factor.least is None and factor.most is None:
        return _with_same_keys([near])
    assert factor.least is not None, "no kind of dilated band has one limit"
    assert factor.most is not None
    return _with_same_keys([near.adding(local_window(left=-factor.least, right=factor.most))])


def _rewrite_window(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Return a smaller search for the keys allowed by `rest` and a factor that is causal order or a window.

    If `rest` has another such factor, both become one window. Else queries and keys are cut to the reach of the factor,
    which is dropped if it excludes none of the keys that remain. None for other factors, if `_joint_window` cannot join
    two, and if nothing changes.
    """
    if not isinstance(factor, Band) or factor.step > 1:
        return None
    left = _ALL_POSITIONS.stop if factor.least is None else -factor.least
    right = _ALL_POSITIONS.stop if factor.most is None else factor.most
    for other in rest.factors:
        if isinstance(other, Band) and other.step == 1:
            joint = _joint_window(factor, other)
            kept = [each for each in rest.factors if each != other]
            return None if joint is None else _with_same_keys([rest.with_factors([*kept, joint])])
    queries, keys = rest.queries, rest.keys
    near = rest.within(
        range(max(0, keys.start - right), keys[-1] + left + 1),
        range(max(0, queries.start - left), queries[-1] + right + 1),
    )
    if near.is_empty:
        return []
    # The factor is not needed if every pair that is left is in the window, or, without further factors, if every key
    # that is left is in the window of some query.
    all_inside = max(near.queries[-1] - near.keys.start - left, near.keys[-1] - near.queries.start - right) <= 0
    gapless = not rest.factors and near.queries.step <= left + right + 1
    if all_inside or gapless:
        return _with_same_keys([near])
    return None if near == rest else _with_same_keys([near.adding(factor)])


def _joint_window(one: Band, other: Band) -> Pattern | None:
    """Return the intersection of two bands of step 1 if it has both limits and includes distance 0, else None."""
    least = max((side for side in (one.least, other.least) if side is not None), default=None)
    most = min((side for side in (one.most, other.most) if side is not None), default=None)
    if least is None or most is None or not least <= 0 <= most:
        return None
    return local_window(left=-least, right=most)


def _rewrite_union(factor: Pattern, rest: KeyQuery) -> Parts | None:
    if isinstance(factor, Or):
        return _with_same_keys(rest.adding(part) for part in factor.parts)
    if isinstance(factor, Not) and isinstance(factor.part, And):
        return _with_same_keys(rest.adding(~part) for part in factor.part.parts)
    return _searches_of_marked_runs(factor, rest) if isinstance(factor, MarkedTokens) else None


def _rewrite_spans(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Return searches for the keys allowed by `rest` and `factor`, one for each span of positions, such as a document.

    None unless the factor is `Spans`, or is `PerDocument` over `Spans` and all factors of `rest` have period 1.
    """
    if isinstance(factor, Spans):
        return _with_same_keys(rest.within(span, span) for span in _common_spans(factor, rest))
    # Rules of distances do not depend on the origin.
    if isinstance(factor, PerDocument) and isinstance(factor.spans, Spans) and common_period(rest.factors) == 1:
        inner = rest.adding(factor.part)
        return [_search_in_span(inner, span) for span in _common_spans(factor.spans, rest)]
    return None


def _search_in_span(wanted: KeyQuery, span: range) -> tuple[KeyQuery, Restore]:
    """Return (the search within a span, with positions counted from the span's start; the map to keys of `wanted`)."""
    start, part = span.start, wanted.within(span, span)
    part = replace(part, queries=moved(part.queries, -start), keys=moved(part.keys, -start))
    return part, lambda found: (moved(keys, start) for keys in found)


def _common_spans(spans: Spans, wanted: KeyQuery) -> Iterator[range]:
    begin, end = _common_interval(wanted)
    starts, stops = spans.runs.starts, spans.runs.stops
    first = int(torch.searchsorted(stops, begin, right=True))
    last = int(torch.searchsorted(starts, end))
    return map(range, starts[first:last].tolist(), stops[first:last].tolist())


def _rewrite_few_segments(factor: Pattern, rest: KeyQuery, most: int = _FEW_SEGMENTS) -> Parts | None:
    """Return searches for the keys allowed by `rest` and a dilated factor, one for each segment.

    Each segment that overlaps the span of the queries and the span of the keys has one, even without a query or a key.
    None for more than `most` segments, and for other factors.
    """
    if not isinstance(factor, Dilated) or len(common := _common_segments(factor, rest)) > most:
        return None
    return _with_same_keys(_search_in_segment(factor, rest, segment) for segment in common)


def _rewrite_many_segments(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Return searches for the keys allowed by `rest` and a dilated factor, in three segments or in each segment.

    If the period of `rest` and the steps of queries and keys divide the segment, all segments but the first and last
    are alike: only the first, second and last are searched, and the keys found in the second are repeated in all
    between the first and last. Else each segment is searched; None for more than 2**12, and for other factors.
    """
    if not isinstance(factor, Dilated):
        return None
    period = common_period(rest.factors) if rest.factors else 1
    steps = (period, rest.queries.step, rest.keys.step)
    if not all(step is not None and factor.segment % step == 0 for step in steps):
        return _rewrite_few_segments(factor, rest, _MOST_SEGMENTS)
    common = _common_segments(factor, rest)
    assert len(common) > _FEW_SEGMENTS, (
        "_rewrite_few_segments comes first: here the first, second and last segment are distinct"
    )
    repeated = partial(_repeated_ranges, len(common) - 2, factor.segment)
    edges = _with_same_keys([_search_in_segment(factor, rest, common[0]), _search_in_segment(factor, rest, common[-1])])
    return [*edges, (_search_in_segment(factor, rest, common[1]), repeated)]


def _common_segments(factor: Dilated, wanted: KeyQuery) -> range:
    begin, end = _common_interval(wanted)
    return range(begin // factor.segment, (end - 1) // factor.segment + 1)


def _search_in_segment(factor: Dilated, wanted: KeyQuery, segment: int) -> KeyQuery:
    assert isinstance(factor.offset, int), "a rule for one head has its offset resolved"
    start = segment * factor.segment
    active = range(start + factor.offset, start + factor.segment, factor.rate)
    return wanted.within(active, active)


def _repeated_ranges(times: int, stride: int, keys: list[range]) -> list[range]:
    """Return `times` copies of the ranges of one segment, shifted by 0, stride, 2 * stride, ..., in few ranges."""
    ranges: list[range] = []
    for each in keys:
        if len(each) * each.step == stride:
            ranges.append(range(each.start, each.start + times * stride, each.step))
        elif len(each) < times:
            ranges += [range(key, key + times * stride, stride) for key in each]
        else:
            ranges += [moved(each, stride * index) for index in range(times)]
    return ranges


def _common_interval(wanted: KeyQuery) -> tuple[int, int]:
    """Return the interval [begin, end) that the span of the queries and the span of the keys have in common.

    A span extends from the first position to the last, both included. begin >= end if they have nothing in common.
    """
    queries, keys = wanted.queries, wanted.keys
    return max(queries.start, keys.start), min(queries[-1], keys[-1]) + 1


def _rewrite_blockwise(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Return a search with the inner rule of a `Blockwise` factor, over block numbers, for the keys that it allows.

    None for other factors, if `rest` has further factors, or if the queries' step exceeds the block and is no multiple
    of it.
    """
    if not isinstance(factor, Blockwise) or rest.factors:
        return None
    block, step = factor.block, rest.queries.step
    if step > block and step % block:
        return None
    queries = range(rest.queries.start // block, rest.queries[-1] // block + 1, max(1, step // block))
    keys = range(rest.keys.start // block, rest.keys[-1] // block + 1)
    wanted = replace(rest, factors=(factor.part,), queries=queries, keys=keys)
    return [(wanted, lambda found: keys_in_blocks(found, block, rest.keys))]


def _rewrite_neighborhood(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Return searches without factors, one for each range of keys that the queries see by a `Neighborhood` factor.

    None for other factors, if `rest` has further factors, or if its queries are not consecutive.
    """
    if not isinstance(factor, Neighborhood) or rest.factors or rest.queries.step > 1:
        return None
    return _with_same_keys(rest.within(keys=keys) for keys in _ranges_seen_on_grid(factor, rest.queries))


def _rewrite_single_query(factor: Pattern, rest: KeyQuery) -> Parts | None:
    """Return the search of `rest`, with a map that keeps only the keys that its single query sees by `factor`.

    None for several queries, for keys of a step above 1, and for a factor whose `row` has no closed form.
    """
    row = factor.row(rest.queries.start, rest.keys) if len(rest.queries) == 1 and rest.keys.step == 1 else None
    if row is None:
        return None
    if not rest.factors:
        return [(rest, lambda found: row)]
    return [(rest, lambda found: (both for each in found for part in row if (both := intersect(each, part))))]


def _ranges_seen_on_grid(pattern: Neighborhood, queries: range) -> Iterator[range]:
    """Yield ranges of tokens that together are the keys that some query sees; the ranges may overlap.

    queries: consecutive positions in the grid's row-major order; those past the end of the grid are ignored.
    """
    strides = [prod(pattern.grid[axis + 1 :]) for axis in range(len(pattern.grid))]
    for rectangle in _rectangles(range(queries.start, min(queries.stop, prod(pattern.grid))), strides):
        # The rule is separable by axis, and a rectangle has every combination of its places.
        yield from _tokens_of_axes(
            [_ranges_seen_on_axis(*each) for each in zip(rectangle, pattern.axes, strict=True)], strides
        )


def _rectangles(run: range, strides: Sequence[int]) -> Iterator[tuple[range, ...]]:
    """Yield the rectangles of a grid, each as one range for each axis, that a run of row-major tokens consists of.

    With two axes these are the end of a grid line, the beginning of another, and the whole lines between; with more, an
    incomplete part is split again along the inner axes.

    strides: distance in tokens between neighbours along each axis, the outermost first; the last is 1.
    """
    stride, *inner = strides
    if not run or not inner:
        yield from [(run,)] if run else []
        return
    first, last = -(-run.start // stride), run.stop // stride
    ends = [(first - 1, run.start, min(first * stride, run.stop)), (last, last * stride, run.stop)]
    for row, start, stop in ends if first <= last else ends[:1]:
        for rest in _rectangles(range(start - row * stride, stop - row * stride), inner):
            yield (range(row, row + 1), *rest)
    if first < last:
        yield (range(first, last), *(range(outer // each) for outer, each in zip(strides, inner, strict=False)))


def _ranges_seen_on_axis(places: range, axis: Axis) -> Ranges:
    """Return the places along one axis of a grid that at least one of the queries at these consecutive places sees."""
    classes = ((first, places[-1] - (places[-1] - first) % axis.rate) for first in places[: axis.rate])
    return union_of(part for first, last in classes for part in axis.seen(first, last))


def _tokens_of_axes(along: Sequence[Ranges], strides: Sequence[int]) -> Ranges:
    """Return the tokens whose index along each axis is in that axis's ranges, as ranges of row-major token numbers.

    along: ranges of indices for each axis.
    strides: distance in tokens between neighbours along each axis.
    """
    *outer, found = along
    for rows, stride in zip(reversed(outer), reversed(strides[:-1]), strict=True):
        if found == (range(stride),):
            runs = (run for each in rows for run in ([each] if each.step == 1 else [range(at, at + 1) for at in each]))
            found = tuple(range(run.start * stride, run.stop * stride) for run in runs)
        else:
            found = tuple(moved(each, row * stride) for run in rows for row in run for each in found)
    return found
