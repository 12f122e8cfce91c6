"""Traffic: bytes that this process has sent and received, by purpose."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, get_args

from ...masks.core import require_choice

Role = Literal["keys", "gradients", "heads", "shards", "set-up"]


@dataclass
class Traffic:
    """Payload bytes sent and received, and number of transfers, by role, since the process began or since `reset`.

    keys: K and V sent to queries. gradients: of K and V, sent back. heads: exchanges of head parallelism. shards:
    `unshard` and its gradient, and so the gathers of a `SelectedAttention`. set-up: the check that all ranks agree, and
    the choice of codec "auto". A transfer is one collective, or one message to or from another rank.

    >>> sent = fd.distributed.traffic().sent  # bytes, by role
    """

    sent: Counter[Role] = field(default_factory=Counter)
    received: Counter[Role] = field(default_factory=Counter)
    transfers: Counter[Role] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def reset(self) -> None:
        """Count from 0 again."""
        with self._lock:
            for counter in (self.sent, self.received, self.transfers):
                counter.clear()

    def add(self, role: Role, sent: int, received: int) -> None:
        """Count one transfer."""
        require_choice("role", role, get_args(Role))
        with self._lock:
            self.sent[role] += sent
            self.received[role] += received
            self.transfers[role] += 1


_traffic = Traffic()


def traffic() -> Traffic:
    """The counts of this process.

    >>> print(sum(fd.distributed.traffic().sent.values()), 'bytes')
    0 bytes
    """
    return _traffic


def record(role: Role, *, sent: int = 0, received: int = 0) -> None:
    """Count a transfer of this process, in bytes."""
    _traffic.add(role, sent, received)
