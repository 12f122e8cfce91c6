"""Messages between ranks: posted together, waited for later, counted; and what is raised when a peer fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError

from ...masks.core import device_kind
from ._agreement import begun_elsewhere
from ._ranks import Ranks, group_of, timeout_of
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
        if not device_kind(self.ranks.device_type).on_host:
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


@contextmanager
def communicating(what: str, ranks: Ranks) -> Iterator[None]:
    """Around transfers, and the waits for them, and nothing else: a failure says what failed, where and when.

    what: the transfer, as the subject of a sentence: "the exchange of keys". Raises torch.distributed.DistError, which
    is a RuntimeError, for what gloo and NCCL raise when a peer has died or is not heard of within the group's timeout.
    (Where NCCL does not block on a wait, which is its default, its watchdog ends the process instead.)
    """
    start = time.monotonic()
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # what gloo raises has no class of its own
        elapsed_s = time.monotonic() - start
        raise DistError(
            f"rank {ranks.rank} of {ranks.size}: {what} failed after {elapsed_s:.1f} s; the timeout of the process "
            f"group is {timeout_of(ranks).total_seconds():g} s. A peer may have died or hang, or not run this pass. "
            f"{begun_elsewhere(ranks)}"
            f"\ntorch says: {error}"
        ) from error
