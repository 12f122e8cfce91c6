"""ExchangeCall: a call of the exchange without its tensors, and its two passes on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..engines._call_key import CallKey
from ..engines._placed_call import PlacedCall, WholeRows
from ..engines.flex._flex_op import flex
from ._codec import gradient_codec
from ._codec_choice import codec_for
from ._exchange_rows import bring_keys, return_gradients
from ._plain_call import PlainCall
from ._pools import pool_named
from ._ranks import Ranks, group_of
from ._sharding import Sharding
from ._whole_rule import whole_rule
from ._wires import Wires

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, M own and received tokens, D head dim


class ExchangeCall(PlainCall):
    """The passes of a call of the exchange on this rank."""

    __slots__ = ()

    def wires(self, num_heads: int, num_kv_heads: int, bindings: Sequence[Tensor]) -> Wires:
        """Which rows go where, for these values of the run-time tensors."""
        heads = {"head_offset": self.head_offset, "num_heads_global": self.num_heads_global}
        split, rank = Sharding.of(self.sharding), group_of(self.group).rank()
        rule = whole_rule(self.pattern, bindings, split.num_tokens)
        return Wires.of(rule, split, rank, num_heads=num_heads, num_kv_heads=num_kv_heads, **heads)

    def placed(self, wires: Wires) -> PlacedCall:
        """Attention of this rank's queries to its own and the received keys."""
        where = (self.head_offset, self.num_heads_global)
        return PlacedCall(self.pattern, wires.placement, self.scale, *where, self.engine, self.block_size)

    def bring(self, k: Tensor, v: Tensor, wires: Wires) -> tuple[Tensor, Tensor]:
        """(k, v) with those that this rank's queries need of other ranks."""
        ranks = Ranks.named(self.group, k.device.type)
        codec = codec_for(self.codec, self.error_bound, k, v, ranks)
        return bring_keys(k, v, wires, ranks, codec, pool_named(self.pool, k.device))

    def give_back(self, own_k: Tensor, own_v: Tensor, dk: Tensor, dv: Tensor, wires: Wires) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's own k and v, in float32 or wider, from those of own and received keys."""
        ranks = Ranks.named(self.group, dk.device.type)
        codec = gradient_codec(codec_for(self.codec, self.error_bound, own_k, own_v, ranks), dk.dtype)
        return return_gradients(dk, dv, own_k.shape[2], wires, ranks, codec, pool_named(self.pool, dk.device))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bindings: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, lse, and the own and received keys and values)."""
        wires = self.wires(q.shape[1], k.shape[1], bindings)
        found = self.bring(k, v, wires)
        if not q.shape[2]:
            return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=_wide(q)), *found
        out, lse = self.placed(wires).forward(q, *found, sinks, bindings)
        assert lse is not None
        return out, lse, *found

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], whole: WholeRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank's own tensors; k and v are own and received ones."""
        wires = self.wires(q.shape[1], k.shape[1], bindings)
        if q.shape[2]:
            dq, dk, dv = self.placed(wires).backward(q, k, v, bindings, whole)
        else:
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        own_k, own_v = (x[:, :, : q.shape[2]] for x in (k, v))
        dk, dv = self.give_back(own_k, own_v, dk, dv, wires)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def traced(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bindings: list[Tensor], *, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out, lse if asked for) where torch.compile follows the engine: only the transfer of keys is an op."""
        k_all, v_all = torch.ops.flexdilated.exchange_keys(q, k, v, bindings, *self)
        if not q.shape[2]:
            nothing = k_all.sum() + v_all.sum()  # the backward of every rank has to come to the exchange
            return q + nothing, q.sum(-1).to(_wide(q)) + nothing
        key = CallKey(*_key(tuple(self), q.shape[1], k.shape[1], q.shape[2], bindings))
        options = {"scale": self.scale, "score_mod": None, "sinks": sinks, "return_lse": return_lse}
        return flex(q, k_all, v_all, bindings, key, **options)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _key(
    values: tuple[Any, ...], num_heads: int, num_kv_heads: int, num_queries: int, bindings: list[Tensor]
) -> tuple[Any, ...]:
    call = ExchangeCall(*values)
    wires = call.wires(num_heads, num_kv_heads, bindings)
    return tuple(call.placed(wires).key(num_heads, num_kv_heads, num_queries, wires.num_keys))


# Where keys lie is a constant of a compiled graph. Such a function takes a call only as a plain tuple, and what it
# returns must be one too: torch 2.11 cannot unpack a named tuple that it got as a constant.
_key._dynamo_marked_constant = True  # type: ignore[attr-defined]
