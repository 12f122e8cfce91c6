"""Messages between ranks: posted together, waited for later, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from ._faults import communicating
from ._ranks import Ranks, group_of
from ._traffic import Role, record

Message = tuple[Tensor, int]  # contiguous, and the rank to which it goes or from which it comes


@dataclass
class Posted:
    """Messages on their way. What is sent must not change, and what comes must not be read, until it was waited for."""

    role: Role
    ranks: Ranks
    sent: list[Tensor]  # held until it is gone
    arriving: list[dist.Work] = field(default_factory=list)
    leaving: list[dist.Work] = field(default_factory=list)

    def wait(self) -> None:
        """Until what comes is there."""
        self._wait(self.arriving)

    def wait_for_all(self) -> None:
        """Until what goes is gone, too."""
        self._wait(self.arriving)
        self._wait(self.leaving)
        self.sent.clear()

    def drop(self) -> None:
        """Give up what is still on its way, after a failure: the memory may go, or serve others, afterwards."""
        if self.ranks.device_type != "cpu":
            # The device may still write there. Whatever uses that memory next has to queue up behind it.
            with suppress(dist.DistError):
                self.wait_for_all()
        # gloo writes only into what somebody holds the work of.
        self.arriving.clear()
        self.leaving.clear()
        self.sent.clear()

    def _wait(self, works: list[dist.Work]) -> None:
        with communicating(_named(self.role), self.ranks):
            while works:
                works[0].wait()
                del works[0]


def post(role: Role, ranks: Ranks, *, send: Sequence[Message] = (), receive: Sequence[Message] = ()) -> Posted:
    """Send and receive as one group. Between two ranks messages arrive in the order in which they were posted."""
    posted, group = Posted(role, ranks, [x for x, _ in send]), group_of(ranks.name)
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in send]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receive]
    if not operations:
        return posted
    with communicating(_named(role), ranks):
        works = dist.batch_isend_irecv(operations)
    if len(works) == len(operations):
        posted.leaving, posted.arriving = works[: len(send)], works[len(send) :]
    else:  # the backend runs the group as one
        posted.arriving = works
    for x, _ in send:
        record(role, sent=x.nbytes)
    for x, _ in receive:
        record(role, received=x.nbytes)
    return posted


def _named(role: Role) -> str:
    return f"sending and receiving {role}"
