"""Patterns composed of patterns: intersection, union, complement, all pairs, and one pattern for each head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd, lcm
from typing import Any, ClassVar

import torch
from torch import Tensor

from ._advice import advises
from ._box import Bounds, Box, Squares
from ._check import AND, LARGEST, NOT, OR, Phrase, chain
from ._expression import DEEPEST, KINDS, constructor, pattern_kind
from ._pattern import MaskMod, Pattern, require_set_patterns
from ._ranges import Ranges, as_ranges, intersect_all, unite
from ._reason import Pair, Reason, listing, span


@dataclass(frozen=True)
class Composite(Pattern):
    """Base of patterns composed of `parts`.

    The period is the `common_period` of the parts.
    """

    parts: tuple[Pattern, ...]

    def direct_parts(self) -> tuple[Pattern, ...]:
        return self.parts

    def map_parts(self, change: Callable[[Pattern], Pattern]) -> Any:
        return type(self)(tuple(map(change, self.parts)))

    def period(self) -> int | None:
        return common_period(self.parts)

    def likeness(self, box: Box, *, num_heads: int) -> tuple[Tensor, ...]:
        if self.period() is not None:
            return super().likeness(box, num_heads=num_heads)
        return tuple(each for part in self.parts for each in part.likeness(box, num_heads=num_heads))

    def rates(self) -> tuple[int, ...]:
        return tuple(rate for part in self.parts for rate in part.rates())


@dataclass(frozen=True)
class OnePart(Pattern):
    """Base of patterns derived from one pattern, `part`.

    recounts: True (the default) if the part is evaluated at numbers other than token positions, such as block numbers
        or positions within a document.

    Construction raises TypeError if `part` is not a pattern, or is a mixture, and ValueError if `recounts` is True and
    `part` has run-time tensors.

    >>> @masks.extend.pattern_kind("sketch_of_a_transposition")
    ... class Transposed(masks.extend.OnePart):
    ...     def mask_mod(self, *, num_heads, device):
    ...         rule = self.part.mask_mod(num_heads=num_heads, device=device)
    ...         return lambda b, h, q, k: rule(b, h, k, q)
    ...
    ...     def count(self, box, *, num_heads):
    ...         return self.part.count(masks.extend.Box(box.head, box.k, box.q), num_heads=num_heads)
    >>> testing.check_pattern(Transposed(masks.causal()), examples=5)
    """

    recounts: ClassVar[bool] = True

    part: Pattern

    def check(self) -> None:
        if not isinstance(self.part, Pattern):
            raise TypeError(
                f"{self.kind} needs a pattern that is not a mixture such as longnet or p + q; got {self.part!r}"
            )
        if self.recounts and any(
            leaf.is_run_time for leaf in self.part.leaves()
        ):  # `varies` is cached under a lock, which a graph cannot take
            raise ValueError(
                f"{self.kind} needs a pattern without run-time tensors, whose values belong to single tokens: leave "
                f"them out here, and intersect the result with their pattern by &; got {self.part!r}"
            )

    def direct_parts(self) -> tuple[Pattern, ...]:
        return (self.part,)

    def map_parts(self, change: Callable[[Pattern], Pattern]) -> Any:
        return replace(self, part=change(self.part))


def common_period(parts: tuple[Pattern, ...]) -> int | None:
    """Return the least common multiple of the parts' periods; None if it exceeds 2**31 - 1 or a period is unknown.

    A period is a shift of query and key together that leaves a pattern unchanged. Without parts, the result is 1.
    """
    periods = [part.period() for part in parts]
    known = [period for period in periods if period is not None]
    least = reduce(lcm, known, 1)
    return least if len(known) == len(periods) and least <= LARGEST else None


@dataclass(frozen=True)
class _Combination(Composite):
    binding: ClassVar[int]
    decisive: ClassVar[bool]  # a single part with this verdict decides the result
    joined: ClassVar[Callable[[MaskMod, MaskMod], MaskMod]]
    joined_bounds: ClassVar[Callable[[Bounds, Bounds, Tensor], Bounds]]

    @classmethod
    def of(cls, *parts: Pattern) -> Pattern:
        """Return the combination of the parts, without repeats; a part of this class is replaced by its own parts.

        A single distinct part is returned unchanged. Without parts, And gives `Every()`, and Or raises ValueError.
        """
        flat = [inner for part in parts for inner in (part.parts if isinstance(part, cls) else (part,))]
        unique = tuple(dict.fromkeys(flat))
        if not unique and cls is And:
            return Every()
        return unique[0] if len(unique) == 1 else cls(unique)

    def check(self) -> None:
        kind = self.kind
        require_set_patterns(f"{kind!r}", self.parts, least=2)
        if any(isinstance(part, type(self)) for part in self.parts):
            raise ValueError(f"{kind!r} must list the parts of an inner {kind!r} directly; got {self.parts!r:.200}")
        if len({part.text for part in self.parts}) < len(self.parts):
            self.given_tensors()  # raises an error that names a carried tensor in which the parts differ
            raise ValueError(f"{kind!r} must have distinct parts; got {self.parts!r:.200}")

    def map_parts(self, change: Callable[[Pattern], Pattern]) -> Any:
        return type(self).of(*map(change, self.parts))

    def phrase(self) -> Phrase:
        return chain((part.phrase() for part in self.parts), self.binding)

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return reduce(self.joined, [part.mask_mod(num_heads=num_heads, device=device) for part in self.parts])

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        area = box.area
        counts = [part.count(box, num_heads=num_heads) for part in self.parts]
        return reduce(lambda a, b: self.joined_bounds(a, b, area), counts)

    def reason(self, pair: Pair) -> Reason:
        parts = tuple(map(pair.reason_of, self.parts))
        by = [index for index, part in enumerate(parts, 1) if bool(part.allowed) == self.decisive]
        if not by:
            text = f"none of {len(parts)} parts allows it" if self.decisive else f"all {len(parts)} parts allow it"
            return Reason(self, not self.decisive, text, parts)
        verdict = "allowed" if self.decisive else "forbidden"
        text = f"{verdict} by part{'s' * (len(by) > 1)} {listing(by)} of {len(parts)}"
        return Reason(self, self.decisive, text, parts)


def both(first: MaskMod, second: MaskMod) -> MaskMod:
    return lambda b, h, q, k: first(b, h, q, k) & second(b, h, q, k)


def either(first: MaskMod, second: MaskMod) -> MaskMod:
    return lambda b, h, q, k: first(b, h, q, k) | second(b, h, q, k)


def both_bounds(a: Bounds, b: Bounds, area: Tensor) -> Bounds:
    """Return bounds on the number of pairs that two rules both allow in each box; `a` and `b` are the rules' bounds.

    area: number of pairs of each box.

    >>> most = masks.extend.Bounds(torch.tensor([12]), torch.tensor([14]))
    >>> masks.extend.both_bounds(most, most, torch.tensor([16])).low
    tensor([8])
    """
    return Bounds((a.low + b.low - area).clamp(min=0), torch.minimum(a.high, b.high))


@pattern_kind("and")
class And(_Combination):
    """Intersection: a pair is allowed if every part allows it."""

    binding = AND
    decisive = False
    joined = staticmethod(both)
    joined_bounds = staticmethod(both_bounds)

    @classmethod
    def of(cls, *parts: Pattern) -> Pattern:
        """Return the intersection of the parts, flattened and without repeats; `Every()` without parts.

        If a factor of a part is `causal()`, all parts lose the zero keys (score 0, value 0) that pad their segments:
        these keys come after all tokens, so causal order hides them. Without `causal()`, a part with zero keys raises
        ValueError, unless all parts are equal.
        """
        if any(part.pads for part in parts):
            causal = any(isinstance(factor, KINDS["causal"]) for part in parts for factor in part.factors())
            parts = tuple(part.unpadded for part in parts) if causal else parts
        return super().of(*parts)

    def factors(self) -> tuple[Pattern, ...]:
        return self.parts

    def alternatives(self) -> tuple[Pattern, ...]:
        """Return patterns whose union is this intersection, by distributing over the first part that is a union.

        For example (a | b) & c gives (a & c, b & c). Without a union the result is (self,).
        """
        union = next((part for part in self.parts if len(part.alternatives()) > 1), None)
        others = [part for part in self.parts if part != union]
        return (self,) if union is None else tuple(And.of(part, *others) for part in union.alternatives())

    def squares(self, head: int, num_heads: int) -> Squares | None:
        listed = (part.squares(head, num_heads) for part in self.parts)
        return next((squares for squares in listed if squares is not None), None)

    def confined(self) -> bool:
        return any(part.confined() for part in self.parts)

    def spacing(self) -> int:
        return lcm(*(part.spacing() for part in self.parts))

    def row(self, query: int, keys: range) -> Ranges | None:
        common: Ranges | None = as_ranges(keys)
        for part in self.parts:
            seen = part.row(query, keys)
            if seen == ():
                return ()
            common = None if common is None or seen is None else intersect_all(common, seen)
        return common


@pattern_kind("or")
class Or(_Combination):
    """Union: a pair is allowed if at least one part allows it."""

    binding = OR
    decisive = True
    joined = staticmethod(either)

    @staticmethod
    def joined_bounds(a: Bounds, b: Bounds, area: Tensor) -> Bounds:
        return Bounds(torch.maximum(a.low, b.low), torch.minimum(a.high + b.high, area))

    @classmethod
    def without_shared_factors(cls, parts: tuple[Pattern, ...]) -> Pattern:
        """Return the union of the parts, with the factors (see `factors`) that all parts share written once.

        (a & c) | (b & c) becomes (a | b) & c, which has exact bounds on pair counts more often; (a & c) | c becomes c.
        The plain union is returned if the parts share no factor, or if the result could have more than 32 nested
        levels.
        """
        factors = [part.factors() for part in parts]
        shared = tuple(factor for factor in factors[0] if all(factor in others for others in factors[1:]))
        rests = [tuple(factor for factor in each if factor not in shared) for each in factors]
        if not shared or max(part.depth for part in parts) + 2 > DEEPEST:
            return cls.of(*parts)
        if not all(rests):
            return And.of(*shared)
        return And.of(cls.of(*(And.of(*rest) for rest in rests)), *shared)

    def alternatives(self) -> tuple[Pattern, ...]:
        return self.parts

    def confined(self) -> bool:
        return all(part.confined() for part in self.parts)

    def spacing(self) -> int:
        return gcd(*(part.spacing() for part in self.parts))

    def row(self, query: int, keys: range) -> Ranges | None:
        rows = [part.row(query, keys) for part in self.parts]
        return None if None in rows else unite(tuple(each for row in rows for each in row or ()))


@pattern_kind("every")
class Every(Pattern):
    """Dense attention: every pair is allowed. It is also the intersection of no parts."""

    def snapped(self, q_side: int, k_side: int) -> Pattern:
        return self

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return lambda b, h, q, k: (q == q) & (k == k)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        return Bounds(box.area, box.area)

    def reason(self, pair: Pair) -> Reason:
        return Reason(self, True, "every pair is allowed")

    def period(self) -> int:
        return 1

    def row(self, query: int, keys: range) -> Ranges:
        return as_ranges(keys)


@pattern_kind("not")
class Not(OnePart):
    """Complement: a pair is allowed if `part` forbids it."""

    recounts = False

    def check(self) -> None:
        if isinstance(self.part, Not):
            raise ValueError(
                f"a complement must not be complemented again: write its part, as ~ does; got {self.part!r}"
            )
        super().check()

    def __invert__(self) -> Pattern:
        return self.part

    def phrase(self) -> Phrase:
        return Phrase(f"~{self.part.phrase().inside(NOT)}", NOT)

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        inner = self.part.mask_mod(num_heads=num_heads, device=device)
        return lambda b, h, q, k: ~inner(b, h, q, k)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        inner = self.part.count(box, num_heads=num_heads)
        return Bounds(box.area - inner.high, box.area - inner.low)

    def reason(self, pair: Pair) -> Reason:
        inner = pair.reason_of(self.part)
        return Reason(self, not inner.allowed, f"its part {'allows' if inner.allowed else 'forbids'} it", (inner,))

    def map_parts(self, change: Callable[[Pattern], Pattern]) -> Any:
        return ~change(self.part)

    def likeness(self, box: Box, *, num_heads: int) -> tuple[Tensor, ...]:
        return self.part.likeness(box, num_heads=num_heads)

    def period(self) -> int | None:
        return self.part.period()

    def rates(self) -> tuple[int, ...]:
        return self.part.rates()

    def superset(self) -> Pattern:
        return self if self.part.superset() == self.part else Every()


@constructor
def every() -> Pattern:
    """Return the pattern of dense attention, in which each query sees every key.

    >>> masks.describe(masks.every(), 4).useful_pairs
    16
    """
    return Every()


@constructor
def full() -> Pattern:
    """Return `every()`, the pattern of dense ("full") attention, in which each query sees every key.

    >>> masks.full()
    every()
    """
    return Every()


@dataclass(frozen=True)
class _HeadChoice(Composite):
    def check(self) -> None:
        require_set_patterns(self.kind, self.parts, least=1)

    def part_indices(self, num_heads: int) -> list[int]:
        raise NotImplementedError

    def for_head(self, head: int, num_heads: int) -> Pattern:
        return self.parts[self.part_indices(num_heads)[head]].for_head(head, num_heads)

    def squares(self, head: int, num_heads: int) -> Squares | None:
        return self.parts[self.part_indices(num_heads)[head]].squares(head, num_heads)

    def confined(self) -> bool:
        return all(part.confined() for part in self.parts)

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        choice = torch.tensor(self.part_indices(num_heads))
        chosen = [
            _on_heads((choice == index).to(device), part.mask_mod(num_heads=num_heads, device=device))
            for index, part in enumerate(self.parts)
        ]
        return reduce(either, chosen)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        chosen = torch.tensor(self.part_indices(num_heads))[box.head]
        low, high = torch.zeros_like(box.area), torch.zeros_like(box.area)
        for index, part in enumerate(self.parts):
            here = (chosen == index).nonzero().squeeze(1)
            bounds = part.count(box.select(here), num_heads=num_heads)
            low[here], high[here] = bounds.low, bounds.high
        return Bounds(low, high)

    def reason(self, pair: Pair) -> Reason:
        choice = self.part_indices(pair.num_heads)
        chosen = choice[pair.head]
        first, number = choice.index(chosen), choice.count(chosen)
        others = f", as heads {span(first, first + number)} do" if number > 1 else ""
        text = f"head {pair.head} follows part {chosen + 1} of {len(self.parts)}{others}"
        inner = pair.reason_of(self.parts[chosen])
        return Reason(self, inner.allowed, text, (inner,))


@pattern_kind("per_head")
class PerHead(_HeadChoice):
    """One pattern for each head: head h follows parts[h]. Heads are counted over all devices."""

    def part_indices(self, num_heads: int) -> list[int]:
        return list(range(num_heads))

    def check_heads(self, num_heads: int) -> None:
        if num_heads != len(self.parts):
            came = f"got {len(self.parts)} for {num_heads} heads"
            raise ValueError(
                f"per_head needs one pattern for each head; {came}: masks.head_groups takes one for each group of heads"
            )
        super().check_heads(num_heads)


@pattern_kind("head_groups")
class HeadGroups(_HeadChoice):
    """One pattern for each group of consecutive heads: group i follows parts[i].

    If the heads do not divide evenly, the first groups have one head more.
    """

    def phrase(self) -> Phrase:
        origins = {part.origin() for part in self.parts}
        joint = self.parts[0].joint_phrase(self.parts, grouped=True) if len(origins) == 1 else None
        return super().phrase() if joint is None else joint

    def part_indices(self, num_heads: int) -> list[int]:
        size, larger = divmod(num_heads, len(self.parts))
        sizes = [size + (index < larger) for index in range(len(self.parts))]
        return [index for index, count in enumerate(sizes) for _ in range(count)]

    def check_heads(self, num_heads: int) -> None:
        if num_heads < len(self.parts):
            raise ValueError(
                f"num_heads must be at least the number of head groups, {len(self.parts)}; got {num_heads=}"
            )
        super().check_heads(num_heads)


@constructor
@advises(how="write masks.per_head([first, second]), a list with a pattern for each head")
def per_head(patterns: Sequence[Pattern]) -> Pattern:
    """Return the pattern in which head h follows patterns[h].

    patterns: one set pattern (not a mixture) for each head, counted over all devices; binding to another number of
        heads raises ValueError.

    Raises TypeError for a value that is not a sequence of set patterns, ValueError for an empty one.

    >>> masks.per_head([masks.causal(), masks.every()])
    per_head((causal(), every()))
    """
    return PerHead(_pattern_tuple(patterns))


@constructor
@advises(how="write masks.head_groups([first, second]), a list with a pattern for each group")
def head_groups(patterns: Sequence[Pattern]) -> Pattern:
    """Return the pattern in which the i-th group of consecutive heads follows patterns[i].

    patterns: one set pattern (not a mixture) for each group.

    If the heads do not divide evenly, the first groups have one head more; binding to fewer heads than groups raises
    ValueError.

    Raises TypeError for a value that is not a sequence of set patterns, ValueError for an empty one.

    >>> masks.head_groups([masks.causal(), masks.every()])
    head_groups((causal(), every()))
    """
    return HeadGroups(_pattern_tuple(patterns))


def _pattern_tuple(patterns: Sequence[Pattern]) -> tuple[Pattern, ...]:
    if not isinstance(patterns, Sequence):
        raise TypeError(f"patterns must be a sequence, with one pattern for each head or group; got {patterns!r:.80}")
    return tuple(patterns)


def _on_heads(chosen: Tensor, inner: MaskMod) -> MaskMod:
    return lambda b, h, q, k: chosen[h] & inner(b, h, q, k)
