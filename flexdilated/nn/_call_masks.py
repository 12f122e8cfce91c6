"""Masks in the form of torch's modules: key padding, and the causal mask that accompanies is_causal=True."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._torch_private import assert_async
from ..masks import Mixture, Pattern, visible_keys


def without_padding(
    pattern: Pattern | Mixture, mask: object, shape: tuple[int, ...], *, k_offset: int = 0, batch_first: bool = True
) -> Pattern | Mixture:
    """Return the pattern restricted to the keys that a padding mask does not hide; mask None returns it unchanged.

    mask: tensor of shape `shape`, (B, M), or (M,) without a batch; boolean, True for keys to hide, or float, -inf for
        keys to hide and 0 for others (torch's encoders convert booleans to floats).
    k_offset: position of the mask's first key.
    batch_first: False adds advice to the error for a mask of the transposed shape.

    Raises TypeError or ValueError for a mask of another shape or dtype.
    """
    if mask is None:
        return pattern
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"key_padding_mask must hold booleans, True for keys to leave out, or floats, -inf for them; got {kind}"
        )
    if tuple(mask.shape) != shape:
        came = f"got {tuple(mask.shape)}"
        if not batch_first and tuple(mask.shape) == shape[::-1]:
            came += ": inputs of (batch, tokens, width) need batch_first=True"
        raise ValueError(f"key_padding_mask must have shape {shape}, one entry for each key; {came}")
    visible = ~mask if mask.dtype == torch.bool else mask
    return pattern & visible_keys(pad(visible, (k_offset, 0)) if k_offset else visible, name="key_padding")


def require_causal_mask(
    mask: object,
    shape: tuple[int, int],
    *,
    instead: str,
) -> None:
    """Raise ValueError unless the mask hides exactly the later keys, as `generate_square_subsequent_mask` does.

    mask: of shape (N, M), boolean, True for pairs to hide, or float, -inf for pairs to hide and 0 for others. In a
        compiled graph the values are checked at run time, with a RuntimeError; on the meta device they are not checked.
    instead: advice for the error message.
    """
    rule = "attn_mask must be None, or exactly torch's causal mask, as the pattern says who attends to whom"
    kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(f"{rule}; {instead}. Got {kind}")
    if tuple(mask.shape) != shape:
        raise ValueError(f"{rule}, here of shape {shape}; {instead}. Got shape {tuple(mask.shape)}")
    if mask.is_meta:
        return
    later = torch.ones(shape, dtype=torch.bool, device=mask.device).triu(1)
    is_causal = (mask == (later if mask.dtype == torch.bool else torch.where(later, -torch.inf, 0.0))).all()
    message = f"{rule}; {instead}. Got a mask that hides other pairs, or adds to scores"
    if torch.compiler.is_compiling():
        assert_async(is_causal, message)
    elif not is_causal:
        raise ValueError(message)
