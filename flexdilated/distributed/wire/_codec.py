"""Codecs: how rows of keys and values are written in a message, and codec "auto", the narrowest that keeps a bound.

A row is one head's vector for one token. The ranks choose together, from the range of their rows.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.distributed as dist
from jaxtyping import Float, UInt8
from torch import Tensor

from ..group import Ranks, group_of, record

# B batch, G key/value heads, L tokens here, D numbers in a row, R bytes of it in a message

CodecName = Literal["bf16", "int8"]
CodecChoice = CodecName | Literal["auto"] | None

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LEVELS = 127  # of an int8 to either side of 0: symmetric, so that a row and its negative have the same error
_SCALE_BYTES = 4
# A row of zeros then needs no case of its own, and no scale is a subnormal number, which some devices take for 0.
_LEAST_SCALE = torch.finfo(torch.float32).tiny

# Of a row, |decoded − row| / |row|. int8: half a scale, with what float32 rounds, over a row whose numbers all have one
# magnitude; as many times that as the row's peak otherwise.
BF16_ERROR = 2.0**-8
INT8_ERROR = 0.50001 / 127


class Codec:
    """Rows as they are; subclasses write them otherwise, each row as equally many bytes. No state, and no gradient."""

    name: CodecName | None = None
    _written: torch.dtype | None = None  # what numbers are rounded to, if they are

    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of a row of so many numbers of this dtype."""
        return head_dim * (self._written or dtype).itemsize

    def check(self, dtype: torch.dtype) -> None:
        """Raises TypeError for a dtype that no codec writes, and ValueError for one that this codec does not."""
        if dtype not in _DTYPES:
            raise TypeError(f"rows must be float64, float32, bfloat16 or float16; got {dtype}")

    @torch.no_grad()
    def encode(self, x: Float[Tensor, "... D"], out: UInt8[Tensor, "... R"] | None = None) -> UInt8[Tensor, "... R"]:
        """The bytes of the rows, in `out` if given: any strides. Without it they may share memory with x."""
        self.check(x.dtype)
        return self._bytes(x, out)

    @torch.no_grad()
    def decode(
        self,
        wire: UInt8[Tensor, "... R"],
        head_dim: int,
        dtype: torch.dtype,
        out: Float[Tensor, "... D"] | None = None,
    ) -> Float[Tensor, "... D"]:
        """The rows, in `out` if given: any strides, any floating dtype. Rows of head_dim and dtype had been written.

        Raises ValueError where these do not fit the bytes, or `out` does not fit the rows.
        """
        self.check(dtype)
        row_bytes = self.row_bytes(head_dim, dtype)
        if wire.dtype != torch.uint8 or wire.shape[-1] != row_bytes:
            got = f"{wire.dtype} of {wire.shape[-1]}"
            raise ValueError(f"a row of {head_dim} numbers of {dtype} is torch.uint8 of {row_bytes} bytes; got {got}")
        shape = (*wire.shape[:-1], head_dim)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=wire.device)
        elif out.shape != shape:
            raise ValueError(f"out must have the shape of the rows, {shape}; got {tuple(out.shape)}")
        self._fill(out, wire, dtype)
        return out

    def _bytes(self, x: Float[Tensor, "... D"], out: UInt8[Tensor, "... R"] | None) -> UInt8[Tensor, "... R"]:
        wire = _viewed(x.to(self._written or x.dtype).contiguous(), torch.uint8)
        return wire if out is None else out.copy_(wire)

    def _fill(self, out: Float[Tensor, "... D"], wire: UInt8[Tensor, "... R"], dtype: torch.dtype) -> None:
        out.copy_(_viewed(wire, self._written or dtype))


class Bf16(Codec):
    """Two bytes a number, rounded to nearest: within 2⁻⁸ of it, where it is a normal number.

    What is beyond bfloat16's largest number, 3.39e38, becomes infinite; infinite and NaN stay so. bfloat16 itself
    comes back as it was. Refused for float16, which is no wider and more exact.
    """

    name = "bf16"
    _written = torch.bfloat16

    def check(self, dtype: torch.dtype) -> None:
        super().check(dtype)
        if dtype == torch.float16:
            raise ValueError('codec "bf16" writes rows wider than float16, which it would only make less exact')


class Int8(Codec):
    """One byte a number, and for each row a scale in float32: its largest magnitude over 127.

    Rounded to nearest: within half a scale of the number. A row with a number that is not finite, or with a scale
    beyond float32, comes back NaN as a whole, so that nobody takes it for sound.
    """

    name = "int8"

    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        return _SCALE_BYTES + head_dim

    def _bytes(self, x: Float[Tensor, "... D"], out: UInt8[Tensor, "... R"] | None) -> UInt8[Tensor, "... R"]:
        if out is None:
            out = torch.empty((*x.shape[:-1], self.row_bytes(x.shape[-1], x.dtype)), dtype=torch.uint8, device=x.device)
        rows = x if x.dtype == torch.float64 else x.float()
        low, high = rows.aminmax(dim=-1, keepdim=True)
        scale = (torch.maximum(-low, high) / _LEVELS).float().clamp_min_(_LEAST_SCALE)
        scale = scale.where(scale.isfinite(), float("nan"))
        levels = (rows / scale).round_().clamp_(-_LEVELS, _LEVELS).nan_to_num_(0)
        out[..., :_SCALE_BYTES] = _viewed(scale, torch.uint8)
        out[..., _SCALE_BYTES:].view(torch.int8).copy_(levels)
        return out

    def _fill(self, out: Float[Tensor, "... D"], wire: UInt8[Tensor, "... R"], dtype: torch.dtype) -> None:
        scale = _viewed(wire[..., :_SCALE_BYTES], torch.float32)
        # The product is float32, where both factors are exact, whatever `out` is.
        torch.mul(wire[..., _SCALE_BYTES:].view(torch.int8), scale, out=out)


_CODECS: dict[str | None, Codec] = {codec.name: codec for codec in (Codec(), Bf16(), Int8())}


def codec_named(name: str | None) -> Codec:
    """The codec of this name; None: rows as they are. Raises ValueError for any other name."""
    if name not in _CODECS:
        raise ValueError(f"codec must be None, {', '.join(map(repr, get_args(CodecName)))} or 'auto'; got {name!r}")
    return _CODECS[name]


def gradient_codec(codec: Codec, dtype: torch.dtype) -> Codec:
    """How gradients of rows go back that came by this codec: never below bf16.

    As they are, where the rows came as they are; where they did not, as bf16 if they are wider than that. Whoever
    gets them adds them up in float32 or wider.
    """
    wider = dtype.itemsize > torch.bfloat16.itemsize
    return _CODECS["bf16" if codec.name is not None and wider else None]


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each row as numbers, or the other way about; copied where numbers of this dtype cannot lie."""
    *strides, step = x.stride()
    if step != 1 or any(number % dtype.itemsize for number in (*strides, x.storage_offset())):
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(dtype)


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
    largest_peak = (error_bound - rounding) / INT8_ERROR
    peak = _peak_of_all(max(row_peak(k), row_peak(v)), ranks) if largest_peak >= 1 else 1.0
    if peak <= largest_peak:
        return codec_named("int8")
    wider = k.dtype.itemsize > torch.bfloat16.itemsize
    return codec_named("bf16" if wider and error_bound >= BF16_ERROR and peak < math.inf else None)


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
    sound = (largest >= _LEVELS * float32.tiny) & (largest <= float32.max)
    return float(peaks.where(sound, math.inf).where(largest != 0, 1.0).amax())


def _peak_of_all(peak: float, ranks: Ranks | None) -> float:
    if ranks is None or ranks.size == 1:
        return peak
    shared = torch.tensor(peak, dtype=torch.float64, device=ranks.device_type)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group_of(ranks.name))
    record("set-up", sent=shared.nbytes, received=shared.nbytes)
    return shared.item()
