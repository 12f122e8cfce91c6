"""Codec "auto": the narrowest that keeps a stated bound, chosen by the ranks together from the range of their rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from ._codec import Codec, CodecName, codec_named
from ._ranks import Ranks, group_of
from ._traffic import record

# B batch, G key/value heads, L tokens here, D head dim

CodecChoice = CodecName | Literal["auto"] | None

_BF16_ERROR = 2.0**-8
_INT8_ERROR = 1 / 254  # of a row whose numbers all have one magnitude; times its peak otherwise


def check_codec(codec: CodecChoice, error_bound: float | None, dtype: torch.dtype) -> None:
    """Raises ValueError or TypeError for a choice that is none, and for rows that it cannot write."""
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
    """The codec with the fewest bytes whose error, |decoded − row| / |row|, is within the bound for each row of all ranks.

    All ranks must call it, with the same bound, and get the same answer: where int8 is in question they compare one
    number, in one collective of 4 bytes. Below 1/256 none is: rows go as they are. ranks=None: this process alone.
    A row that is not finite rules out int8.
    """
    if error_bound < _INT8_ERROR:
        return codec_named(_without_int8(error_bound, k.dtype))
    peak = max(row_peak(k), row_peak(v))
    if ranks is not None and ranks.size > 1:
        peak = _largest(peak, ranks)
    return codec_named("int8" if peak * _INT8_ERROR <= error_bound else _without_int8(error_bound, k.dtype))


def _without_int8(error_bound: float, dtype: torch.dtype) -> CodecName | None:
    return "bf16" if error_bound >= _BF16_ERROR and dtype.itemsize > torch.bfloat16.itemsize else None
