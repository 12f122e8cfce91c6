"""Padding masks: keys that a call leaves out, as the modules take them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..masks import Mixture, Pattern, visible_keys


def without_padding(
    pattern: Pattern | Mixture, mask: object, shape: tuple[int, ...], *, k_offset: int = 0
) -> Pattern | Mixture:
    """The pattern without the keys that a padding mask of this shape marks; all of it where the mask is None.

    The mask holds booleans, True for keys to leave out, or floats, 0 and -inf for them: encoders of torch make
    these of those. Its first key stands at position k_offset. Raises TypeError or ValueError for anything else.
    """
    if mask is None:
        return pattern
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"key_padding_mask must hold booleans, True for keys to leave out, or floats, -inf for them; got {kind}"
        )
    if tuple(mask.shape) != shape:
        raise ValueError(f"key_padding_mask must have shape {shape}, one entry for each key; got {tuple(mask.shape)}")
    visible = ~mask if mask.dtype == torch.bool else mask
    return pattern & visible_keys(pad(visible, (k_offset, 0)) if k_offset else visible, name="key_padding")
