"""Messages between ranks, counted in `Traffic`; the dropout seed of all ranks; the error if another rank fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError

from ...engines import Dropout, own_op
from ...masks.core import device_kind
from ._call import waiting_ranks_text
from ._ranks import Ranks, Role, group_of, record, timeout_of

Message = tuple[Tensor, int]  # (contiguous tensor, peer rank)


@dataclass
class Posted:
    """Messages in transfer: do not read received tensors before `wait`, nor change sent ones before `wait_for_all`.

    sent: tensors to send, kept until `wait_for_all` or `drop`.
    lease: lease of the receiving buffer, or None; `drop` releases it.
    arriving, leaving: pending transfers of received and of sent messages; `wait` waits for the received ones only.
        If the backend makes one transfer of all messages, that transfer is in `arriving`, and `leaving` is empty.
    """

    role: Role
    ranks: Ranks
    sent: list[Tensor]
    lease: Any = None
    arriving: list[dist.Work] = field(default_factory=list)
    leaving: list[dist.Work] = field(default_factory=list)

    def wait(self) -> None:
        self._wait(self.arriving)

    def wait_for_all(self) -> None:
        self._wait(self.arriving)
        self._wait(self.leaving)
        self.sent.clear()

    def drop(self) -> None:
        """Abandon pending transfers and release the lease; the memory of the messages may then be reused.

        On accelerators transfers cannot be abandoned, so `drop` waits for them.
        """
        if not device_kind(self.ranks.device_type).on_host:
            # The device may still write there, so later uses of that memory must be ordered after the transfers.
            with suppress(dist.DistError):
                self.wait_for_all()
        # gloo writes only while a reference to the work exists.
        self.arriving.clear()
        self.leaving.clear()
        self.sent.clear()
        if self.lease is not None:
            self.lease.release()

    def _wait(self, works: list[dist.Work]) -> None:
        with communicating(_transfer_text(self.role), self.ranks):
            while works:
                works[0].wait()
                del works[0]


def post(
    role: Role, ranks: Ranks, *, send: Sequence[Message] = (), receive: Sequence[Message] = (), lease: Any = None
) -> Posted:
    """Start to send and receive messages as one group; return the pending transfers.

    send, receive: (contiguous tensor, other rank) pairs; empty tensors are skipped. Messages between two ranks arrive
        in the order posted.
    role: kind of message under which the bytes are counted.
    lease: lease of the receiving buffer, or None; `Posted.drop` releases it.
    """
    send, receive = ([(x, peer) for x, peer in side if x.numel()] for side in (send, receive))
    posted, group = Posted(role, ranks, [x for x, _ in send], lease), group_of(ranks.name)
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in send]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receive]
    if not operations:
        return posted
    try:
        with communicating(_transfer_text(role), ranks):
            works = dist.batch_isend_irecv(operations)
    except BaseException:
        posted.drop()
        raise
    if len(works) == len(operations):
        posted.leaving, posted.arriving = works[: len(send)], works[len(send) :]
    else:  # the backend runs the group as one operation
        posted.arriving = works
    for x, _ in send:
        record(role, sent=x.nbytes)
    for x, _ in receive:
        record(role, received=x.nbytes)
    return posted


def _transfer_text(role: Role) -> str:
    return f"sending and receiving {role}"


@contextmanager
def communicating(what: str, ranks: Ranks) -> Iterator[None]:
    """Context manager that turns a failed transfer into a DistError with the rank, the transfer and the elapsed time.

    Wrap only transfers and waits for them. what: the transfer as the subject of a sentence, such as "the exchange of
    keys". Raises torch.distributed.DistError for each RuntimeError except OutOfMemoryError. gloo and NCCL raise one
    when a peer has died or sends nothing within the group's timeout. (By default NCCL does not block in a wait; then
    its watchdog ends the process instead.)
    """
    start = time.monotonic()
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # gloo raises no specific class
        elapsed_s = time.monotonic() - start
        raise DistError(
            f"rank {ranks.rank} of {ranks.size}: {what} failed after {elapsed_s:.1f} s; the timeout of the process "
            f"group is {timeout_of(ranks).total_seconds():g} s. A peer may have died, may hang, or may not run "
            "this forward or backward. "
            f"{waiting_ranks_text(ranks)}"
            f"\ntorch says: {error}"
        ) from error


def shared_dropout(p: float, ranks: Ranks, after: Tensor) -> Dropout | None:
    """Return a Dropout with the seed of rank 0, sent to other ranks by one broadcast of 8 bytes; None if p is 0.

    p: probability of dropping an attention weight. Every rank draws a seed from torch's default generator of the
        device, so that generators in equal states stay equal.
    after: a tensor that depends on this rank's earlier transfers; it keeps a compiled graph from moving the broadcast
        before them, so that all ranks have one order.
    """
    if not p:
        return None
    return Dropout(p, seed_of_first_rank(Dropout.drawn(p, after.device).seed, after.detach(), ranks.name))


@own_op("flexdilated::seed_of_first_rank")
def seed_of_first_rank(seed: Tensor, after: Tensor, group: str) -> Tensor:
    """Return the seed of rank 0 of a process group. after: as in `shared_dropout`; it is not read."""
    ranks, shared = Ranks.named(group, seed.device.type), seed.clone()
    if ranks.size > 1:
        with communicating("the broadcast of the seed of dropout", ranks):
            dist.broadcast(shared, group=group_of(group), group_src=0)
        record("set-up", **{"received" if ranks.rank else "sent": shared.nbytes})
    return shared


@seed_of_first_rank.register_fake
def _(seed, after, group):
    return torch.empty_like(seed)
