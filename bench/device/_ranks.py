"""Eight ranks on one device, one after the other, beside one call: what an exchange and a ring compute.

Communication is left out: each rank is given its queries and just the keys that these can reach, and the sum of
the ranks' times is compared. Keys that no query of the rank may see are not among them where they lie outside
the rank's segments; within these the plan leaves them out. In an exchange a rank has these keys at once, in a ring
shard by shard.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import lcm
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import flexdilated as fd
from flexdilated.engines import WholeRows

from .._jobs import Attention, Job, Problem, Size, backward_job, forward_job
from .._measures import Gap, Row, Target, Timing, at_most
from .._rules import LONGNET_5, Contestant, LongNet, Part
from ._device import LARGE, TINY, TINY_SIZE, TRAINING, Comparison, Where, compare, device_row

# H heads, N tokens of all ranks, L of a shard, D head dim; the batch is 1

Whole = Float[Tensor, "1 H N D"]


@dataclass(frozen=True)
class Shard:
    """A rank's queries and the keys that they can reach."""

    queries: range
    keys: range

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: LongNet) -> Tensor:
        """The rank's output from the rank's own tensors.

        Positions are counted from the last place before the keys at which every branch begins a segment: the rule is
        the same from there, and ranks that lie alike share what is compiled, as they would not in one process else.
        """
        period = lcm(*spec.segment_lengths)
        start = self.keys.start // period * period
        return fd.attend(q, k, v, spec.pattern(), q_offset=self.queries.start - start, k_offset=self.keys.start - start)

    def cut(self, problem: Problem) -> Problem:
        """The rank's own copies."""
        queries, keys = (slice(side.start, side.stop) for side in (self.queries, self.keys))
        q, grad = (x[:, :, queries].contiguous() for x in (problem.q, problem.grad))
        k, v = (x[:, :, keys].contiguous() for x in (problem.k, problem.v))
        return Problem(q, k, v, grad)


@device_row(
    "G11", at_most(1.10, "×"), at_most(1.45, "×"),
    full={"spec": LONGNET_5, "size": replace(LARGE, repeats=3), "ranks": 8},
    small={"spec": TINY, "size": TINY_SIZE, "ranks": 4},
    needs=(*TRAINING, "offsets forward", "offsets backward"), limit_s=150, rehearsed=True,
)  # fmt: skip
def gpu_ranks(where: Where, spec: LongNet, size: Size, ranks: int) -> Iterator[Row | Gap]:
    """What do eight ranks compute, one after the other on one device, over what one call computes?

    Equal, contiguous shards; the sum over the ranks over one call; forward and backward.
    """
    problem, label = where.draw(size), f"{spec.label}, {size}, {ranks} ranks on one device"
    one_call = Contestant("one call", spec.attention(), problem, spec)
    held = shards(spec, size.num_tokens, ranks)
    parts: dict[str, Part] = {"forward": "forward", "exchange backward": "backward"}
    for name, part in parts.items():
        make = forward_job if part == "forward" else backward_job
        jobs = [
            make(f"rank {rank}", partial(shard.attend, spec=spec), shard.cut(problem))
            for rank, shard in enumerate(held)
        ]
        together = Contestant("all ranks", on_ranks(spec, held), problem, spec)
        found = compare([one_call, together], where, part=part, repeats=size.repeats, extra=jobs)
        detail = {"keys_of_each_rank": [len(shard.keys) for shard in held]}
        yield _row(f"{label}, {name}", at_most(1.10, "×"), found, jobs, detail)

    # Output and lse of all rows, which a ring's forward leaves, are there before the clock runs.
    @cache
    def forward() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return fd.attend(problem.q, problem.k, problem.v, spec.pattern(), return_lse=True)

    ring = ring_ranks(spec, held)
    jobs = [each.job(f"rank {rank}", problem, forward) for rank, each in enumerate(ring)]
    together = Contestant("all ranks", as_attention(spec, ring), problem, spec)
    found = compare([one_call, together], where, part="backward", repeats=size.repeats, extra=jobs)
    detail = {"shards_of_each_rank": [len(each.shards) for each in ring]}
    yield _row(f"{label}, ring backward", at_most(1.45, "×"), found, jobs, detail)


def shards(spec: LongNet, num_tokens: int, ranks: int) -> tuple[Shard, ...]:
    """Contiguous shards, each with the keys of the segments that its queries lie in."""
    size = -(-num_tokens // ranks)
    found = []
    for first in range(0, num_tokens, size):
        stop = min(first + size, num_tokens)
        start = min(first // length * length for length in spec.segment_lengths)
        end = max(-(-stop // length) * length for length in spec.segment_lengths)
        found.append(Shard(range(first, stop), range(start, stop if spec.causal else min(end, num_tokens))))
    return tuple(found)


def on_ranks(spec: LongNet, parts: Sequence[Shard]) -> Attention:
    """The ranks' outputs side by side, differentiable: what is checked."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for shard in parts:
            queries, keys = (slice(side.start, side.stop) for side in (shard.queries, shard.keys))
            outs.append(shard.attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], spec))
        return torch.cat(outs, dim=2)

    return attend


def _row(name: str, target: Target, found: Comparison, jobs: Sequence[Job], detail: dict[str, Any]) -> Row | Gap:
    """The ranks' times, summed up in each round, over one call's."""
    what = f"{name}: ranks' time over one call's"
    if reason := found.missing("one call", "all ranks", *(job.name for job in jobs)):
        return Gap(what, target, reason)
    ranks = [found.timings[job.name] for job in jobs]
    rounds = zip(*(timing.seconds for timing in ranks), strict=True)
    timings = (found.timings["one call"], Timing("sum over ranks", tuple(map(sum, rounds))))
    detail |= {"median_s_of_each_rank": [timing.median_s for timing in ranks], "first_call_s": found.first_call_s}
    return Row(what, target, timings[1].median_s / timings[0].median_s, timings, detail, found.objections)


# The backward of a ring: for each shard the forward again, and the gradients of its output and lse, which are those of
# the whole rows times the shard's weight in them. What it sends is left out.


@dataclass(frozen=True)
class RingRank:
    """A rank's queries, and the shards that they need keys of, its own first."""

    spec: LongNet
    queries: range
    shards: tuple[range, ...]

    def whole(self, out: Whole, lse: Tensor, grad: Whole) -> WholeRows:
        """This rank's rows over all keys."""
        mine = slice(self.queries.start, self.queries.stop)
        own_out, own_lse, own_grad = (x[:, :, mine].contiguous() for x in (out, lse, grad))
        return WholeRows(own_out, own_lse, own_grad, None)

    def gradients(self, q: Whole, k: Whole, v: Whole, rows: WholeRows) -> list[tuple[slice, Tensor]]:
        """The shares of dq, and of dk and dv of each shard, with the tokens that they belong to; dq is summed up."""
        mine = slice(self.queries.start, self.queries.stop)
        queries, total = q[:, :, mine].contiguous(), None
        found = []
        for shard in self.shards:
            there = slice(shard.start, shard.stop)
            with torch.enable_grad():
                parts = (queries, k[:, :, there], v[:, :, there])
                leaf_q, leaf_k, leaf_v = (x.detach().requires_grad_() for x in parts)
                out, lse = self._attend(leaf_q, leaf_k, leaf_v, shard)
            weighted = rows.gradients_of(out.detach(), lse.detach())
            dq, dk, dv = torch.autograd.grad((out, lse), (leaf_q, leaf_k, leaf_v), weighted)
            total = dq.float() if total is None else total.add_(dq)
            found.append((there, torch.stack((dk, dv))))
        assert total is not None
        return [(mine, total), *found]

    def job(self, name: str, problem: Problem, forward: Callable[[], tuple[Whole, Tensor]]) -> Job:
        """This rank's share of one backward; the clock runs when `forward` has given out and lse of all rows."""
        q, k, v = problem.q, problem.k, problem.v
        return Job(name, lambda rows: self.gradients(q, k, v, rows), lambda: self.whole(*forward(), problem.grad))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, shard: range) -> tuple[Tensor, Tensor]:
        """Positions are counted as in a rank's own call: ranks that lie alike share what is compiled."""
        period = lcm(*self.spec.segment_lengths)
        start = min(self.queries.start, shard.start) // period * period
        q_offset, k_offset = self.queries.start - start, shard.start - start
        return fd.attend(q, k, v, self.spec.pattern(), return_lse=True, q_offset=q_offset, k_offset=k_offset)


def ring_ranks(spec: LongNet, parts: Sequence[Shard]) -> tuple[RingRank, ...]:
    """From each rank's queries and the stretch of keys that these reach."""
    found = []
    for part in parts:
        queries, keys = part.queries, part.keys
        others = [
            each.queries
            for each in parts
            if each is not part and each.queries.start < keys.stop and keys.start < each.queries.stop
        ]
        found.append(RingRank(spec, queries, (queries, *others)))
    return tuple(found)


def as_attention(spec: LongNet, ranks: Sequence[RingRank]) -> Attention:
    """One call forward, and all ranks' backward: what is checked."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = _Ring.apply(q, k, v, spec, ranks)
        assert isinstance(out, Tensor)
        return out

    return attend


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: LongNet, ranks: Sequence[RingRank]) -> Tensor:
        out, lse = fd.attend(q, k, v, spec.pattern(), return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ranks = ranks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dkv = torch.zeros_like(q, dtype=torch.float32), torch.zeros(2, *k.shape, device=k.device)
        for rank in ctx.ranks:
            (mine, own), *shares = rank.gradients(q, k, v, rank.whole(out, lse, grads[0]))
            dq[:, :, mine] += own
            for there, share in shares:
                dkv[:, :, :, there] += share
        return dq.to(q.dtype), *dkv.to(k.dtype).unbind(0), None, None
