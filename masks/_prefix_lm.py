"""Prefix language model: a prefix that everyone sees whole, and causal order after it."""

from ._causal import causal
from ._check import require_int
from ._global_tokens import first_tokens
from ._pattern import Pattern


def prefix_lm(prefix: int) -> Pattern:
    """The first `prefix` tokens see each other both ways; later ones see the keys at their position and before.

    The same as `causal() | first_tokens(prefix)`. Source: T5, arXiv 1910.10683, section 3.2.1. Raises
    ValueError for a prefix below 1.
    """
    return causal() | first_tokens(require_int("prefix", prefix, minimum=1))
