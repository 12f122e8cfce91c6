"""What a codec saves on given keys and values, and what that costs in accuracy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flexdilated.distributed.wire._codec import Codec

# B batch, G key/value heads, L tokens, D head dim


@dataclass(frozen=True)
class WireReport:
    """Bytes on the wire, and as they are; |decoded − row| / |row|, the largest and the mean over rows of K and V.

    An error is NaN where a row is not finite.
    """

    num_bytes: int
    plain_bytes: int
    largest_error: float
    mean_error: float

    @property
    def saved(self) -> float:
        """The share of bytes that is not sent."""
        return 1 - self.num_bytes / self.plain_bytes


@torch.no_grad()
def wire_report(k: Float[Tensor, "B G L D"], v: Float[Tensor, "B G L D"], codec: Codec) -> WireReport:
    """Encodes and decodes all rows. Raises ValueError where there is none."""
    if k.numel() + v.numel() == 0:
        raise ValueError("a report needs at least one row; got none")
    wires = [codec.encode(x) for x in (k, v)]
    errors = torch.cat([_errors(x, wire, codec) for x, wire in zip((k, v), wires, strict=True)])
    return WireReport(
        num_bytes=sum(wire.nbytes for wire in wires),
        plain_bytes=k.nbytes + v.nbytes,
        largest_error=errors.amax().item(),
        mean_error=errors.mean().item(),
    )


def _errors(x: Float[Tensor, "... D"], wire: Tensor, codec: Codec) -> Float[Tensor, " rows"]:
    rows = x.double()
    found = codec.decode(wire, x.shape[-1], x.dtype, out=torch.empty_like(rows))
    lengths = rows.norm(dim=-1)
    return ((found - rows).norm(dim=-1) / lengths).where(lengths != 0, found.norm(dim=-1)).flatten()
