"""Round places along a window of tokens, for the labels of its axes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, count

_LONG, _EVEN = 1 << 12, 1 << 6


def round_places(window: range, most: int) -> range:
    """Multiples of the smallest round step of which at most so many fill the window; its end may be one of them.

    Steps are powers of two in windows that are long or a multiple of 64, and 1, 2, 5, 10, 20 and so on in others.
    """
    binary = len(window) >= _LONG or len(window) % _EVEN == 0
    powers: Iterable[int] = (1 << power for power in count())
    tens = chain.from_iterable((10**power, 2 * 10**power, 5 * 10**power) for power in count())
    step = next(step for step in (powers if binary else tens) if len(window) <= max(most, 1) * step)
    return range(-(-window.start // step) * step, window.stop + 1, step)
