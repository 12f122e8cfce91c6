"""Pattern: who attends to whom, as a value free of sizes; and Mixture, a multiset sum of patterns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._box import Bounds, Box, Squares
from ._canonical import canonical, written_parts
from ._check import instead_of_pattern
from ._ranges import Ranges
from ._spelling import Phrase, call, shortened

if TYPE_CHECKING:
    from ._bound import Bound
    from ._reason import Pair, Reason

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

DEEPEST = 32  # levels: all that walks through a pattern, here or in pickle and copy, fits Python's stack
_FLATTER = "a chain of one operator, such as a | b | c, is one level"


class Expression:
    """What patterns and mixtures share: plain data, a stable text, sums, and binding to sizes.

    `text` is canonical JSON, computed once on construction; equal texts mean equal patterns. The repr is the
    expression that builds the value, which `parse` reads. `depth` counts the levels of patterns in patterns; one of
    more than 32 is a ValueError, so that whatever can be made can be stored, copied, printed and computed.
    """

    text: str
    depth: int = 0

    def __init_subclass__(cls) -> None:
        # A dataclass writes a repr of its own, unless its class has one already.
        if "__repr__" not in vars(cls):
            cls.__repr__ = Expression.__repr__

    def __repr__(self) -> str:
        return shortened(self.phrase().text)

    def __post_init__(self) -> None:
        if inner := self.direct_parts():
            object.__setattr__(self, "depth", 1 + max([part.depth for part in inner]))
        if self.depth > DEEPEST:
            raise ValueError(f"a pattern must nest at most {DEEPEST} levels: {_FLATTER}; got one more, {self!r:.80}")
        object.__setattr__(self, "text", self.write())

    def direct_parts(self) -> tuple[Pattern, ...]:
        """The patterns that this one is directly made of."""
        return ()

    def write(self) -> str:
        """The canonical JSON of `to_data`: no spaces, sorted keys. What has parts joins their texts."""
        return canonical(self.to_data())

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON: a `kind` and its parameters."""
        raise NotImplementedError  # every concrete pattern states its own

    def phrase(self) -> Phrase:
        """How the value is written: its kind, called with its parameters; a single one stands without its name."""
        data = self.to_data()
        kind = data.pop("kind")
        values = {name: getattr(self, name, value) for name, value in data.items()}
        return call(kind, *values.values()) if len(values) == 1 else call(kind, **values)

    def branches(self) -> tuple[Pattern, ...]:
        """The set patterns whose multiset sum this is, one entry for each time a branch counts."""
        raise NotImplementedError  # Pattern and Mixture

    def leaves(self) -> tuple[Pattern, ...]:
        """The patterns without parts that this is composed of, each use of one."""
        raise NotImplementedError

    def map_leaves(self, change: Callable[[Pattern], Pattern]) -> Any:
        """The same composition of changed leaves."""
        raise NotImplementedError

    def below(self, positions: int) -> Any:
        """The same rule where all positions are below this number: no more is drawn."""
        return self.map_leaves(lambda leaf: leaf.below(positions)) if self.draws else self

    @cached_property
    def draws(self) -> bool:
        """Whether something is drawn for each position."""
        return any(type(leaf).below is not Expression.below for leaf in self.leaves())

    @cached_property
    def varies(self) -> bool:
        """Whether run-time tensors take part, by name or with their values in place."""
        from ..patterns.run_time._run_time import RunTime, Table

        return any(isinstance(leaf, RunTime | Table) for leaf in self.leaves())

    def check_heads(self, num_heads: int) -> None:
        """Raise ValueError if the expression cannot be bound to this many (global) heads."""
        for branch in self.branches():
            branch.check_heads(num_heads)

    def check_tokens(self, queries: range, keys: range) -> None:
        """Raise ValueError if the expression cannot be bound to queries and keys at these positions."""
        for branch in self.branches():
            branch.check_tokens(queries, keys)

    def bind(
        self,
        *,
        num_heads: int,
        num_queries: int,
        num_keys: int,
        head_offset: int = 0,
        num_heads_global: int | None = None,
        q_offset: int = 0,
        k_offset: int = 0,
        batch: int = 1,
    ) -> Bound:
        """The expression with its sizes. Heads are global: this device holds `num_heads` from `head_offset` on.

        Query i has position q_offset + i; key j has position k_offset + j. `num_heads_global` defaults to
        head_offset + num_heads. Tensors that the pattern carries are read now. Raises ValueError for sizes below
        1, heads the pattern has no rule for, and tensors that are missing or do not fit.
        """
        from ..patterns.run_time._run_time import Extent, given_tensors, num_entries, resolve
        from ._bound import Bound

        total = head_offset + num_heads if num_heads_global is None else num_heads_global
        rule = self
        if self.varies:
            rule = resolve(self, given_tensors(self), Extent(q_offset + num_queries, k_offset + num_keys))
            batch = num_entries(rule) if batch == 1 else batch
        bound = Bound(rule, num_queries, num_keys, num_heads, head_offset, total, q_offset, k_offset, batch)
        rule.check_tokens(*(range(at, at + size) for at, size in ((q_offset, num_queries), (k_offset, num_keys))))
        return replace(bound, pattern=bound.pattern.below(bound.num_positions)) if rule.draws else bound

    def per_document(self, documents: Any) -> Any:
        """The rule counted anew from the start of each document, and no pair across documents.

        documents: what `masks.documents` takes, or a pattern from `masks.documents` or `masks.lengths`.
        Packed sequences then attend as they would apart. For a mixture it is each branch that starts anew.
        """
        from ..patterns._per_document import per_document

        return per_document(self, documents)

    def __add__(self, other: object) -> Mixture:
        if not isinstance(other, Expression):
            return NotImplemented
        return Mixture(self.branches() + other.branches())


class Pattern(Expression):
    """A set of (head, query, key) triples: a pair is allowed or it is not.

    A subclass is a frozen dataclass that states the rule twice, held together by a property test:
    `mask_mod` elementwise, the whole truth, and `count`, sound bounds over boxes.
    """

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        """Closure (b, h, q, k) -> bool over *positions* and global heads; parameters ride in tensors."""
        raise NotImplementedError

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        """Sound bounds on the number of allowed pairs in each box."""
        raise NotImplementedError

    def reason(self, pair: Pair) -> Reason:
        """Whether one pair is allowed and why, stated in plain numbers for people."""
        raise NotImplementedError

    def for_head(self, head: int, num_heads: int) -> Pattern:
        """The same rule for one head, with every choice by head resolved."""
        return self

    def period(self) -> int | None:
        """A shift of query and key together that leaves the rule as it is; 1 for any shift, None for no shift."""
        return None

    def confined(self) -> bool:
        """Whether no allowed pair crosses a multiple of the period: the rule is then copies of one square."""
        return False

    def rates(self) -> tuple[int, ...]:
        """The dilation rates that the rule uses."""
        return ()

    def superset(self) -> Pattern:
        """A pattern that allows at least these pairs, whatever the values of run-time tensors."""
        return self

    def spacing(self) -> int:
        """A number that divides the distance of every allowed pair; 1 where no more is known."""
        return 1

    def row(self, query: int, keys: range) -> Ranges | None:
        """Which of a run of keys one query sees, of a rule for one head; None where that has no closed form.

        At most as many ranges as keys; the work depends on the number of keys, not on their positions.
        """
        return None

    def squares(self, head: int, num_heads: int) -> Squares | None:
        """Squares outside of which the head has no pair, of a rule that lists some; None for other rules."""
        return None

    def branches(self) -> tuple[Pattern, ...]:
        return (self,)

    def leaves(self) -> tuple[Pattern, ...]:
        return (self,)

    def map_leaves(self, change: Callable[[Pattern], Pattern]) -> Any:
        return change(self)

    def check_heads(self, num_heads: int) -> None:
        return None

    def check_tokens(self, queries: range, keys: range) -> None:
        return None

    def __and__(self, other: Expression) -> Any:
        from ._algebra import And

        if isinstance(other, Mixture):
            return other & self
        return And.of(self, other) if isinstance(other, Pattern) else NotImplemented

    def __or__(self, other: Expression) -> Pattern:
        from ._algebra import Or

        if isinstance(other, Mixture):
            raise TypeError(_needs_set("|", self, other))
        return Or.of(self, other) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> Pattern:
        from ._algebra import Not

        return self.part if isinstance(self, Not) else Not(self)


@dataclass(frozen=True)
class Mixture(Expression):
    """Multiset sum of set patterns: a pair allowed by m parts has attention weight m * exp(score).

    Source: LongNet, arXiv 2307.02486, eqs. 9 and 10 (branches weighted by their softmax denominators).
    """

    parts: tuple[Pattern, ...]

    @classmethod
    def of(cls, *parts: Pattern) -> Pattern | Mixture:
        """The sum of some set patterns; one alone is its own sum."""
        return parts[0] if len(parts) == 1 else cls(parts)

    def __post_init__(self) -> None:
        require_set_patterns("a mixture", self.parts, least=2)
        super().__post_init__()

    def direct_parts(self) -> tuple[Pattern, ...]:
        return self.parts

    def to_data(self) -> dict[str, Any]:
        return {"kind": "mixture", "parts": [part.to_data() for part in self.parts]}

    def write(self) -> str:
        return written_parts("mixture", self.parts)

    def phrase(self) -> Phrase:
        from ..text._written_branches import mixture_phrase

        return mixture_phrase(self.parts)

    def branches(self) -> tuple[Pattern, ...]:
        return self.parts

    def leaves(self) -> tuple[Pattern, ...]:
        return all_leaves(self.parts)

    def map_leaves(self, change: Callable[[Pattern], Pattern]) -> Any:
        return Mixture(tuple(part.map_leaves(change) for part in self.parts))

    def __and__(self, other: Expression) -> Mixture:
        if isinstance(other, Mixture):
            raise TypeError(_needs_set("&", self, other))
        if not isinstance(other, Pattern):
            return NotImplemented
        return Mixture(tuple(part & other for part in self.parts))

    def __or__(self, other: Expression) -> Mixture:
        raise TypeError(_needs_set("|", self, other))

    def __invert__(self) -> Mixture:
        raise TypeError(f"~ needs a set pattern, where a pair is allowed or not; got the mixture {self!r}")


def require_expression(value: object) -> Expression:
    """The value itself, if it is a pattern or mixture; TypeError otherwise."""
    if not isinstance(value, Expression):
        came = f"{type(value).__name__}{instead_of_pattern(value)}"
        raise TypeError(f"pattern must be a pattern or mixture from flexdilated.masks; got {came}")
    return value


def require_set_patterns(what: str, parts: object, *, least: int) -> None:
    """Raise TypeError or ValueError unless the parts are a tuple of at least so many set patterns."""
    if not isinstance(parts, tuple) or not all(isinstance(part, Pattern) for part in parts):
        raise TypeError(f"{what} takes set patterns, in a tuple; got {parts!r:.200}")
    if len(parts) < least:
        alone = ": a set pattern alone stands for itself" if least > 1 else ""
        raise ValueError(f"{what} takes at least {least} set pattern{'s' * (least > 1)}{alone}; got {parts!r:.200}")


def all_leaves(parts: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
    return tuple(leaf for part in parts for leaf in part.leaves())


def _needs_set(operator: str, left: object, right: object) -> str:
    return (
        f"{operator} needs set patterns, where a pair is allowed or not; a mixture counts pairs, "
        f"and only `mixture & set` and `+` keep that meaning. Got {left!r} {operator} {right!r}"
    )
