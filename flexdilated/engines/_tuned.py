"""Results of tuning: the fastest measured choice of the planner's options for each call, until the process ends."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..masks.planning import Choice
from ._call import Call


class TuningKey(NamedTuple):
    """Key of a measurement: the call, the type of device ("cpu", "cuda", ...), the dtype and the head dim."""

    call: Call
    kind: str
    dtype: str
    head_dim: int

    @classmethod
    def of(cls, call: Call, q: Tensor) -> TuningKey:
        return cls(call, q.device.type, str(q.dtype), int(q.shape[-1]))  # symbolic in a trace


results: dict[TuningKey, tuple[Choice, bool]] = {}  # fastest choice; True if it was measured with the backward


def measured_choice(call: Call, q: Tensor) -> Choice | None:
    """Return the planner options that were the fastest for this call; None if it was not measured.

    q: a query tensor of the call, for the type of device, dtype and head dim.
    """
    return results.get(TuningKey.of(call, q), (None,))[0] if results else None


def num_measured() -> int:
    """Return the number of `results`."""
    return len(results)
