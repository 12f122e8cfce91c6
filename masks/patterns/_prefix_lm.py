"""Prefix language model: a prefix that everyone sees whole, and causal order after it."""

from ..core._check import require_int
from ..core._pattern import Pattern
from ._causal import causal
from ._global_tokens import first_tokens


def prefix_lm(prefix: int) -> Pattern:
    """The first `prefix` tokens see each other both ways; later ones see the keys at their position and before.

    The same as `causal() | first_tokens(prefix)`. Source: T5, arXiv 1910.10683, section 3.2.1. Raises
    ValueError for a prefix below 1.
    """
    return causal() | first_tokens(require_int("prefix", prefix, minimum=1))
