"""Codec "auto": the narrowest that keeps a stated bound, chosen by the ranks together from the range of their rows."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from ..group import Ranks, group_of, record
from ._codec import Codec, CodecName, codec_named

# B batch, G key/value heads, L tokens here, D head dim

CodecChoice = CodecName | Literal["auto"] | None

# Of a row, |decoded − row| / |row|. int8: half a scale, with what float32 rounds, over a row whose numbers all have one
# magnitude; as many times that as the row's peak otherwise.
_BF16_ERROR = 2.0**-8
_INT8_ERROR = 0.50001 / 127


def check_codec(codec: CodecChoice, error_bound: float | None, dtype: torch.dtype) -> None:
    """Raises ValueError or TypeError for a choice that is none, and for rows that it cannot write."""
    if codec is not None and not isinstance(codec, str):
        raise TypeError(f"codec must be a name or None; got {type(codec).__name__}")
    if codec == "auto":
        if not isinstance(error_bound, int | float) or not 0 < error_bound < 1:
            raise ValueError(f'codec "auto" needs an error_bound above 0 and below 1; got {error_bound!r}')
        codec_named(None).check(dtype)
        return
    codec_named(codec).check(dtype)
    if error_bound is not None:
        raise ValueError(f'error_bound is what codec "auto" keeps; got {error_bound!r} with codec={codec!r}')


@torch.no_grad()
def choose_codec(
    k: Float[Tensor, "B G L D"], v: Float[Tensor, "B G L D"], error_bound: float, ranks: Ranks | None = None
) -> Codec:
    """The codec with the fewest bytes that keeps each row of all ranks within the bound on |decoded − row| / |row|.

    All ranks must call it, with the same bound and dtype, and get the same answer: they compare one number, in one
    collective of 8 bytes, unless int8 could not keep the bound whatever the rows. ranks=None: this process alone. A row
    that is not finite, or beyond float32's range, is sent as it is.
    """
    rounding = torch.finfo(k.dtype).eps / 2 if k.dtype.itemsize == 2 else 0.0  # what is decoded is of this dtype again
    largest_peak = (error_bound - rounding) / _INT8_ERROR
    peak = _peak_of_all(max(row_peak(k), row_peak(v)), ranks) if largest_peak >= 1 else 1.0
    if peak <= largest_peak:
        return codec_named("int8")
    wider = k.dtype.itemsize > torch.bfloat16.itemsize
    return codec_named("bf16" if wider and error_bound >= _BF16_ERROR and peak < math.inf else None)


def codec_for(
    name: str | None, error_bound: float, k: Float[Tensor, "B G L D"], v: Float[Tensor, "B G L D"], ranks: Ranks
) -> Codec:
    """The codec of this name, or the one that "auto" finds; rows that are bfloat16 need none that writes bfloat16."""
    if name == "auto":
        return choose_codec(k, v, error_bound, ranks)
    return codec_named(None if name == "bf16" and k.dtype == torch.bfloat16 else name)


def row_peak(x: Float[Tensor, "... D"]) -> float:
    """The largest magnitude in a row over the row's root mean square, in the row where that is most; 1 without rows.

    Infinite where a row is not finite, or so small or large that its scale as int8 is no normal number of float32.
    """
    if x.numel() == 0:
        return 1.0
    rows = x if x.dtype == torch.float64 else x.float()
    low, high = rows.aminmax(dim=-1, keepdim=True)
    largest = torch.maximum(-low, high)
    peaks = (rows / largest).square_().mean(-1, keepdim=True).rsqrt_()
    float32 = torch.finfo(torch.float32)
    sound = (largest >= 127 * float32.tiny) & (largest <= float32.max)
    return float(peaks.where(sound, math.inf).where(largest != 0, 1.0).amax())


def _peak_of_all(peak: float, ranks: Ranks | None) -> float:
    if ranks is None or ranks.size == 1:
        return peak
    shared = torch.tensor(peak, dtype=torch.float64, device=ranks.device_type)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group_of(ranks.name))
    record("set-up", sent=shared.nbytes, received=shared.nbytes)
    return shared.item()
