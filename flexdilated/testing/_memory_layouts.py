"""Memory layouts: the same numbers as projections, convolutions and views of them leave them in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Shaped
from torch import Tensor

# B batch, X heads, N tokens, D head dim


def _fused(x: Tensor) -> Tensor:
    """One of three in the output of a joint projection, (B, N, 3, X, D)."""
    return torch.stack([x.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2)


def _stacked(x: Tensor) -> Tensor:
    return torch.stack([x + 1, x, x - 1], -1)[..., 1]


def _every_second(x: Tensor) -> Tensor:
    return torch.stack([x - 1, x], -1).flatten(-2)[..., 1::2]


def _expanded(x: Tensor) -> Tensor:
    return x[..., :1].expand_as(x)


def _misaligned(x: Tensor) -> Tensor:
    """Rows with a gap behind each, which begin five numbers into a buffer."""
    *sizes, D = x.shape
    buffer = x.new_full((5 + x[..., 0].numel() * (D + 3),), 7.0)
    room = buffer[5:].view(*sizes, D + 3)[..., :D]
    return room.copy_(x)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x.clone(memory_format=torch.contiguous_format),
    "tokens first": lambda x: x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2),
    "fused": _fused,
    "channels first": lambda x: x.mT.clone(memory_format=torch.contiguous_format).mT,
    "stacked": _stacked,
    "every second": _every_second,
    "expanded": _expanded,
    "misaligned": _misaligned,
}

MEMORY_LAYOUTS = tuple(_LAYOUTS)


def laid_out(x: Shaped[Tensor, "B X N D"], layout: str) -> Shaped[Tensor, "B X N D"]:
    """x in memory as the layout says, cut off from where it came from; "expanded" repeats its first channel.

    "heads first" is contiguous; "tokens first" a transposed projection; "fused" one of three side by side in a token's
    row; "channels first" the output of a Conv1d; "stacked" one of three along a last dim; "every second" every second
    channel; "expanded" one channel, with stride 0; "misaligned" rows with gaps, which begin at an odd place.
    Raises ValueError for another name.
    """
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, MEMORY_LAYOUTS))}; got {layout!r}")
    return _LAYOUTS[layout](x.detach())
