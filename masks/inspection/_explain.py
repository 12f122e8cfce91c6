"""explain: why one pair is allowed or not, rule by rule, and where it stands among the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..core._ambient import plans
from ..core._bound import Extent
from ..core._check import require_below, require_int
from ..core._pattern import Expression, Mixture, Pattern, require_expression
from ..core._reason import Pair, Reason
from ..patterns.run_time._run_time import (
    Table,
    named,
    names,
    run_time_leaves,
)
from ..planning._block_mask import block_sides
from ._standing import Standing, standings


@dataclass(frozen=True)
class Explanation:
    """What a pattern says of one pair, as a tree of reasons, and the block that holds the pair.

    `multiplicity` is how many branches allow the pair: 0 or 1 for a set. `standings` are empty where no number of
    tokens was given. The str is the tree as indented lines.
    """

    pair: Pair
    batch: int
    multiplicity: int
    reason: Reason
    standings: tuple[Standing, ...] = ()

    @property
    def pattern(self) -> Expression:
        return self.reason.pattern

    @property
    def allowed(self) -> bool:
        return self.reason.allowed

    @property
    def text(self) -> str:
        return self.reason.text

    @property
    def parts(self) -> tuple[Reason, ...]:
        return self.reason.parts

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        pair = {"query": self.pair.query, "key": self.pair.key, "head": self.pair.head}
        where = {**pair, "num_heads": self.pair.num_heads, "batch": self.batch}
        found = {**where, "multiplicity": self.multiplicity, **self.reason.to_data()}
        return {**found, "standings": [standing.to_data() for standing in self.standings]}

    def __str__(self) -> str:
        entry = f", batch entry {self.batch}" if self.pattern.varies else ""
        asked = f"query {self.pair.query}, key {self.pair.key}, head {self.pair.head} of {self.pair.num_heads}{entry}"
        times = f", {self.multiplicity} times" if self.multiplicity > 1 else ""
        verdict = f"{asked}: {'allowed' if self.allowed else 'not allowed'}{times}"
        return "\n".join([verdict, *self.reason.lines(), *map(str, self.standings)])


@plans
def explain(
    pattern: Expression,
    *,
    query: int,
    key: int,
    head: int = 0,
    num_heads: int = 1,
    batch: int = 0,
    num_tokens: int | None = None,
    num_keys: int | None = None,
    bindings: Mapping[str, Tensor] | None = None,
    block_size: int | tuple[int, int] = 128,
) -> Explanation:
    """Say why the query sees the key, or why not: by each branch and each part, in plain numbers.

    query, key: positions. head: one of num_heads global heads. batch: the entry whose run-time tensors are asked.
    num_tokens: positions of the queries, and of the keys unless num_keys is given. With it the explanation says too
    in which block the pair lies, in the natural order and in that of `masks.layout`, and how many pairs it holds.
    A pattern with run-time tensors needs it. bindings: those tensors that the pattern names and does not carry.

    Raises ValueError or TypeError for a pair, a head or an entry that there is not, and for tensors that do not fit.
    """
    require_expression(pattern)
    sides = block_sides(block_size)
    require_int("num_heads", num_heads, minimum=1)
    keys = num_tokens if num_keys is None else num_keys
    _require_position("query", query, num_tokens, "tokens")
    _require_position("key", key, keys, "tokens" if num_keys is None else "keys")
    require_below("head", head, num_heads, "heads")
    require_int("batch", batch, minimum=0)
    rule = _rule(pattern, num_heads, num_tokens, keys, bindings)
    if rule.num_entries() > 1:
        require_below("batch", batch, rule.num_entries(), "batch entries")
    rule = rule.entry(batch)
    pair = Pair(query, key, head, num_heads)
    branches = tuple(branch.reason(pair) for branch in rule.branches())
    places = () if num_tokens is None or keys is None else standings(rule, pair, num_tokens, keys, sides)
    found = _as_written(_whole(rule, branches), pattern)
    return Explanation(pair, batch, sum(branch.allowed for branch in branches), found, places)


def _whole(rule: Expression, branches: tuple[Reason, ...]) -> Reason:
    """The reason of a set itself; of a mixture how many branches allow the pair."""
    if not isinstance(rule, Mixture):
        return branches[0]
    times = sum(branch.allowed for branch in branches)
    if not times:
        return Reason(rule, False, f"none of {len(branches)} branches allows it", branches)
    counts = "once" if times == 1 else f"{times} times"
    return Reason(rule, True, f"allowed by {times} of {len(branches)} branches: it counts {counts}", branches)


def _rule(
    pattern: Expression,
    num_heads: int,
    num_tokens: int | None,
    num_keys: int | None,
    bindings: Mapping[str, Tensor] | None,
) -> Expression:
    """The pattern with run-time tensors' values in place, checked for these sizes as far as they are known."""
    tensors = _tensors(pattern, bindings)
    if num_tokens is not None and num_keys is not None:
        rule = pattern.resolve(tensors, Extent(num_tokens, num_keys))
        rule.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_keys)
        return rule
    if num_keys is not None:
        raise ValueError(f"num_keys goes with num_tokens, the positions of the queries; got num_keys={num_keys} alone")
    if names(pattern):
        needed = ", ".join(map(repr, names(pattern)))
        raise ValueError(f"a pattern with run-time tensors needs num_tokens, as many as they speak of; it has {needed}")
    pattern.check_heads(num_heads)
    return pattern


def _tensors(pattern: Expression, bindings: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The run-time tensors that the pattern carries and those given by name."""
    if bindings is not None and not isinstance(bindings, Mapping):
        raise TypeError(f"bindings must map names to tensors; got {type(bindings).__name__}")
    carried, given = pattern.given_tensors(), dict(bindings or {})
    free = [name for name in names(pattern) if name not in carried]
    for name in given:
        if name not in free:
            known = f"lacks {', '.join(map(repr, free))}" if free else "lacks none"
            raise ValueError(f"bindings must name run-time tensors that the pattern lacks; it {known}; got {name!r}")
    return carried | given


def _as_written(reason: Reason, pattern: Expression) -> Reason:
    """The same reasons, of the rules as the pattern has them: with run-time tensors by their names."""
    carried = {leaf.text: leaf for leaf in run_time_leaves(pattern)}

    def written(leaf: Pattern) -> Pattern:
        return carried[named(leaf).text] if isinstance(leaf, Table) else leaf

    def renamed(each: Reason) -> Reason:
        source = each.pattern.map_leaves(written)
        return replace(each, pattern=source, parts=tuple(renamed(part) for part in each.parts))

    return renamed(reason) if pattern.varies else reason


def _require_position(name: str, value: int, stop: int | None, what: str) -> None:
    require_int(name, value, minimum=0)
    if stop is not None:
        require_below(name, value, require_int(f"the number of {what}", stop, minimum=1), what)
