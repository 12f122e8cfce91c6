"""What moves in a ring: keys and values to those who need them, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ._messages import Message, Posted, post
from ._pool import Lease, lease_from
from ._ring_call import RingCall
from ._ring_plan import Part, Turn
from ._traffic import Role

# B batch, G key/value heads, L tokens of this rank's shard, S tokens of a part of a shard, D head dim


@dataclass(frozen=True)
class Shard:
    """Keys and values (B, G, S, D) that are here now, of the tokens of `part`; this rank's own have no turn."""

    turn: Turn | None
    part: Part
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class _Transfer:
    """Messages on their way, and the memory for what comes: (2, B, G, S, D)."""

    posted: Posted
    lease: Lease

    def give_up(self) -> None:
        self.posted.drop()
        self.lease.release()


def rotate(call: RingCall, k: Tensor, v: Tensor, visit: Callable[[Shard], None]) -> None:
    """Show this rank's own shard, if it has tokens, then turn by turn what comes; the next is on its way meanwhile.

    A turn in which nothing comes shows an empty part. What came is gone after its visit, so what two ranks sent is
    held at most.
    """
    mine = k.contiguous(), v.contiguous()
    begun: list[_Transfer] = []
    try:
        begun += [_send_keys(call, turn, mine) for turn in call.turns[:1]]
        if len(call.own):
            visit(Shard(None, call.own, *mine))
        for index, turn in enumerate(call.turns):
            here = begun[index]
            here.posted.wait()
            begun += [_send_keys(call, following, mine) for following in call.turns[index + 1 : index + 2]]
            visit(Shard(turn, turn.received, *here.lease.tensor))
            here.lease.release()
        for transfer in begun:
            transfer.posted.wait_for_all()
    finally:
        for transfer in begun:
            transfer.give_up()


class Gradients:
    """The gradients of this rank's keys and values; others send what they computed with them.

    What comes is added turn by turn, in float32 or wider.
    """

    def __init__(self, call: RingCall, dk: Tensor, dv: Tensor) -> None:
        """dk, dv (B, G, L, D) are added to in place."""
        self._call, self.totals = call, (dk, dv)
        self._begun: tuple[Turn, _Transfer] | None = None

    def exchange(self, turn: Turn, grads: Sequence[Tensor], like: Tensor) -> None:
        """Begin to send these gradients of what came in a turn back, and to receive those of what went.

        The turn before ends first: what one turn sends, and what comes in it, are held at most.
        """
        self.settle()
        send = [(grad.contiguous(), turn.source) for grad in grads]
        shape = (2, *like.shape[:2], len(turn.sent), like.shape[3])
        lease = lease_from(self._call.pool, shape, like.dtype, like.device, role="gradients")
        receive = [(x, turn.target) for x in lease.tensor if x.numel()]
        self._begun = turn, _begin(self._call, "gradients", lease, send=send, receive=receive)

    def settle(self) -> None:
        """Wait for what is on its way, and add what came."""
        if self._begun is None:
            return
        turn, transfer = self._begun
        transfer.posted.wait_for_all()
        for total, grad in zip(self.totals, transfer.lease.tensor, strict=True):
            total[:, :, turn.sent.slice] += grad
        self.close()

    def close(self) -> None:
        """Give up what is still on its way."""
        if self._begun is not None:
            self._begun[1].give_up()
        self._begun = None


def _send_keys(call: RingCall, turn: Turn, mine: tuple[Tensor, Tensor]) -> _Transfer:
    """Begin to send what a turn's target needs of this rank's keys and values, and to receive what comes in it."""
    k = mine[0]
    shape = (2, *k.shape[:2], len(turn.received), k.shape[3])
    lease = lease_from(call.pool, shape, k.dtype, k.device, role="keys")
    send = [(row, turn.target) for x in mine for row in _rows(x[:, :, turn.sent.slice], len(call.own))]
    length = call.sharding.length(turn.source)
    receive = [(row, turn.source) for x in lease.tensor for row in _rows(x, length)]
    return _begin(call, "keys", lease, send=send, receive=receive)


def _rows(x: Tensor, length: int) -> Sequence[Tensor]:
    """x (B, G, S, D) as messages: one if these are all tokens of a shard, else one a head, which needs no copy."""
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
