"""KV needs: the tokens that each KV head's query heads need, where pairs of shards that look alike are asked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexdilated.masks._asked import moved
from flexdilated.masks._check import require_int
from flexdilated.masks._needs import keys_of_rules, rules_of_heads
from flexdilated.masks._pattern import Expression, Pattern, common_period, require_expression
from flexdilated.masks._ranges import Ranges
from flexdilated.masks._run_time import missing, run_time_leaves

Rules = tuple[tuple[Pattern, int], ...]  # distinct rules for one head, each with a head that follows it


@dataclass(frozen=True, eq=False)
class KVNeeds:
    """The keys that queries need in each of this device's KV heads, by the rules of its group of query heads."""

    sizes: tuple[int, ...]  # query heads and KV heads of this device, its first head, heads of all devices
    groups: tuple[Rules, ...]
    _known: dict[object, Ranges] = field(default_factory=dict)

    @classmethod
    def of(
        cls, pattern: Expression, num_heads: int, num_kv_heads: int, head_offset: int, num_heads_global: int | None
    ) -> KVNeeds:
        """Raises ValueError for sizes that do not fit, and for run-time tensors without values."""
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
        size = num_heads // num_kv_heads
        firsts = range(head_offset, head_offset + num_heads, size)
        groups = tuple(tuple(rules_of_heads(pattern, range(at, at + size), total).items()) for at in firsts)
        return cls((num_heads, num_kv_heads, head_offset, total), groups)

    def by_head(self, queries: Ranges, keys: Ranges) -> tuple[Ranges, ...]:
        """For each KV head the positions among the keys that some of the queries need."""
        return tuple(self._of_group(rules, queries, keys) for rules in self.groups)

    def number(self, queries: Ranges, keys: Ranges) -> int:
        """How many (KV head, token) pairs these are."""
        return sum(len(each) for ranges in self.by_head(queries, keys) for each in ranges)

    def _of_group(self, rules: Rules, queries: Ranges, keys: Ranges) -> Ranges:
        if not queries or not keys:
            return ()
        # Where all rules repeat after a shift, so do the needs.
        period = common_period(tuple(rule for rule, _ in rules))
        least = min(queries[0].start, keys[0].start)
        shift = 0 if period is None else least // period * period
        sides = tuple(tuple(moved(each, -shift) for each in side) for side in (queries, keys))
        asked = (tuple(rule for rule, _ in rules), *sides)
        if asked not in self._known:
            self._known[asked] = keys_of_rules(dict(rules), *sides, num_heads=self.sizes[-1])
        return tuple(moved(each, shift) for each in self._known[asked])
