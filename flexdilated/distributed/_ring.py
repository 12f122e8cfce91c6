"""The ring: attention over all ranks' tokens; a rank receives the shards of keys and values one by one.

Contains the turns of a rank, the transfers of keys and gradients, and custom ops for forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engines import WholeRows, own_op, set_gradient, sum_dtype, without_seed
from ..masks.core import Expression, Ranges
from ..masks.orders import Placement
from ..masks.plan_cache import cache
from .counts import KVNeeds
from .group import PartSums, PlainCall, Posted, Ranks, Sharding, post, resolved_pattern, with_dtype_and_strides_of
from .wire import Codec, Lease, codec_for, gradient_codec, lease_from, pool_named

# B batch, G key/value heads, L tokens of this rank's shard, S tokens of a part of a shard, D head dim


@dataclass(frozen=True)
class ShardPart:
    """Part of a rank's shard: its consecutive local token indices, and their positions in the sequence.

    Both are empty for a part without tokens.
    """

    tokens: range
    positions: Ranges

    def __len__(self) -> int:
        return len(self.tokens)

    def view_of(self, x: Tensor) -> Tensor:
        """Return a view of these tokens of a shard x (B, G, L, ...)."""
        return x[:, :, self.tokens.start : self.tokens.stop]


@dataclass(frozen=True)
class Turn:
    """One turn of a ring for one rank: it receives keys and values from rank `source`, and sends its own to `target`.

    received: the part of the shard of `source` that this rank receives.
    sent: the part of this rank's shard that it sends.

    The backward reverses both: gradients of received keys go back to `source`, gradients of sent keys come from
    `target`.
    """

    source: int
    received: ShardPart
    target: int
    sent: ShardPart


def turns_of(
    rule: Expression, sharding: Sharding, rank: int, *, heads: range, num_heads_global: int
) -> tuple[Turn, ...]:
    """Return the turns of a rank in a ring, one for each other rank: the tokens that it receives and sends; cached.

    A run (contiguous range of positions) of a shard is sent whole if some query of the receiver needs a key of it.
    Sender and receiver decide that independently, from the sharding and the rule.

    rule: the pattern with the values of its run-time tensors.
    heads: the query heads on this device, of num_heads_global.
    """

    def build() -> tuple[Turn, ...]:
        needs = KVNeeds.of(rule, sharding.num_tokens, len(heads), 1, heads.start, num_heads_global)

        def part(holder: int, receiver: int) -> ShardPart:
            return _needed_part(needs, sharding, holder, receiver)

        return tuple(
            Turn(source, part(source, rank), target, part(rank, target))
            for step in _steps(sharding.num_ranks)
            for source, target in [((rank - step) % sharding.num_ranks, (rank + step) % sharding.num_ranks)]
        )

    key = ("ring", rule.text, sharding.numbers(), rank, heads.start, heads.stop, num_heads_global)
    return cache().get(key, build, lambda turns: 500 * len(turns), pattern=rule)


def _steps(num_ranks: int) -> Iterator[int]:
    """Yield the step of each turn, 1, -1, 2, -2, ... modulo num_ranks: rank r sends to rank r + step."""
    # All ranks use the same order; otherwise messages between three ranks could deadlock.
    # The two nearest neighbours come first, so that the turns overlap if only neighbours need each other's keys.
    for step in range(1, num_ranks // 2 + 1):
        yield step
        if num_ranks - step != step:
            yield num_ranks - step


def _needed_part(needs: KVNeeds, sharding: Sharding, holder: int, receiver: int) -> ShardPart:
    """Return the part of rank `holder`'s shard that is sent to rank `receiver`; empty if no key is needed.

    A shard has at most two ranges of contiguous positions; each that contains a needed key is sent whole.
    """
    queries = sharding.ranges(receiver)
    needed, first = [], 0
    for run in sharding.ranges(holder):
        if any(needs.by_head(queries, (run,))):
            needed.append((range(first, first + len(run)), run))
        first += len(run)
    tokens = range(needed[0][0].start, needed[-1][0].stop) if needed else range(0)
    return ShardPart(tokens, tuple(run for _, run in needed))


Visit = Callable[[Turn | None, ShardPart, Tensor, Tensor], None]


class Ring:
    """Transfers of this rank in one attention call: shards of keys and values in turns, and the buffers for them.

    With codec "auto" all ranks must construct it together, as the constructor may make a collective.

    bindings: as in `ring_op`.
    """

    def __init__(self, call: PlainCall, q: Tensor, k: Tensor, v: Tensor, bindings: Sequence[Tensor]) -> None:
        self.call, self.k, self.v, self.bindings = call, k, v, bindings
        self.ranks, self.sharding = Ranks.named(call.group, q.device.type), Sharding.of(call.sharding)
        self.codec = codec_for(call.codec, call.error_bound, k, v, self.ranks)
        self.pool = pool_named(call.pool, q.device)
        # CPU kernels round results to the dtype of their operands, here once per shard; float32 avoids that and is as
        # fast as bfloat16. Engine "portable" computes in float32 or wider.
        self.dtype = q.dtype if call.engine == "flex" else sum_dtype(q)
        rank = self.ranks.rank
        self.own = ShardPart(range(self.sharding.length(rank)), self.sharding.ranges(rank))
        self.turns: tuple[Turn, ...] = ()
        if len(self.own):  # no other rank sends to a rank without tokens, or waits for it
            heads = range(call.head_offset, call.head_offset + q.shape[1])
            rule = resolved_pattern(call.pattern, without_seed(bindings, call.dropout_p)[0], self.sharding.num_tokens)
            self.turns = turns_of(rule, self.sharding, rank, heads=heads, num_heads_global=call.num_heads_global)

    def placement(self, part: ShardPart) -> Placement:
        """Return the positions of this rank's queries and of the keys of `part`."""
        tokens = self.sharding.num_tokens
        return Placement(self.own.positions, (part.positions,), complete=False, num_tokens=tokens)

    def rotate(self, visit: Visit) -> None:
        """Call `visit` with this rank's shard, then with the received part of each turn.

        visit: gets (turn, part, keys (B, G, S, D), values (B, G, S, D)) for the S tokens of the part. The turn is None
            for this rank's shard. S is 0 if the turn receives nothing.

        The next part is in transfer during a visit. Received keys are freed after their visit, so at most two shards of
        other ranks are held. Without tokens on this rank there are no visits.
        """
        if not len(self.own):
            return
        mine = [self.k, self.v]
        if any(len(turn.sent) for turn in self.turns):
            mine = [_encoded(x, self.codec) for x in mine]
        begun: list[Posted] = []
        try:
            begun += [self._send_keys(turn, mine) for turn in self.turns[:1]]
            visit(None, self.own, self.k, self.v)
            for place, turn in enumerate(self.turns):
                begun[place].wait()
                begun += [self._send_keys(following, mine) for following in self.turns[place + 1 : place + 2]]
                self._visit_received(turn, begun[place], visit)
            for transfer in begun:
                transfer.wait_for_all()
        finally:
            for transfer in begun:
                transfer.drop()

    def _visit_received(self, turn: Turn, transfer: Posted, visit: Visit) -> None:
        """Call `visit` with the received part; keeps no reference to its tensors, so that they can be freed."""
        lease = self.decoded(transfer, self.codec, self.k, self.dtype)
        with lease:
            visit(turn, turn.received, *lease.tensor)

    def _send_keys(self, turn: Turn, mine: Sequence[Tensor]) -> Posted:
        """Start to send keys and values to the turn's target, and to receive those of its source; return the transfers.

        mine: this rank's encoded keys and values.
        """
        lease, length = self.lease_buffer(self.codec, len(turn.received), self.k), self.sharding.length(turn.source)
        send = [(row, turn.target) for x in mine for row in _message_views(turn.sent.view_of(x), len(self.own))]
        receive = [(row, turn.source) for x in lease.tensor for row in _message_views(x, length)]
        return post("keys", self.ranks, send=send, receive=receive, lease=lease)

    def lease_buffer(self, codec: Codec, num_tokens: int, like: Tensor) -> Lease:
        """Return the lease of a buffer (2, B, G, num_tokens, W) for a message of keys and values, or of dk and dv.

        W is the number of bytes of an encoded vector, and the dtype is uint8. If the codec leaves vectors unchanged, W
        is the head dim, and the dtype is that of `like`.

        like: a tensor (B, G, L, D) on the device of the buffer.
        """
        width, dtype = (like.shape[3], like.dtype)
        if codec.name is not None:
            width, dtype = codec.vector_bytes(width, dtype), torch.uint8
        return lease_from(self.pool, (2, *like.shape[:2], num_tokens, width), dtype, like.device)

    def decoded(self, transfer: Posted, codec: Codec, like: Tensor, dtype: torch.dtype) -> Lease:
        """Return a lease of the decoded message (2, B, G, S, D): (k, v) or (dk, dv).

        If nothing is to be decoded or cast, it is the lease of the message itself; else that lease is released.

        transfer: the message, which must have arrived.
        codec: the codec with which it was sent.
        like: a tensor (B, G, L, D) in the dtype before encoding.
        dtype: of the result.
        """
        assert transfer.lease is not None
        if codec.name is None and dtype == like.dtype:
            return transfer.lease
        wire, head_dim = transfer.lease.tensor, like.shape[3]
        lease = lease_from(self.pool, (*wire.shape[:-1], head_dim), dtype, like.device)
        if codec.name is None:
            lease.tensor.copy_(wire)
        else:
            codec.decode(wire, head_dim, like.dtype, out=lease.tensor)
        transfer.lease.release()
        return lease


class Gradients:
    """Adds to dk and dv (B, G, L, D), in place, the gradients of this rank's keys and values that other ranks send.

    In each turn one other rank sends the gradients from its queries.
    """

    def __init__(self, ring: Ring, dk: Tensor, dv: Tensor) -> None:
        self.ring, self.totals = ring, (dk, dv)
        self.codec = gradient_codec(ring.codec, dk.dtype)
        self.begun: tuple[Turn, Posted] | None = None

    def exchange(self, turn: Turn, grads: Sequence[Tensor]) -> None:
        """Start to send grads, (dk, dv) of the keys received in `turn`, and to receive gradients of keys sent in it.

        grads: empty if no keys were received.

        Waits for the previous turn first, so that buffers of at most one turn are in memory.
        """
        self.settle()
        send = [(_encoded(grad, self.codec), turn.source) for grad in grads]
        lease = self.ring.lease_buffer(self.codec, len(turn.sent), self.totals[0])
        receive = [(x, turn.target) for x in lease.tensor]
        self.begun = turn, post("gradients", self.ring.ranks, send=send, receive=receive, lease=lease)

    def settle(self) -> None:
        """Wait for the pending transfer, if any, and add the received gradients to dk and dv."""
        if self.begun is None:
            return
        turn, transfer = self.begun
        transfer.wait_for_all()
        like = self.totals[0]
        with self.ring.decoded(transfer, self.codec, like, like.dtype) as came:
            for total, grad in zip(self.totals, came, strict=True):
                turn.sent.view_of(total).add_(grad)
        self.begun = None

    def close(self) -> None:
        if self.begun is not None:
            self.begun[1].drop()
        self.begun = None


def _message_views(x: Tensor, length: int) -> Sequence[Tensor]:
    """Return contiguous views of x, one for each message: x itself if it has all tokens, S == length.

    Otherwise there is one view per batch entry and KV head, as some tokens of a shard are contiguous only within these.
    The receiver cuts its buffer in the same way.

    x: (B, G, S, ...), contiguous, or some consecutive tokens of a contiguous tensor.
    length: number of tokens of the sender's whole shard.
    """
    return (x,) if x.shape[2] == length else x.flatten(0, 1).unbind()


def _encoded(x: Tensor, codec: Codec) -> Tensor:
    return x.contiguous() if codec.name is None else codec.encode(x).contiguous()


@own_op("flexdilated::ring")
def ring_op(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bindings: list[Tensor], constants: str
) -> tuple[Tensor, Tensor]:
    """Return (out (B, H, L, D), lse (B, H, L)) of attention of this rank's queries to the keys of all ranks.

    Every rank must make this call, and run its backward.

    bindings: the pattern's run-time tensors, for the whole sequence, sorted by name; if there is dropout, followed by
        its seed.
    constants: the other arguments of the call (pattern, scale, sharding, process group and so on) as the text that
        `PlainCall.constants` returns.

    Each contiguous range of a shard is sent whole, directly from its owner to every rank that needs a key of it, while
    that rank computes with another shard. The backward sends these keys again, and their gradients return to the owner.
    The gradients of sinks must be summed over the ranks.

    A rank holds at most two shards of other ranks. Sums are in float32 or wider and in a fixed order. Raises
    torch.distributed.DistError if another rank fails.
    """
    call = PlainCall.of(constants)
    ring = Ring(call, q, k, v, bindings)
    parts = PartSums(call, q, bindings, ring.dtype)

    def visit(_: Turn | None, part: ShardPart, part_k: Tensor, part_v: Tensor) -> None:
        if len(part):
            parts.attend(ring.placement(part), part_k, part_v)

    ring.rotate(visit)
    return parts.rows(sinks)


@ring_op.register_fake
def _(q, k, v, sinks, bindings, constants):
    return PlainCall.of(constants).fake_rows(q)


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
    """Return (dq, dk, dv) of this rank's q, k and v, from the results out and lse of `ring_op` and their gradients.

    Receives the shards of other ranks again, and sends the gradients of each shard directly to its owner.

    grad_lse: None if lse has no gradient.
    bindings, constants: as in `ring_op`.
    """
    call = PlainCall.of(constants)
    ring = Ring(call, q, k, v, bindings)
    parts = PartSums(call, q, bindings, ring.dtype, WholeRows(out, lse, grad_out, grad_lse))
    dk, dv = (torch.zeros_like(x, dtype=parts.wide) for x in (k, v))
    gradients = Gradients(ring, dk, dv)

    def visit(turn: Turn | None, part: ShardPart, part_k: Tensor, part_v: Tensor) -> None:
        found = parts.gradients(ring.placement(part), part_k, part_v) if len(part) else []
        if turn is None:
            dk.add_(found[0])
            dv.add_(found[1])
        else:
            gradients.exchange(turn, found)

    try:
        ring.rotate(visit)
        gradients.settle()
    finally:
        gradients.close()
    return parts.query_gradient(), with_dtype_and_strides_of(dk, k), with_dtype_and_strides_of(dv, v)


@ring_backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, out, lse, *options):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


set_gradient(
    ring_op,
    ring_backward_op,
    refusal="the ring has no second derivative; engine='reference' has one, on one rank (dense, small inputs)",
    over_ranks=True,
)
