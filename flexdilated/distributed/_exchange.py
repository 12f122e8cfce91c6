"""The exchange: every rank receives the keys that its queries need, and no others, in one all-to-all.

A whole call is one op for tiles; of engines that torch.compile traces, only the transfer of keys is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from .._torch_private import graph_constant
from ..engines import (
    Call,
    WholeRows,
    add_sinks,
    copies,
    merge_,
    no_gradients,
    own_op,
    refuse,
    run,
    set_gradient,
    sum_dtype,
)
from ..masks.core import own_modes
from ..masks.orders import Placement
from ._exchange_plan import ExchangePlan
from .group import (
    PlainCall,
    Ranks,
    Role,
    Sharding,
    as_promised,
    communicating,
    empty_rows,
    group_of,
    record,
    whole_rule,
)
from .wire import Codec, codec_for, gradient_codec, lease_from, pool_named

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim, S rows sent,
# R rows received (in one key/value head, where G is a dim)

Pair = tuple[Tensor, Tensor]


class ExchangeCall(PlainCall):
    """Forward and backward of an exchange call on this rank."""

    __slots__ = ()

    def plan(self, num_heads: int, num_kv_heads: int, bindings: Sequence[Tensor]) -> ExchangePlan:
        """Plan of the rows to send and to receive, for these values of the run-time tensors."""
        heads = {"head_offset": self.head_offset, "num_heads_global": self.num_heads_global}
        split, rank = Sharding.of(self.sharding), group_of(self.group).rank()
        rule = whole_rule(self.pattern, bindings, split.num_tokens)
        return ExchangePlan.of(rule, split, rank, num_heads=num_heads, num_kv_heads=num_kv_heads, **heads)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bindings: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, lse, received k, received v); overlaps the transfer of keys with attention to this rank's keys."""
        plan = self.plan(q.shape[1], k.shape[1], bindings)
        dtype, others = _computed_in(q, plan), _room(k, v, plan.others.num_keys)

        def attend(placement: Placement, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            part = self.placed(placement).forward(q.to(dtype), k.to(dtype), v.to(dtype), None, bindings, wide=True)
            assert part[1] is not None
            return part[0], part[1]

        with self._sending_keys(k, v, plan) as receive:
            out, lse = attend(plan.own, k, v) if q.shape[2] else empty_rows(q)
            receive(others)
        if plan.others.num_keys:
            merge_(out, lse, *attend(plan.others, *others))
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        return as_promised(out, q), lse.contiguous(), *others

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, others: Pair, bindings: list[Tensor], whole: WholeRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); overlaps the transfer of received keys' gradients with the gradients of this rank's keys."""
        plan = self.plan(q.shape[1], k.shape[1], bindings)
        dtype, wide = _computed_in(q, plan), sum_dtype(q)
        rows = WholeRows(whole.out.to(dtype), whole.lse, whole.grad_out.to(dtype), whole.grad_lse)

        def gradients(placement: Placement, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if q.shape[2] and k.shape[2]:
                return self.placed(placement).backward(q.to(dtype), k.to(dtype), v.to(dtype), bindings, rows)
            return tuple(torch.zeros_like(x, dtype=wide) for x in (q, k, v))  # pyright: ignore[reportReturnType]

        dq, *of_others = gradients(plan.others, *others)
        with self._sending_gradients(of_others, k, v, plan) as add_received:
            del of_others
            of_queries, dk, dv = gradients(plan.own, k, v)
            add_received(dk, dv)
        return as_promised(dq.add_(of_queries), q), as_promised(dk, k), as_promised(dv, v)

    def bring(self, k: Tensor, v: Tensor, plan: ExchangePlan) -> Pair:
        """(k, v) of this rank followed by the keys and values that its queries need from other ranks."""
        found, own = _room(k, v, plan.both.num_keys), k.shape[2]
        with self._sending_keys(k, v, plan) as receive:
            for whole, x in zip(found, (k, v), strict=True):
                whole[:, :, :own] = x
            receive([x[:, :, own:] for x in found])
        return found

    def give_back(self, own_k: Tensor, own_v: Tensor, dk: Tensor, dv: Tensor, plan: ExchangePlan) -> Pair:
        """(dk, dv) of this rank's keys, summed over ranks.

        dk, dv: gradients of `bring`'s result, own keys first. The gradients of received keys go back to their owners.
        """
        own = own_k.shape[2]
        with self._sending_gradients([x[:, :, own:] for x in (dk, dv)], own_k, own_v, plan) as add_received:
            totals = dk[:, :, :own].to(sum_dtype(dk), copy=True), dv[:, :, :own].to(sum_dtype(dv), copy=True)
            add_received(*totals)
        return totals

    @contextmanager
    def _sending_keys(
        self, k: Tensor, v: Tensor, plan: ExchangePlan
    ) -> Iterator[Callable[[Sequence[Float[Tensor, "B G R D"]]], None]]:
        """Send keys and values on entry; yields a function that waits for the received rows and writes them."""
        ranks, (sent, received) = Ranks.named(self.group, k.device.type), plan.rows(k.device)
        codec = codec_for(self.codec, self.error_bound, k, v, ranks)

        def receive(others: Sequence[Tensor]) -> None:
            for room, x in zip(others, arrived(), strict=True):
                room[:, received.heads, received.index] = x

        numbers, how = (plan.num_sent, plan.num_received), (ranks, codec, self.pool)
        with _swapping([x[:, sent.heads, sent.index] for x in (k, v)], *numbers, *how, role="keys") as arrived:
            yield receive

    @contextmanager
    def _sending_gradients(
        self, grads: Sequence[Float[Tensor, "B G R D"]], k: Tensor, v: Tensor, plan: ExchangePlan
    ) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """Send gradients of received keys on entry; yields a function that waits for the gradients of this rank's keys.

        The function adds them in place, in the order of the ranks, to sums in float32 or wider.
        """
        ranks, (sent, received) = Ranks.named(self.group, k.device.type), plan.rows(k.device)
        codec = gradient_codec(codec_for(self.codec, self.error_bound, k, v, ranks), grads[0].dtype)

        def add_received(dk: Tensor, dv: Tensor) -> None:
            heads, tokens = (index.split(plan.num_sent) for index in (sent.heads, sent.index))
            for total, x in zip((dk, dv), arrived(), strict=True):
                for head, token, part in zip(heads, tokens, x.split(plan.num_sent, dim=1), strict=True):
                    total[:, head, token] += part  # a rank sends at most one row per token and head: no repeated index

        numbers, how = (plan.num_received, plan.num_sent), (ranks, codec, self.pool)
        rows = [x[:, received.heads, received.index] for x in grads]
        with _swapping(rows, *numbers, *how, role="gradients") as arrived:
            del grads, rows  # free their memory while this rank computes with its own keys
            yield add_received

    def traced(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bindings: list[Tensor], *, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out, lse if requested) for engines that torch.compile traces: only the transfer of keys is an op."""
        k_all, v_all = torch.ops.flexdilated.exchange_keys(q, k, v, bindings, self.constants)
        if not q.shape[2]:
            nothing = k_all.sum() + v_all.sum()  # makes every rank's backward take part in the exchange
            return q + nothing, q.sum(-1).to(sum_dtype(q)) + nothing
        where = {"head_offset": self.head_offset, "num_heads_global": self.num_heads_global}
        placement = _placement(tuple(self), q.shape[1], k.shape[1], bindings)
        call = Call.at(q, k_all, self.pattern, **where, block_size=self.block_size, placement=placement)
        return run(self.engine, q, k_all, v_all, sinks, bindings, call, self.scale, return_lse=return_lse)


def _computed_in(q: Tensor, plan: ExchangePlan) -> torch.dtype:
    """float32 or wider if parts are merged, because CPU kernels would round each part to the dtype of q."""
    return sum_dtype(q) if plan.others.num_keys else q.dtype


def _room(k: Tensor, v: Tensor, num_keys: int) -> Pair:
    return k.new_empty(*k.shape[:2], num_keys, k.shape[3]), v.new_empty(*v.shape[:2], num_keys, v.shape[3])


# A constant of a graph. A `graph_constant` takes plain values: torch 2.11 cannot unpack a named tuple that is one.
@graph_constant
def _placement(values: tuple[Any, ...], num_heads: int, num_kv_heads: int, bindings: list[Tensor]) -> str:
    """Placement of this rank's queries, and of its keys followed by those received, as text."""
    return ExchangeCall(*values).plan(num_heads, num_kv_heads, bindings).both.text


@contextmanager
def _swapping(
    rows: Sequence[Float[Tensor, "B S D"]],
    num_sent: Sequence[int],
    num_received: Sequence[int],
    ranks: Ranks,
    codec: Codec,
    pool: str,
    *,
    role: Role,
) -> Iterator[Callable[[], list[Float[Tensor, "B R D"]]]]:
    """Start one all-to-all of rows of keys and values; yields a function that waits for it and returns received rows.

    num_sent and num_received count rows by rank. The function may be called once. Buffers are held until the transfer
    ends, also if the block raises: until the other ranks have sent their rows, or the process group's timeout.
    """
    batch, _, head_dim = rows[0].shape
    dtype, device = rows[0].dtype, rows[0].device
    each = (len(rows), batch, codec.row_bytes(head_dim, dtype))
    leases = [
        lease_from(pool_named(pool, device), (sum(numbers), *each), torch.uint8, device)
        for numbers in (num_sent, num_received)
    ]
    begun: list[dist.Work] = []

    def arrived() -> list[Tensor]:
        with communicating(f"the exchange of {role}", ranks):
            begun.pop().wait()
        sent, received = (lease.tensor for lease in leases)
        record(role, sent=sent.nbytes, received=received.nbytes)
        return [codec.decode(wire, head_dim, dtype).transpose(0, 1) for wire in received.unbind(1)]

    try:
        sent, received = (lease.tensor for lease in leases)
        for place, x in enumerate(rows):
            codec.encode(x.transpose(0, 1), out=sent[:, place])
            del x
        with communicating(f"the exchange of {role}", ranks):
            splits, group = (list(num_received), list(num_sent)), group_of(ranks.name)
            work = dist.all_to_all_single(received, sent, *splits, group=group, async_op=True)
        assert work is not None
        begun.append(work)
        del rows, work, sent, received  # so that only the leases hold memory while the caller computes
        yield arrived
    finally:
        for work in begun:
            with suppress(RuntimeError):  # another error already propagates to the caller
                work.wait()
        for lease in leases:
            lease.release()


@own_op("flexdilated::exchange_attention")
def exchange_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bindings: list[Tensor],
    constants: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, received k, received v) of this rank's queries over the keys of all ranks.

    constants: an `ExchangeCall` as text.
    """
    return ExchangeCall.of(constants).forward(q, k, v, sinks, bindings)


@exchange_op.register_fake
def _(q, k, v, sinks, bindings, constants):
    call = ExchangeCall.of(constants)
    return *call.rows_of(q), *_empty_keys(q, k, bindings, call, own=False)


@own_op("flexdilated::exchange_attention_backward")
def exchange_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    k_others: Tensor,
    v_others: Tensor,
    bindings: list[Tensor],
    constants: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank's tensors; k_others and v_others are the received keys that the forward returned."""
    whole = WholeRows(out, lse, grad_out, grad_lse)
    return ExchangeCall.of(constants).backward(q, k, v, (k_others, v_others), bindings, whole)


@exchange_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, *others):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@own_op("flexdilated::exchange_keys")
def exchange_keys_op(q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], constants: str) -> tuple[Tensor, Tensor]:
    """(k, v) of this rank followed by the received ones that its queries need; of q only the shape is used."""
    call = ExchangeCall.of(constants)
    return call.bring(k, v, call.plan(q.shape[1], k.shape[1], bindings))


@exchange_keys_op.register_fake
def _(q, k, v, bindings, constants):
    return _empty_keys(q, k, bindings, ExchangeCall.of(constants), own=True)


@own_op("flexdilated::exchange_keys_backward")
def exchange_keys_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    bindings: list[Tensor],
    constants: str,
) -> tuple[Tensor, Tensor]:
    """(dk, dv) of this rank's keys, from the gradients of own and received keys."""
    call = ExchangeCall.of(constants)
    found = call.give_back(k, v, dk, dv, call.plan(q.shape[1], k.shape[1], bindings))
    return found[0].to(dk.dtype), found[1].to(dv.dtype)


@exchange_keys_backward_op.register_fake
def _(q, k, v, dk, dv, bindings, constants):
    return torch.empty_like(k, memory_format=torch.contiguous_format), v.new_empty(v.shape)


def _empty_keys(q: Tensor, k: Tensor, bindings: list[Tensor], call: ExchangeCall, *, own: bool) -> Pair:
    """Fake (k, v) received, preceded by this rank's if `own`; run-time tensors make their number data-dependent."""
    if bindings:
        num_keys = torch.library.get_ctx().new_dynamic_size()
    else:
        with own_modes():
            plan = call.plan(int(q.shape[1]), int(k.shape[1]), [])
            num_keys = (plan.both if own else plan.others).num_keys
    return tuple(k.new_empty(k.shape[0], k.shape[1], num_keys, k.shape[3]) for _ in range(2))  # pyright: ignore[reportReturnType]


def _setup_keys(ctx, inputs, output) -> None:
    q, k, v, bindings, ctx.constants = inputs
    ctx.save_for_backward(q, k, v, *copies(bindings))


def _keys_backward(ctx, dk, dv):
    q, k, v, *bindings = ctx.saved_tensors
    grads = exchange_keys_backward_op(q, k, v, dk.contiguous(), dv.contiguous(), bindings, ctx.constants)
    return None, *grads, *no_gradients(bindings, [ctx.constants])


_REFUSAL = "the exchange has no second derivative; engine='reference' has one, on one rank (dense, small inputs)"

set_gradient(exchange_op, exchange_backward_op, refusal=_REFUSAL, over_ranks=True)
exchange_keys_op.register_autograd(_keys_backward, setup_context=_setup_keys)
exchange_keys_backward_op.register_autograd(refuse(_REFUSAL))


def exchange(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G L D"],
    v: Float[Tensor, "B G L D"],
    sinks: Float[Tensor, " H"] | None,
    bindings: list[Tensor],
    call: PlainCall,
    *,
    return_lse: bool,
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"] | None]:
    """(out, lse if requested) of this rank's queries over all ranks' keys; every rank must call it, and its backward.

    bindings: the pattern's run-time tensors, for the whole sequence, ordered by name. One all-to-all brings each
    (key/value head, token) that some query of this rank may attend to; in the backward another returns the gradients,
    which the owners add up in float32 or wider. With tiles the call is one op, which overlaps each transfer with work
    on this rank's keys; other engines are traced, and only the transfers are ops.

    Raises ValueError if the engine cannot serve the call, torch.distributed.DistError if another rank fails.
    """
    if call.engine != "tiles":
        return ExchangeCall(*call).traced(q, k, v, sinks, bindings, return_lse=return_lse)
    out, lse, _, _ = exchange_op(q, k, v, sinks, bindings, call.constants)
    return out, lse
