"""Fastest measured Choice of each call, for the life of the process."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..masks.planning import Choice
from ._call_key import CallKey


class TuningKey(NamedTuple):
    """Key of a measurement: the call, the kind of device, the dtype and the head dim."""

    call: CallKey
    kind: str
    dtype: str
    head_dim: int

    @classmethod
    def of(cls, call: CallKey, q: Tensor) -> TuningKey:
        return cls(call, q.device.type, str(q.dtype), int(q.shape[-1]))  # symbolic in a trace


class TuningResult(NamedTuple):
    """Fastest choice; `backward`: the measurement included the backward."""

    choice: Choice
    backward: bool


results: dict[TuningKey, TuningResult] = {}


def chosen(call: CallKey, q: Tensor) -> Choice | None:
    """The fastest measured choice for a call; None if it was not measured."""
    result = results.get(TuningKey.of(call, q)) if results else None
    return None if result is None else result.choice


def num_measured() -> int:
    """Number of calls with a result."""
    return len(results)
