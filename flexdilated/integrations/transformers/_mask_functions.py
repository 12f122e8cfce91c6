"""Convert a mask function of transformers to patterns, by calling it with symbolic positions.

transformers composes its rules as functions (batch, head, query, key) -> bool: causal order, windows, chunks, packing,
groups of image tokens. Here comparisons of positions become bands of distances, look-ups in a tensor become run-time
tensors, and `&` and `|` combine them. torch.compile can trace all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...masks import Mixture, Pattern, causal, chunked, documents, every, local_window, visible_keys

# B batch entries, L positions

PACKED = "packed"  # name of the run-time tensor (B, L) with the packed sequence of each token
_GROUPS, _VISIBLE = "groups", "visible"


@dataclass(frozen=True, eq=False)
class RulePatterns:
    """The rule of a mask function, as three patterns: a pair is allowed if each that is not None allows it.

    begin: pattern that divides a sequence into documents and allows pairs within a document only; None for no division.
    positions: constraints on the positions of query and key, counted from the first token of their document; None if
        the rule has none.
    further: further constraints: tensors with an entry per token, such as groups of image tokens, and unions of
        constraints; None if the rule has none.
    tensors: run-time tensors, by name. `pattern_from_mask_function` omits the tensors of its argument `begin`.
    """

    positions: Pattern | None
    begin: Pattern | None
    further: Pattern | None
    tensors: dict[str, Tensor]

    def whole(self) -> Pattern:
        """Return the intersection of all constraints as one pattern, which allows every pair if there are none."""
        positions = self.positions
        if self.begin is not None:
            positions = (every() if positions is None else positions).per_document(self.begin)
        found = all_of([positions, self.further])
        return every() if found is None else found


def pattern_from_mask_function(function: Callable[..., Any], begin: Pattern | None) -> RulePatterns:
    """Convert a mask function (batch, head, query, key) -> bool to patterns.

    begin: pattern that divides each sequence into documents, from whose first tokens positions are counted; None to
        count from the start of the sequence.

    If the function itself counts positions from the starts of packed sequences, the result has a pattern of these
    sequences in place of `begin`.

    Raises ValueError for operations on positions and results that are not supported, and for the result `new_zeros` of
    a position, alone or joined with other rules by `&`.
    """
    with _SymbolicLookups():
        try:
            found = function(_Batch(), _Head(), _Position(of_query=True), _Position(of_query=False))
        except TypeError as error:
            _refuse(str(error))
    if not isinstance(found, _PairRule):
        _refuse(f"it returns {type(found).__name__}")
    return found.to_patterns(begin, {})


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"flexdilated cannot read the model's mask function: {what}. It takes comparisons of a query's and a key's "
        "position, chunks, tables that say to which group a token belongs, `&` and `|`; attn_implementation='sdpa' "
        "takes any"
    )


class _Batch:
    """Symbolic index of a batch entry."""


class _Head:
    """Symbolic index of a head."""


class _FirstPosition:
    """Symbolic first position of a batch entry; subtracting it changes nothing, as positions are counted from it."""


class _SymbolicLookups(TorchFunctionMode):
    """Mode that makes look-ups of tensors with symbolic indices return symbolic values.

    table[batch, position] gives a `_Position` with this table; a boolean table gives a `_PairRule` at a key's position,
    and ValueError at a query's. table[batch] gives `_FirstPosition`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            if isinstance(index, _Batch):
                return _FirstPosition()
            if isinstance(index, tuple) and isinstance(index[0], _Batch):
                return index[1].entry_of(table)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class _Position:
    """Symbolic number: `shift` plus the position of the query (`of_query`) or of the key.

    With a `table`, `shift` plus the table's entry at that position: a group id, or the token's position in its
    sequence.
    """

    of_query: bool
    shift: int = 0
    table: Tensor | None = None

    device = None

    def entry_of(self, table: Tensor) -> Any:
        if self.shift or self.table is not None:
            _refuse("it reads a table elsewhere than at a query's or key's own position")
        if table.dtype != torch.bool:
            return replace(self, table=table)
        return _refuse("it hides queries by a table") if self.of_query else _PairRule(visible=table)

    def new_ones(self, *_: Any, **__: Any) -> _PairRule:
        return _PairRule()

    def new_zeros(self, *_: Any, **__: Any) -> _PairRule:
        return _PairRule(nothing=True)

    def __add__(self, number: Any) -> _Position:
        return replace(self, shift=self.shift + _integer(number))

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, _FirstPosition):
            return self
        return _Distance(self, other) if isinstance(other, _Position) else self + -_integer(other)

    def __floordiv__(self, size: Any) -> _ChunkIndex:
        return _ChunkIndex(self, _integer(size))

    def __le__(self, other: Any) -> _PairRule:
        if not isinstance(other, _Position) or other.of_query == self.of_query:
            _refuse("it compares a position of a query or key with other than a position of the other of the two")
        _require_one_table(self, other)
        # key + a <= query + b: key - query is at most b - a. query + a <= key + b: key - query is at least a - b.
        counted = self.table is not None
        if self.of_query:
            return _PairRule(least=self.shift - other.shift, from_group_start=counted)
        return _PairRule(most=other.shift - self.shift, from_group_start=counted)

    def __lt__(self, other: Any) -> _PairRule:
        return self + 1 <= other

    def __ge__(self, other: Any) -> _PairRule:
        if isinstance(other, _Position):
            return other <= self
        if _integer(other) != 0 or self.shift:
            _refuse("it compares a position or a group with a number other than 0")
        return _PairRule()  # no position is below 0, and tokens with negative ids are in no group

    def __gt__(self, other: Any) -> _PairRule:
        if not isinstance(other, _Position):
            _refuse("it asks whether a position or a group is above a number")
        return other < self

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, _Position) and self.table is not None and other.table is not None:
            _require_one_table(self, other)
            if self.shift != other.shift or self.of_query == other.of_query:
                _refuse("it compares groups other than those of a query and a key")
            return _PairRule(same=self.table)
        return (self <= other) & (other <= self)


def _require_one_table(one: _Position, other: _Position) -> None:
    """Raise ValueError unless both are positions, or both are entries of tables with equal values."""
    if one.table is other.table:
        return
    if one.table is None or other.table is None:
        _refuse("it compares an entry of a table with a position")
    if one.table.shape != other.table.shape or not torch.equal(one.table, other.table):
        _refuse("it compares entries of two tables")


@dataclass(frozen=True, eq=False)
class _Distance:
    """Symbolic difference of two positions, `of` - `since`, or, if `either_way`, its absolute value."""

    of: _Position
    since: _Position
    either_way: bool = False

    def __abs__(self) -> _Distance:
        return replace(self, either_way=True)

    def __le__(self, most: Any) -> _PairRule:
        near = self.of <= self.since + most
        return near & (self.since <= self.of + most) if self.either_way else near

    def __lt__(self, most: Any) -> _PairRule:
        return self <= _integer(most) - 1

    def __ge__(self, least: Any) -> _PairRule:
        if self.either_way:
            _refuse("it requires a least distance in both directions")
        return -self <= -_integer(least)

    def __gt__(self, least: Any) -> _PairRule:
        return self >= _integer(least) + 1

    def __neg__(self) -> _Distance:
        if self.either_way:
            _refuse("it computes with an absolute distance")
        return _Distance(self.since, self.of)


@dataclass(frozen=True, eq=False)
class _ChunkIndex:
    """Symbolic index of the chunk that contains a position: position // size."""

    of: _Position
    size: int

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, _ChunkIndex) or other.size != self.size or self.of.shift or other.of.shift:
            _refuse("it compares chunks of different sizes or of shifted positions")
        _require_one_table(self.of, other.of)
        return _PairRule(chunk=self.size, from_group_start=self.of.table is not None)


@dataclass(frozen=True, eq=False)
class _PairRule:
    """Intersection of constraints on pairs (query, key); a field that is None adds no constraint.

    least, most: inclusive limits of the distance key - query.
    chunk: length of consecutive chunks; query and key must be in one chunk.
    same: tensor (B, L) of group ids; query and key must have equal, nonnegative ids.
    visible: tensor (B, L), True for the keys that are allowed.
    from_group_start: True if positions are counted from the first token of each group of `same`.
    nothing: True if no pair is allowed.
    unions: pairs of rules; of each pair of rules at least one must allow (query, key).
    """

    least: int | None = None
    most: int | None = None
    chunk: int | None = None
    same: Tensor | None = None
    visible: Tensor | None = None
    from_group_start: bool = False
    nothing: bool = False
    unions: tuple[tuple[_PairRule, _PairRule], ...] = ()

    device = None

    def to(self, *_: Any, **__: Any) -> _PairRule:
        return self

    def __and__(self, other: Any) -> _PairRule:
        if not isinstance(other, _PairRule):
            _refuse(f"it joins a rule with {type(other).__name__}")
        return _PairRule(
            least=_join_constraints(self.least, other.least, max),
            most=_join_constraints(self.most, other.most, min),
            chunk=_join_constraints(self.chunk, other.chunk),
            same=_join_constraints(self.same, other.same),
            visible=_join_constraints(self.visible, other.visible),
            from_group_start=self.from_group_start or other.from_group_start,
            nothing=self.nothing or other.nothing,
            unions=(*self.unions, *other.unions),
        )

    def __or__(self, other: Any) -> _PairRule:
        if not isinstance(other, _PairRule):
            _refuse(f"it joins a rule with {type(other).__name__}")
        if self.nothing or other.nothing:
            return other if self.nothing else self
        return _PairRule(unions=((self, other),))

    def to_patterns(self, begin: Pattern | None, tensors: dict[str, Tensor]) -> RulePatterns:
        """Return this rule as patterns, after adding their run-time tensors to `tensors`.

        begin: as in `pattern_from_mask_function`.
        """
        if self.nothing:
            _refuse("it allows no pair")
        positions = all_of([_band(self.least, self.most), None if self.chunk is None else chunked(self.chunk)])
        further: list[Pattern | None] = []
        if self.from_group_start:
            begin = documents(_add_table(tensors, PACKED, self.same))
        elif self.same is not None:
            further.append(documents(_add_table(tensors, _GROUPS, self.same)))
        if self.visible is not None:
            further.append(visible_keys(_add_table(tensors, _VISIBLE, self.visible)))
        for pair in self.unions:
            one, other = (each.to_patterns(begin, tensors).whole() for each in pair)
            further.append(one | other)
        return RulePatterns(positions, begin, all_of(further), tensors)


def all_of(patterns: Sequence[Pattern | Mixture | None]) -> Any:
    """Return the intersection of the patterns that are not None; None if there are none."""
    found = None
    for each in patterns:
        found = each if found is None else found if each is None else found & each
    return found


def _band(least: int | None, most: int | None) -> Pattern | None:
    """Return the pattern of the pairs with least <= key - query <= most (None: no limit); None if both are None."""
    if least is not None and most is not None and least <= 0 <= most:
        return local_window(left=-least, right=most)
    return all_of([None if most is None else _at_most(most), None if least is None else _at_least(least)])


def _at_most(most: int) -> Pattern:
    """Return the pattern of the pairs with key - query <= most."""
    if most < 0:
        return causal() & ~local_window(left=-most - 1, right=0)
    return causal() | local_window(left=0, right=most) if most else causal()


def _at_least(least: int) -> Pattern:
    """Return the pattern of the pairs with key - query >= least."""
    return ~_at_most(least - 1) if least > 0 else local_window(left=-least, right=0) | ~causal()


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        _refuse(f"it computes a position with {type(value).__name__}, not with an int")
    return value


def _join_constraints(one: Any, other: Any, choose: Callable[[Any, Any], Any] | None = None) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if choose is None:
        _refuse("it joins two chunk sizes, or two tables")
    return choose(one, other)


def _add_table(tensors: dict[str, Tensor], name: str, table: Tensor | None) -> str:
    if table is None:
        _refuse("it counts positions within sequences, without a comparison of the sequences' ids")
    if name in tensors:
        _refuse("it reads two tables of one kind")
    tensors[name] = table
    return name
