"""Chunked: tokens see their own chunk, whole."""

from ..core._check import require_int
from ..core._pattern import Pattern
from ._dilated import dilated


def chunked(size: int) -> Pattern:
    """Chunks of `size` tokens that see themselves, each both ways: a block-diagonal mask.

    The same as `dilated(size, 1)`. The last chunk is as long as there are tokens. Raises ValueError for a size
    below 1.
    """
    return dilated(require_int("size", size, minimum=1), 1)
