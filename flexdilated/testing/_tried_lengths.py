"""The lengths that a module or a call is tried at."""

from __future__ import annotations

import torch

from ..masks import Mixture, Pattern
from ._edges import edges_of

_BLOCKS = (64, 128, 256, 512, 1024)  # that kernels work in: the last one whole, or with one token in it


def lengths_for(pattern: Pattern | Mixture, num_heads: int, *, max_tokens: int, examples: int) -> tuple[int, ...]:
    """Rising lengths that the pattern takes: small ones, around multiples of its numbers, after blocks, the largest."""
    edges = [edge for edge in edges_of(pattern) if 1 < edge <= max_tokens]
    around = {multiple * edge + step for edge in edges for multiple in (1, 2, 3) for step in (-1, 0, 1)}
    wanted = {1, 2, 3, 4, 5, 7, max_tokens - 1, max_tokens} | around
    wanted |= {block + step for block in _BLOCKS for step in (0, 1)}
    possible = [n for n in sorted(wanted) if 1 <= n <= max_tokens and takes(pattern, num_heads, n)]
    if not possible:
        possible = [n for n in range(1, max_tokens + 1) if takes(pattern, num_heads, n)][-1:]
    if not possible:
        raise ValueError(f"the pattern takes no length up to max_tokens; got {max_tokens=} and {pattern!r}")
    if len(possible) <= examples:
        return tuple(possible)
    places = torch.linspace(0, len(possible) - 1, examples).round().long().unique().tolist()
    return tuple(possible[place] for place in places)


def takes(pattern: Pattern | Mixture, num_heads: int, num_tokens: int) -> bool:
    """Whether the pattern can be bound to so many queries and keys."""
    try:
        pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens)
    except ValueError:
        return False
    return True
