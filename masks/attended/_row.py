"""For decoding: keys that a few queries see, and keys that later queries may see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ..core import Box, Pattern, Progression, Ranges, intersect, union_of
from ._rewrites import KeyQuery
from ._search import keys_of_any

# N rows, n keys, R runs of keys

Keys = Ranges | Int64[Tensor, " n"]  # ranges in closed form, or single positions

_FEW_PAIRS = 1 << 20  # of a rule without a closed form: up to this many, evaluation is faster than bounds
FOREVER = 1 << 30  # number of future queries if it is unknown
_MOST_COMPARISONS = 1 << 9  # of a row's range with a range of all keys; beyond, pairs are evaluated


@dataclass(frozen=True)
class SeenKeys:
    """Keys that at least one of a few queries sees, each once, and the allowed pairs.

    rows: indices in the range of queries. They include every query that sees a key, and may include others.
    keys: positions.
    pairs: True where a query sees a key, in the order of `rows` and `keys`; None means that every query of `rows` sees
        every key.
    """

    rows: range
    keys: Keys
    pairs: Bool[Tensor, "N n"] | None


@dataclass(frozen=True)
class RowSource:
    """The rule of one head, with a method that returns the keys that given queries see.

    head: a global head that follows the rule.
    num_heads: number of global heads.
    """

    rule: Pattern
    head: int
    num_heads: int

    def seen(self, queries: range, keys: range) -> SeenKeys | None:
        """Return the keys in `keys` that at least one of a few queries sees, and the allowed pairs.

        None if no query sees a key.

        queries, keys: ranges of consecutive positions.
        """
        listed: list[Ranges] = []
        for query in queries:
            row = self.rule.row(query, keys)
            if row is None:
                return self._seen_by_search(queries, keys)
            listed.append(row)
        return self._seen_by_ranges(queries, listed)

    def _seen_by_ranges(self, queries: range, listed: Sequence[Ranges]) -> SeenKeys | None:
        """Return the keys that some query sees and the allowed pairs; None if no query sees a key.

        listed[i]: ranges of the keys that the i-th query sees.
        """
        rows = _hull([index for index, row in enumerate(listed) if row])
        if not rows:
            return None
        some = [listed[index] for index in rows]
        if all(row == some[0] for row in some):
            return SeenKeys(rows, some[0], None)
        every = _union(keys for row in some for keys in row)
        if len(every) * sum(map(len, some)) <= _MOST_COMPARISONS:
            return SeenKeys(rows, every, _pair_mask(some, every))
        return SeenKeys(rows, every, self._allowed_pairs(queries[rows.start : rows.stop : rows.step], positions(every)))

    def _seen_by_search(self, queries: range, keys: range) -> SeenKeys | None:
        """Return the keys that some query sees and the allowed pairs, for a rule without a closed form.

        None if no query sees a key. Up to 2**20 pairs are all evaluated; for more, `keys_of_any` finds the keys first.
        """
        if len(queries) * len(keys) > _FEW_PAIRS:
            found = keys_of_any([KeyQuery((self.rule,), queries, keys, self.head, self.num_heads)])
            if not found:
                return None
            places = positions(found)
            pairs = self._allowed_pairs(queries, places)
        else:
            places = positions([keys])
            pairs = self._allowed_pairs(queries, places)
            some = pairs.any(0).nonzero().flatten()
            places, pairs = places[some], pairs[:, some]
        rows = _hull(pairs.any(1).nonzero().flatten().tolist())
        pairs = pairs[rows.start : rows.stop : rows.step]
        return SeenKeys(rows, places, None if bool(pairs.all()) else pairs) if rows else None

    def _allowed_pairs(self, queries: range, keys: Int64[Tensor, " n"]) -> Bool[Tensor, "N n"]:
        wanted = KeyQuery((self.rule,), queries, range(0), self.head, self.num_heads)
        return wanted.allows(positions([queries])[:, None], keys)


def positions(ranges: Sequence[range]) -> Int64[Tensor, " n"]:
    parts = [torch.arange(each.start, each.stop, each.step) for each in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _hull(indices: Sequence[int]) -> range:
    """Return the shortest range that contains these ascending numbers; range(0) if there are none."""
    if not indices:
        return range(0)
    step = reduce(gcd, (index - indices[0] for index in indices[1:]), 0)
    return range(indices[0], indices[-1] + 1, step or 1)


def _union(ranges: Iterable[range]) -> Ranges:
    """Return the union of non-empty ranges, as disjoint ranges."""
    # For speed, ranges of equal step and residue that overlap or continue each other are joined before `union_of`.
    joined: dict[tuple[int, int], range] = {}
    rest: list[range] = []
    for each in sorted(ranges, key=lambda each: each.start):
        line = each.step, each.start % each.step
        before = joined.get(line)
        if before is not None and each.start > before[-1] + each.step:
            rest.append(before)
            before = None
        joined[line] = each if before is None else range(before.start, max(before.stop, each.stop), each.step)
    every = [*rest, *joined.values()]
    return union_of(every) if len(every) > 1 else tuple(every)


def _pair_mask(rows: Sequence[Ranges], every: Ranges) -> Bool[Tensor, "N n"]:
    pairs = torch.zeros(len(rows), sum(map(len, every)), dtype=torch.bool)
    begin = 0
    for part in every:
        for index, row in enumerate(rows):
            for keys in row:
                if both := intersect(keys, part):
                    first, last = ((key - part.start) // part.step for key in (both[0], both[-1]))
                    pairs[index, begin + first : begin + last + 1 : max(1, both.step // part.step)] = True
        begin += len(part)
    return pairs


def maybe_visible(
    sources: Sequence[RowSource],
    firsts: Int64[Tensor, " R"],
    lengths: Int64[Tensor, " R"],
    query: int,
    num_queries: int,
) -> Bool[Tensor, " R"]:
    """Return a mask of R runs of keys: True if some query may see a key of the run, by at least one rule.

    False is certain, True is not.

    sources: the rules.
    firsts, lengths: first position and length of each run.
    query, num_queries: first position and number of the queries, which are consecutive.
    """
    seen = torch.zeros(len(firsts), dtype=torch.bool)
    for source in sources:
        left = (~seen).nonzero().squeeze(1)
        if len(left) == 0:
            break
        each = torch.ones_like(left)
        queries = Progression(each * query, 1, each * num_queries)
        box = Box(each * source.head, queries, Progression(firsts[left], 1, lengths[left]))
        seen[left] = source.rule.count(box, num_heads=source.num_heads).high > 0
    return seen
