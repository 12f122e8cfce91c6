"""Fastest measured Choice of each call, for the life of the process."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..masks.planning import Choice
from ._call import Call


class TuningKey(NamedTuple):
    """Key of a measurement: the call, the kind of device, the dtype and the head dim."""

    call: Call
    kind: str
    dtype: str
    head_dim: int

    @classmethod
    def of(cls, call: Call, q: Tensor) -> TuningKey:
        return cls(call, q.device.type, str(q.dtype), int(q.shape[-1]))  # symbolic in a trace


results: dict[TuningKey, tuple[Choice, bool]] = {}  # the fastest; True if it was measured with the backward


def chosen(call: Call, q: Tensor) -> Choice | None:
    """The fastest measured choice for a call; None if it was not measured."""
    return results.get(TuningKey.of(call, q), (None,))[0] if results else None


def num_measured() -> int:
    """Number of calls with a result."""
    return len(results)
