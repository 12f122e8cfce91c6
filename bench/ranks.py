"""Many ranks: bytes received, load balance, collectives, exactness, and the memory of a ring."""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from flexdilated import masks
from flexdilated.distributed import Sharding, _ring, traffic
from flexdilated.distributed.counts._loads import token_counts
from flexdilated.distributed.counts._tokens import work_of_ranks
from flexdilated.distributed.group._ranks import Role
from flexdilated.distributed.group._sharding import ShardOrder

from ._jobs import Size, tokens_text
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
    take_cut,
    take_steps,
)
from ._rules import LONGNET_4, LONGNET_5, LongNet, Window, dense, longnet_n

# N tokens

Ranges = Sequence[range]
_EXACT = 1e-5  # relative, float32: ten times the error of attention in float32
_MILLION = 1 << 20
_ORDERS: tuple[ShardOrder, ...] = ("contiguous", "zigzag")
_SCHEDULES: tuple[Schedule, ...] = ("exchange", "ring", "heads")


@dataclass(frozen=True)
class Heads:
    """Query heads, and the key/value heads that equal groups of them share."""

    num_heads: int
    num_kv_heads: int

    def of(self, kv_head: int) -> range:
        """The query heads that read a key/value head."""
        group = self.num_heads // self.num_kv_heads
        return range(kv_head * group, (kv_head + 1) * group)


@measure(
    "D1",
    counted=longnet_n(65536).shrunk(16),
    counted_tokens=4096,
    heads=(Heads(4, 2),),
    run=longnet_n(4096).shrunk(16),
    size=Size(256, 4, head_dim=8),
    ranks=(2,),
)
def exchange_bytes(
    counted: LongNet = longnet_n(_MILLION),
    counted_tokens: int = _MILLION,
    counted_ranks: int = 8,
    heads: tuple[Heads, ...] = (Heads(16, 16), Heads(16, 4)),
    run: LongNet = longnet_n(4096),
    size: Size = Size(4096, num_heads=4),
    ranks: tuple[int, ...] = (2, 4, 8),
) -> Iterator[Row]:
    """Does each rank receive just the keys and values that its queries need?

    Over the marks of the rule in closed form, where nothing runs (`counted`) and where ranks do.
    """
    for spec in (counted, counted.as_causal()):
        yield counted_row(spec, counted_tokens, counted_ranks, heads)
    for num_ranks in ranks:
        yield _sent_row(run, size, num_ranks)


def counted_row(spec: LongNet, num_tokens: int, num_ranks: int, heads: Sequence[Heads]) -> Row:
    """The worst rank of any order and number of key/value heads; in the detail an all-gather's tokens."""
    cases = {}
    for order, each in product(_ORDERS, heads):
        least = least_received(spec, num_tokens, shard_ranges(num_tokens, num_ranks, order), each)
        sharding = Sharding(num_tokens, num_ranks, order=order)
        sizes = {"num_heads": each.num_heads, "num_kv_heads": each.num_kv_heads}
        counts = token_counts(spec.pattern(), sharding, **sizes)["exchange"]
        all_gather = (num_tokens - num_tokens // num_ranks) * each.num_kv_heads
        cases[f"{order}, {each.num_heads} heads, {each.num_kv_heads} of keys"] = {
            "ratio": _worst(counts.fill_diagonal_(0).sum(1).tolist(), least),
            "tokens_a_kv_head": [number / each.num_kv_heads for number in least],
            "all_gather_tokens_a_kv_head": all_gather / each.num_kv_heads,
            "all_gather_ratio": num_ranks * all_gather / sum(least),
        }
    what = f"{spec.label}, {tokens_text(num_tokens)}, {num_ranks} ranks, counted: K and V received over the least"
    return Row(what, at_most(1.0, "×"), max(case["ratio"] for case in cases.values()), detail=cases)


def _sent_row(run: LongNet, size: Size, num_ranks: int) -> Row:
    """The bytes that ranks count as they receive them; the results are checked first, against one rank's."""
    cases = [
        (spec, Step(masks.to_json(spec.pattern()), size, num_kv_heads, "exchange", order))
        for spec in (run, run.as_causal())
        for order in _ORDERS
        for num_kv_heads in (size.num_heads, size.num_heads // 2)
    ]
    detail = {}
    for (spec, step), found in zip(cases, take_steps(num_ranks, [step for _, step in cases]), strict=True):
        off = errors(found.tensors, take_cut(step, 1))
        assert max(off.values()) <= _EXACT, f"ranks must compute what one rank does; {step} is off by {off}"
        shards = shard_ranges(size.num_tokens, num_ranks, step.order)
        least = least_received(spec, size.num_tokens, shards, Heads(size.num_heads, step.num_kv_heads))
        row = 2 * size.head_dim * getattr(torch, step.dtype).itemsize  # bytes of a token's K and V
        name = f"{'causal' if spec.causal else 'full'}, {step.order}, {step.num_kv_heads} heads of keys"
        detail[name] = {
            # Keys are received; their gradients are sent back to their owners.
            "ratio": _worst([counts["keys"] / row for counts in found.received], least),
            "gradient_ratio": _worst([counts["gradients"] / row for counts in found.sent], least),
            "tokens_a_kv_head": [number / step.num_kv_heads for number in least],
            "received_bytes": [counts["keys"] for counts in found.received],
            "least_bytes": [row * number for number in least],
        }
    ratios = [case[which] for case in detail.values() for which in ("ratio", "gradient_ratio")]
    what = f"{run.name}, full and causal, {size}, {num_ranks} ranks, run: K and V received, and gradients sent"
    return Row(f"{what}, over the least", at_most(1.0, "×"), max(ratios), detail=detail)


def _worst(received: Sequence[float], least: Sequence[int]) -> float:
    assert all(got == 0 for got, needed in zip(received, least, strict=True) if needed == 0)
    return max((got / needed for got, needed in zip(received, least, strict=True) if needed), default=1.0)


@measure("D4", specs=(LONGNET_5.shrunk(64).as_causal(),), tokens=(4096,), num_heads=4, ranks=(4,))
def work_balance(
    specs: tuple[LongNet, ...] = (LONGNET_4.as_causal(), LONGNET_5.as_causal()),
    tokens: tuple[int, ...] = (1 << 17, 1 << 20),
    num_heads: int = 16,
    ranks: tuple[int, ...] = (8, 64),
) -> Iterator[Row]:
    """Do ranks that hold early and late tokens of a causal sequence compute alike?

    Load imbalance, the most over the mean useful pairs of a rank, in zigzag; in the detail also in contiguous shards.
    """
    for num_tokens in tokens:
        for spec in (*specs, dense(num_tokens, causal=True)):
            keys = keys_of_queries(spec, num_tokens, num_heads)
            for num_ranks in ranks:
                balance = {}
                for order in ("zigzag", "contiguous"):
                    shards = shard_ranges(num_tokens, num_ranks, order)
                    counted = [sum(int(keys[each.start : each.stop].sum()) for each in shard) for shard in shards]
                    sharding = Sharding(num_tokens, num_ranks, order=order)
                    found = work_of_ranks(spec.pattern(), sharding, num_heads=num_heads).tolist()
                    assert found == counted, f"the library's count must be that of the rule; got {found} for {counted}"
                    imbalance = max(counted) * num_ranks / sum(counted)
                    balance[order] = {"max_over_mean": imbalance, "pairs_of_each_rank": counted}
                name = f"{spec.label}, {tokens_text(num_tokens)}, {num_ranks} ranks, zigzag"
                worst = balance["zigzag"]["max_over_mean"]
                yield Row(f"{name}: most over mean pairs of a rank", at_most(1.05, "×"), worst, detail=balance)


def keys_of_queries(spec: LongNet, num_tokens: int, num_heads: int) -> Int64[Tensor, " N"]:
    """The keys of each query of a causal spec, over all heads and branches, from the rule."""
    keys = torch.zeros(num_tokens, dtype=torch.int64)
    for length, rate in spec.branches:
        for head in range(num_heads):
            for start in range(0, num_tokens, length):
                # An active token has the active tokens of its segment before it, and itself.
                active = keys[start + head % rate : min(start + length, num_tokens) : rate]
                active += torch.arange(1, len(active) + 1)
    return keys


# The keys that a rank needs and does not hold, marked token by token: the least that an exchange can send, written from
# LongNet's rule without the library's plans.


def shard_ranges(num_tokens: int, num_ranks: int, order: ShardOrder) -> list[Ranges]:
    """The tokens of each rank: one piece of equal length, or in zigzag the r-th of 2W pieces and the r-th from the end.

    `num_tokens` is a multiple of the pieces.
    """
    num_pieces = num_ranks * (2 if order == "zigzag" else 1)
    size, rest = divmod(num_tokens, num_pieces)
    assert not rest, f"shards must be equal; got {num_tokens} tokens in {num_pieces} pieces"
    pieces = [range(first, first + size) for first in range(0, num_tokens, size)]
    if order == "zigzag":
        return [(pieces[rank], pieces[-1 - rank]) for rank in range(num_ranks)]
    return [(piece,) for piece in pieces]


def least_received(spec: LongNet, num_tokens: int, shards: Sequence[Ranges], heads: Heads) -> list[int]:
    """For each rank, (token, key/value head) pairs outside its shard that its queries may attend to."""
    least = [0] * len(shards)
    for (rank, shard), kv_head in product(enumerate(shards), range(heads.num_kv_heads)):
        marks = torch.zeros(num_tokens, dtype=torch.bool)
        for length, rate in spec.branches:
            for offset, piece in product({head % rate for head in heads.of(kv_head)}, shard):
                _mark(marks, piece, length, rate, offset, causal=spec.causal)
        for piece in shard:
            marks[piece.start : piece.stop] = False
        least[rank] += int(marks.sum())
    return least


def _mark(marks: Bool[Tensor, " N"], queries: range, length: int, rate: int, offset: int, *, causal: bool) -> None:
    """The active tokens of each segment in which one of the queries is active; if causal, up to the last such query."""
    num_tokens = len(marks)
    for start in range(queries.start // length * length, queries.stop, length):
        end = min(start + length, num_tokens)
        active = range(start + offset, end, rate)
        first = -(-(max(queries.start, start) - active.start) // rate)
        among = active[max(0, first) : max(0, -(-(min(queries.stop, end) - active.start) // rate))]
        if among:
            marks[active.start : among[-1] + 1 if causal else end : rate] = True


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
    orders: tuple[ShardOrder, ...] = _ORDERS,
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
    alone = {key: errors(take_cut(step, 1), wanted[key]) for key, (_, step) in problems.items()}
    rows = []
    for num_ranks in ranks:
        # All steps are taken by the same processes, which know the plans from the first one on.
        taken = take_steps(num_ranks, [step for _, step in cases])
        cut = {key: errors(take_cut(step, num_ranks), wanted[key]) for key, (_, step) in problems.items()}
        kernel = {key: _over(found, alone[key]) for key, found in cut.items()}
        detail: dict[str, dict[str, dict[str, Any]]] = {dtype: {} for dtype in dtypes}
        for (spec, step), found in zip(cases, taken, strict=True):
            key = step.pattern, step.num_kv_heads, step.dtype
            many = errors(found.tensors, wanted[key])
            name = f"{spec.label}; {step.schedule}, {step.order}, {step.num_kv_heads} heads of keys"
            beside = {"kernel": kernel[key], "many": many, "one": alone[key]}
            detail[step.dtype][name] = {**_over(many, alone[key]), **beside}
        for dtype, each in detail.items():
            worst = {case: max(found[tensor] for tensor in NAMES) for case, found in each.items()}
            own = max(case["kernel"][tensor] for case in each.values() for tensor in NAMES)
            about = {"worst": max(worst, key=worst.__getitem__), "worst_of_kernel": own, "cases": each}
            what = f"{dtype}, {size.num_tokens} tokens, {num_ranks} ranks: error of out, dq, dk, dv over one rank's"
            rows.append(Row(what, at_most(1.1, "×"), max(worst.values()), detail=about))
    return sorted(rows, key=lambda row: dtypes.index(row.measure.partition(",")[0]))


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
        full: list[tuple[LongNet, ShardOrder]] = [(spec, "contiguous") for spec in specs]
        ways = [*full, *((spec.as_causal(), _ORDERS[1]) for spec in specs)]
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
    """For each part of a step and each role, peak elements of transfer buffers over those of K and V."""
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
