"""Calls of few queries, computed without a plan: head groups, the rows that see keys, and the keys they see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from jaxtyping import Bool
from torch import Tensor

from ...masks import Pattern, cache
from ...masks.core import Expression, plans
from ...masks.needs import Keys, RowSource, Seen, positions
from ...masks.text import read_text
from .._call_key import CallKey
from ._row_attention import HeadGroup, Part, Selection


@dataclass(frozen=True)
class HeadRule:
    """A rule and the heads of this device that have it."""

    source: RowSource
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Branch:
    """Rules of one branch, which partition the heads; a pair counts exp(log_weight) times."""

    rules: tuple[HeadRule, ...]
    log_weight: float


def branch_rules(pattern: Expression, *, num_heads: int, head_offset: int, num_heads_global: int) -> tuple[Branch, ...]:
    """Distinct branches of a pattern, with heads grouped by rule."""
    branches = []
    for branch, times in Counter(pattern.branches()).items():
        members: dict[Pattern, list[int]] = {}
        for head in range(num_heads):
            members.setdefault(branch.for_head(head + head_offset, num_heads_global), []).append(head)
        rules = tuple(
            HeadRule(RowSource(rule, heads[0] + head_offset, num_heads_global), tuple(heads))
            for rule, heads in members.items()
        )
        branches.append(Branch(rules, log(times)))
    return tuple(branches)


@dataclass(frozen=True)
class GroupedBranch:
    """Heads of a branch in groups; a group sees one set of keys and is computed in one call."""

    groups: tuple[HeadGroup, ...]
    log_weight: float


def group_heads(
    branches: tuple[Branch, ...], *, num_heads: int, num_kv_heads: int, device: torch.device
) -> tuple[GroupedBranch, ...]:
    """Split the rules of each branch into groups for this number of key/value heads."""
    return tuple(
        GroupedBranch(
            tuple(group for rule in branch.rules for group in _groups(rule, num_heads, num_kv_heads, device)),
            branch.log_weight,
        )
        for branch in branches
    )


def _groups(rule: HeadRule, num_heads: int, num_kv_heads: int, device: torch.device) -> Iterator[HeadGroup]:
    """Yield groups with equally many of the rule's heads per key/value head and evenly spaced key/value heads."""
    shared = num_heads // num_kv_heads
    queries: dict[int, list[int]] = {}
    for head in rule.heads:
        queries.setdefault(head // shared, []).append(head)
    by_size: dict[int, list[int]] = {}
    for key_head, heads in queries.items():
        by_size.setdefault(len(heads), []).append(key_head)
    for size, key_heads in by_size.items():
        for run in _progressions(key_heads):
            heads = [head for key_head in run for head in queries[key_head]]
            yield HeadGroup(rule.source, _selection(heads, device), _slice(run), size)


def _progressions(numbers: list[int]) -> list[range]:
    """Ascending numbers as one arithmetic progression, else one range per number."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    whole = range(numbers[0], numbers[-1] + 1, step)
    return [whole] if list(whole) == numbers else [range(number, number + 1) for number in numbers]


def _selection(heads: list[int], device: torch.device) -> Selection:
    runs = _progressions(heads)
    return _slice(runs[0]) if len(runs) == 1 else torch.tensor(heads, device=device)


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)


MOST_ROWS = 16  # most queries of a call that is computed without a plan
_MOST_VIEWS = 4  # most ranges of keys that are read as views; more are gathered by index
_GROUP_BYTES = 1000


def takes_rows(key: CallKey) -> bool:
    """True for calls that need no plan: few queries in order, not self-attention, no requested block size.

    Self-attention repeats its sizes, so its plan is found in the cache, and is then faster.
    """
    few = key.num_queries <= MOST_ROWS and key.rate == 1 and not key.block_size and not key.placement
    return few and (key.num_queries, key.q_offset) != (key.num_keys, key.k_offset)


def parts_of_call(key: CallKey, rule: Expression | None, device: torch.device) -> tuple[Part, ...]:
    """Parts of `rule`, or of the call's pattern if None, over the call's queries and keys.

    Head groups of a pattern are cached for all offsets and lengths; a `rule` from run-time tensors is not cached.
    """

    def build() -> tuple[Expression, tuple[GroupedBranch, ...]]:
        read = read_text(key.pattern) if rule is None else rule
        where = {"head_offset": key.head_offset, "num_heads_global": key.num_heads_global}
        # From the unbound rule: the random draws of a bound one end with the positions of its call.
        branches = branch_rules(read, num_heads=key.num_heads, **where)
        return read, group_heads(branches, num_heads=key.num_heads, num_kv_heads=key.num_kv_heads, device=device)

    if rule is None:
        heads = (key.num_heads, key.num_kv_heads, key.head_offset, key.num_heads_global)
        name = ("rows", key.pattern, *heads, device)
        read, branches = cache().get(name, build, _rules_bytes, pattern=key.pattern)
    else:
        read, branches = build()
    bound = key.bound(read)
    queries = range(bound.q_offset, bound.q_offset + bound.num_queries)
    keys = range(bound.k_offset, bound.k_offset + bound.num_keys)
    return row_parts(branches, queries, keys, _InOrder(keys.start))


def _rules_bytes(rules: tuple[Expression, tuple[GroupedBranch, ...]]) -> int:
    return _GROUP_BYTES * sum(len(branch.groups) for branch in rules[1])


class Slots(Protocol):
    """Map of key positions to slots of a tensor."""

    def slices(self, positions: range) -> list[slice]:
        """Slots of a range of positions, as slices."""
        ...

    def slots(self, positions: Tensor) -> Tensor:
        """Slot of each position."""
        ...


@dataclass(frozen=True)
class _InOrder:
    """Slots of keys at consecutive positions from `first`."""

    first: int

    def slices(self, positions: range) -> list[slice]:
        return [slice(positions.start - self.first, positions.stop - self.first, positions.step)]

    def slots(self, positions: Tensor) -> Tensor:
        return positions - self.first


@plans
def row_parts(branches: Sequence[GroupedBranch], queries: range, keys: range, store: Slots) -> tuple[Part, ...]:
    """Parts for queries and keys at these positions; every visible key must be in `store`."""
    parts: list[Part] = []
    level = 0
    for branch in branches:
        deepest = level
        for group in branch.groups:
            seen = group.source.seen(queries, keys)
            if seen is not None:
                own = _parts(group, seen, store, level, branch.log_weight)
                parts += own
                deepest = max(deepest, level + len(own))
        level = deepest
    return tuple(parts)


def _parts(group: HeadGroup, seen: Seen, store: Slots, level: int, log_weight: float) -> list[Part]:
    """Parts over a few views of the visible keys, or a single part that gathers them by index."""
    slots, lengths = _selections(seen.keys, store)
    pairs = [None] * len(slots) if seen.pairs is None else seen.pairs.split(lengths, 1)
    rows = slice(seen.rows.start, seen.rows.stop, seen.rows.step)
    return [
        Part(group, rows, each, shown, _blind(shown), at, log_weight)
        for at, (each, shown) in enumerate(zip(slots, pairs, strict=True), start=level)
    ]


def _blind(pairs: Bool[Tensor, "rows n"] | None) -> Bool[Tensor, " rows"] | None:
    """Mask of the rows without a pair; None if every row has one."""
    blind = None if pairs is None else ~pairs.any(1)
    return None if blind is None or not bool(blind.any()) else blind


def _selections(keys: Keys, store: Slots) -> tuple[list[Selection], list[int]]:
    """(selections of the keys' slots, number of keys in each)."""
    if isinstance(keys, Tensor):
        return [store.slots(keys)], [len(keys)]
    views = [view for each in keys for view in store.slices(each)]
    lengths = [len(range(view.start, view.stop, view.step)) for view in views]
    assert sum(lengths) == sum(map(len, keys)), "key evicted"
    if len(views) > _MOST_VIEWS:
        return [positions([range(view.start, view.stop, view.step) for view in views])], [sum(lengths)]
    # A slice of one key gets step 1: a large step could overflow as a memory stride.
    return [slice(x.start, x.start + 1) if n == 1 else x for x, n in zip(views, lengths, strict=True)], lengths
