"""Rules that differ by head: one pattern a head, or groups of heads that share one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ._advice import advises
from ._algebra import Composite, either
from ._box import Bounds, Box, Squares
from ._check import Phrase
from ._expression import constructor, pattern_kind
from ._pattern import MaskMod, Pattern, require_set_patterns
from ._reason import Pair, Reason, span


@dataclass(frozen=True)
class _HeadChoice(Composite):
    def __post_init__(self) -> None:
        require_set_patterns("a choice by head", self.parts, least=1)
        super().__post_init__()

    def choice(self, num_heads: int) -> list[int]:
        """Index of the part of each global head."""
        raise NotImplementedError

    def for_head(self, head: int, num_heads: int) -> Pattern:
        return self.parts[self.choice(num_heads)[head]].for_head(head, num_heads)

    def squares(self, head: int, num_heads: int) -> Squares | None:
        return self.parts[self.choice(num_heads)[head]].squares(head, num_heads)

    def confined(self) -> bool:
        return all(part.confined() for part in self.parts)

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        choice = torch.tensor(self.choice(num_heads))
        chosen = [
            _on_heads((choice == index).to(device), part.mask_mod(num_heads=num_heads, device=device))
            for index, part in enumerate(self.parts)
        ]
        return reduce(either, chosen)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        chosen = torch.tensor(self.choice(num_heads))[box.head]
        low, high = torch.zeros_like(box.area), torch.zeros_like(box.area)
        for index, part in enumerate(self.parts):
            here = (chosen == index).nonzero().squeeze(1)
            bounds = part.count(box.select(here), num_heads=num_heads)
            low[here], high[here] = bounds.low, bounds.high
        return Bounds(low, high)

    def reason(self, pair: Pair) -> Reason:
        choice = self.choice(pair.num_heads)
        chosen = choice[pair.head]
        first, number = choice.index(chosen), choice.count(chosen)
        others = f", as heads {span(first, first + number)} do" if number > 1 else ""
        text = f"head {pair.head} follows part {chosen + 1} of {len(self.parts)}{others}"
        inner = pair.reason_of(self.parts[chosen])
        return Reason(self, inner.allowed, text, (inner,))


@pattern_kind("per_head")
class PerHead(_HeadChoice):
    """Head h follows parts[h]; exactly one part for each global head."""

    def choice(self, num_heads: int) -> list[int]:
        return list(range(num_heads))

    def check_heads(self, num_heads: int) -> None:
        if num_heads != len(self.parts):
            came = f"got {len(self.parts)} for {num_heads} heads"
            raise ValueError(f"per_head needs one pattern a head; {came}: masks.head_groups takes one a group of them")
        super().check_heads(num_heads)


@pattern_kind("head_groups")
class HeadGroups(_HeadChoice):
    """Consecutive groups of heads, one a part; if they do not divide evenly, the first groups have one head more."""

    def phrase(self) -> Phrase:
        origins = {part.origin() for part in self.parts}
        joint = self.parts[0].joint_phrase(self.parts, grouped=True) if len(origins) == 1 else None
        return super().phrase() if joint is None else joint

    def choice(self, num_heads: int) -> list[int]:
        size, larger = divmod(num_heads, len(self.parts))
        sizes = [size + (index < larger) for index in range(len(self.parts))]
        return [index for index, count in enumerate(sizes) for _ in range(count)]

    def check_heads(self, num_heads: int) -> None:
        if num_heads < len(self.parts):
            raise ValueError(f"{len(self.parts)} head groups need a head each; got num_heads={num_heads}")
        super().check_heads(num_heads)


@constructor
@advises(how="write masks.per_head([first, second]), a list with a pattern for each head")
def per_head(patterns: Sequence[Pattern]) -> Pattern:
    """Head h follows patterns[h]: one set pattern for each head, counted over all devices.

    >>> masks.per_head([masks.causal(), masks.every()])
    per_head((causal(), every()))
    """
    return PerHead(_listed(patterns))


@constructor
@advises(how="write masks.head_groups([first, second]), a list with a pattern for each group")
def head_groups(patterns: Sequence[Pattern]) -> Pattern:
    """Consecutive groups of heads follow one pattern each; if they do not divide evenly, the first have one head more.

    >>> masks.head_groups([masks.causal(), masks.every()])
    head_groups((causal(), every()))
    """
    return HeadGroups(_listed(patterns))


def _listed(patterns: Sequence[Pattern]) -> tuple[Pattern, ...]:
    if not isinstance(patterns, Sequence):
        raise TypeError(f"a choice by head needs a sequence of set patterns; got {patterns!r:.80}")
    return tuple(patterns)


def _on_heads(chosen: Tensor, inner: MaskMod) -> MaskMod:
    return lambda b, h, q, k: chosen[h] & inner(b, h, q, k)
