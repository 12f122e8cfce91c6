"""The exact keys that given queries attend to: in closed form where a rewrite fits the rule.

Other rules are searched by bounds: over differences of position if only the distance counts, else over boxes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import gcd, lcm

import torch
from torch import Tensor

from ..core import (
    Bounds,
    Box,
    Expression,
    Pattern,
    Progression,
    Ranges,
    clip,
    common_period,
    intersect,
    joined_intervals,
    ranges_of,
    union_of,
)
from ..orders import residue_rate
from ._rewrites import KeyQuery, simpler_searches

_MOST_CLASS_PAIRS = 1 << 16  # pairs of residue classes at the start of a search
_FRONTIER = 1 << 17  # boxes counted together: bounds the memory
_SIDE = 16  # boxes of at most this many queries and keys are evaluated pair by pair
_FEW_PAIRS = 1 << 16  # queries × keys: up to this many, evaluating each pair is faster than bounds
_BOXES_AT_ONCE = 1 << 13  # evaluated together
_MOST_CLASSES = 1 << 9  # most residue classes of keys that are searched by distance
_NUM_PARTS = 8  # parts into which an undecided interval of lags is cut


def attended_keys(
    pattern: Expression, *, queries: Ranges, keys: Ranges, heads: Iterable[int], num_heads_global: int
) -> Ranges:
    """Return the positions in `keys` to which at least one position of `queries` attends, in at least one of the heads.

    The result is exact: the union over heads, over the branches of a mixture, and over batch entries. The ranges do not
    overlap and ascend by their first positions; equal arguments give equal ranges.

    pattern: its run-time tensors must have values.
    heads: global heads.
    """
    rules = rules_of_heads(pattern, heads, num_heads_global)
    return keys_of_any(
        KeyQuery((rule,), q, k, head, num_heads_global)
        for rule, head in rules.items()
        for q, k in product(queries, keys)
    )


def keys_of_any(searches: Iterable[KeyQuery]) -> Ranges:
    """Return the union of the keys that these searches find, as disjoint ranges ascending by their first positions."""
    return union_of(found for wanted in searches for found in keys_seen(wanted))


def rules_of_heads(pattern: Expression, heads: Iterable[int], num_heads: int) -> dict[Pattern, int]:
    """Return the distinct rules of these global heads, as {rule: the first of `heads` that follows it}.

    They are collected over the branches of a mixture and over batch entries.

    num_heads: number of global heads.
    """
    rules: dict[Pattern, int] = {}
    for head in heads:
        for batch in range(pattern.num_entries()):
            for branch in pattern.entry(batch).branches():
                rules.setdefault(branch.for_head(head, num_heads), head)
    return rules


def keys_seen(wanted: KeyQuery) -> list[range]:
    """Return the keys that `wanted` searches for, exactly, as ranges that may overlap."""
    if wanted.is_empty:
        return []
    if not wanted.factors:
        return [wanted.keys]
    parts = simpler_searches(wanted)
    if parts is not None:
        return [keys for part, restored in parts for keys in restored(keys_seen(part))]
    by_distance = keys_by_distance(wanted)
    return keys_by_boxes(wanted) if by_distance is None else by_distance


def keys_by_boxes(wanted: KeyQuery) -> list[range]:
    """Return the keys that some query sees, by bounds on ever smaller boxes of pairs.

    Small boxes that bounds do not decide are evaluated pair by pair, and so are all pairs if there are at most 2**16.
    """
    if len(wanted.queries) * len(wanted.keys) <= _FEW_PAIRS:
        q, k = (torch.arange(side.start, side.stop, side.step) for side in (wanted.queries, wanted.keys))
        return list(ranges_of(k[wanted.allows(q[:, None], k).any(0)]))
    stack = [_first_boxes(wanted)]
    step, firsts, counts = stack[0].k.step, [], []
    while stack:
        boxes = stack.pop()
        if len(boxes.head) > _FRONTIER:  # sorted: boxes with equal keys mostly stay together
            stack += [boxes.select(half) for half in boxes.k.first.argsort(stable=True).tensor_split(2)]
            continue
        seen, boxes = _seen_and_undecided_boxes(wanted, boxes)
        small = (boxes.q.count <= _SIDE) & (boxes.k.count <= _SIDE)
        single = _evaluated_keys(wanted, boxes.select(small))
        firsts += [seen.k.first, single]
        counts += [seen.k.count, torch.ones_like(single)]
        if not bool(small.all()):
            stack.append(_halve_long_sides(boxes.select(~small)))
    return _union_of_progressions(torch.cat(firsts), torch.cat(counts), step)


def _first_boxes(wanted: KeyQuery) -> Box:
    """Return the boxes with which a search begins; together they have all allowed pairs.

    If the rule lists squares, these are the squares, cut to the queries and keys; else pairs of the parts that
    `_residue_classes` makes of queries and keys.
    """
    squares = wanted.rule.squares(wanted.head, wanted.num_heads)
    sides = [_progression(side) for side in (wanted.queries, wanted.keys)]
    if squares is not None:
        q, k = (
            clip(side.select(torch.zeros_like(first)), first, first + squares.side)
            for side, first in zip(sides, (squares.q_first, squares.k_first), strict=True)
        )
        held = (q.count > 0) & (k.count > 0)
        q, k = q.select(held), k.select(held)
    else:
        q, k = _residue_classes(sides, residue_rate(wanted.rule, _MOST_CLASS_PAIRS))
        of_q, of_k = torch.cartesian_prod(torch.arange(len(q.first)), torch.arange(len(k.first))).unbind(1)
        q, k = q.select(of_q), k.select(of_k)
    return Box(torch.full_like(q.first, wanted.head), q, k)


def _progression(positions: range) -> Progression:
    return Progression(torch.tensor([positions.start]), positions.step, torch.tensor([len(positions)]))


def _residue_classes(sides: list[Progression], rate: int) -> list[Progression]:
    """Return [queries, keys], both split into one progression for each residue class modulo `rate` that they have.

    sides: one progression of queries and one of keys; returned unsplit if there would be over 2**16 pairs of classes.
    """
    cycles = [min(rate // gcd(rate, side.step), int(side.count)) for side in sides]
    if cycles[0] * cycles[1] > _MOST_CLASS_PAIRS:
        return sides
    found = []
    for side, cycle in zip(sides, cycles, strict=True):
        place, step = torch.arange(cycle), lcm(rate, side.step)
        count = (side.count - 1 - place) // (step // side.step) + 1
        found.append(Progression(side.first + side.step * place, step, count))
    return found


def _seen_and_undecided_boxes(wanted: KeyQuery, boxes: Box) -> tuple[Box, Box]:
    """Return (boxes of which, by bounds, every key is seen by some query; boxes that are left to be searched).

    The second do not include boxes that by bounds have no allowed pair, or that have the same keys as one of the first.
    """
    bounds = wanted.rule.count(boxes, num_heads=wanted.num_heads)
    # A key that no query sees accounts for q.count forbidden pairs.
    seen = boxes.area - bounds.low < boxes.q.count
    runs, number = _key_runs(boxes)
    known = torch.zeros(runs, dtype=torch.bool).index_fill(0, number[seen], True)
    return boxes.select(seen), boxes.select((bounds.high > 0) & ~known[number])


def _key_runs(boxes: Box) -> tuple[int, Tensor]:
    """Return (number of distinct key progressions, here called runs; index of the run of each box)."""
    longest = int(boxes.k.count.max()) + 1 if len(boxes.head) else 1
    # Counts are below `longest`, so equal numbers mean equal runs.
    runs, number = (boxes.k.first * longest + boxes.k.count).unique(return_inverse=True)
    return len(runs), number


def _halve_long_sides(boxes: Box) -> Box:
    """Return up to four parts of each box: sides of more than 16 positions are halved, equal sides alike."""
    box, q = _halves(boxes.q)
    part, k = _halves(boxes.k.select(box))
    return Box(boxes.head[box][part], q.select(part), k)


def _halves(side: Progression) -> tuple[Tensor, Progression]:
    """Return (index of each part's progression, parts); progressions of more than 16 positions are halved."""
    half = torch.where(side.count > _SIDE, (side.count + 1) // 2, side.count)
    cut = (half < side.count).nonzero().squeeze(1)
    first = torch.cat([side.first, (side.first + side.step * half)[cut]])
    count = torch.cat([half, (side.count - half)[cut]])
    return torch.cat([torch.arange(len(half)), cut]), Progression(first, side.step, count)


def _evaluated_keys(wanted: KeyQuery, boxes: Box) -> Tensor:
    """Return the keys of boxes with sides of at most 16 that some query of the box sees, by evaluating pairs."""
    runs, number = _key_runs(boxes)
    first, count = (torch.zeros(runs, dtype=torch.int64) for _ in range(2))
    first[number], count[number] = boxes.k.first, boxes.k.count
    place = torch.arange(_SIDE)
    open_keys = place < count[:, None]
    seen = torch.zeros(runs, _SIDE, dtype=torch.bool)
    turn = _num_earlier_of_run(number, runs)
    # In rounds of doubling size: a few boxes often settle all keys of a run.
    begin, rounds = 0, 1
    while len(turn):
        now = (turn >= begin) & (turn < begin + rounds)
        for some in now.nonzero().squeeze(1).split(_BOXES_AT_ONCE):
            shown = _allowed_pairs(wanted, boxes.select(some)).any(1)
            run, key = shown.nonzero().unbind(1)
            seen[number[some][run], key] = True
        later = ((turn >= begin + rounds) & (open_keys & ~seen).any(1)[number]).nonzero().squeeze(1)
        boxes, number, turn = boxes.select(later), number[later], turn[later]
        begin, rounds = begin + rounds, rounds * 2
    run, key = seen.nonzero().unbind(1)
    return first[run] + boxes.k.step * key


def _num_earlier_of_run(number: Tensor, runs: int) -> Tensor:
    """Return, for each box, how many of the boxes before it have the same keys.

    number, runs: index of the key progression of each box, and number of distinct ones, from `_key_runs`.
    """
    order = number.argsort(stable=True)
    counts = torch.bincount(number, minlength=runs)
    turn = torch.empty_like(number)
    turn[order] = torch.arange(len(number)) - (counts.cumsum(0) - counts)[number[order]]
    return turn


def _allowed_pairs(wanted: KeyQuery, boxes: Box) -> Tensor:
    """Return a bool tensor (n, 16, 16): entry (b, i, j) is True if box b has query i and key j, an allowed pair."""
    place = torch.arange(_SIDE)
    in_q, in_k = (place < count[:, None] for count in (boxes.q.count, boxes.k.count))
    # Places beyond a box repeat its first position; the result masks them.
    q = boxes.q.first[:, None] + boxes.q.step * place * in_q
    k = boxes.k.first[:, None] + boxes.k.step * place * in_k
    return wanted.allows(q[:, :, None], k[:, None, :]) & in_q[:, :, None] & in_k[:, None, :]


def _union_of_progressions(first: Tensor, count: Tensor, step: int) -> list[range]:
    """Return the union of the progressions first[i], first[i] + step, ..., of count[i] terms, as disjoint ranges."""
    if not len(first):
        return []
    # All residue classes on one axis, with gaps between them.
    length = int((first // step + count).max()) + 1
    place = first % step * length + first // step
    begin, end = joined_intervals(place, place + count)
    first, last = (side % length * step + side // length for side in (begin, end - 1))
    return [range(*run, step) for run in zip(first.tolist(), (last + 1).tolist(), strict=True)]


def keys_by_distance(wanted: KeyQuery) -> list[range] | None:
    """Return the keys that some query sees, as ranges, if the rule depends on the distance alone; else None.

    None also if the queries' step cuts the keys into over 512 residue classes: step // gcd(step, keys.step).
    """
    keys, number = wanted.keys, len(wanted.queries)
    step = wanted.queries.step if number > 1 else 1
    classes = step // gcd(step, keys.step)
    if common_period(wanted.factors) != 1 or classes > _MOST_CLASSES:
        return None
    found: list[range] = []
    # The keys of a residue class are filled up to the queries' step, so that lags are differences of indices.
    for index in range(min(classes, len(keys))):
        hull = range(keys.start + index * keys.step, keys[-1] + 1, step)
        begin, end = _seen_lags(wanted, hull)  # key j is seen iff one of the lags j - number + 1 to j is allowed
        for run in zip(begin.tolist(), (end + (number - 1)).tolist(), strict=True):
            places = intersect(range(*run), range(len(hull)))
            found.append(intersect(hull[places.start : places.stop], keys))
    return [each for each in found if each]


def _seen_lags(wanted: KeyQuery, keys: range) -> tuple[Tensor, Tensor]:
    """Return the lags (key index - query index) that count as allowed, as ascending intervals (begins, exclusive ends).

    An allowed lag counts, and others may count if they are between two allowed lags at most n apart, for n queries: a
    key has n consecutive lags, so with a lag between the two it also has one of them. Queries and keys must have equal
    steps, and the rule must depend on the distance alone.

    keys: positions of the keys by key index; they replace wanted.keys.
    """
    n, found = len(wanted.queries), []
    begin, end = torch.tensor([1 - n]), torch.tensor([len(keys)])
    while len(begin):
        bounds = _count_lags(wanted, keys, begin, end)
        some, full = bounds.low > 0, bounds.low == end - begin
        between = joined_intervals(*_lags_between(begin[some], end[some], n))
        found += [(begin[full], end[full]), between]
        doubtful = (bounds.high > 0) & ~full & ~_inside_runs(begin, end, *between)
        begin, end = _cut_intervals(begin[doubtful], end[doubtful])
    return joined_intervals(*(torch.cat(side) for side in zip(*found, strict=True)))


def _count_lags(wanted: KeyQuery, keys: range, begin: Tensor, end: Tensor) -> Bounds:
    """Return bounds on the number of allowed lags in each interval [begin, end); exact for single lags.

    A lag is key index - query index.

    keys: as in `_seen_lags`.
    """
    # A query position for which no lag gives a negative key position.
    shift = keys.start - wanted.queries.start
    place = max(0, -(shift + keys.step * (1 - len(wanted.queries))))
    head, query = torch.full_like(begin, wanted.head), torch.full_like(begin, place)
    first = place + shift + keys.step * begin
    q, k = Progression(query, keys.step, torch.ones_like(query)), Progression(first, keys.step, end - begin)
    bounds = wanted.rule.count(Box(head, q, k), num_heads=wanted.num_heads)
    single = ((end - begin == 1) & (bounds.low < bounds.high)).nonzero().squeeze(1)
    if not len(single):
        return bounds
    allowed = wanted.allows(query[single], first[single]).long()
    return Bounds(bounds.low.index_copy(0, single, allowed), bounds.high.index_copy(0, single, allowed))


def _lags_between(begin: Tensor, end: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return intervals of lags between two allowed lags at most n apart, as (begins, exclusive ends).

    begin, end: disjoint ascending intervals [begin, end), each with an allowed lag.

    For each interval i, let j be the last one with end[j] <= begin[i] + n + 1: if j > i, the result has an interval
    from the last lag of i to the first lag of j, both included.
    """
    last = torch.searchsorted(end, begin + (n + 1), right=True) - 1
    first = (last > torch.arange(len(last))).nonzero().squeeze(1)
    return end[first] - 1, begin[last[first]] + 1


def _inside_runs(begin: Tensor, end: Tensor, run_begin: Tensor, run_end: Tensor) -> Tensor:
    if not len(run_begin):
        return torch.zeros_like(begin, dtype=torch.bool)
    run = torch.searchsorted(run_begin, begin, right=True) - 1
    return (run >= 0) & (end <= run_end[run.clamp(min=0)])


def _cut_intervals(begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return (begins, ends) of the parts of the intervals [begin, end), in the order of the intervals.

    Each interval is cut into at most 8 non-empty parts of about equal length.
    """
    edges = begin[:, None] + (end - begin)[:, None] * torch.arange(_NUM_PARTS + 1) // _NUM_PARTS
    first, last = edges[:, :-1].flatten(), edges[:, 1:].flatten()
    held = first < last
    return first[held], last[held]
