"""Ranges of positions: what a row's keys are in closed form, and how they intersect and join."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

Ranges = tuple[range, ...]  # of steps above 0, none of them empty, no two with a position in common

_MOST_MEETINGS = 1 << 14  # of one range with another: milliseconds


def as_ranges(keys: range) -> Ranges:
    """One range as a set of positions, which has no empty ranges."""
    return (keys,) if keys else ()


def within(keys: range, start: int, stop: int) -> range:
    """The positions of an ascending range that lie in [start, stop)."""
    skipped = max(0, -(-(start - keys.start) // keys.step))
    return range(keys.start + skipped * keys.step, min(keys.stop, stop), keys.step)


def intersect(left: range, right: range) -> range:
    """The positions of both ascending ranges."""
    if right.step == 1:
        return within(left, right.start, right.stop)
    if left.step == 1:
        return within(right, left.start, left.stop)
    divisor = gcd(left.step, right.step)
    if (right.start - left.start) % divisor:
        return range(0)
    # left.start + left.step * index meets right at one index in every right.step / divisor.
    cycle = right.step // divisor
    index = (right.start - left.start) // divisor * pow(left.step // divisor, -1, cycle) % cycle
    both = range(left.start + left.step * index, min(left.stop, right.stop), left.step * cycle)
    return within(both, right.start, both.stop)


def among(listed: Iterable[range], keys: range) -> Ranges:
    """The positions of ranges without overlap that are also among `keys`."""
    return tuple(both for each in listed if (both := intersect(each, keys)))


def intersect_all(left: Ranges, right: Ranges) -> Ranges | None:
    """The positions of both sets; None where too many ranges meet."""
    if len(left) * len(right) > _MOST_MEETINGS:
        return None
    return tuple(both for a in left for b in right if (both := intersect(a, b)))


def unite(ranges: Ranges) -> Ranges | None:
    """The positions of any of these ranges, each once; None for many ranges, or if longer steps overlap."""
    if len(ranges) ** 2 > _MOST_MEETINGS:
        return None
    joined: list[range] = []
    for keys in sorted(ranges, key=lambda keys: keys.step):  # runs first: they can be cut out of what follows
        rest = [keys]
        for earlier in joined:
            if earlier.step == 1:
                rest = [part for piece in rest for part in _without(piece, earlier) if part]
            elif any(intersect(piece, earlier) for piece in rest):
                return None
        joined += rest
    return tuple(joined)


def _without(keys: range, run: range) -> tuple[range, range]:
    return within(keys, keys.start, run.start), within(keys, run.stop, keys.stop)
