"""KV needs: the tokens that each KV head's query heads need, where pairs of shards that look alike are asked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flexdilated.masks.core._check import require_int
from flexdilated.masks.core._composite import common_period
from flexdilated.masks.core._pattern import Expression, Pattern, require_expression
from flexdilated.masks.core._ranges import Ranges
from flexdilated.masks.needs._asked import Asked, moved
from flexdilated.masks.needs._needs import keys_of_any, rules_of_heads

from ..masks.patterns.run_time._run_time import run_time_leaves
from ..masks.patterns.run_time._run_time_checks import missing

HeadRule = tuple[Pattern, int]  # a rule for one head, and a head that follows it


@dataclass(frozen=True, eq=False)
class KVNeeds:
    """The keys that queries need in each of this device's KV heads, by the rules of its group of query heads."""

    num_heads_global: int
    groups: tuple[tuple[HeadRule, ...], ...]  # the distinct rules of each KV head's query heads
    _known: dict[tuple[Asked, ...], Ranges] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pattern: Expression,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_offset: int,
        num_heads_global: int | None,
    ) -> KVNeeds:
        """Raises ValueError for sizes that do not fit each other, or the pattern, and for tensors without values."""
        for leaf in run_time_leaves(require_expression(pattern)):
            raise ValueError(missing(leaf.name))
        require_int("num_heads", num_heads, minimum=1)
        require_int("num_kv_heads", num_kv_heads, minimum=1)
        require_int("head_offset", head_offset, minimum=0)
        total = head_offset + num_heads if num_heads_global is None else num_heads_global
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads; got {num_heads=} and {num_kv_heads=}")
        if head_offset + num_heads > total:
            raise ValueError(
                f"heads {head_offset} to {head_offset + num_heads - 1} must lie within num_heads_global; "
                f"got num_heads_global={total}"
            )
        pattern.check_heads(total)
        pattern.check_tokens(range(num_tokens), range(num_tokens))
        size = num_heads // num_kv_heads
        firsts = range(head_offset, head_offset + num_heads, size)
        # Groups with the same rules are equal: each rule goes with the first of all heads that follows it.
        follower = rules_of_heads(pattern, range(head_offset, head_offset + num_heads), total)
        rules = (rules_of_heads(pattern, range(at, at + size), total) for at in firsts)
        groups = tuple(tuple((rule, follower[rule]) for rule in each) for each in rules)
        return cls(total, groups)

    def by_head(self, queries: Ranges, keys: Ranges) -> tuple[Ranges, ...]:
        """For each KV head the positions among the keys that some of the queries need."""
        if not queries or not keys:
            return ((),) * len(self.groups)
        return tuple(self.of_any([(rule, run) for rule in rules for run in queries], keys) for rules in self.groups)

    def of_any(self, asked: Sequence[tuple[HeadRule, range]], keys: Ranges) -> Ranges:
        """The positions among some keys that some of these queries need, each run of them by a rule of its own."""
        # Where all rules repeat after a shift, so do the needs.
        period = common_period(tuple(rule for (rule, _), _ in asked))
        least = min(keys[0].start, *(queries.start for _, queries in asked))
        shift = 0 if period is None else least // period * period
        questions = tuple(
            Asked((rule,), moved(queries, -shift), moved(run, -shift), head, self.num_heads_global)
            for (rule, head), queries in asked
            for run in keys
        )
        if questions not in self._known:
            self._known[questions] = keys_of_any(questions)
        return tuple(moved(each, shift) for each in self._known[questions])
