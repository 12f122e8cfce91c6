"""Constructors for drawn patterns: all of `masks`, and functions for `custom`.

A test may replace this module by another with equal names, to draw each pattern together with an independent rule:
constructors then return (pattern, rule) objects with &, |, ~, +, `after` and `per_document`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import masks
from ..masks import EMPTY, FULL, PARTIAL, Pattern, custom


def __getattr__(name: str) -> Any:
    """Constructor of `masks`, for names not defined here."""
    return getattr(masks, name)


def custom_lattice(a: int, b: int, modulus: int) -> Pattern:
    """Query q sees key k where a q + b k is a multiple of `modulus`."""
    return custom(lattice(a, b, modulus))


def custom_windows(widths: Sequence[int], *, classified: bool) -> Pattern:
    """Head h sees the last widths[h mod len(widths)] keys, the query's own included.

    classified: also give a function that classifies boxes, and a period.
    """
    table = torch.tensor(widths)
    if not classified:
        return custom(window_by_head(table))
    return custom(window_by_head(table), classify=classify_window(table), period=1)


def custom_kinds(kinds: Sequence[int]) -> Pattern:
    """Positions of equal kind see each other; kinds repeat."""
    return custom(same_kind(torch.tensor(kinds)), period=len(kinds))


def lattice(a: int, b: int, modulus: int):
    """mask_mod of `custom_lattice`."""

    def mask_mod(b_, h, q, k):
        return (q * a + k * b) % modulus == 0

    return mask_mod


def window_by_head(widths: Tensor):
    """mask_mod of `custom_windows`."""

    def mask_mod(b, h, q, k):
        distance = q - k
        return (distance >= 0) & (distance < widths[h % len(widths)])

    return mask_mod


def classify_window(widths: Tensor):
    """Classifier of boxes for `window_by_head`."""

    def classify(head, q_first, q_last, k_first, k_last):
        width = widths[head % len(widths)]
        empty = (q_last < k_first) | (q_first - k_last >= width)
        full = (q_first >= k_last) & (q_last - k_first < width)
        return torch.where(full, FULL, torch.where(empty, EMPTY, PARTIAL))

    return classify


def same_kind(kinds: Tensor):
    """mask_mod of `custom_kinds`."""
    size = len(kinds)

    def mask_mod(b, h, q, k):
        return kinds[q % size] == kinds[k % size]

    return mask_mod
