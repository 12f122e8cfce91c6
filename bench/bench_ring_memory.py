"""How many shards of other ranks' keys and values does a ring hold at one time?"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import masks
from flexdilated.distributed.group._sharding import Order
from flexdilated.distributed.group._traffic import Role
from flexdilated.distributed.ring import _transfers

from ._longnets import LongNet, dense, longnet_n
from ._problem import Size
from ._rank_step import Step, attend_on, local_tensors
from ._ranks import each_on_ranks
from ._result import Result, Row, at_most

_TARGET = at_most(2, "shards")
_PARTS = ("forward", "backward")
_ROLES: dict[Role, str] = {"keys": "K and V", "gradients": "gradients of K and V"}


@dataclass(frozen=True)
class Config:
    """Each rule, causal in zigzag and full in contiguous shards, on so many ranks."""

    specs: tuple[LongNet, ...]
    size: Size
    ranks: tuple[int, ...]


FULL = Config((dense(4096, causal=False), longnet_n(4096)), Size(4096, num_heads=4, head_dim=32), (2, 4, 8))
SMALL = Config((dense(256, causal=False),), Size(256, num_heads=2, head_dim=8), (4,))


def run(config: Config) -> Result:
    """D5: buffers that messages come into or go out of, each until it is freed; the most of any rank.

    Counted in numbers, not in bytes: gradients may travel wider than what they are of.
    """
    return Result(tuple(row for num_ranks in config.ranks for row in _rows(config, num_ranks)))


def _rows(config: Config, num_ranks: int) -> list[Row]:
    """One row for keys and one for gradients: the peak over rules and orders of what each part holds."""
    ways = [way for spec in config.specs for way in _ways(spec)]
    heads = config.size.num_heads
    steps = [Step(masks.to_json(spec.pattern()), config.size, heads, "ring", order) for spec, order in ways]
    found = each_on_ranks(num_ranks, peaks, [(step,) for step in steps])
    cases = {
        f"{spec.label}, {order}": {
            f"{part}, {role}": max(most[part][role] for most in by_rank) for part in _PARTS for role in _ROLES
        }
        for (spec, order), by_rank in zip(ways, found, strict=True)
    }
    return [
        Row(
            f"dense and LongNet, {config.size}, {num_ranks} ranks, ring: shards of others' {what} held at one time",
            _TARGET,
            max(case[f"{part}, {role}"] for case in cases.values() for part in _PARTS),
            detail=cases,
        )
        for role, what in _ROLES.items()
    ]


def _ways(spec: LongNet) -> tuple[tuple[LongNet, Order], ...]:
    return (spec, "contiguous"), (spec.as_causal(), "zigzag")


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
    post = _transfers.post

    def counting(role: Role, *args: Any, send: Any = (), receive: Any = (), **options: Any) -> Any:
        for x, _ in (*send, *receive):
            held.hold(x, role)
        return post(role, *args, send=send, receive=receive, **options)

    with patch.object(_transfers, "post", counting):
        yield held
