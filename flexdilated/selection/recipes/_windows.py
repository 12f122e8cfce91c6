"""Windows of keys: the pattern by which a query sees a pooled key whose window ends before the query."""

from __future__ import annotations

from typing import Any

import torch

from ...masks import EMPTY, FULL, PARTIAL, custom


class WindowsBefore:
    """`pattern` over (query position, window): window i is visible from position i * stride + reach.

    It has bounds for boxes: a box is full if its first query sees its last window, and empty if its last query does not
    see its first window. Modules keep an instance of this class, because a function that captures numbers cannot be
    pickled, and because torch.compile can read an existing pattern but not build one from a function.
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
