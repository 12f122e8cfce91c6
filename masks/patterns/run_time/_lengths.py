"""Lengths: sequences padded to one size, of which only the real tokens take part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core import Extent, Pattern, constructor, pattern_kind, require_choice
from ._run_time import RunTime, of_tensor
from ._run_time_checks import integers
from ._spans import PADDING, Spans

SIDES = ("right", "left")


@pattern_kind("lengths")
class Lengths(RunTime):
    """Allowed iff query and key are both real tokens: the first `length` positions, or with padding="left" the last."""

    padding: str = "right"

    def __post_init__(self) -> None:
        require_choice("padding", self.padding, SIDES)
        super().__post_init__()

    def table(self, tensor: Tensor, extent: Extent) -> Spans:
        num_positions = extent.tokens
        lengths = torch.atleast_1d(integers("lengths", tensor, (0, 1)))[:, None]
        wrong = ((lengths < 0) | (lengths > num_positions)).nonzero()
        if len(wrong):
            batch = int(wrong[0, 0])
            raise ValueError(
                f"lengths must lie between 0 and the {num_positions} positions; "
                f"got {int(lengths[batch, 0])} in batch entry {batch}"
            )
        positions = torch.arange(num_positions)
        start = num_positions - lengths if self.padding == "left" else torch.zeros_like(lengths)
        real = (positions >= start) & (positions < start + lengths)
        return Spans.of(torch.where(real, start, PADDING))

    def most(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        """No padding."""
        return torch.full(shape, extent.tokens)


@constructor
def lengths(lengths: Any, *, padding: str = "right", name: str = "lengths") -> Pattern:
    """Real tokens see each other; padding neither sees nor is seen.

    lengths: integers of shape (batch,) or (), real tokens of each batch entry, from 0 to the number of
    positions. Or a string, the name under which `attend(bindings=)` passes them. padding: the side on which
    the padding lies. With padding on the left, `p.per_document(lengths(n, padding="left"))` counts positions
    from the first real token, so that padded equals unpadded for every p.
    """
    return of_tensor(Lengths, lengths, name, padding=padding)
