"""Functions that are drawn as patterns: of positions, of heads, of a table; with classify and a period, and without."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..masks import EMPTY, FULL, PARTIAL, Pattern, custom


def lattice(a: int, b: int, modulus: int) -> Pattern:
    """Query q sees key k where a q + b k is a multiple of `modulus`."""
    return custom(lattice_mod(a, b, modulus))


def head_windows(widths: Sequence[int], *, classified: bool) -> Pattern:
    """Head h sees the last widths[h mod len(widths)] keys up to the query's own; classified: with bounds and a period."""
    table = torch.tensor(widths)
    if not classified:
        return custom(head_windows_mod(table))
    return custom(head_windows_mod(table), classify=classify_head_windows(table), period=1)


def same_kind(kinds: Sequence[int]) -> Pattern:
    """Positions of equal kinds see each other; kinds repeat."""
    return custom(same_kind_mod(torch.tensor(kinds)), period=len(kinds))


def lattice_mod(a: int, b: int, modulus: int):
    """The function of `lattice`."""

    def lattice(b_, h, q, k):
        return (q * a + k * b) % modulus == 0

    return lattice


def head_windows_mod(widths: Tensor):
    """The function of `head_windows`."""

    def head_windows(b, h, q, k):
        distance = q - k
        return (distance >= 0) & (distance < widths[h % len(widths)])

    return head_windows


def classify_head_windows(widths: Tensor):
    """What `head_windows` says of boxes."""

    def classify(head, q_first, q_last, k_first, k_last):
        width = widths[head % len(widths)]
        empty = (q_last < k_first) | (q_first - k_last >= width)
        full = (q_first >= k_last) & (q_last - k_first < width)
        return torch.where(full, FULL, torch.where(empty, EMPTY, PARTIAL))

    return classify


def same_kind_mod(kinds: Tensor):
    """The function of `same_kind`."""
    size = len(kinds)

    def same_kind(b, h, q, k):
        return kinds[q % size] == kinds[k % size]

    return same_kind
