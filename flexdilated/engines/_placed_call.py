"""PlacedCall: attention over part of a sequence, with the positions of its queries and keys in a Placement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks.core import device_kind
from ..masks.orders import Placement
from ._call import Call
from ._dropout import without_seed
from ._features import Features
from ._merge import WholeRows, sum_dtype
from ._ops import autograd_on
from ._run import run
from .aten._aten_op import attention, gradients
from .flex import portable_gradients

# B batch, H query heads, G key/value heads, L queries, M keys, D head dim


@dataclass(frozen=True)
class PlacedCall:
    """Attention over part of a sequence, such as one rank's tokens: all its arguments except tensors.

    pattern: as JSON.
    placement: positions of the queries and keys.
    num_heads_global: number of query heads on all devices; q has some of them, from head_offset on.
    sides: requested (queries, keys) of a block; empty for the default.
    dropout_p: probability of dropping an attention weight.
    """

    pattern: str
    placement: Placement
    scale: float
    head_offset: int
    num_heads_global: int
    engine: str
    sides: tuple[int, ...] = ()
    dropout_p: float = 0.0

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bindings: list[Tensor],
        *,
        wide: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return (out, natural lse) of queries q (B, H, L, D) over keys k and values v (B, G, M, D).

        bindings: the pattern's run-time tensors, sorted by name; if dropout_p > 0, followed by the seed of dropout.
        wide: True to get out in the dtype of the lse, without a gradient, from engine "aten"; other engines ignore it.
        """
        if self.engine == "aten" and wide:
            return attention(self.call(q, k), q, k, v, None, bindings, self.scale, wide=True)
        bindings, dropout = without_seed(bindings, self.dropout_p)
        features = Features(self.scale).with_dropout(dropout)
        out, lse = run(self.engine, q, k, v, bindings, self.call(q, k), features)
        assert lse is not None
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], whole: WholeRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of attention over these keys; the rows in `whole` may have more keys.

        bindings: as in `forward`.
        whole: results over all keys, with their gradients.

        The gradients of all parts sum to the gradients of the whole. Engines "aten" and "portable" return them in
        float32 or wider, "flex" in the dtypes of q, k and v.
        """
        if self.engine == "aten":
            return gradients(self.call(q, k), q, k, v, bindings, whole, self.scale, wide=True)
        if self.engine == "portable":
            bindings, dropout = without_seed(bindings, self.dropout_p)
            q, k, v = (x.to(sum_dtype(x)) for x in (q, k, v))
            features = Features(self.scale).with_dropout(dropout)
            return portable_gradients(self.call(q, k), q, k, v, bindings, whole, features)
        with autograd_on():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            part, part_lse = self.forward(q, k, v, bindings)
            sent = whole.gradients_of(part.detach(), part_lse.detach())
            dq, dk, dv = torch.autograd.grad((part, part_lse), (q, k, v), sent)
        return dq, dk, dv

    def call(self, q: Tensor, k: Tensor) -> Call:
        """Return the Call (pattern and sizes) of attention with these queries and keys."""
        return Call.at(
            q,
            k,
            self.pattern,
            head_offset=self.head_offset,
            num_heads_global=self.num_heads_global,
            block_size=self.sides,
            placement=self.placement.text,
        )


def placed_engine(engine: str, device: torch.device) -> str:
    """Return `engine` if it can compute attention over part of a sequence on this device; else raise ValueError."""
    if engine not in ("aten", "flex", "portable"):
        raise ValueError(
            f"{engine=} runs whole sequences only: for parts of one write engine='aten' (on CPU), 'flex' or 'portable'"
        )
    if engine == "aten" and not device_kind(device).on_host:
        raise ValueError(f"{engine=} runs parts of a sequence on CPU only; got {device}: take engine='flex'")
    return engine
