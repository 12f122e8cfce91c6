"""Patterns that differ between batch entries: a choice among several patterns, and the position of the first query."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from ..core import (
    LARGEST,
    And,
    Bounds,
    Box,
    Composite,
    Expression,
    Extent,
    MaskMod,
    Mixture,
    Or,
    Pair,
    Pattern,
    Phrase,
    Progression,
    Ranges,
    Reason,
    call,
    constructor,
    every,
    parameters,
    pattern_kind,
)
from ._renumbered import _MethodPattern
from ._run_time import RunTime, Table, integers, missing, of_tensor
from ._token_values import KeySet, VisibleKeys

# B batch entries (or one for all of them)


@pattern_kind("entry_number")
class EntryNumber(RunTime):
    """Run-time tensor with an integer for each batch entry, or one for all; not a rule itself.

    `PerSample` and `QueriesFrom` read it.
    """

    num_dims = 0

    def table(self, tensor: Tensor, extent: Extent) -> EntryNumbers:
        rows = torch.atleast_1d(integers(self.name, tensor, (0, 1)))
        if not len(rows):
            raise ValueError(f"{self.name} must hold an integer for each batch entry, or one for all; got none")
        return EntryNumbers.of(rows)

    def widest(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)


class EntryNumbers(Table):
    """Table with an integer for each batch entry, or one for all; not a rule itself."""

    kind = "entry numbers"

    rows: Int64[Tensor, " B"]

    def described(self) -> str:
        return f"{self.rows.tolist()}"

    def check_range(self, what: str, stop: int) -> None:
        """Raise ValueError for a value outside [0, stop); the values of a placeholder are not checked.

        what: name of the values, for errors.
        """
        least, most = (int(edge) for edge in self.rows.aminmax())
        if self.known and (least < 0 or most >= stop):
            raise ValueError(f"{what} must be at least 0 and below {stop}; got {least if least < 0 else most}")

    def for_entry(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function that maps a tensor of batch indices to the values of these entries, on `device`."""
        held, step = self.on(device), self.batch_step(device)
        return lambda b: held.rows[b * step]


def _check_entry_numbers(what: str, numbers: object, stop: int) -> None:
    """Raise TypeError unless `numbers` is an EntryNumber or EntryNumbers, ValueError for values out of [0, stop)."""
    if not isinstance(numbers, EntryNumber | EntryNumbers):
        raise TypeError(
            f"{what} must be integers of shape (batch,) or (), or the name of a tensor; got {numbers!r:.80}"
        )
    if isinstance(numbers, EntryNumbers):
        numbers.check_range(what, stop)


def _require_entry_numbers(numbers: Pattern) -> EntryNumbers:
    if isinstance(numbers, EntryNumbers):
        return numbers
    assert isinstance(numbers, RunTime)
    raise ValueError(missing(numbers.name))


@pattern_kind("per_sample")
class PerSample(Composite):
    """Pattern in which batch entry b follows parts[which[b]].

    which: an EntryNumber, or EntryNumbers once its values are known.
    """

    which: Pattern

    def check(self) -> None:
        super().check()
        if not self.parts:
            raise ValueError("per_sample needs at least one pattern; got none")
        _check_entry_numbers("the pattern numbers of per_sample", self.which, len(self.parts))

    def direct_parts(self) -> tuple[Pattern, ...]:
        return (*self.parts, self.which)

    def map_parts(self, change: Callable[[Pattern], Pattern]) -> Any:
        return PerSample(tuple(map(change, self.parts)), change(self.which))

    def phrase(self) -> Phrase:
        name = getattr(self.which, "name", None) or str(self.which)
        return call(self.kind, self.parts, name)

    @property
    def chosen(self) -> Pattern:
        """Return the part that all batch entries follow.

        Raises ValueError if they follow different parts, or if `which` is an `EntryNumber`.
        """
        return self.parts[int(_require_entry_numbers(self.which).only_row)]

    def superset(self) -> Pattern:
        return Or.of(*(part.superset() for part in self.parts))

    def confined(self) -> bool:
        return all(part.confined() for part in self.parts)

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        which = _require_entry_numbers(self.which).for_entry(device)

        def if_chosen(index: Tensor, inner: MaskMod) -> MaskMod:
            return lambda b, h, q, k: (which(b) == index) & inner(b, h, q, k)

        numbers = parameters(device, *range(len(self.parts)))
        mods = (part.mask_mod(num_heads=num_heads, device=device) for part in self.parts)
        chosen = [*map(if_chosen, numbers, mods)]
        return lambda b, h, q, k: reduce(or_, [mod(b, h, q, k) for mod in chosen])

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        return self.chosen.count(box, num_heads=num_heads)

    def row(self, query: int, keys: range) -> Ranges | None:
        return self.chosen.row(query, keys)

    def reason(self, pair: Pair) -> Reason:
        inner, index = pair.reason_of(self.chosen), int(_require_entry_numbers(self.which).only_row)
        return Reason(self, inner.allowed, f"the batch entry follows part {index + 1} of {len(self.parts)}", (inner,))


@pattern_kind("queries_from")
class QueriesFrom(_MethodPattern):
    """Pattern that allows a pair iff `part` allows (query + starts[b], key) in batch entry b.

    starts: an EntryNumber, or EntryNumbers once its values are known.
    """

    recounts = False  # `check` refuses run-time tensors with an error that names the alternatives

    starts: Pattern

    @staticmethod
    def of(pattern: Expression, starts: Any, name: str = "starts") -> Any:
        """Return `pattern` with query i at position starts[b] + i in batch entry b.

        starts: a tensor, a name under which calls pass it, or an `EntryNumber`.
        name: name of the tensor in texts and errors, unless `starts` is a string.
        """
        numbers = starts if isinstance(starts, Pattern) else of_tensor(EntryNumber, starts, name)

        def moved(branch: Pattern) -> Pattern:
            # They do not depend on the query, and `QueriesFrom.check` refuses run-time tensors in its part.
            keys = [factor for factor in branch.factors() if isinstance(factor, VisibleKeys)]
            rest = [factor for factor in branch.factors() if factor not in keys]
            return And.of(QueriesFrom(And.of(*rest), numbers), *keys)

        return Mixture.of(*map(moved, pattern.branches()))

    def check(self) -> None:
        super().check()
        if any(leaf.is_run_time for leaf in self.part.leaves()):
            raise ValueError(
                "queries_from needs a pattern without run-time tensors other than visible_keys, also for a q_offset of "
                "shape (batch,): write part.queries_from(starts) for its parts without them, and combine these with "
                "the other parts, for which query i is at position i, such as masks.mask or masks.same_document; "
                f"got {self.part!r}"
            )
        _check_entry_numbers("positions of the first queries", self.starts, LARGEST + 1)

    def direct_parts(self) -> tuple[Pattern, ...]:
        return (self.part, self.starts)

    def map_parts(self, change: Callable[[Pattern], Pattern]) -> Any:
        return QueriesFrom(change(self.part), change(self.starts))

    def method(self) -> str:
        name = getattr(self.starts, "name", None) or str(self.starts)
        return f"queries_from({name!r})"

    def origin(self) -> Hashable:
        return self.starts

    @property
    def start(self) -> int:
        """Return the start of all batch entries.

        Raises ValueError if they have different starts, or if `starts` is an `EntryNumber`.
        """
        return int(_require_entry_numbers(self.starts).only_row)

    def below(self, positions: int) -> Pattern:
        if not isinstance(self.starts, EntryNumbers) or not self.starts.known:
            return self
        return replace(self, part=self.part.below(positions + int(self.starts.rows.max())))

    def superset(self) -> Pattern:
        return every()

    def check_tokens(self, queries: range, keys: range) -> None:
        starts = _require_entry_numbers(self.starts)
        if starts.known:
            least, most = (int(edge) for edge in starts.rows.aminmax())
            self.part.check_tokens(range(queries.start + least, queries.stop + most), keys)

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        inner = self.part.mask_mod(num_heads=num_heads, device=device)
        start = _require_entry_numbers(self.starts).for_entry(device)
        return lambda b, h, q, k: inner(b, h, q + start(b), k)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        q = Progression(box.q.first + self.start, box.q.step, box.q.count)
        return self.part.count(Box(box.head, q, box.k), num_heads=num_heads)

    def row(self, query: int, keys: range) -> Ranges | None:
        return self.part.row(query + self.start, keys)

    def reason(self, pair: Pair) -> Reason:
        inner = replace(pair, query=pair.query + self.start).reason_of(self.part)
        return Reason(self, inner.allowed, f"{pair.the_query} is at position {pair.query + self.start}", (inner,))


def _without_per_sample(rule: Expression) -> Any:
    """Return the rule of one batch entry, with each `per_sample` replaced by the part that the entry follows."""
    if isinstance(rule, PerSample):
        return _without_per_sample(rule.chosen)
    return (
        rule.map_parts(_without_per_sample) if any(isinstance(leaf, EntryNumbers) for leaf in rule.leaves()) else rule
    )


def rules_of_entries(pattern: Expression, batch: int) -> list[tuple[slice, Expression]]:
    """Return [(slice of batch entries, their pattern), ...] for runs of consecutive entries with equal patterns.

    Each `per_sample` is replaced by the part that the entries follow. Run-time tensors must have their values: see
    `Expression.resolve`. batch: number of batch entries. Raises ValueError if run-time tensors have neither one row nor
    `batch` rows.
    """
    pattern.require_entries(batch)
    if pattern.num_entries() == 1:
        return [(slice(None), _without_per_sample(pattern))]
    groups: list[tuple[slice, Expression]] = []
    for index in range(batch):
        rule = _without_per_sample(pattern.entry(index))
        if groups and groups[-1][1].text == rule.text:
            groups[-1] = (slice(groups[-1][0].start, index + 1), rule)
        else:
            groups.append((slice(index, index + 1), rule))
    return groups


def without_start(rule: Expression) -> tuple[Any, int]:
    """Return (rule, q_offset), which together allow the pairs of `rule`, the rule of one batch entry.

    A `queries_from` has its `start`; every other factor of a branch has start 0, except masks of keys (`KeySet`), which
    have no start. If all starts are equal and there is a `queries_from`, the rule is returned without `queries_from`,
    and q_offset is this start. Otherwise the rule is returned unchanged, and q_offset is 0.
    """
    factors = [factor for branch in rule.branches() for factor in branch.factors() if not isinstance(factor, KeySet)]
    starts = {factor.start if isinstance(factor, QueriesFrom) else 0 for factor in factors}
    if len(starts) != 1 or not any(isinstance(factor, QueriesFrom) for factor in factors):
        return rule, 0

    def plain(branch: Pattern) -> Pattern:
        return And.of(*(each.part if isinstance(each, QueriesFrom) else each for each in branch.factors()))

    return Mixture.of(*map(plain, rule.branches())), starts.pop()


@constructor
def per_sample(patterns: Sequence[Pattern], which: Any = None, *, name: str = "which") -> Pattern:
    """Pattern in which batch entry b follows patterns[which[b]].

    patterns: set patterns, not mixtures.
    which: integers of shape (batch,) or (), or a string, the name under which `attend(bindings=)` passes the tensor;
        None for arange(batch), with one pattern per batch entry. New values do not recompile.
    name: name of the tensor in texts and errors, unless `which` is a string. Names within a pattern must differ.

    Raises TypeError if `patterns` is not a sequence of set patterns, ValueError if it is empty or, when the tensor is
    used, for an index out of range.

    >>> q, k, v = torch.randn(3, 2, 4, 16, 8)
    >>> out = fd.attend(q, k, v, masks.per_sample([masks.causal(), masks.every()]))
    """
    if not isinstance(patterns, Sequence) or not all(isinstance(each, Pattern) for each in patterns):
        raise TypeError(
            "per_sample needs a sequence of patterns, none of them a mixture such as longnet or p + q; "
            f"got {patterns!r:.200}"
        )
    which = torch.arange(len(patterns)) if which is None else which
    return PerSample(tuple(patterns), of_tensor(EntryNumber, which, name))
