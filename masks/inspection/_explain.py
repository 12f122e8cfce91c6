"""explain: reasons why one (query, key) pair is allowed or not, and the block that contains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core import (
    Expression,
    Extent,
    Mixture,
    Pair,
    Pattern,
    Reason,
    advises,
    outside_torch_modes,
    renamed,
    require_below,
    require_expression,
    require_int,
)
from ..orders import Layout, residue_rate
from ..patterns import Table, named, names, run_time_leaves
from ..planning import block_sides

_PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class BlockOfPair:
    """The block that contains a pair if tokens are sorted by (position mod rate, position div rate).

    Rate 1 is natural order.

    query_slot, key_slot: places of the tokens in that order.
    row, column: indices of the block.
    block_pairs: number of its pairs, of which the head allows `allowed_pairs`.
    """

    rate: int
    query_slot: int
    key_slot: int
    row: int
    column: int
    allowed_pairs: int
    block_pairs: int

    @property
    def order(self) -> str:
        return "natural" if self.rate == 1 else "residue"

    @property
    def computed(self) -> bool:
        """True if the block has allowed pairs, so that block lists include it."""
        return self.allowed_pairs > 0

    def to_data(self) -> dict[str, Any]:
        """Return the fields, `order` and `computed` as a dict for JSON; "block" is the list [row, column]."""
        names = ("order", "rate", "query_slot", "key_slot", "allowed_pairs", "block_pairs", "computed")
        return {**{name: getattr(self, name) for name in names}, "block": [self.row, self.column]}

    def __str__(self) -> str:
        slots = f"residue-major order of rate {self.rate}, slots {self.query_slot} and {self.key_slot}"
        where = f"{'natural order' if self.rate == 1 else slots}: block ({self.row}, {self.column})"
        kinds = {0: ("none", "left out"), self.block_pairs: ("all", "computed without a mask")}
        some, then = kinds.get(self.allowed_pairs, (self.allowed_pairs, "computed with a mask"))
        return f"{where} allows {some} of its {self.block_pairs} pairs and is {then}"


@dataclass(frozen=True)
class Explanation:
    """Tree of reasons why a pattern allows a pair or not, and the blocks that contain the pair.

    multiplicity: number of branches that allow the pair.
    reason: root of the tree, which str() writes as indented lines.
    standings: the blocks that contain the pair: one in natural order, and one in the order of `masks.layout` if this
        differs and there are as many keys as queries; empty if the number of tokens is unknown.
    zero_keys: number of zero keys that padding adds to the query's softmax; None if that depends on an unknown number
        of tokens.
    """

    pair: Pair
    batch: int
    multiplicity: int
    reason: Reason
    standings: tuple[BlockOfPair, ...] = ()
    zero_keys: int | None = 0

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
        """Return the explanation as a dict for JSON."""
        pair = {name: getattr(self.pair, name) for name in ("query", "key", "head", "num_heads")}
        found = {name: getattr(self, name) for name in ("batch", "multiplicity", "zero_keys")}
        blocks = [block.to_data() for block in self.standings]
        return {**pair, **found, **self.reason.to_data(), "standings": blocks}

    def __str__(self) -> str:
        entry = f", batch entry {self.batch}" if self.pattern.varies else ""
        asked = f"query {self.pair.query}, key {self.pair.key}, head {self.pair.head} of {self.pair.num_heads}{entry}"
        times = f", {self.multiplicity} times" if self.multiplicity > 1 else ""
        verdict = f"{asked}: {'allowed' if self.allowed else 'not allowed'}{times}"
        padding = []
        if self.pattern.pads:
            seen = "an unknown number of" if self.zero_keys is None else self.zero_keys
            known = ": give num_tokens to count them" if self.zero_keys is None else ""
            padding = [f"padding: the softmax of query {self.pair.query} has {seen} zero keys besides{known}"]
        return "\n".join([verdict, *self.reason.lines(), *padding, *map(str, self.standings)])


@outside_torch_modes
@advises(keywords=renamed(query="q row i", key="k column j"), how="write masks.explain(pattern, query=5, key=2)")
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
    """Return the reasons why the query attends to the key or not, by branches and parts of the pattern.

    query, key: positions.
    head: index of the head, below num_heads.
    batch: index of the batch entry, for run-time tensors.
    num_tokens: number of queries, and of keys unless num_keys is given; required for run-time tensors. With num_tokens,
        the explanation has `standings`: the blocks that contain the pair in natural order and, if there are as many
        keys as queries, in the order of `masks.layout`.
    bindings: map from name to tensor, for run-time tensors that the pattern names but does not carry.
    block_size: tokens of a block, one number or (queries, keys).

    Raises ValueError or TypeError for arguments out of range, and for tensors that are missing or do not fit.

    >>> print(masks.explain(masks.local_window(left=2, right=0), query=5, key=2))
    query 5, key 2, head 0 of 1: not allowed
    no   local_window(left=2, right=0): key 2 is 3 tokens before query 5: the window reaches 2 before and 0 after
    """
    require_expression(pattern)
    sides = block_sides(block_size)
    require_int("num_heads", num_heads, minimum=1)
    keys = num_tokens if num_keys is None else num_keys
    _require_position("query", query, num_tokens, "tokens")
    _require_position("key", key, keys, "tokens" if num_keys is None else "keys")
    require_below("head", head, num_heads, "heads")
    require_int("batch", batch, minimum=0)
    rule = _with_run_time_values(pattern, num_heads, num_tokens, keys, bindings)
    if rule.num_entries() > 1:
        require_below("batch", batch, rule.num_entries(), "batch entries")
    rule = rule.entry(batch)
    pair = Pair(query, key, head, num_heads)
    branches = tuple(branch.reason(pair) for branch in rule.branches())
    places = ()
    if num_tokens is not None and keys is not None:
        places = tuple(_blocks_of_pair(rule.union, pair, (num_tokens, keys), sides))
    times, reason = sum(branch.allowed for branch in branches), branches[0]
    if isinstance(rule, Mixture):
        counts = "once" if times == 1 else f"{times} times"
        text = f"allowed by {times} of {len(branches)} branches: it counts {counts}"
        reason = Reason(rule, times > 0, text if times else f"none of {len(branches)} branches allows it", branches)
    return Explanation(pair, batch, times, _with_named_tensors(reason, pattern), places, _zero_keys(rule, pair, keys))


def _zero_keys(rule: Expression, pair: Pair, num_tokens: int | None) -> int | None:
    if rule.pads and num_tokens is None:
        return None
    head, query = torch.tensor(pair.head), torch.tensor(pair.query)
    tokens = max(num_tokens or 0, pair.query + 1)
    return int(rule.zero_keys(head, query, num_heads=pair.num_heads, num_tokens=tokens)) if rule.pads else 0


def _blocks_of_pair(rule: Pattern, pair: Pair, sizes: tuple[int, int], sides: tuple[int, int]) -> Iterator[BlockOfPair]:
    """Yield the pair's block in natural order, then in residue-major order if its rate is above 1 and sizes are equal.

    sizes: number of queries and of keys.
    sides: (queries, keys) of a block.
    """
    mod = rule.mask_mod(num_heads=pair.num_heads, device=torch.device("cpu"))
    zero, head = torch.tensor(0), torch.tensor(pair.head)
    for rate in sorted({1, residue_rate(rule, sizes[0]) if sizes[0] == sizes[1] else 1}):
        (q_slot, row, queries), (k_slot, column, keys) = (
            _block_of_token(Layout(size, rate), position, side)
            for size, position, side in zip(sizes, (pair.query, pair.key), sides, strict=True)
        )
        some = queries.split(max(1, _PAIRS_AT_ONCE // len(keys)))
        allowed = sum(int(mod(zero, head, few[:, None], keys[None, :]).sum()) for few in some)
        yield BlockOfPair(rate, q_slot, k_slot, row, column, allowed, len(queries) * len(keys))


def _block_of_token(layout: Layout, position: int, side: int) -> tuple[int, int, torch.Tensor]:
    """Return (slot of the token, index of its block of slots, positions of the tokens in that block)."""
    slot = int(layout.slot_of(torch.tensor(position)))
    block = slot // side
    slots = torch.arange(block * side, min((block + 1) * side, layout.num_tokens))
    # Positions by runs of residue classes, so no tensor here is as long as the sequence.
    return slot, block, layout.pieces(0).position(torch.tensor(0), slots)


def _with_run_time_values(
    pattern: Expression,
    num_heads: int,
    num_tokens: int | None,
    num_keys: int | None,
    bindings: Mapping[str, Tensor] | None,
) -> Expression:
    """Return the pattern with the values of its run-time tensors, its own and those in `bindings`.

    num_tokens, num_keys: numbers of queries and keys; None for both leaves a pattern without run-time tensors as it is.

    Raises TypeError or ValueError for heads, sizes and bindings that do not fit, for num_keys alone, and for run-time
    tensors without values or num_tokens.
    """
    if bindings is not None and not isinstance(bindings, Mapping):
        raise TypeError(f"bindings must map names to tensors; got {type(bindings).__name__}")
    carried, given = pattern.given_tensors(), dict(bindings or {})
    free = [name for name in names(pattern) if name not in carried]
    for name in given:
        if name not in free:
            known = f"{', '.join(map(repr, free))} here" if free else "none here"
            raise ValueError(f"bindings must name run-time tensors that the pattern still needs, {known}; got {name!r}")
    if num_tokens is not None and num_keys is not None:
        rule = pattern.resolve(carried | given, Extent(num_tokens, num_keys))
        rule.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_keys)
        return rule
    if num_keys is not None:
        raise ValueError(f"num_keys needs num_tokens, the number of queries, too; got num_keys={num_keys} alone")
    if names(pattern):
        needed = ", ".join(map(repr, names(pattern)))
        raise ValueError(
            f"a pattern with run-time tensors needs num_tokens, their number of tokens; got one with {needed}"
        )
    pattern.check_heads(num_heads)
    return pattern


def _with_named_tensors(reason: Reason, pattern: Expression) -> Reason:
    """Return the tree of reasons with each `Table` replaced by the run-time leaf of `pattern` that it comes from.

    A table that was built directly stays.
    """
    carried = {leaf.text: leaf for leaf in run_time_leaves(pattern)}

    def written(leaf: Pattern) -> Pattern:
        return carried.get(named(leaf).text, leaf) if isinstance(leaf, Table) else leaf

    def with_names(each: Reason) -> Reason:
        source = each.pattern.map_leaves(written)
        return replace(each, pattern=source, parts=tuple(with_names(part) for part in each.parts))

    return with_names(reason) if pattern.varies else reason


def _require_position(name: str, value: int, stop: int | None, what: str) -> None:
    require_int(name, value, minimum=0)
    if stop is not None:
        require_below(name, value, require_int(f"num_{what}", stop, minimum=1), what)
