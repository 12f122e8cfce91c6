"""Codecs: how rows of keys and values are written in a message. A row is one head's vector for one token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

# D numbers in a row, R bytes of it in a message

CodecName = Literal["bf16", "int8"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LEVELS = 127  # of an int8 to either side of 0: symmetric, so that a row and its negative have the same error
_SCALE_BYTES = 4
# A row of zeros then needs no case of its own, and no scale is a subnormal number, which some devices take for 0.
_LEAST_SCALE = torch.finfo(torch.float32).tiny


class Codec(ABC):
    """A way to write rows of numbers as bytes, equally many for each row. It has no state, and no gradient."""

    name: CodecName | None

    @abstractmethod
    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of a row of so many numbers of this dtype."""

    @abstractmethod
    def _bytes(self, x: Float[Tensor, "... D"], out: UInt8[Tensor, "... R"] | None) -> UInt8[Tensor, "... R"]: ...

    @abstractmethod
    def _fill(self, out: Float[Tensor, "... D"], wire: UInt8[Tensor, "... R"], dtype: torch.dtype) -> None: ...

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


class Plain(Codec):
    """Rows as they are."""

    name = None

    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        return head_dim * dtype.itemsize

    def _bytes(self, x: Float[Tensor, "... D"], out: UInt8[Tensor, "... R"] | None) -> UInt8[Tensor, "... R"]:
        wire = _viewed(x.contiguous(), torch.uint8)
        return wire if out is None else out.copy_(wire)

    def _fill(self, out: Float[Tensor, "... D"], wire: UInt8[Tensor, "... R"], dtype: torch.dtype) -> None:
        out.copy_(_viewed(wire, dtype))


class Bf16(Codec):
    """Two bytes a number, rounded to nearest: within 2⁻⁸ of it, where it is a normal number.

    What is beyond bfloat16's largest number, 3.39e38, becomes infinite; infinite and NaN stay so. bfloat16 itself
    comes back as it was. Refused for float16, which is no wider and more exact.
    """

    name = "bf16"

    def row_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        return head_dim * torch.bfloat16.itemsize

    def check(self, dtype: torch.dtype) -> None:
        super().check(dtype)
        if dtype == torch.float16:
            raise ValueError('codec "bf16" writes rows wider than float16, which it would only make less exact')

    def _bytes(self, x: Float[Tensor, "... D"], out: UInt8[Tensor, "... R"] | None) -> UInt8[Tensor, "... R"]:
        wire = _viewed(x.to(torch.bfloat16).contiguous(), torch.uint8)
        return wire if out is None else out.copy_(wire)

    def _fill(self, out: Float[Tensor, "... D"], wire: UInt8[Tensor, "... R"], dtype: torch.dtype) -> None:
        out.copy_(_viewed(wire, torch.bfloat16))


class Int8(Codec):
    """One byte a number, and for each row a scale in float32: its largest magnitude over 127.

    Rounded to nearest: within half a scale of the number. A row with a number that is not finite, or with a scale
    beyond float32, comes back NaN as a whole: what it was cannot be told, and nobody takes it for sound.
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


_CODECS: dict[str | None, Codec] = {codec.name: codec for codec in (Plain(), Bf16(), Int8())}


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
