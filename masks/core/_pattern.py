"""Pattern, a set of (query, key) pairs that is independent of sizes; and Mixture, a multiset sum of patterns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from ctypes import c_char
from functools import cached_property, reduce
from hashlib import sha256
from itertools import groupby
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from ._advice import instead_of_pattern, no_operand
from ._bound import Extent
from ._box import Bounds, Box, Counts, Squares
from ._check import AND, SUM, Phrase, chain
from ._devices import device_kind
from ._expression import KINDS, Expression, pattern_kind
from ._ranges import Ranges
from ._reason import Pair, Reason

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


def index_dtype(device: torch.device, least: int, most: int) -> torch.dtype:
    """Return the dtype for integers in [least, most]: int64 on CPU; on other devices int32 if they fit, else int64."""
    # Kernels index in 32 bits; a 64-bit number makes them compute all that depends on it in 64 bits, with twice the
    # registers.
    return torch.int32 if device_kind(device).flex_trains and least >= _LEAST and most <= _MOST else torch.int64


def parameters(device: torch.device, *numbers: int) -> list[Tensor]:
    """Return each number as a scalar integer tensor on `device`, for the closure of a mask_mod.

    The dtype is int64 on CPU; on other devices int32 if the number fits, else int64. New Python numbers in a closure
    can make FlexAttention recompile; new values of these tensors, of equal dtype, do not.

    >>> masks.extend.parameters(torch.device("cpu"), 4, 64)
    [tensor(4), tensor(64)]
    """
    return [torch.tensor(number, dtype=index_dtype(device, number, number), device=device) for number in numbers]


def content_digest(tensor: Tensor) -> str:
    """Return the SHA-256 hex digest of the bytes of a contiguous CPU tensor; dtype and shape are not included."""
    content = (c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
    return sha256(content).hexdigest()


class Pattern(Expression):
    """A set of allowed (head, query, key) triples, without numbers of heads and tokens: `bind` gives these.

    A subclass is a frozen dataclass that states the rule twice: `mask_mod` is elementwise and exact, and `count` gives
    sound bounds over boxes. `testing.check_pattern` compares the two. Other methods have defaults.

    is_run_time: True for a leaf that depends on a run-time tensor, such as document ids. `mask_mod`, `count` and
        `reason` of a `RunTime` raise ValueError: see `resolve`.

    >>> (masks.local_window(left=127, right=0) | masks.first_tokens(4)) & masks.causal()
    (local_window(left=127, right=0) | first_tokens(4)) & causal()
    """

    is_run_time: ClassVar[bool] = False
    entries: int = 1  # batch size of the run-time tensor; 1 if all batch entries share its values

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        """Return a closure (b, h, q, k) -> bool in FlexAttention's form; q and k are positions, and h is a global head.

        num_heads: number of global heads.
        device: device of the tensors that the closure reads, and of its arguments.
        """
        raise NotImplementedError

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        """Return lower and upper bounds on the number of allowed (query, key) pairs in each of n boxes.

        A box pairs some query positions with some key positions of a global head, below num_heads. No box is empty.
        """
        raise NotImplementedError

    def likeness(self, box: Box, *, num_heads: int) -> tuple[Counts, ...]:
        """Return integer tensors with an entry for each of n boxes; equal entries in all of them mean equal masks.

        This holds for boxes of one head with equal counts and steps of queries and of keys: pair (i-th query, j-th key)
        is then allowed in both or in neither. Boxes with different entries may have equal masks, too.
        """
        bounds, period = self.count(box, num_heads=num_heads), self.period()
        q, k = box.q.first, box.k.first
        at, ahead = (q, k) if period is None else (q % period, k - q)
        # Negative entries mark boxes that bounds decide: positions are never negative.
        none, every = bounds.high == 0, bounds.low == box.area
        at = torch.where(none, -1, torch.where(every, -2, at))
        return at, torch.where(none | every, 0, ahead)

    def reason(self, pair: Pair) -> Reason:
        """Return the verdict on one pair, allowed or not, with an explanation in one line.

        By default the line states the distance of the key from the query.
        """
        return Reason(self, pair.allowed_by(self), pair.distance)

    def factors(self) -> tuple[Pattern, ...]:
        """Return patterns whose intersection is this pattern; (self,) unless it is an intersection."""
        return (self,)

    def alternatives(self) -> tuple[Pattern, ...]:
        """Return patterns whose union is this pattern; (self,) unless it is a union or an intersection with one."""
        return (self,)

    def origin(self) -> Hashable:
        """Return a key: patterns with equal keys may print as one call, such as `longnet(...)`; None for no such call.

        The patterns are adjacent branches of a mixture, or all parts of `head_groups`. `joint_phrase` returns the text
        of the call.
        """
        return None

    def joint_phrase(self, branches: Sequence[Any], *, grouped: bool = False) -> Phrase | None:
        """Return the text of one call that builds all these branches; None to print them separately.

        branches: patterns of equal `origin`.
        grouped: True for the parts of `head_groups`, False for a mixture's.
        """
        return None

    def carried(self) -> dict[str, Tensor]:
        """Return the run-time tensor that this leaf holds, as {name: tensor}; {} if it holds none."""
        return {}

    @property
    def held_bytes(self) -> int:
        """Bytes of tensors that the cache of plans counts for this leaf, without run-time tensors."""
        return 0

    def resolved(self, tensors: Mapping[str, Tensor], extent: Extent) -> Pattern:
        """Return this leaf with its run-time tensor replaced by its values; self if it needs none.

        tensors: values by name.
        extent: one past the last position of the queries and of the keys.

        Raises ValueError for a tensor that is missing or does not fit, TypeError for a wrong dtype.
        """
        return self

    def of_entry(self, batch: int) -> Pattern:
        """Return this leaf for batch entry `batch`, with that entry's values of a run-time tensor if it has one."""
        return self

    def for_head(self, head: int, num_heads: int) -> Pattern:
        """Return the rule of global head `head` of `num_heads`, with every choice by head resolved."""
        rule = self._rules_of_heads.get((head, num_heads))
        if rule is None:
            rule = self.map_parts(lambda part: part.for_head(head, num_heads))
            if rule is not self:  # a reference to itself would keep its tensors alive
                self._rules_of_heads[head, num_heads] = rule
        return rule

    @cached_property
    def _rules_of_heads(self) -> dict[tuple[int, int], Pattern]:
        """Cache of `for_head`, by (head, num_heads)."""
        return {}  # every plan needs these rules, and combining them takes longer than a look-up

    def period(self) -> int | None:
        """Return a shift of query and key together, in tokens, that leaves the rule unchanged; None if none is known.

        With period 1 the rule depends on key position - query position only.
        """
        return None

    def confined(self) -> bool:
        """True if query position // period == key position // period is known to hold for every allowed pair.

        The mask then consists of copies of one square, period queries by period keys, on the diagonal. If `period` is
        None, the result has no meaning.
        """
        return False

    def rates(self) -> tuple[int, ...]:
        """Return the dilation rates of the rule, by which tokens can be sorted into residue classes; () without any."""
        return ()

    def superset(self) -> Pattern:
        """Return a pattern that allows every pair that this one can allow, for any values of its run-time tensors."""
        return self.map_parts(lambda part: part.superset())

    def spacing(self) -> int:
        """Return an integer that divides key position - query position of every allowed pair; 1 if none is known."""
        return 1

    def row(self, query: int, keys: range) -> Ranges | None:
        """Return the positions in `keys` that the query at position `query` sees; None if they are not known.

        The pattern must be the rule of one head, see `for_head`. keys: a range of step 1.
        """
        return None

    def keys_of(self, queries: Bool[Tensor, " N"]) -> Bool[Tensor, " N"] | None:
        """Return a mask of the N key positions, True for keys that at least one of `queries` sees; None if unknown.

        It is known for some patterns that list keys or blocks, such as `block_list`. queries: mask of the query
        positions. The pattern must be the rule of one head, see `for_head`.
        """
        return None

    def squares(self, head: int, num_heads: int) -> Squares | None:
        """Return disjoint squares of pairs that contain all allowed pairs of global head `head` of `num_heads`.

        None if the rule does not list squares.
        """
        return None

    def snapped(self, q_side: int, k_side: int) -> Pattern | None:
        """Return this leaf with its sizes rounded up to blocks of q_side queries by k_side keys.

        Returns an equal leaf if its sizes fit or it has none; None if no rounding is defined. Raises ValueError for a
        `block_list` whose blocks do not fit.
        """
        return None

    @property
    def union(self) -> Pattern:
        return self

    def branches(self) -> tuple[Pattern, ...]:
        return (self,)

    def __and__(self, other: Expression) -> Any:
        if isinstance(other, Mixture):
            return other & self
        if not isinstance(other, Pattern):
            raise TypeError(no_operand("&", other))
        return KINDS["and"].of(self, other)

    def __or__(self, other: Expression) -> Pattern:
        if isinstance(other, Mixture):
            raise TypeError(_mixture_error_text("|", self, other))
        if not isinstance(other, Pattern):
            raise TypeError(no_operand("|", other))
        return KINDS["or"].of(self, other)

    def __invert__(self) -> Pattern:
        return KINDS["not"](self)


@pattern_kind("mixture")
class Mixture(Expression):
    """Multiset sum of set patterns: a pair allowed by m parts has attention weight m * exp(score).

    The output is the mean of the branches' outputs, weighted by their softmax denominators.
    Source: LongNet, arXiv 2307.02486, eqs. 9 and 10.

    >>> masks.longnet((4, 8), (1, 2)) & masks.causal()
    longnet((4, 8), (1, 2)) & causal()
    """

    parts: tuple[Pattern, ...]

    @classmethod
    def of(cls, *parts: Pattern) -> Pattern | Mixture:
        """Return the mixture of set patterns; a single pattern is returned unchanged."""
        return parts[0] if len(parts) == 1 else cls(parts)

    def check(self) -> None:
        require_set_patterns("a mixture", self.parts, least=2)

    def direct_parts(self) -> tuple[Pattern, ...]:
        return self.parts

    def take_padding(self) -> None:
        object.__setattr__(self, "pads", True)

    @property
    def unpadded(self) -> Mixture:
        return self.map_parts(lambda part: part.unpadded) if self.pads else self

    def zero_keys(self, head: Tensor, query: Tensor, *, num_heads: int, num_tokens: int) -> Tensor:
        sizes = {"num_heads": num_heads, "num_tokens": num_tokens}
        return reduce(torch.add, [part.zero_keys(head, query, **sizes) for part in self.parts])

    def phrase(self) -> Phrase:
        return sum_phrase(self.parts)

    @property
    def union(self) -> Pattern:
        return KINDS["or"].without_shared_factors(tuple(part.unpadded for part in self.parts))

    def branches(self) -> tuple[Pattern, ...]:
        return self.parts

    def map_parts(self, change: Callable[[Pattern], Pattern]) -> Any:
        return Mixture(tuple(map(change, self.parts)))

    def __and__(self, other: Expression) -> Mixture:
        if isinstance(other, Mixture):
            raise TypeError(_mixture_error_text("&", self, other))
        if not isinstance(other, Pattern):
            raise TypeError(no_operand("&", other))
        return self.map_parts(lambda part: part & other)

    def __or__(self, other: Expression) -> Mixture:
        raise TypeError(
            _mixture_error_text("|", self, other) if isinstance(other, Expression) else no_operand("|", other)
        )

    def __invert__(self) -> Mixture:
        raise TypeError(f"~ needs a pattern that is not a mixture such as longnet or p + q; got {self!r}")


def require_expression(value: object) -> Expression:
    """Return the value if it is a pattern or mixture; raise TypeError otherwise."""
    if not isinstance(value, Expression):
        came = f"{type(value).__name__}{instead_of_pattern(value)}"
        raise TypeError(f"pattern must be a pattern or mixture from flexdilated.masks; got {came}")
    return value


def require_set_patterns(what: str, parts: object, *, least: int) -> None:
    """Raise TypeError or ValueError unless `parts` is a tuple of at least `least` set patterns, not mixtures.

    what: the expression that has these parts, for the error.
    """
    if not isinstance(parts, tuple) or not all(isinstance(part, Pattern) for part in parts):
        sums = isinstance(parts, tuple) and any(isinstance(part, Mixture) for part in parts)
        advice = ": for mixtures write per_head for each branch, and add the results by +"
        raise TypeError(
            f"{what} needs patterns, none of them a mixture such as longnet or p + q; got "
            f"{parts!r:.200}{advice if sums else ''}"
        )
    if len(parts) < least:
        alone = ": use a single pattern directly" if least > 1 else ""
        raise ValueError(f"{what} needs at least {least} pattern{'s' * (least > 1)}{alone}; got {parts!r:.200}")


def sum_phrase(parts: Sequence[Pattern]) -> Phrase:
    """Return the text of a sum of patterns, such as "causal() + every()".

    Consecutive patterns that one call can build (their first factors have equal `origin`) are written as that call; if
    they are intersections, their other factors must be equal, and follow the call after `&`.
    """

    def shared(part: Pattern) -> Hashable:
        first, *rest = part.factors()
        return None if (origin := first.origin()) is None else (origin, tuple(rest))

    terms: list[Phrase] = []
    for origin, run in groupby(parts, shared):
        branches = list(run)
        first, *rest = branches[0].factors()
        joint = None if origin is None else first.joint_phrase([each.factors()[0] for each in branches])
        if joint is None:
            terms += [branch.phrase() for branch in branches]
        else:
            terms.append(chain([joint, *(factor.phrase() for factor in rest)], AND))
    return chain(terms, SUM)


def _mixture_error_text(operator: str, left: object, right: object) -> str:
    return (
        "a mixture such as longnet or p + q can only be added to patterns by +, or intersected by & with a pattern "
        f"that is not a mixture; got {left!r} {operator} {right!r}"
    )
