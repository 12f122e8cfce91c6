"""How many collectives does a step need besides those that carry keys and gradients?"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from flexdilated import masks
from flexdilated.distributed import traffic

from ._longnets import LONGNET_4, LongNet
from ._problem import Size
from ._rank_step import Schedule, Step, attend_on, local_tensors
from ._ranks import each_on_ranks
from ._result import Result, Row, at_most

_NAMES: dict[Schedule, str] = {"exchange": "exchange", "ring": "ring", "heads": "head parallel"}
_PAYLOAD = ("keys", "gradients", "heads")
# What PyTorch's profiler calls them, whoever calls them: Python, an autograd function, a custom operator.
_PREFIX = "c10d::"


@dataclass(frozen=True)
class Config:
    """A LongNet, full and causal, by each schedule on so many ranks; `steps` after the first are counted."""

    spec: LongNet
    size: Size
    ranks: int
    schedules: tuple[Schedule, ...]
    steps: int


FULL = Config(LONGNET_4.shrunk(8), Size(2048, num_heads=8, head_dim=16), 4, ("exchange", "ring", "heads"), 4)
SMALL = Config(LONGNET_4.shrunk(64), Size(256, num_heads=4, head_dim=8), 2, ("exchange", "ring", "heads"), 2)


def run(config: Config) -> Result:
    """D2: calls of torch.distributed without payload, and checks of agreement, which go through the group's store.

    Forward and backward, most of any rank.
    """
    specs, heads = (config.spec, config.spec.as_causal()), config.size.num_heads
    cases = [
        (schedule, spec, Step(masks.to_json(spec.pattern()), config.size, heads, schedule))
        for schedule in config.schedules
        for spec in specs
    ]
    counted = each_on_ranks(config.ranks, count, [(step, config.steps) for _, _, step in cases])
    detail: dict[str, dict[str, dict[str, Any]]] = {schedule: {} for schedule in config.schedules}
    for (schedule, spec, _), by_rank in zip(cases, counted, strict=True):
        detail[schedule][spec.label] = {
            "planning_a_step": max((calls.total() - carried) / config.steps for calls, carried in by_rank),
            "calls_of_each_rank": [dict(calls) for calls, _ in by_rank],
            "transfers_of_payload_of_each_rank": [carried for _, carried in by_rank],
        }
    return Result(tuple(_row(config, schedule, detail[schedule]) for schedule in config.schedules))


def _row(config: Config, schedule: Schedule, detail: dict[str, dict[str, Any]]) -> Row:
    measure = (
        f"{config.spec.name}, {config.size}, {config.ranks} ranks, {_NAMES[schedule]}: collectives a step that carry "
        "no keys, values or gradients, after the first step"
    )
    return Row(measure, at_most(0), max(each["planning_a_step"] for each in detail.values()), detail=detail)


def count(mesh: DeviceMesh, step: Step, steps: int) -> tuple[Counter[str], int]:
    """Calls in the steps after the first, by name, and the transfers of payload among them."""
    sharding, (q, k, v, grad) = local_tensors(mesh, step)

    def take() -> None:
        torch.autograd.grad(attend_on(mesh, step, sharding, q, k, v), (q, k, v), grad)

    take()
    traffic().reset()
    with counted_calls() as calls:
        for _ in range(steps):
            take()
    transfers = traffic().transfers
    calls["check of agreement"] = transfers["set-up"]
    return calls, sum(transfers[role] for role in _PAYLOAD)


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts every collective and message of this process by its name, below all that may call it."""
    calls: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        yield calls
    for event in profiled.key_averages():
        if event.key.startswith(_PREFIX):
            calls[event.key.removeprefix(_PREFIX)] += event.count
