"""Many ranks: collectives, exactness, and what a ring holds at one time."""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from flexdilated import masks
from flexdilated.distributed import _ring, traffic
from flexdilated.distributed.group._ranks import Role
from flexdilated.distributed.group._sharding import Order

from ._jobs import Size
from ._measures import Row, at_most, measure
from ._rank_steps import (
    NAMES,
    Schedule,
    Step,
    attend_on,
    by_rule,
    each_on_ranks,
    errors,
    local_tensors,
    take_alone,
    take_cut,
    take_steps,
)
from ._rules import LONGNET_4, LongNet, Window, dense, longnet_n

_ORDERS: tuple[Order, ...] = ("contiguous", "zigzag")
_SCHEDULES: tuple[Schedule, ...] = ("exchange", "ring", "heads")


@measure("D2", spec=LONGNET_4.shrunk(128), size=Size(128, num_heads=4, head_dim=8), ranks=2, steps=1)
def planning_collectives(
    spec: LongNet = LONGNET_4.shrunk(8),
    size: Size = Size(2048, num_heads=8, head_dim=16),
    ranks: int = 4,
    schedules: tuple[Schedule, ...] = _SCHEDULES,
    steps: int = 4,
) -> Iterator[Row]:
    """How many collectives does a step need besides those that carry keys and gradients?

    Calls of torch.distributed without payload, and checks of agreement, which go through the group's store, in the
    steps after the first. Forward and backward, full and causal, most of any rank.
    """
    both = (spec, spec.as_causal())
    cases: list[tuple[Schedule, LongNet]] = [(schedule, each) for schedule in schedules for each in both]
    taken = [(Step(masks.to_json(each.pattern()), size, size.num_heads, schedule), steps) for schedule, each in cases]
    detail: dict[str, dict[str, dict[str, Any]]] = {schedule: {} for schedule in schedules}
    for (schedule, each), by_rank in zip(cases, each_on_ranks(ranks, count, taken), strict=True):
        detail[schedule][each.label] = {
            "planning_a_step": max((calls.total() - carried) / steps for calls, carried in by_rank),
            "calls_of_each_rank": [dict(calls) for calls, _ in by_rank],
            "transfers_of_payload_of_each_rank": [carried for _, carried in by_rank],
        }
    for schedule, found in detail.items():
        name = f"{spec.name}, {size}, {ranks} ranks, {'head parallel' if schedule == 'heads' else schedule}"
        what = f"{name}: collectives a step that carry no keys, values or gradients, after the first step"
        yield Row(what, at_most(0), max(each["planning_a_step"] for each in found.values()), detail=found)


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
    return calls, sum(transfers[role] for role in ("keys", "gradients", "heads"))


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts every collective and message of this process by its name, below all that may call it."""
    calls: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        yield calls
    for event in profiled.key_averages():
        # What PyTorch's profiler calls them, whoever calls them: Python, an autograd function, a custom operator.
        if event.key.startswith("c10d::"):
            calls[event.key.removeprefix("c10d::")] += event.count


_SHRUNK = LONGNET_4.shrunk(16)
_WINDOW = Window("window of 400", 300, 99)


@measure(
    "D3",
    specs=(LONGNET_4.shrunk(128).as_causal(),),
    size=Size(128, num_heads=4, head_dim=8),
    ranks=(2,),
    orders=("zigzag",),
)
def rank_accuracy(
    specs: tuple[LongNet | Window, ...] = (_SHRUNK, _SHRUNK.as_causal(), dense(1024, causal=True), _WINDOW),
    size: Size = Size(1024, num_heads=8, head_dim=32),
    ranks: tuple[int, ...] = (2, 4, 8),
    schedules: tuple[Schedule, ...] = _SCHEDULES,
    orders: tuple[Order, ...] = _ORDERS,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
) -> list[Row]:
    """Is attention on many ranks as exact as on one?

    Error of output and gradients against float64, over one rank's error; the worst of all rules, schedules and
    orders, with as many key/value heads as query heads and with half. The size must allow an N x N matrix in float64.
    `kernel` beside each case: the ratio where one rank computes the ranks' queries in turn, and nothing is sent.
    """
    heads = (size.num_heads, size.num_heads // 2)
    cases = [
        (spec, Step(masks.to_json(spec.pattern()), size, num_kv_heads, schedule, order, dtype))
        for dtype, spec, schedule, order, num_kv_heads in product(dtypes, specs, schedules, orders, heads)
    ]
    # What one rank computes does not depend on schedule and order.
    problems = {(step.pattern, step.num_kv_heads, step.dtype): (spec, step) for spec, step in cases}
    wanted = {key: by_rule(step, spec) for key, (spec, step) in problems.items()}
    alone = {key: errors(take_alone(step), wanted[key]) for key, (_, step) in problems.items()}
    rows = []
    for num_ranks in ranks:
        # All steps are taken by the same processes, which know the plans from the first one on.
        taken = take_steps(num_ranks, [step for _, step in cases])
        kernel = {
            key: _over(errors(take_cut(step, num_ranks), wanted[key]), alone[key])
            for key, (_, step) in problems.items()
        }
        detail: dict[str, dict[str, dict[str, Any]]] = {dtype: {} for dtype in dtypes}
        for (spec, step), found in zip(cases, taken, strict=True):
            key = step.pattern, step.num_kv_heads, step.dtype
            many = errors(found.tensors, wanted[key])
            name = f"{spec.label}; {step.schedule}, {step.order}, {step.num_kv_heads} heads of keys"
            beside = {"kernel": kernel[key], "many": many, "one": alone[key]}
            detail[step.dtype][name] = {**_over(many, alone[key]), **beside}
        rows += [
            _accuracy_row(f"{dtype}, {size.num_tokens} tokens, {num_ranks} ranks", detail[dtype]) for dtype in dtypes
        ]
    return sorted(rows, key=lambda row: dtypes.index(row.measure.partition(",")[0]))


def _accuracy_row(name: str, cases: Mapping[str, Mapping[str, Any]]) -> Row:
    worst = {case: max(found[tensor] for tensor in NAMES) for case, found in cases.items()}
    kernel = max(case["kernel"][tensor] for case in cases.values() for tensor in NAMES)
    detail = {"worst": max(worst, key=worst.__getitem__), "worst_of_kernel": kernel, "cases": dict(cases)}
    what = f"{name}: error of out, dq, dk, dv over one rank's"
    return Row(what, at_most(1.1, "×"), max(worst.values()), detail=detail)


def _over(many: Mapping[str, float], one: Mapping[str, float]) -> dict[str, float]:
    return {name: many[name] / one[name] for name in NAMES}


_PARTS = ("forward", "backward")
_ROLES: dict[Role, str] = {"keys": "K and V", "gradients": "gradients of K and V"}


@measure("D5", specs=(dense(256, causal=False),), size=Size(256, num_heads=2, head_dim=8), ranks=(4,))
def ring_memory(
    specs: tuple[LongNet, ...] = (dense(4096, causal=False), longnet_n(4096)),
    size: Size = Size(4096, num_heads=4, head_dim=32),
    ranks: tuple[int, ...] = (2, 4, 8),
) -> Iterator[Row]:
    """How many shards of other ranks' keys and values does a ring hold at one time?

    Buffers that messages come into or go out of, each until it is freed; the most of any rank. Causal in zigzag, full
    in contiguous shards. Counted in numbers, not in bytes: gradients may travel wider than what they are of.
    """
    for num_ranks in ranks:
        ways: list[tuple[LongNet, Order]] = []
        for spec in specs:
            ways.append((spec, "contiguous"))
            ways.append((spec.as_causal(), "zigzag"))
        steps = [(Step(masks.to_json(spec.pattern()), size, size.num_heads, "ring", order),) for spec, order in ways]
        cases = {
            f"{spec.label}, {order}": {
                f"{part}, {role}": max(most[part][role] for most in by_rank) for part in _PARTS for role in _ROLES
            }
            for (spec, order), by_rank in zip(ways, each_on_ranks(num_ranks, peaks, steps), strict=True)
        }
        for role, what in _ROLES.items():
            name = f"dense and LongNet, {size}, {num_ranks} ranks, ring: shards of others' {what} held at one time"
            most = max(case[f"{part}, {role}"] for case in cases.values() for part in _PARTS)
            yield Row(name, at_most(2, "shards"), most, detail=cases)


def peaks(mesh: DeviceMesh, step: Step) -> dict[str, Counter[str]]:
    """For each part of a step and each role, the most elements in transfer buffers at once over those of K and V."""
    sharding, (q, k, v, grad) = local_tensors(mesh, step)
    shard = max(sharding.lengths) * 2 * k.shape[1] * k.shape[3]
    found = {}
    with held_buffers(q, k, v) as held:
        out = attend_on(mesh, step, sharding, q, k, v)
        found["forward"] = held.restart()
        torch.autograd.grad(out, (q, k, v), grad)
        found["backward"] = held.restart()
    assert held.live.total() == 0, f"buffers must be freed after the step; got {held.live}"
    return {part: Counter({role: number / shard for role, number in most.items()}) for part, most in found.items()}


@dataclass
class Held:
    """Elements in buffers that are alive, by role, and the most at once."""

    live: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)
    known: set[int] = field(default_factory=set)

    def hold(self, x: Tensor, role: str) -> None:
        """Count the whole storage of this tensor until it is freed."""
        storage = x.untyped_storage()
        key, number = storage._cdata, storage.nbytes() // x.element_size()
        if key not in self.known:
            self.known.add(key)
            self.live[role] += number
            self.peak[role] = max(self.peak[role], self.live[role])
            weakref.finalize(storage, self._drop, key, role, number).atexit = False

    def restart(self) -> Counter[str]:
        """The peaks so far, which are forgotten."""
        found, self.peak = self.peak, Counter(self.live)
        return found

    def _drop(self, key: int, role: str, number: int) -> None:
        self.known.discard(key)
        self.live[role] -= number


@contextmanager
def held_buffers(*own: Tensor) -> Iterator[Held]:
    """Counts what the ring hands to its messages; the rank's `own` tensors are no buffers."""
    held = Held()
    held.known |= {x.untyped_storage()._cdata for x in own}
    post = _ring.post

    def counting(role: Role, *args: Any, send: Any = (), receive: Any = (), **options: Any) -> Any:
        for x, _ in (*send, *receive):
            held.hold(x, role)
        return post(role, *args, send=send, receive=receive, **options)

    with patch.object(_ring, "post", counting):
        yield held
