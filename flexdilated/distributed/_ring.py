"""The ring: attention over all ranks' tokens, whose keys and values arrive shard by shard.

Turns of a rank, transfers of keys and of gradients, and the ops, of which torch.compile traces shapes and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..engines import PlacedCall, WholeRows, add_sinks, autograd_on, merge_, own_op, set_gradient, sum_dtype
from ..masks.core import Expression, Ranges
from ..masks.orders import Placement
from ..masks.plan_cache import cache
from .counts import KVNeeds
from .group import Message, PlainCall, Posted, Ranks, Role, Sharding, as_promised, empty_rows, post, whole_rule
from .wire import BufferPool, Codec, Lease, codec_for, gradient_codec, lease_from, pool_named

# B batch, G key/value heads, L tokens of this rank's shard, S tokens of a part of a shard, D head dim


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a rank's shard, and their positions; empty if no token is needed."""

    tokens: range
    positions: Ranges

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def slice(self) -> slice:
        return slice(self.tokens.start, self.tokens.stop)


@dataclass(frozen=True)
class Turn:
    """One turn of a ring for one rank: it receives from `source` and sends to `target`.

    The backward reverses both: gradients of received keys go back to `source`, gradients of sent keys come from
    `target`.
    """

    source: int
    received: Part
    target: int
    sent: Part


def turns_of(
    rule: Expression, sharding: Sharding, rank: int, *, heads: range, num_heads_global: int
) -> tuple[Turn, ...]:
    """Cached turns of a rank with the W - 1 other ranks.

    A run of a shard is sent whole if some query of the receiver needs a key of it. Both sides decide that
    independently, from the sharding and the pattern, which must hold the values of its run-time tensors. heads: global
    query heads.
    """

    def build() -> tuple[Turn, ...]:
        needs = KVNeeds.of(rule, sharding.num_tokens, len(heads), 1, heads.start, num_heads_global)

        def part(holder: int, receiver: int) -> Part:
            return _needed_part(needs, sharding, holder, receiver)

        return tuple(
            Turn(source, part(source, rank), target, part(rank, target))
            for step in _steps(sharding.num_ranks)
            for source, target in [((rank - step) % sharding.num_ranks, (rank + step) % sharding.num_ranks)]
        )

    key = ("ring", rule.text, sharding.numbers(), rank, heads.start, heads.stop, num_heads_global)
    return cache().get(key, build, lambda turns: 500 * len(turns), pattern=rule)


def _steps(num_ranks: int) -> Iterator[int]:
    """Ring steps, nearest neighbours first: if only neighbours need each other's keys, their turns overlap.

    All ranks take the steps in one order; otherwise messages between three ranks could deadlock.
    """
    for step in range(1, num_ranks // 2 + 1):
        yield step
        if num_ranks - step != step:
            yield num_ranks - step


def _needed_part(needs: KVNeeds, sharding: Sharding, holder: int, receiver: int) -> Part:
    """Runs of the holder's shard in which the receiver needs a key; adjacent, because a shard has at most two runs."""
    queries = sharding.ranges(receiver)
    needed, first = [], 0
    for run in sharding.ranges(holder):
        if any(needs.by_head(queries, (run,))):
            needed.append((range(first, first + len(run)), run))
        first += len(run)
    tokens = range(needed[0][0].start, needed[-1][0].stop) if needed else range(0)
    return Part(tokens, tuple(run for _, run in needed))


@dataclass(frozen=True, eq=False)
class RingCall:
    """A call with its names resolved to ranks, sharding, codec and pool, and its run-time tensors and heads.

    dtype: in which attention to a shard is computed.
    """

    plain: PlainCall
    ranks: Ranks
    sharding: Sharding
    bindings: Sequence[Tensor]
    num_heads: int
    dtype: torch.dtype
    codec: Codec
    pool: BufferPool | None

    @classmethod
    def of(cls, plain: PlainCall, q: Tensor, k: Tensor, v: Tensor, bindings: Sequence[Tensor]) -> RingCall:
        ranks = Ranks.named(plain.group, q.device.type)
        return cls(
            plain,
            ranks,
            Sharding.of(plain.sharding),
            bindings,
            q.shape[1],
            # CPU kernels round results to the dtype of their operands, here once per shard; float32 avoids that and is
            # as fast as bfloat16.
            sum_dtype(q) if plain.engine == "tiles" else q.dtype,
            codec_for(plain.codec, plain.error_bound, k, v, ranks),
            pool_named(plain.pool, q.device),
        )

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        first, num_heads_global = self.plain.head_offset, self.plain.num_heads_global
        heads = range(first, first + self.num_heads)
        rule = whole_rule(self.plain.pattern, self.bindings, self.sharding.num_tokens)
        return turns_of(rule, self.sharding, self.ranks.rank, heads=heads, num_heads_global=num_heads_global)

    @cached_property
    def own(self) -> Part:
        return Part(range(self.sharding.length(self.ranks.rank)), self.sharding.ranges(self.ranks.rank))

    def with_keys_of(self, part: Part) -> PlacedCall:
        """Attention of this rank's queries to the keys of `part`."""
        tokens = self.sharding.num_tokens
        return self.plain.placed(Placement(self.own.positions, (part.positions,), complete=False, num_tokens=tokens))


@dataclass(frozen=True)
class Shard:
    """Keys and values (B, G, S, D) of the tokens of `part`, in the dtype of the computation.

    turn: None for this rank's shard.
    """

    turn: Turn | None
    part: Part
    k: Tensor
    v: Tensor


def rotate(call: RingCall, k: Tensor, v: Tensor, visit: Callable[[Shard], None]) -> None:
    """Visit this rank's shard, then the received part of each turn, while the next turn's transfer runs.

    A turn that receives nothing visits an empty part. Received keys are freed after their visit, so at most two shards
    of other ranks are held.
    """
    mine = [_written(x, call.codec) for x in (k, v)] if any(len(turn.sent) for turn in call.turns) else [k, v]
    begun: list[_Transfer] = []
    try:
        begun += [_send_keys(call, turn, mine, k) for turn in call.turns[:1]]
        visit(Shard(None, call.own, k.to(call.dtype), v.to(call.dtype)))
        for index, turn in enumerate(call.turns):
            begun[index].posted.wait()
            begun += [_send_keys(call, following, mine, k) for following in call.turns[index + 1 : index + 2]]
            _show(call, turn, begun[index], k, visit)
        for transfer in begun:
            transfer.posted.wait_for_all()
    finally:
        for transfer in begun:
            transfer.give_up()


class Gradients:
    """Gradients of this rank's keys and values; adds the gradients from other ranks turn by turn."""

    def __init__(self, call: RingCall, dk: Tensor, dv: Tensor) -> None:
        """dk, dv (B, G, L, D): gradients from this rank's queries; received gradients are added to them in place."""
        self._call, self.dk, self.dv = call, dk, dv
        self._codec = gradient_codec(call.codec, dk.dtype)
        self._begun: tuple[Turn, _Transfer] | None = None

    def exchange(self, turn: Turn, grads: Sequence[Tensor]) -> None:
        """Start to send the gradients of the keys received in `turn`, and to receive gradients of keys sent in it.

        Settles the previous turn first, so that buffers of at most one turn are held.
        """
        self.settle()
        send = [(_written(grad, self._codec), turn.source) for grad in grads]
        lease = _room(self._call, self._codec, len(turn.sent), self.dk)
        receive = [(x, turn.target) for x in lease.tensor if x.numel()]
        self._begun = turn, _begin(self._call, "gradients", lease, send=send, receive=receive)

    def settle(self) -> None:
        """Wait for the pending transfer and add the gradients received."""
        if self._begun is None:
            return
        turn, transfer = self._begun
        transfer.posted.wait_for_all()
        with _read(self._call, transfer, self._codec, self.dk, self.dk.dtype) as came:
            for total, grad in zip((self.dk, self.dv), came, strict=True):
                total[:, :, turn.sent.slice] += grad
        self._begun = None

    def close(self) -> None:
        if self._begun is not None:
            self._begun[1].give_up()
        self._begun = None


@dataclass(frozen=True)
class _Transfer:
    """Pending messages, and the buffer for received rows, (2, B, G, S, ...), encoded."""

    posted: Posted
    lease: Lease

    def give_up(self) -> None:
        self.posted.drop()
        self.lease.release()


def _show(call: RingCall, turn: Turn, transfer: _Transfer, like: Tensor, visit: Callable[[Shard], None]) -> None:
    """Visit the received shard. Leaves no reference to its tensors, so that they can be freed."""
    lease = _read(call, transfer, call.codec, like, call.dtype)
    with lease:
        visit(Shard(turn, turn.received, *lease.tensor))


def _send_keys(call: RingCall, turn: Turn, mine: Sequence[Tensor], like: Tensor) -> _Transfer:
    """Start to send the keys and values that the turn's target needs, and to receive from its source."""
    lease = _room(call, call.codec, len(turn.received), like)
    send = [(row, turn.target) for x in mine for row in _messages(x[:, :, turn.sent.slice], len(call.own))]
    length = call.sharding.length(turn.source)
    receive = [(row, turn.source) for x in lease.tensor for row in _messages(x, length)]
    return _begin(call, "keys", lease, send=send, receive=receive)


def _messages(x: Tensor, length: int) -> Sequence[Tensor]:
    """x (B, G, S, ...) as contiguous tensors: one if it is a whole shard, else one per batch entry and head (views)."""
    if not x.numel():
        return ()
    return (x,) if x.shape[2] == length else x.flatten(0, 1).unbind()


def _begin(
    call: RingCall, role: Role, lease: Lease, *, send: Sequence[Message], receive: Sequence[Message]
) -> _Transfer:
    try:
        return _Transfer(post(role, call.ranks, send=send, receive=receive), lease)
    except BaseException:
        lease.release()
        raise


def _written(x: Tensor, codec: Codec) -> Tensor:
    return x.contiguous() if codec.name is None else codec.encode(x).contiguous()


def _room(call: RingCall, codec: Codec, num_tokens: int, like: Tensor) -> Lease:
    """Lease of a buffer for encoded keys and values of num_tokens tokens."""
    shape = (2, *like.shape[:2], num_tokens)
    if codec.name is None:
        return lease_from(call.pool, (*shape, like.shape[3]), like.dtype, like.device)
    width = codec.row_bytes(like.shape[3], like.dtype)
    return lease_from(call.pool, (*shape, width), torch.uint8, like.device)


def _read(call: RingCall, transfer: _Transfer, codec: Codec, like: Tensor, dtype: torch.dtype) -> Lease:
    """Received rows, decoded: (2, B, G, S, D) in `dtype`; if that needs another buffer, the encoded one is released."""
    if codec.name is None and dtype == like.dtype:
        return transfer.lease
    wire, head_dim = transfer.lease.tensor, like.shape[3]
    lease = lease_from(call.pool, (*wire.shape[:-1], head_dim), dtype, like.device)
    if codec.name is None:
        lease.tensor.copy_(wire)
    else:
        codec.decode(wire, head_dim, like.dtype, out=lease.tensor)
    transfer.lease.release()
    return lease


@own_op("flexdilated::ring")
def ring_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bindings: list[Tensor],
    constants: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over the keys of all ranks; every rank must call it, and its backward.

    bindings: the pattern's run-time tensors, for the whole sequence, ordered by name. constants: a `PlainCall` as text.

    Each shard is sent directly from its owner to every rank that needs a key of it, while that rank computes with the
    previous shard. The backward sends it again, and its gradients return to the owner. The gradients of sinks must be
    summed over the ranks.

    A rank holds at most two shards of other ranks. Sums are in float32 or wider and in a fixed order. Codec "auto"
    keeps its error bound, for one collective of 8 bytes in each pass. Raises torch.distributed.DistError if another
    rank fails.
    """
    return run_forward(RingCall.of(PlainCall.of(constants), q, k, v, bindings), q, k, v, sinks)


@ring_op.register_fake
def _(q, k, v, sinks, bindings, constants):
    return PlainCall.of(constants).rows_of(q)


@own_op("flexdilated::ring_backward")
def ring_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bindings: list[Tensor],
    constants: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `ring_op`, from out and lse over all keys."""
    call = RingCall.of(PlainCall.of(constants), q, k, v, bindings)
    return run_backward(call, q, k, v, WholeRows(out, lse, grad_out, grad_lse))


@ring_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, out, lse, *options):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


set_gradient(
    ring_op,
    ring_backward_op,
    refusal="the ring has no second derivative; engine='reference' has one, on one rank (dense, small inputs)",
    over_ranks=True,
)


def run_forward(call: RingCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out (B, H, L, D) in q's dtype, lse (B, H, L)); sums over shards are in float32 or wider."""
    if not len(call.own):  # no other rank sends to a rank without tokens, or waits for it
        return empty_rows(q)
    wide = sum_dtype(q)
    queries = q.to(call.dtype)
    sums: list[Tensor] = []

    def visit(shard: Shard) -> None:
        if not len(shard.part):
            return
        placed, bindings = call.with_keys_of(shard.part), list(call.bindings)
        out, lse = placed.forward(queries, shard.k, shard.v, None, bindings, wide=True)
        assert lse is not None
        if sums:
            merge_(sums[0], sums[1], out, lse)
        else:
            sums.extend((out.to(wide), lse.to(wide)))

    rotate(call, k, v, visit)
    out, lse = sums
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return as_promised(out, q), lse.contiguous()


def run_backward(call: RingCall, q: Tensor, k: Tensor, v: Tensor, whole: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); receives the shards again, and sends the gradients of each directly to its owner."""
    if not len(call.own):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    wide = sum_dtype(q)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    gradients = Gradients(call, dk, dv)
    queries = q.to(call.dtype)
    rows = WholeRows(whole.out.to(call.dtype), whole.lse, whole.grad_out.to(call.dtype), whole.grad_lse)

    def visit(shard: Shard) -> None:
        found: list[Tensor] = []
        if len(shard.part):
            placed, bindings = call.with_keys_of(shard.part), list(call.bindings)
            with autograd_on():
                of_queries, *found = placed.backward(queries, shard.k, shard.v, bindings, rows)
            dq.add_(of_queries)
        if shard.turn is not None:
            gradients.exchange(shard.turn, [x.to(wide) for x in found])
        else:
            dk.add_(found[0])
            dv.add_(found[1])

    try:
        rotate(call, k, v, visit)
        gradients.settle()
    finally:
        gradients.close()
    return as_promised(dq, q), as_promised(dk, k), as_promised(dv, v)
