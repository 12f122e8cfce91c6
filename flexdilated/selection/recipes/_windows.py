"""Windows of keys: who sees one that stands for several keys, which ends somewhere before the query."""

from __future__ import annotations

from typing import Any

import torch

from ...masks import EMPTY, FULL, PARTIAL, custom


class WindowsBefore:
    """Window i is seen from position i * stride + reach on: `pattern` has it, between queries and windows.

    With its bounds: of a box of pairs the first query with the last window decides whether it is full, and the last
    query with the first window whether it is empty. A module holds this, since a function that captured numbers cannot
    be pickled, and torch.compile reads a pattern that is there, but makes none of a function.
    """

    def __init__(self, stride: int, reach: int) -> None:
        def seen(b, h, q, k):
            return q >= k * stride + reach

        def classify(head, q_first, q_last, k_first, k_last):
            full, some = q_first >= k_last * stride + reach, q_last >= k_first * stride + reach
            return torch.where(full, FULL, torch.where(some, PARTIAL, EMPTY))

        self.pattern = custom(seen, classify=classify)
        self._made_of = (stride, reach)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of
