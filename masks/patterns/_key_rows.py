"""The keys of each query in tables of single keys, as lists of any lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

# T tables, N queries, E listed keys


class KeyRows(NamedTuple):
    """Lists of keys: list t * N + n has the keys of query first + n in table t, ascending, as positions.

    keys: the lists, one after the other.
    ends: index in `keys` one past the end of each list.
    shape: (T, N).
    first: position of the first query.
    """

    keys: Int64[Tensor, " E"]
    ends: Int64[Tensor, " TN"]
    shape: tuple[int, int]
    first: int = 0

    def list_indices(self) -> Int64[Tensor, " E"]:
        """Return the index of the list of each key in `keys`."""
        return torch.arange(len(self.ends)).repeat_interleave(self.ends.diff(prepend=self.ends.new_zeros(1)))


def require_tables(tables: int, num_heads: int) -> None:
    if num_heads % tables:
        raise ValueError(
            "a pattern of chosen keys or blocks must have a number of tables that divides the number of heads; got "
            f"{tables} for {num_heads} heads"
        )
