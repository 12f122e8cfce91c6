"""What moves in a ring: keys and values to those who need them, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..group import Message, Posted, Role, post
from ..wire import Codec, Lease, gradient_codec, lease_from
from ._plan import Part, RingCall, Turn

# B batch, G key/value heads, L tokens of this rank's shard, S tokens of a part of a shard, D head dim


@dataclass(frozen=True)
class Shard:
    """Keys and values (B, G, S, D) that are here now, of the tokens of `part`; this rank's own have no turn.

    They have the dtype in which the call computes.
    """

    turn: Turn | None
    part: Part
    k: Tensor
    v: Tensor


def rotate(call: RingCall, k: Tensor, v: Tensor, visit: Callable[[Shard], None]) -> None:
    """Show this rank's own shard, then turn by turn what comes; what comes next is on its way meanwhile.

    A turn in which nothing comes shows an empty part. What came goes after its visit: the shards of two other ranks
    are held at most.
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
    """The gradients of this rank's keys and values; others send what they computed with them.

    What comes is added turn by turn.
    """

    def __init__(self, call: RingCall, dk: Tensor, dv: Tensor) -> None:
        """dk, dv (B, G, L, D) of this rank's own queries: what comes is added to them, in place."""
        self._call, self.dk, self.dv = call, dk, dv
        self._codec = gradient_codec(call.codec, dk.dtype)
        self._begun: tuple[Turn, _Transfer] | None = None

    def exchange(self, turn: Turn, grads: Sequence[Tensor]) -> None:
        """Begin to send the gradients of what came in a turn back, and to receive those of what went.

        The turn before ends first: what one turn sends, and what comes in it, is held at most.
        """
        self.settle()
        send = [(_written(grad, self._codec), turn.source) for grad in grads]
        lease = _room(self._call, self._codec, len(turn.sent), self.dk)
        receive = [(x, turn.target) for x in lease.tensor if x.numel()]
        self._begun = turn, _begin(self._call, "gradients", lease, send=send, receive=receive)

    def settle(self) -> None:
        """Wait for what is on its way, and add what came."""
        if self._begun is None:
            return
        turn, transfer = self._begun
        transfer.posted.wait_for_all()
        with _read(self._call, transfer, self._codec, self.dk, self.dk.dtype) as came:
            for total, grad in zip((self.dk, self.dv), came, strict=True):
                total[:, :, turn.sent.slice] += grad
        self._begun = None

    def close(self) -> None:
        """Give up what is still on its way."""
        if self._begun is not None:
            self._begun[1].give_up()
        self._begun = None


@dataclass(frozen=True)
class _Transfer:
    """Messages on their way, and the memory for what comes, (2, B, G, S, ...), as it is written."""

    posted: Posted
    lease: Lease

    def give_up(self) -> None:
        self.posted.drop()
        self.lease.release()


def _show(call: RingCall, turn: Turn, transfer: _Transfer, like: Tensor, visit: Callable[[Shard], None]) -> None:
    """Visit what has come. No name of it is left afterwards: a tensor lives as long as one."""
    lease = _read(call, transfer, call.codec, like, call.dtype)
    with lease:
        visit(Shard(turn, turn.received, *lease.tensor))


def _send_keys(call: RingCall, turn: Turn, mine: Sequence[Tensor], like: Tensor) -> _Transfer:
    """Begin to send what a turn's target needs of this rank's keys and values, and to receive what comes in it."""
    lease = _room(call, call.codec, len(turn.received), like)
    send = [(row, turn.target) for x in mine for row in _messages(x[:, :, turn.sent.slice], len(call.own))]
    length = call.sharding.length(turn.source)
    receive = [(row, turn.source) for x in lease.tensor for row in _messages(x, length)]
    return _begin(call, "keys", lease, send=send, receive=receive)


def _messages(x: Tensor, length: int) -> Sequence[Tensor]:
    """x (B, G, S, ...) as contiguous tensors: one if it is a whole shard, else one a head, which needs no copy."""
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
    """x as it is sent: contiguous."""
    return x.contiguous() if codec.name is None else codec.encode(x).contiguous()


def _room(call: RingCall, codec: Codec, num_tokens: int, like: Tensor) -> Lease:
    """Memory for two tensors of so many tokens, as they are written."""
    shape = (2, *like.shape[:2], num_tokens)
    if codec.name is None:
        return lease_from(call.pool, (*shape, like.shape[3]), like.dtype, like.device)
    width = codec.row_bytes(like.shape[3], like.dtype)
    return lease_from(call.pool, (*shape, width), torch.uint8, like.device)


def _read(call: RingCall, transfer: _Transfer, codec: Codec, like: Tensor, dtype: torch.dtype) -> Lease:
    """What has come, (2, B, G, S, D) in this dtype; the memory of what was written goes, where that is another."""
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
