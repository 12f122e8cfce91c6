"""Step time: how long a forward and a backward over many ranks should take, by the cost model and the links."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ..masks.core._pattern import Expression
from ..masks.orders._layout import Layout
from ..masks.planning._cost import cost_of
from ..masks.planning._planner import plan
from ..masks.planning.machine._machine_in_use import machine_of
from ..memory._memory import AttentionSize
from ._links import Links

# W ranks


@dataclass(frozen=True)
class Computing:
    """Seconds that each rank computes for."""

    forward: Float64[Tensor, " W"]
    backward: Float64[Tensor, " W"]


@dataclass(frozen=True)
class StepTime:
    """Seconds of the rank that takes longest, each number for itself.

    forward and backward are of a rank's computing and communicating together: one after the other in an exchange and
    an all-gather, both at once in a ring.
    """

    keys: float
    gradients: float
    computing: float
    forward: float
    backward: float

    @property
    def step(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def computing_time(pattern: Expression, size: AttentionSize, work: Int64[Tensor, " W"], *, device: str) -> Computing:
    """What the cost model predicts for one device with all tokens, given to the ranks in proportion to their pairs."""
    tokens = size.num_tokens
    bound = pattern.bind(num_heads=size.num_heads, num_queries=tokens, num_keys=tokens)
    machine = machine_of(device)
    terms, sizes = plan(bound, device=device).terms, {"head_dim": size.head_dim, "element_bytes": size.dtype.itemsize}
    seconds = size.batch * cost_of(terms, machine, Layout(tokens), **sizes).seconds
    forward = seconds * work.double() / work.sum().clamp(min=1)
    return Computing(forward, machine.backward_ratio * forward)


def step_time(
    computing: Computing,
    links: Links,
    *,
    keys: Int64[Tensor, "W W"],
    gradients: Int64[Tensor, "W W"],
    overlapped: bool,
) -> StepTime:
    """A step in which rank i receives keys[i, j] bytes from rank j, and sends gradients[i, j] back to it.

    overlapped: communication goes on while a rank computes, and the keys come again in the backward, as in a ring.
    """
    fetch, give_back = links.seconds(keys), links.seconds(gradients.T)
    if overlapped:
        forward = torch.maximum(fetch, computing.forward)
        backward = torch.maximum(fetch + give_back, computing.backward)
    else:
        forward, backward = fetch + computing.forward, computing.backward + give_back
    parts = (fetch, give_back, computing.forward + computing.backward, forward, backward)
    return StepTime(*(float(each.max()) for each in parts))
