"""The exchange: each rank receives exactly the keys that its queries need, in one all-to-all.

With engines "aten" and "portable" the whole attention is one custom op; with "flex", which torch.compile traces, and
with a score_mod, which ops cannot take, only the transfers of keys and values are custom ops.
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
    Features,
    WholeRows,
    copies,
    no_gradients,
    own_op,
    refusing_backward,
    run,
    set_gradient,
    sum_dtype,
    without_seed,
)
from ..masks.core import suspended_torch_modes
from ._exchange_plan import ExchangePlan
from .group import (
    PartSums,
    PlainCall,
    Ranks,
    Role,
    Sharding,
    communicating,
    group_of,
    record,
    resolved_pattern,
    with_dtype_and_strides_of,
)
from .wire import codec_for, gradient_codec, lease_from, pool_named

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim, S vectors sent,
# R vectors received (in one key/value head, where G is a dim)

KeysAndValues = tuple[Tensor, Tensor]


def plan_of(call: PlainCall, num_heads: int, num_kv_heads: int, bindings: Sequence[Tensor]) -> ExchangePlan:
    """Return this rank's plan: the vectors (each of one token and KV head) that it sends and receives.

    num_heads, num_kv_heads: on this device.
    bindings: the pattern's run-time tensors, sorted by name.
    """
    split, rank = Sharding.of(call.sharding), group_of(call.group).rank()
    return ExchangePlan.of(
        resolved_pattern(call.pattern, bindings, split.num_tokens),
        split,
        rank,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_offset=call.head_offset,
        num_heads_global=call.num_heads_global,
    )


class Exchange:
    """Transfers of this rank in one attention call: keys and values in the forward, their gradients in the backward.

    With codec "auto" all ranks must construct it together, as the constructor may make a collective.

    bindings: as in `exchange_op`.
    """

    def __init__(self, call: PlainCall, q: Tensor, k: Tensor, v: Tensor, bindings: Sequence[Tensor]) -> None:
        self.call, self.k, self.v = call, k, v
        self.plan = plan_of(call, q.shape[1], k.shape[1], without_seed(bindings, call.dropout_p)[0])
        self.ranks = Ranks.named(call.group, k.device.type)
        self.codec = codec_for(call.codec, call.error_bound, k, v, self.ranks)
        self.sent, self.received = self.plan.vectors_on(k.device)
        # If parts are merged, float32 or wider, because CPU kernels would round each part to the dtype of q.
        self.dtype = sum_dtype(q) if self.plan.others.num_keys else q.dtype

    def new_buffers(self, num_keys: int) -> KeysAndValues:
        k, v = self.k, self.v
        return k.new_empty(*k.shape[:2], num_keys, k.shape[3]), v.new_empty(*v.shape[:2], num_keys, v.shape[3])

    @contextmanager
    def sending_keys(self) -> Iterator[Callable[[Sequence[Float[Tensor, "B G R D"]]], None]]:
        """Context manager that starts to send this rank's keys and values, and to receive those that its queries need.

        Yields a function that waits for the transfer and writes the received vectors into its argument: (k, v), each
        (B, G, R, D), with R tokens for the KV head that receives most. Padding of other heads is not written.
        """

        def receive(others: Sequence[Tensor]) -> None:
            for room, x in zip(others, arrived(), strict=True):
                room[:, self.received.heads, self.received.tokens] = x

        vectors = [x[:, self.sent.heads, self.sent.tokens] for x in (self.k, self.v)]
        with self._all_to_all(vectors, "keys") as arrived:
            del vectors
            yield receive

    @contextmanager
    def sending_gradients(
        self, grads: Sequence[Float[Tensor, "B G R D"]]
    ) -> Iterator[Callable[[Sequence[Tensor]], None]]:
        """Context manager that starts to send `grads`, (dk, dv) of the received keys and values, to their owners.

        Yields a function that waits for the gradients of this rank's keys and values, and adds them in place, in the
        order of the ranks, to its argument: (dk, dv), each (B, G, L, D), in float32 or wider.
        """

        def add_received(totals: Sequence[Tensor]) -> None:
            numbers = self.plan.num_sent
            heads, tokens = self.sent.heads.split(numbers), self.sent.tokens.split(numbers)
            for total, x in zip(totals, arrived(), strict=True):
                for head, token, part in zip(heads, tokens, x.split(numbers, dim=1), strict=True):
                    # A rank sends at most one vector per token and head, so no index repeats.
                    total[:, head, token] += part

        vectors = [x[:, self.received.heads, self.received.tokens] for x in grads]
        with self._all_to_all(vectors, "gradients") as arrived:
            del grads, vectors  # free their memory while this rank computes with its own keys
            yield add_received

    @contextmanager
    def _all_to_all(
        self, vectors: Sequence[Float[Tensor, "B S D"]], role: Role
    ) -> Iterator[Callable[[], list[Float[Tensor, "B R D"]]]]:
        """Context manager that starts one all-to-all of `vectors`; yields a function that returns the received vectors.

        vectors: one tensor for k and one for v.
        role: "keys", or "gradients" for the way back to the owners.

        The function waits for the transfer; call it once. Buffers are kept until the transfer ends, also if the `with`
        block raises: until the other ranks have sent their vectors, or until the process group's timeout.
        """
        batch, _, head_dim = vectors[0].shape
        dtype, device, ranks, codec = vectors[0].dtype, vectors[0].device, self.ranks, self.codec
        numbers = self.plan.num_sent, self.plan.num_received
        if role == "gradients":
            numbers, codec = numbers[::-1], gradient_codec(codec, dtype)
        pool, each = pool_named(self.call.pool, device), (len(vectors), batch, codec.vector_bytes(head_dim, dtype))
        leases = [lease_from(pool, (sum(number), *each), torch.uint8, device) for number in numbers]
        begun: list[dist.Work] = []

        def arrived() -> list[Tensor]:
            with communicating(f"the exchange of {role}", ranks):
                begun.pop().wait()
            sent, received = (lease.tensor for lease in leases)
            record(role, sent=sent.nbytes, received=received.nbytes)
            return [codec.decode(wire, head_dim, dtype).transpose(0, 1) for wire in received.unbind(1)]

        try:
            sent, received = (lease.tensor for lease in leases)
            for place, x in enumerate(vectors):
                codec.encode(x.transpose(0, 1), out=sent[:, place])
                del x
            with communicating(f"the exchange of {role}", ranks):
                splits, group = (list(numbers[1]), list(numbers[0])), group_of(ranks.name)
                work = dist.all_to_all_single(received, sent, *splits, group=group, async_op=True)
            assert work is not None
            begun.append(work)
            del vectors, work, sent, received  # so that only the leases hold memory while the caller computes
            yield arrived
        finally:
            for work in begun:
                with suppress(RuntimeError):  # another error already propagates to the caller
                    work.wait()
            for lease in leases:
                lease.release()


@own_op("flexdilated::exchange_attention")
def exchange_op(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bindings: list[Tensor], constants: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, lse, received k, received v) of attention of this rank's queries to the keys of all ranks.

    Their shapes are (B, H, L, D), (B, H, L) and twice (B, G, R, D). R is the number of tokens received for the KV head
    that receives most; the other heads are padded, uninitialised. The transfer of keys overlaps with attention to this
    rank's keys.

    bindings: the pattern's run-time tensors, sorted by name; if there is dropout, followed by its seed.
    constants: the other arguments of the call (pattern, scale, sharding, process group and so on) as the text that
        `PlainCall.constants` returns.
    """
    call = PlainCall.of(constants)
    own = Exchange(call, q, k, v, bindings)
    parts, others = PartSums(call, q, bindings, own.dtype), own.new_buffers(own.plan.others.num_keys)
    with own.sending_keys() as receive:
        if q.shape[2]:
            parts.attend(own.plan.own, k, v)
        receive(others)
    if own.plan.others.num_keys:
        parts.attend(own.plan.others, *others)
    return *parts.rows(sinks), *others


@exchange_op.register_fake
def _(q, k, v, sinks, bindings, constants):
    call = PlainCall.of(constants)
    return *call.fake_rows(q), *_empty_keys(q, k, bindings, call, own=False)


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
    """Return (dq, dk, dv) of this rank's q, k and v, from the results of `exchange_op` and their gradients.

    The gradients of received keys are sent to their owners while the gradients of this rank's keys are computed.

    k_others, v_others: the received keys and values, which the forward returned.
    grad_lse: None if lse has no gradient.
    bindings, constants: as in `exchange_op`.
    """
    call = PlainCall.of(constants)
    own = Exchange(call, q, k, v, bindings)
    parts = PartSums(call, q, bindings, own.dtype, WholeRows(out, lse, grad_out, grad_lse))
    with own.sending_gradients(parts.gradients(own.plan.others, k_others, v_others)) as add_received:
        grads = parts.gradients(own.plan.own, k, v)
        add_received(grads)
    return parts.query_gradient(), with_dtype_and_strides_of(grads[0], k), with_dtype_and_strides_of(grads[1], v)


@exchange_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, *others):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@own_op("flexdilated::exchange_keys")
def exchange_keys_op(q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], constants: str) -> tuple[Tensor, Tensor]:
    """Return (k, v), each with this rank's tokens, then tokens received from other ranks: (B, G, L + R, D).

    A rank receives the keys and values that its queries need: R tokens for the KV head that receives most; the other
    heads are padded at the end, uninitialised. Only the shape of q is used.

    bindings, constants: as in `exchange_op`; the seed of dropout is not read.
    """
    own = Exchange(PlainCall.of(constants), q, k, v, bindings)
    found = own.new_buffers(own.plan.both.num_keys)
    with own.sending_keys() as receive:
        for whole, x in zip(found, (k, v), strict=True):
            whole[:, :, : x.shape[2]] = x
        receive([x[:, :, k.shape[2] :] for x in found])
    return found


@exchange_keys_op.register_fake
def _(q, k, v, bindings, constants):
    return _empty_keys(q, k, bindings, PlainCall.of(constants), own=True)


@own_op("flexdilated::exchange_keys_backward")
def exchange_keys_backward_op(
    q: Tensor, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, bindings: list[Tensor], constants: str
) -> tuple[Tensor, Tensor]:
    """Return (dk, dv) of this rank's keys and values, summed over all ranks.

    The arguments dk and dv are the gradients of the results of `exchange_keys_op`, so they include received keys.
    Other arguments: as in `exchange_keys_op`.
    """
    own, first = Exchange(PlainCall.of(constants), q, k, v, bindings), k.shape[2]
    with own.sending_gradients([x[:, :, first:] for x in (dk, dv)]) as add_received:
        totals = [x[:, :, :first].to(sum_dtype(x), copy=True) for x in (dk, dv)]
        add_received(totals)
    return totals[0].to(dk.dtype), totals[1].to(dv.dtype)


@exchange_keys_backward_op.register_fake
def _(q, k, v, dk, dv, bindings, constants):
    return torch.empty_like(k, memory_format=torch.contiguous_format), v.new_empty(v.shape)


def _empty_keys(q: Tensor, k: Tensor, bindings: list[Tensor], call: PlainCall, *, own: bool) -> KeysAndValues:
    """Return uninitialised (k, v) for the tokens that this rank receives: (B, G, R, D), or (B, G, L + R, D) if `own`.

    For the fake implementations of ops, which need only shapes and dtypes. own: True to include this rank's tokens. If
    the pattern has run-time tensors, the number of keys is data-dependent (an unbacked size).
    """
    if without_seed(bindings, call.dropout_p)[0]:
        num_keys = torch.library.get_ctx().new_dynamic_size()
    else:
        with suspended_torch_modes():
            plan = plan_of(call, int(q.shape[1]), int(k.shape[1]), [])
            num_keys = (plan.both if own else plan.others).num_keys
    return tuple(k.new_empty(k.shape[0], k.shape[1], num_keys, k.shape[3]) for _ in range(2))  # pyright: ignore[reportReturnType]


def _remember_keys(ctx, inputs, output) -> None:
    q, k, v, bindings, ctx.constants = inputs
    ctx.save_for_backward(q, k, v, *copies(bindings))


def _keys_backward(ctx, dk, dv):
    q, k, v, *bindings = ctx.saved_tensors
    grads = exchange_keys_backward_op(q, k, v, dk.contiguous(), dv.contiguous(), bindings, ctx.constants)
    return None, *grads, *no_gradients(bindings, [ctx.constants])


_REFUSAL = "the exchange has no second derivative; engine='reference' has one, on one rank (dense, small inputs)"

set_gradient(exchange_op, exchange_backward_op, refusal=_REFUSAL, over_ranks=True)
exchange_keys_op.register_autograd(_keys_backward, setup_context=_remember_keys)
exchange_keys_backward_op.register_autograd(refusing_backward(_REFUSAL))


def exchange(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G L D"],
    v: Float[Tensor, "B G L D"],
    bindings: list[Tensor],
    call: PlainCall,
    features: Features,
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"] | None]:
    """Return (out, lse or None) of attention of this rank's queries to the keys of all ranks.

    Every rank must make this call, and run its backward.

    call: the pattern, the engine and other plain arguments.
    bindings: the pattern's run-time tensors, for the whole sequence, sorted by name; if there is dropout, followed by
        its seed.
    features: without return_lse the lse may be None. Dropout is taken from `call` and `bindings`, not from `features`.

    One all-to-all brings each (key/value head, token) that some query of this rank may attend to; in the backward
    another returns the gradients, which the owners add up in float32 or wider.

    Raises ValueError if the engine cannot serve the call, and under torch.compile for run-time tensors with "flex" or a
    score_mod; torch.distributed.DistError if another rank fails.
    """
    if call.engine != "flex" and features.score_mod is None:
        out, lse, _, _ = exchange_op(q, k, v, features.sinks, bindings, call.constants)
        return out, lse
    if torch.compiler.is_compiling() and without_seed(bindings, call.dropout_p)[0]:
        _refuse_run_time_tensors()
    k_all, v_all = torch.ops.flexdilated.exchange_keys(q, k, v, bindings, call.constants)
    if not q.shape[2]:
        nothing = k_all.sum() + v_all.sum()  # makes every rank's backward take part in the exchange
        nothing = nothing if features.sinks is None else nothing + features.sinks[:0].sum()
        return q + nothing, q.sum(-1).to(sum_dtype(q)) + nothing
    bindings, dropout = without_seed(bindings, call.dropout_p)
    placed = Call.at(
        q,
        k_all,
        call.pattern,
        head_offset=call.head_offset,
        num_heads_global=call.num_heads_global,
        block_size=call.block_size,
        placement=_placement_text(tuple(call), q.shape[1], k.shape[1], bindings),
    )
    return run(call.engine, q, k_all, v_all, bindings, placed, features.with_dropout(dropout))


@graph_constant  # raises while torch.compile traces, also if graphs may break
def _refuse_run_time_tensors() -> None:
    raise ValueError(
        "in a graph of torch.compile, run-time tensors over ranks need engine 'aten' or 'portable', and no score_mod: "
        "give the pattern its values, or take the call out of the graph"
    )


# A constant of a graph. `graph_constant` gets plain values, because torch 2.11 cannot unpack a constant named tuple.
@graph_constant
def _placement_text(values: tuple[Any, ...], num_heads: int, num_kv_heads: int, bindings: list[Tensor]) -> str:
    """Return the positions of this rank's queries, and of its keys followed by the received keys, as JSON text.

    values: the fields of the call's `PlainCall` (pattern, sharding and so on).
    num_heads, num_kv_heads: on this device.
    bindings: the pattern's run-time tensors, sorted by name.
    """
    return plan_of(PlainCall(*values), num_heads, num_kv_heads, bindings).both.text
