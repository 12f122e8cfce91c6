"""A call of the exchange on this rank: the transfers of rows, and attention to own and received keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from ...engines import CallKey, WholeRows, flex
from ..group import PlainCall, Ranks, Role, Sharding, communicating, empty_rows, group_of, record, whole_rule
from ..wire import Codec, codec_for, gradient_codec, lease_from, pool_named
from ._plan import ExchangePlan

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, M own and received tokens, D head dim
# S rows sent, R rows received


class ExchangeCall(PlainCall):
    """The passes of a call of the exchange on this rank."""

    __slots__ = ()

    def plan(self, num_heads: int, num_kv_heads: int, bindings: Sequence[Tensor]) -> ExchangePlan:
        """Which rows go where, for these values of the run-time tensors."""
        heads = {"head_offset": self.head_offset, "num_heads_global": self.num_heads_global}
        split, rank = Sharding.of(self.sharding), group_of(self.group).rank()
        rule = whole_rule(self.pattern, bindings, split.num_tokens)
        return ExchangePlan.of(rule, split, rank, num_heads=num_heads, num_kv_heads=num_kv_heads, **heads)

    def bring(
        self, k: Float[Tensor, "B G L D"], v: Float[Tensor, "B G L D"], plan: ExchangePlan
    ) -> tuple[Float[Tensor, "B G M D"], Float[Tensor, "B G M D"]]:
        """This rank's keys and values, and after them those of other ranks that its queries need."""
        ranks, own, (sent, received) = Ranks.named(self.group, k.device.type), k.shape[2], plan.rows(k.device)
        codec = codec_for(self.codec, self.error_bound, k, v, ranks)
        found = tuple(x.new_empty(*x.shape[:2], plan.num_keys, x.shape[3]) for x in (k, v))
        for whole, x in zip(found, (k, v), strict=True):
            whole[:, :, :own] = x
        rows = [x[:, sent.heads, sent.index] for x in (k, v)]
        with _swapped(rows, plan.num_sent, plan.num_received, ranks, codec, self.pool, role="keys") as arrived:
            for whole, x in zip(found, arrived, strict=True):
                whole[:, received.heads, received.index] = x
        return found[0], found[1]

    def give_back(
        self,
        own_k: Float[Tensor, "B G L D"],
        own_v: Float[Tensor, "B G L D"],
        dk: Float[Tensor, "B G M D"],
        dv: Float[Tensor, "B G M D"],
        plan: ExchangePlan,
    ) -> tuple[Float[Tensor, "B G L D"], Float[Tensor, "B G L D"]]:
        """The gradients of this rank's own k and v, from those of own and received keys and what other ranks send.

        They are added up in float32 or wider, and in the order of the ranks.
        """
        ranks, own, (sent, received) = Ranks.named(self.group, dk.device.type), own_k.shape[2], plan.rows(dk.device)
        codec = gradient_codec(codec_for(self.codec, self.error_bound, own_k, own_v, ranks), dk.dtype)
        totals = tuple(x[:, :, :own].to(_wide(x), copy=True) for x in (dk, dv))
        rows = [x[:, received.heads, received.index] for x in (dk, dv)]
        heads, tokens = (index.split(plan.num_sent) for index in (sent.heads, sent.index))
        with _swapped(rows, plan.num_received, plan.num_sent, ranks, codec, self.pool, role="gradients") as arrived:
            for total, x in zip(totals, arrived, strict=True):
                for head, token, part in zip(heads, tokens, x.split(plan.num_sent, dim=1), strict=True):
                    total[:, head, token] += part  # a rank sends one row a token and head
        return totals[0], totals[1]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bindings: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, lse, and the own and received keys and values)."""
        plan = self.plan(q.shape[1], k.shape[1], bindings)
        found = self.bring(k, v, plan)
        if not q.shape[2]:
            return *empty_rows(q), *found
        out, lse = self.placed(plan.placement).forward(q, *found, sinks, bindings)
        assert lse is not None
        return out, lse, *found

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], whole: WholeRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank's own tensors; k and v are own and received ones."""
        plan = self.plan(q.shape[1], k.shape[1], bindings)
        if q.shape[2]:
            dq, dk, dv = self.placed(plan.placement).backward(q, k, v, bindings, whole)
        else:
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        own_k, own_v = (x[:, :, : q.shape[2]] for x in (k, v))
        dk, dv = self.give_back(own_k, own_v, dk, dv, plan)
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


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _key(
    values: tuple[Any, ...], num_heads: int, num_kv_heads: int, num_queries: int, bindings: list[Tensor]
) -> tuple[Any, ...]:
    call = ExchangeCall(*values)
    plan = call.plan(num_heads, num_kv_heads, bindings)
    return tuple(call.placed(plan.placement).key(num_heads, num_kv_heads, num_queries, plan.num_keys))


# Where keys lie is a constant of a compiled graph. Such a function takes a call only as a plain tuple, and what it
# returns must be one too: torch 2.11 cannot unpack a named tuple that it got as a constant.
_key._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def _swapped(
    rows: Sequence[Float[Tensor, "B S D"]],
    num_sent: Sequence[int],
    num_received: Sequence[int],
    ranks: Ranks,
    codec: Codec,
    pool: str,
    *,
    role: Role,
) -> Iterator[list[Float[Tensor, "B R D"]]]:
    """The rows that come for those of keys and of values that go, in one all-to-all; the numbers are by rank."""
    batch, _, head_dim = rows[0].shape
    dtype, device = rows[0].dtype, rows[0].device
    each = (len(rows), batch, codec.row_bytes(head_dim, dtype))
    leases = [
        lease_from(pool_named(pool, device), (sum(numbers), *each), torch.uint8, device, role=role)
        for numbers in (num_sent, num_received)
    ]
    try:
        sent, received = (lease.tensor for lease in leases)
        for place, x in enumerate(rows):
            codec.encode(x.transpose(0, 1), out=sent[:, place])
        with communicating(f"the exchange of {role}", ranks):
            dist.all_to_all_single(received, sent, list(num_received), list(num_sent), group=group_of(ranks.name))
        record(role, sent=sent.nbytes, received=received.nbytes)
        yield [codec.decode(received[:, place], head_dim, dtype).transpose(0, 1) for place in range(len(rows))]
    finally:
        for lease in leases:
            lease.release()
