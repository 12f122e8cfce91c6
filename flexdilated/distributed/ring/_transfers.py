"""Transfers of a ring: keys and values to the ranks that need them, and their gradients back."""

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
        """Abandon the pending transfer, if any."""
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
    """x encoded and contiguous."""
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
