"""Ranks on one machine: steps on several processes that share a gloo group, forward and backward."""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import lcm
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding, traffic
from flexdilated.distributed._heads import attend_heads
from flexdilated.distributed.group._ranks import Ranks
from flexdilated.distributed.group._sharding import ShardOrder
from flexdilated.engines import WholeRows

from ._checks import by_definition, relative_error
from ._jobs import Job, Problem, Size, train
from ._processes import run_together
from ._rules import LongNet, Rule

# H query heads, G key/value heads, N tokens, L tokens of a rank, D head dim; the batch is 1

Schedule = Literal["exchange", "ring", "heads"]
NAMES = ("out", "dq", "dk", "dv")
LIMIT_S = 120.0


def on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """function(mesh, *args) on every rank of a mesh of one dimension, one thread each; the results by rank.

    The function must be importable; args and results must pickle. Raises as `run_together` does; `limit_s` is the
    group's timeout too.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        calls = [(_rank, (rank, num_ranks, store, limit_s, function, args)) for rank in range(num_ranks)]
        return run_together(calls, limit_s=limit_s)


def each_on_ranks(num_ranks: int, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """function(mesh, *args) for each args of `calls`, in turn on the same ranks; for each call the results by rank."""
    by_rank = on_ranks(num_ranks, _in_turn, function, tuple(calls))
    return [list(found) for found in zip(*by_rank, strict=True)]


def _in_turn(mesh: DeviceMesh, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [function(mesh, *args) for args in calls]


def _rank(
    rank: int, num_ranks: int, store: str, limit_s: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, num_ranks)  # pyright: ignore[reportPrivateImportUsage]
    timeout = timedelta(seconds=limit_s)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=num_ranks, timeout=timeout)
    try:
        mesh: DeviceMesh = init_device_mesh("cpu", (num_ranks,))
        result = function(mesh, *args)
        # A rank that leaves sooner would take its connections from under those that still work.
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Step:
    """A call, and how it is distributed; "heads" is head parallelism."""

    pattern: str
    size: Size
    num_kv_heads: int
    schedule: Schedule
    order: ShardOrder = "contiguous"
    dtype: str = "float32"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output, whole, the same on every rank."""
        drawn = Problem.draw(self.size)
        kind = getattr(torch, self.dtype)
        q, k, v, grad = (x.to(kind) for x in (drawn.q, drawn.k, drawn.v, drawn.grad))
        return q, k[:, : self.num_kv_heads], v[:, : self.num_kv_heads], grad


@dataclass(frozen=True)
class Taken:
    """Output and gradients of all tokens, and the bytes that each rank sent and received by role."""

    tensors: dict[str, Float[Tensor, "1 _ N D"]]
    sent: list[Counter[str]]
    received: list[Counter[str]]


def take_steps(num_ranks: int, steps: Sequence[Step]) -> list[Taken]:
    """Each step in turn on a group of `num_ranks` processes."""
    taken = []
    for step, found in zip(steps, each_on_ranks(num_ranks, _take, [(step,) for step in steps]), strict=True):
        sharding = Sharding(step.size.num_tokens, num_ranks, order=step.order)
        order = torch.cat([sharding.positions(rank) for rank in range(num_ranks)]).argsort()
        parts = {name: [torch.from_numpy(each[name]) for each in found] for name in NAMES}
        tensors = {name: torch.cat(each, dim=2)[:, :, order] for name, each in parts.items()}
        taken.append(Taken(tensors, [each["sent"] for each in found], [each["received"] for each in found]))
    return taken


def _named(out: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> dict[str, Tensor]:
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, grad)), strict=True))


def take_cut(step: Step, num_ranks: int) -> dict[str, Tensor]:
    """The same tensors in one call for each contiguous shard of queries, over all keys: nothing sent, sums in float64.

    With one rank a plain call; with more the rounding of the kernel in shorter calls.
    """
    q, k, v, grad = step.tensors()
    pattern, grouped = masks.from_json(step.pattern), q.shape[1] != k.shape[1]
    parts = []
    for part, part_grad in zip(q.tensor_split(num_ranks, dim=2), grad.tensor_split(num_ranks, dim=2), strict=True):
        leaves = [x.detach().requires_grad_() for x in (part, k, v)]
        first = sum(out.shape[2] for out, *_ in parts)
        out = fd.attend(leaves[0], leaves[1], leaves[2], pattern, enable_gqa=grouped, q_offset=first)
        parts.append((out.detach(), *torch.autograd.grad(out, leaves, part_grad)))
    outs, dqs, *others = zip(*parts, strict=True)
    sums = (torch.stack([x.double() for x in each]).sum(0).to(q.dtype) for each in others)
    return dict(zip(NAMES, (torch.cat(outs, dim=2), torch.cat(dqs, dim=2), *sums), strict=True))


def by_rule(step: Step, rule: Rule) -> dict[str, Tensor]:
    """The same tensors from the definition, in float64; the rule is written outside of the library."""
    q, k, v, grad = (x[0].double() for x in step.tensors())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    group = q.shape[0] // k.shape[0]
    keys, values = (x.repeat_interleave(group, dim=0) for x in leaves[1:])
    out, _ = by_definition(leaves[0], keys, values, rule, torch.arange(q.shape[1]))
    return {name: x[None] for name, x in _named(out, leaves, grad).items()}


def errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each tensor by name."""
    return {name: relative_error(got[name], wanted[name]) for name in NAMES}


def attend_on(mesh: DeviceMesh, step: Step, sharding: Sharding, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pattern = masks.from_json(step.pattern)
    grouped = q.shape[1] != k.shape[1]
    if step.schedule == "heads":
        out = attend_heads(q, k, v, pattern, ranks=Ranks.of(mesh), sharding=sharding, enable_gqa=grouped)
        assert isinstance(out, Tensor)  # no lse is asked for
        return out
    return fd.distributed.attend(
        q, k, v, pattern, mesh=mesh, sharding=sharding, schedule=step.schedule, enable_gqa=grouped
    )


def local_tensors(mesh: DeviceMesh, step: Step) -> tuple[Sharding, list[Tensor]]:
    """The sharding, and this rank's shards of q, k, v, which want gradients, and of the gradient of the output."""
    sharding = Sharding(step.size.num_tokens, mesh.size(), order=step.order)
    held = sharding.positions(mesh.get_local_rank())
    shards = [x[:, :, held] for x in step.tensors()]
    return sharding, [*(x.requires_grad_() for x in shards[:3]), shards[3]]


def _take(mesh: DeviceMesh, step: Step) -> dict[str, Any]:
    # Arrays of float32: the memory of a tensor would go with the process.
    sharding, (q, k, v, grad) = local_tensors(mesh, step)
    traffic().reset()
    found = _named(attend_on(mesh, step, sharding, q, k, v), (q, k, v), grad)
    arrays, counts = {name: x.float().numpy() for name, x in found.items()}, traffic()
    return {**arrays, "sent": Counter(counts.sent), "received": Counter(counts.received)}


# Ranks that take turns on one device, beside one call: what an exchange and a ring compute. Nothing is sent.

Share = tuple[range, tuple[Tensor, ...]]  # tokens, and summands of their dq, or of dk and dv


def stretches(spec: LongNet, num_tokens: int, num_ranks: int) -> list[tuple[range, range]]:
    """(queries, keys) of each rank: contiguous shards of equal length, and the segments that these lie in."""
    found, size = [], -(-num_tokens // num_ranks)
    for first in range(0, num_tokens, size):
        stop = min(first + size, num_tokens)
        start = min(first // length * length for length in spec.segment_lengths)
        end = max(-(-stop // length) * length for length in spec.segment_lengths)
        found.append((range(first, stop), range(start, stop if spec.causal else min(end, num_tokens))))
    return found


@dataclass(frozen=True, eq=False)
class InTurn:
    """Ranks in turn: each has its queries, and in an exchange all keys that these reach.

    In the backward of a ring the keys come shard by shard: for each the forward again, and the gradients of its output
    and lse: those of the whole rows times the shard's weight in them.
    """

    spec: LongNet
    problem: Problem
    num_ranks: int

    def job(self, what: str) -> Job:
        """Job of all ranks: "forward", "exchange backward" or "ring backward"; its forward is not timed."""
        prepare, run = {
            "forward": (self._inputs, self._forward),
            "exchange backward": (self._before_exchange, _exchange),
            "ring backward": (self._before_ring, self._ring),
        }[what]
        return Job("ranks", run, prepare)

    def error(self, what: str) -> float:
        """The relative error of the ranks' output or gradients, put together, against one call's."""
        job, attention = self.job(what), self.spec.attention()
        assert job.prepare is not None
        found: Any = job.run(job.prepare())
        if what == "forward":
            with torch.no_grad():
                return relative_error(torch.cat(found, dim=2), attention(*self.problem.qkv))
        wanted = train(attention, self.problem)
        totals = [torch.zeros_like(x, dtype=torch.float64) for x in wanted]
        for tokens, parts in found:
            for total, part in zip(totals[:1] if len(parts) == 1 else totals[1:], parts, strict=True):
                _part(total, tokens).add_(part)
        return max(relative_error(total, each) for total, each in zip(totals, wanted, strict=True))

    @property
    def _ranks(self) -> list[tuple[range, range]]:
        return stretches(self.spec, self.problem.q.shape[2], self.num_ranks)

    def _leaves(self, queries: range, keys: range) -> list[Tensor]:
        given = zip(self.problem.qkv, (queries, keys, keys), strict=True)
        return [_part(x, tokens).requires_grad_() for x, tokens in given]

    def _attend(self, queries: range, keys: range, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        """(out, lse). Positions are counted from the last one before both at which every branch begins a segment.

        The rule repeats from there, and ranks of equal offsets share compiled code.
        """
        start = min(queries.start, keys.start) // (period := lcm(*self.spec.segment_lengths)) * period
        offsets: dict[str, Any] = {"q_offset": queries.start - start, "k_offset": keys.start - start}
        return fd.attend(leaves[0], leaves[1], leaves[2], self.spec.pattern(), return_lse=True, **offsets)

    def _inputs(self) -> list[tuple[range, range, list[Tensor]]]:
        """Each rank's own copies."""
        given = [(queries, keys, self._leaves(queries, keys)) for queries, keys in self._ranks]
        return [(q, k, [x.detach().contiguous().requires_grad_() for x in leaves]) for q, k, leaves in given]

    @torch.no_grad()
    def _forward(self, inputs: list[tuple[range, range, list[Tensor]]]) -> list[Tensor]:
        return [self._attend(*each)[0] for each in inputs]

    def _before_exchange(self) -> list[tuple[range, range, list[Tensor], Tensor, Tensor]]:
        return [(*each, self._attend(*each)[0], _part(self.problem.grad, each[0])) for each in self._inputs()]

    def _before_ring(self) -> list[WholeRows]:
        with torch.no_grad():
            out, lse = fd.attend(*self.problem.qkv, self.spec.pattern(), return_lse=True)
        rows = (out, lse, self.problem.grad)
        return [WholeRows(*(_part(x, queries).contiguous() for x in rows)) for queries, _ in self._ranks]

    def _ring(self, rows: list[WholeRows]) -> list[Share]:
        """A rank's dq is summed up over the shards, its own first."""
        found: list[Share] = []
        for (queries, reached), own in zip(self._ranks, rows, strict=True):
            shards = [shard for shard, _ in self._ranks if shard.start < reached.stop and reached.start < shard.stop]
            total = torch.zeros(())
            for keys in sorted(shards, key=lambda shard: shard != queries):
                leaves = self._leaves(queries, keys)
                out, lse = self._attend(queries, keys, leaves)
                dq, dk, dv = torch.autograd.grad((out, lse), leaves, own.gradients_of(out.detach(), lse.detach()))
                total = dq.float() if keys == queries else total.add_(dq)
                found.append((keys, (dk, dv)))
            found.append((queries, (total,)))
        return found


def _exchange(before: list[tuple[range, range, list[Tensor], Tensor, Tensor]]) -> list[Share]:
    found: list[Share] = []
    for queries, keys, leaves, out, grad in before:
        dq, dk, dv = torch.autograd.grad(out, leaves, grad)
        found += [(queries, (dq,)), (keys, (dk, dv))]
    return found


def _part(x: Tensor, tokens: range) -> Tensor:
    return x[:, :, tokens.start : tokens.stop]
