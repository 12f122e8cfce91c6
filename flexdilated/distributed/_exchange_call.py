"""ExchangeCall: what a call of the exchange is besides its tensors, and its two passes on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._placed_call import PlacedCall, WholeRows
from ..masks._json import read_text
from ..masks._pattern import Expression
from ..masks._run_time import Extent, names, resolve
from ._codec import gradient_codec
from ._codec_choice import CodecChoice, codec_for
from ._exchange_rows import bring_keys, return_gradients
from ._pools import pool_named
from ._ranks import Ranks, group_of
from ._sharding import Sharding
from ._wires import Wires

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, M own and received tokens, D head dim


@dataclass(frozen=True)
class ExchangeCall:
    """What a call of the exchange is besides its tensors, as plain values, the same on all ranks.

    `pattern` is JSON, `sharding` its numbers; `pool` is the name of one, or "".
    """

    pattern: str
    scale: float
    head_offset: int
    num_heads_global: int
    engine: str
    sides: tuple[int, ...]
    sharding: tuple[int, ...]
    group: str
    codec: CodecChoice
    error_bound: float
    pool: str

    def ranks(self, q: Tensor) -> Ranks:
        group = group_of(self.group)
        return Ranks(self.group, group.size(), group.rank(), q.device.type)

    def rule(self, bindings: Sequence[Tensor]) -> Expression:
        """The pattern with the values of its run-time tensors in place."""
        pattern, tokens = read_text(self.pattern), self.sharding[0]
        return resolve(pattern, dict(zip(names(pattern), bindings, strict=True)), Extent(tokens, tokens))

    def wires(self, num_heads: int, num_kv_heads: int, bindings: Sequence[Tensor]) -> Wires:
        """Which rows go where, for these values of the run-time tensors."""
        heads = {"head_offset": self.head_offset, "num_heads_global": self.num_heads_global}
        split, rank = Sharding.of(self.sharding), group_of(self.group).rank()
        return Wires.of(self.rule(bindings), split, rank, num_heads=num_heads, num_kv_heads=num_kv_heads, **heads)

    def placed(self, wires: Wires) -> PlacedCall:
        """Attention of this rank's queries to its own and the received keys."""
        where = (self.head_offset, self.num_heads_global)
        return PlacedCall(self.pattern, wires.placement, self.scale, *where, self.engine, self.sides)

    def bring(self, q: Tensor, k: Tensor, v: Tensor, bindings: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(k, v) with those that this rank's queries need of other ranks."""
        wires, ranks = self.wires(q.shape[1], k.shape[1], bindings), self.ranks(q)
        codec = codec_for(self.codec, self.error_bound, k, v, ranks)
        return bring_keys(k, v, wires, ranks, codec, pool_named(self.pool, k.device))

    def give_back(
        self, q: Tensor, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, bindings: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's own k and v, in float32 or wider, from those of own and received keys."""
        wires, ranks = self.wires(q.shape[1], dk.shape[1], bindings), self.ranks(q)
        own = slice(q.shape[2])
        codec = gradient_codec(codec_for(self.codec, self.error_bound, k[:, :, own], v[:, :, own], ranks), dk.dtype)
        return return_gradients(dk, dv, q.shape[2], wires, ranks, codec, pool_named(self.pool, dk.device))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bindings: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, lse, and the own and received keys and values)."""
        found = self.bring(q, k, v, bindings)
        if not q.shape[2]:
            return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=_wide(q)), *found
        placed = self.placed(self.wires(q.shape[1], k.shape[1], bindings))
        out, lse = placed.forward(q, *found, sinks, bindings)
        assert lse is not None
        return out, lse, *found

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], whole: WholeRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank's own tensors; k and v are own and received ones."""
        if q.shape[2]:
            placed = self.placed(self.wires(q.shape[1], k.shape[1], bindings))
            dq, dk, dv = placed.backward(q, k, v, bindings, whole)
        else:
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dk, dv = self.give_back(q, k, v, dk, dv, bindings)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def traced(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bindings: list[Tensor], *, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out, lse if asked for) where torch.compile follows the engine: only the transfer of keys is an op."""
        options = (self.pattern, self.scale, self.head_offset, self.num_heads_global, self.engine, list(self.sides))
        sending = (list(self.sharding), self.group, self.codec, self.error_bound, self.pool)
        k_all, v_all = torch.ops.flexdilated.exchange_keys(q, k, v, bindings, *options, *sending)
        if not q.shape[2]:
            nothing = k_all.sum() + v_all.sum()  # the backward of every rank has to come to the exchange
            return q + nothing, q.sum(-1).to(_wide(q)) + nothing
        placed = self.placed(_wires(self, q.shape[1], k.shape[1], bindings))
        return placed.forward(q, k_all, v_all, sinks, bindings, return_lse=return_lse)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _wires(call: ExchangeCall, num_heads: int, num_kv_heads: int, bindings: list[Tensor]) -> Wires:
    return call.wires(num_heads, num_kv_heads, bindings)


# Where keys lie is a constant of a compiled graph.
_wires._dynamo_marked_constant = True  # type: ignore[attr-defined]
