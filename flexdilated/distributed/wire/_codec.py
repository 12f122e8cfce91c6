"""Codecs: encodings of key and value vectors in a message; codec "auto" is the narrowest that keeps an error bound.

For "auto" all ranks choose the same codec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from jaxtyping import Float, UInt8
from torch import Tensor

from ..group import Ranks, group_of, record

# B batch, G key/value heads, L tokens of this rank, D numbers in a vector, R bytes of an encoded vector

CodecName = Literal["bf16", "int8"]
CodecChoice = CodecName | Literal["auto"] | None

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LEVELS = 127  # largest int8 level; symmetric, so that a vector and its negative have equal errors
_SCALE_BYTES = 4
_FLOAT32 = torch.finfo(torch.float32)

# Bounds on |decoded − x| / |x| of a vector x. int8: half a scale, including float32 rounding, if all numbers of x have
# one magnitude; multiply by `peak_to_rms` for other vectors.
BF16_ERROR = 2.0**-8
INT8_ERROR = 0.50001 / 127


@dataclass(frozen=True)
class Codec:
    """Encoding that gives every vector of head_dim numbers the same number of bytes. Not differentiable.

    name: the encoding. None: vectors are unchanged. "bf16": rounded to nearest, with a relative error of at most 2⁻⁸
        where the result is a normal number; overflow gives infinity; refused for float16, which is more precise.
        "int8": one byte per number and one float32 scale per vector, its largest magnitude over 127, but at least the
        smallest normal float32; errors are at most half a scale, apart from rounding to floats. With "int8" a vector
        that is not finite, or whose scale exceeds float32, decodes to NaN.
    """

    name: CodecName | None

    def vector_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of an encoded vector of `head_dim` numbers of this dtype."""
        return _SCALE_BYTES + head_dim if self.name == "int8" else head_dim * self._wire_dtype(dtype).itemsize

    def check(self, dtype: torch.dtype) -> None:
        """Raise TypeError unless vectors of this dtype can be encoded: float64, float32, bfloat16 or float16.

        Raises ValueError for float16 if the codec is "bf16", which is less precise.
        """
        if dtype not in _DTYPES:
            raise TypeError(f"rows must be float64, float32, bfloat16 or float16; got {dtype}")
        if self.name == "bf16" and dtype == torch.float16:
            raise ValueError(
                'codec="bf16" makes float16 no smaller, only less exact: write codec=None or "int8"; got float16'
            )

    @torch.no_grad()
    def encode(self, x: Float[Tensor, "... D"], out: UInt8[Tensor, "... R"] | None = None) -> UInt8[Tensor, "... R"]:
        """Return the encoded vectors as bytes, in `out` (any strides) if given; else they may share memory with x."""
        if self.name != "int8":
            wire = _view_as(x.to(self._wire_dtype(x.dtype)).contiguous(), torch.uint8)
            return wire if out is None else out.copy_(wire)
        if out is None:
            out = torch.empty((*x.shape[:-1], _SCALE_BYTES + x.shape[-1]), dtype=torch.uint8, device=x.device)
        rows, largest = _vectors_and_largest(x)
        # A scale of at least the smallest normal number: vectors of 0 need no special case, and some devices flush
        # subnormals.
        scale = (largest / _LEVELS).float().clamp_min_(_FLOAT32.tiny)
        scale = scale.where(scale.isfinite(), math.nan)
        out[..., :_SCALE_BYTES] = _view_as(scale, torch.uint8)
        levels = (rows / scale).round_().clamp_(-_LEVELS, _LEVELS).nan_to_num_(0)
        out[..., _SCALE_BYTES:].view(torch.int8).copy_(levels)
        return out

    @torch.no_grad()
    def decode(
        self, wire: UInt8[Tensor, "... R"], head_dim: int, dtype: torch.dtype, out: Float[Tensor, "... D"] | None = None
    ) -> Float[Tensor, "... D"]:
        """Return the decoded vectors, in `out` if given, else in a new tensor of this dtype.

        head_dim, dtype: of the vectors before they were encoded.
        out: a tensor of any strides and any floating dtype.
        """
        assert wire.shape[-1] == self.vector_bytes(head_dim, dtype), (
            f"{head_dim} numbers of {dtype} are no {wire.shape}"
        )
        if out is None:
            out = torch.empty((*wire.shape[:-1], head_dim), dtype=dtype, device=wire.device)
        if self.name != "int8":
            return out.copy_(_view_as(wire, self._wire_dtype(dtype)))
        scale = _view_as(wire[..., :_SCALE_BYTES], torch.float32)
        # The product is computed in float32, in which both factors are exact, for any dtype of `out`.
        return torch.mul(wire[..., _SCALE_BYTES:].view(torch.int8), scale, out=out)

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if self.name == "bf16" else dtype


def codec_named(name: str | None) -> Codec:
    """Return the codec of this name: "bf16", "int8", or None, which leaves vectors unchanged.

    Raises ValueError for any other name.
    """
    if name is None or name == "bf16" or name == "int8":
        return Codec(name)
    raise ValueError(f"codec must be None, {', '.join(map(repr, get_args(CodecName)))} or 'auto'; got {name!r}")


def gradient_codec(codec: Codec, dtype: torch.dtype) -> Codec:
    """Return the codec for the gradients of keys and values that were sent with `codec`.

    dtype: of the gradients.

    If keys and values were sent unchanged, so are gradients. Otherwise float64 and float32 gradients become bf16;
    bfloat16 and float16 ones are sent unchanged. Receivers sum them in float32 or wider.
    """
    return Codec("bf16" if codec.name is not None and dtype.itemsize > torch.bfloat16.itemsize else None)


def check_codec(codec: CodecChoice, error_bound: float | None, dtype: torch.dtype) -> None:
    """Raise ValueError or TypeError for an invalid codec, error bound or dtype of keys and values.

    error_bound must be above 0 and below 1 for codec "auto", else None. dtype must be float64, float32,
    bfloat16 or float16, the last not with codec "bf16".
    """
    if codec is not None and not isinstance(codec, str):
        raise TypeError(f"codec must be a name or None; got {type(codec).__name__}")
    if codec == "auto" and not (isinstance(error_bound, int | float) and 0 < error_bound < 1):
        raise ValueError(f'codec="auto" needs an error_bound above 0 and below 1; got {error_bound!r}')
    codec_named(None if codec == "auto" else codec).check(dtype)
    if codec != "auto" and error_bound is not None:
        raise ValueError(
            f'error_bound is for codec="auto" only: leave it out; got {error_bound!r} with codec={codec!r}'
        )


@torch.no_grad()
def choose_codec(
    k: Float[Tensor, "B G L D"], v: Float[Tensor, "B G L D"], error_bound: float, ranks: Ranks | None = None
) -> Codec:
    """Return the first of int8, bf16 and None that surely keeps |decoded − x| / |x| within error_bound.

    x is each vector of k and v, on all ranks. int8 is skipped if a vector would take at least as many bytes as in the
    next codec, as with small head dims; bf16 is tried for float32 and float64 only. If some vector is not finite,
    exceeds the range of bfloat16, or is not 0 but has an int8 scale below the normal numbers of float32, the result is
    `Codec(None)`.

    All ranks must call it, with equal bound, dtype and head dim, and get the same codec: they compare one number, in
    one collective of 8 bytes. It is skipped if these arguments alone rule out int8 and bf16. ranks=None: this process
    only.
    """
    wider = k.dtype.itemsize > torch.bfloat16.itemsize
    rounding = 0.0 if wider else torch.finfo(k.dtype).eps / 2  # decoding rounds to this dtype again
    largest_peak, peak = (error_bound - rounding) / INT8_ERROR, 1.0
    takes_bf16 = wider and error_bound >= BF16_ERROR
    after_int8, head_dim = Codec("bf16" if takes_bf16 else None), k.shape[-1]
    if Codec("int8").vector_bytes(head_dim, k.dtype) >= after_int8.vector_bytes(head_dim, k.dtype):
        largest_peak = 0.0  # every vector's peak is at least 1
    if largest_peak >= 1 or takes_bf16:
        peak = max(peak_to_rms(k), peak_to_rms(v))
        if ranks is not None and ranks.size > 1:
            shared = torch.tensor(peak, dtype=torch.float64, device=ranks.device_type)
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=group_of(ranks.name))
            record("set-up", sent=shared.nbytes, received=shared.nbytes)
            peak = shared.item()
    if peak <= largest_peak:
        return Codec("int8")
    return after_int8 if peak < math.inf else Codec(None)


def codec_for(
    name: str | None, error_bound: float, k: Float[Tensor, "B G L D"], v: Float[Tensor, "B G L D"], ranks: Ranks
) -> Codec:
    """Return the codec of this name; for "auto" that of `choose_codec`, which keeps error_bound on all ranks.

    For "auto" all ranks must call it.

    error_bound: used by "auto" alone.

    For k in bfloat16 the name "bf16" gives Codec(None), which leaves vectors unchanged.
    """
    if name == "auto":
        return choose_codec(k, v, error_bound, ranks)
    return codec_named(None if name == "bf16" and k.dtype == torch.bfloat16 else name)


def peak_to_rms(x: Float[Tensor, "... D"]) -> float:
    """Return the largest ratio, over all vectors, of a vector's largest magnitude to its root mean square.

    The ratio of a vector of zeros is 1, and so is the result for a tensor without vectors. The result is infinite if a
    vector is not finite, exceeds the range of bfloat16, or is not 0 but has an int8 scale that is no normal float32.
    """
    if x.numel() == 0:
        return 1.0
    rows, largest = _vectors_and_largest(x)
    peaks = (rows / largest).square_().mean(-1, keepdim=True).rsqrt_()
    sound = (largest >= _LEVELS * _FLOAT32.tiny) & (largest <= torch.finfo(torch.bfloat16).max)
    return float(peaks.where(sound, math.inf).where(largest != 0, 1.0).amax())


def _vectors_and_largest(x: Float[Tensor, "... D"]) -> tuple[Float[Tensor, "... D"], Float[Tensor, "... 1"]]:
    """Return (the vectors in float32 or wider, the largest magnitude in each vector)."""
    rows = x if x.dtype == torch.float64 else x.float()
    low, high = rows.aminmax(dim=-1, keepdim=True)
    return rows, torch.maximum(-low, high)


def _view_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x with the bytes of its last dim read as `dtype`: a view, or a copy if x has no such view."""
    *strides, step = x.stride()
    if step != 1 or any(number % dtype.itemsize for number in (*strides, x.storage_offset())):
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(dtype)
