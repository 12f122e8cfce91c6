"""What a rank is told when its peers fail it: which step, which rank, how long it waited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import DistError

from ._agreement import begun_elsewhere
from ._group_timeout import timeout_of
from ._ranks import Ranks


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
