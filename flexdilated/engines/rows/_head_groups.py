"""Which heads see the same keys, for calls of few queries: found once, from the pattern's rule for each head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import log

import torch

from ...masks import Pattern
from ...masks.core import Expression
from ...masks.needs import RowSource
from ._row_attention import HeadGroup, Selection


@dataclass(frozen=True)
class HeadRule:
    """One head's rule, shared by these heads of this device."""

    source: RowSource
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Branch:
    """The rules of one branch, which part the heads among them; a pair counts exp(log_weight) times."""

    rules: tuple[HeadRule, ...]
    log_weight: float


def branch_rules(pattern: Expression, *, num_heads: int, head_offset: int, num_heads_global: int) -> tuple[Branch, ...]:
    """Each distinct branch, its heads sorted by rule."""
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
    """A branch's heads, in groups that see the same keys and are computed at once."""

    groups: tuple[HeadGroup, ...]
    log_weight: float


def group_heads(
    branches: tuple[Branch, ...], *, num_heads: int, num_kv_heads: int, device: torch.device
) -> tuple[GroupedBranch, ...]:
    """The groups of each branch, once the key/value heads are known."""
    return tuple(
        GroupedBranch(
            tuple(group for rule in branch.rules for group in _groups(rule, num_heads, num_kv_heads, device)),
            branch.log_weight,
        )
        for branch in branches
    )


def _groups(rule: HeadRule, num_heads: int, num_kv_heads: int, device: torch.device) -> Iterator[HeadGroup]:
    """The rule's heads, those apart that have another number of companions at their key/value head."""
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
    """Ascending numbers as one progression, or one by one."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    whole = range(numbers[0], numbers[-1] + 1, step)
    return [whole] if list(whole) == numbers else [range(number, number + 1) for number in numbers]


def _selection(heads: list[int], device: torch.device) -> Selection:
    runs = _progressions(heads)
    return _slice(runs[0]) if len(runs) == 1 else torch.tensor(heads, device=device)


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)
