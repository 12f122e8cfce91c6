"""A sample of receptive fields: what a few tokens have heard of, followed layer by layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..core._bound import Bound
from ..core._range_union import union_of
from ..core._ranges import Ranges
from ..needs._needs import needed_keys
from ._sections import groups_of

_MOST_LAYERS = 64
_MOST_RANGES = 1 << 7  # that one token's field consists of


@dataclass(frozen=True)
class FollowedTokens:
    """What some tokens have heard of, exactly; what the others have is not known.

    `reached` holds for each of the `tokens` how many tokens it has heard of after 1, 2, 3, ... layers, itself among
    them. `finished` says of each whether more layers bring it nothing.
    """

    num_tokens: int
    tokens: tuple[int, ...]
    reached: tuple[tuple[int, ...], ...]
    finished: tuple[bool, ...]

    @property
    def layers_at_least(self) -> int:
        """A pattern needs no fewer layers until more bring nothing."""
        return max(map(len, self.reached))

    def to_data(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {**asdict(self), "layers_at_least": self.layers_at_least}


def follow_tokens(bound: Bound) -> FollowedTokens:
    """The first token, the middle one and the last, through at most 64 layers."""
    last = bound.num_queries - 1
    tokens = tuple(sorted({0, last // 2, last}))
    followed = [_follow(bound, token) for token in tokens]
    reached, finished = zip(*followed, strict=True)
    return FollowedTokens(bound.num_queries, tokens, reached, finished)


def _follow(bound: Bound, token: int) -> tuple[tuple[int, ...], bool]:
    keys = (range(bound.k_offset, bound.k_offset + bound.num_keys),)
    # One head for each set of rules.
    heads = [group.heads[0] + bound.head_offset for group in groups_of(bound)]
    position = bound.q_offset + token
    known: Ranges = (range(position, position + 1),)
    news, reached = known, []
    while len(reached) < _MOST_LAYERS and len(known) <= _MOST_RANGES:
        seen = needed_keys(bound.pattern, queries=news, keys=keys, heads=heads, num_heads_global=bound.num_heads_global)
        further = union_of([*known, *seen])
        number = sum(map(len, further))
        if number == sum(map(len, known)):
            return tuple(reached), True
        reached.append(number)
        known = news = further
    return tuple(reached), False
