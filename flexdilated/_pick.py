"""Picking a term's operands and joining its results, as expressions that autograd and torch.compile follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ._merge import merge
from .masks import Layout
from .masks._layout import Compact, Permutation

# B batch, X heads of a tensor, N tokens, F folds, H heads of a term, S slots, D head dim


@dataclass(frozen=True, eq=False)
class PickRows:
    """A compact term's slots: rows of (heads * tokens) in (fold, head, slot) order."""

    index: Int64[Tensor, " F*H*S"]
    folds: int
    heads: int
    slots: int

    @property
    def nbytes(self) -> int:
        return self.index.nbytes

    def take(self, x: Float[Tensor, "B X N D"]) -> Float[Tensor, "B*F H S D"]:
        rows = x.flatten(1, 2).index_select(1, self.index)
        return rows.view(x.shape[0] * self.folds, self.heads, self.slots, x.shape[3])

    def join(
        self, q: Float[Tensor, "B X N D"], out: Tensor | None, lse: Tensor | None, part: Tensor, part_lse: Tensor | None
    ) -> tuple[Float[Tensor, "B X N D"], Float[Tensor, "B X N"] | None]:
        """Merge a part into the rows it computed; without lses the parts must have no row in common."""
        batch, heads, tokens, dim = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        rows = q.new_zeros(batch, heads * tokens, dim, dtype=wide) if out is None else out.flatten(1, 2)
        part = part.reshape(batch, -1, dim).to(wide)
        if part_lse is None:
            return rows.index_copy(1, self.index, part).view(q.shape), None
        row_lse = q.new_full((batch, heads * tokens), -torch.inf, dtype=wide) if lse is None else lse.flatten(1, 2)
        joined, joined_lse = merge(
            rows.index_select(1, self.index),
            row_lse.index_select(1, self.index),
            part,
            part_lse.reshape(batch, -1).to(wide),
        )
        rows, row_lse = rows.index_copy(1, self.index, joined), row_lse.index_copy(1, self.index, joined_lse)
        return rows.view(q.shape), row_lse.view(q.shape[:3])


@dataclass(frozen=True, eq=False)
class PickTokens:
    """A shared term's slots: every token, reordered where `slots` and `positions` say so."""

    positions: Int64[Tensor, " N"] | None
    slots: Int64[Tensor, " N"] | None

    @property
    def nbytes(self) -> int:
        return sum(order.nbytes for order in (self.positions, self.slots) if order is not None)

    def take(self, x: Float[Tensor, "B X N D"]) -> Float[Tensor, "B X N D"]:
        return x if self.positions is None else x.index_select(2, self.positions)

    def join(
        self, q: Float[Tensor, "B X N D"], out: Tensor | None, lse: Tensor | None, part: Tensor, part_lse: Tensor | None
    ) -> tuple[Float[Tensor, "B X N D"], Float[Tensor, "B X N"] | None]:
        """Merge a part that computed every row."""
        if self.slots is not None:
            part = part.index_select(2, self.slots)
            part_lse = None if part_lse is None else part_lse.index_select(2, self.slots)
        if out is None or lse is None or part_lse is None:
            wide = torch.promote_types(q.dtype, torch.float32)
            return part.to(wide), None if part_lse is None else part_lse.to(wide)
        return merge(out, lse, part, part_lse)


Pick = PickRows | PickTokens


def make_pick(layout: Compact | Permutation, heads: tuple[int, ...], given: Layout, device: torch.device) -> Pick:
    """How a tensor's tokens, ordered as `given`, become a term's; `heads` are the tensor's heads it uses."""
    if isinstance(layout, Permutation):
        # A term is in the given order, or the given order is the natural one.
        same = layout == given
        return PickTokens(None if same else layout.positions(device), None if same else layout.slots(device))
    first_row = torch.tensor(heads, device=device)[:, None, None] * given.num_tokens
    index = (first_row + layout.tokens(device)).transpose(0, 1).flatten()
    return PickRows(index, layout.folds, len(heads), layout.num_slots)
