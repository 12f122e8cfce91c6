"""The sizes that a pattern fixes itself: the tokens of its grid, and the heads it has rules for."""

from __future__ import annotations

from functools import cache
from itertools import chain

from ..masks.core._check import LARGEST
from ..masks.core._pattern import Expression

MOST_HEADS = 1 << 12


@cache
def most_tokens(pattern: Expression) -> int | None:
    """The most tokens that the pattern binds to, as those of its grid; None where any number does, or none."""

    def binds(num_tokens: int) -> bool:
        try:
            pattern.check_tokens(range(num_tokens), range(num_tokens))
        except ValueError:
            return False
        return True

    if binds(LARGEST):
        return None
    low = next(filter(binds, chain((1 << power for power in reversed(range(31))), range(1 << 12, 0, -1))), None)
    if low is None:
        return None
    high = LARGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if binds(middle) else (low, middle)
    return low


def fitting_heads(pattern: Expression, usual: int) -> int:
    """`usual` where the pattern takes so many heads, or else the fewest that it takes."""
    for num_heads in (usual, *range(1, MOST_HEADS + 1)):
        try:
            pattern.check_heads(num_heads)
        except ValueError:
            continue
        return num_heads
    return usual  # which does not bind, and is answered there
