"""What do eight ranks compute, one after the other on one device, over what one call computes?

Communication is left out: each rank is given its queries and just the keys that these can reach, and the sum of
the ranks' times is compared. Keys that no query of the rank may see are not among them where they lie outside
the rank's segments; within these the plan leaves them out. In an exchange a rank has these keys at once, in a ring
shard by shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import lcm
from typing import Any

import torch
from torch import Tensor

import flexdilated as fd

from .._longnets import LONGNET_5, LongNet
from .._problem import Attention, Problem, Size, backward_job, forward_job
from .._result import Gap, Result, Row, Target, Timing, at_most
from .._timing import Job
from ._compare import Comparison, Contestant, Part, compare
from ._ring_on_one import as_attention, ring_ranks
from ._sizes import LARGE, TINY, TINY_SIZE
from ._where import Where


@dataclass(frozen=True)
class Config:
    """One LongNet at one size, on so many ranks of equal, contiguous shards."""

    spec: LongNet
    size: Size
    ranks: int


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


FULL = Config(LONGNET_5, replace(LARGE, repeats=3), 8)
SMALL = Config(TINY, TINY_SIZE, 8)
NEEDS = ("longnet forward", "longnet backward", "offsets forward", "offsets backward")

_TARGET, _RING = at_most(1.10, "×"), at_most(1.45, "×")
_PARTS: dict[str, Part] = {"forward": "forward", "exchange backward": "backward"}


def run(config: Config, where: Where) -> Result:
    """G11: the sum over the ranks over one call; forward and backward."""
    rows = tuple(_measure(config, where, name, part) for name, part in _PARTS.items())
    return Result((*rows, _measure_ring(config, where)))


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


def _measure(config: Config, where: Where, name: str, part: Part) -> Row | Gap:
    spec, problem = config.spec, where.draw(config.size)
    parts = shards(spec, config.size.num_tokens, config.ranks)
    make = forward_job if part == "forward" else backward_job
    jobs = [make(f"rank {rank}", _alone(shard, spec), shard.cut(problem)) for rank, shard in enumerate(parts)]
    together = Contestant("all ranks", on_ranks(spec, parts), problem, spec)
    found = compare([_one_call(spec, problem), together], where, part=part, repeats=config.size.repeats, extra=jobs)
    detail: dict[str, Any] = {"keys_of_each_rank": [len(shard.keys) for shard in parts]}
    return _row(f"{_label(config)}, {name}", _TARGET, found, jobs, detail)


def _measure_ring(config: Config, where: Where) -> Row | Gap:
    """Output and lse of all rows, which a ring's forward leaves, are there before the clock runs."""
    spec, problem = config.spec, where.draw(config.size)
    parts = [(shard.queries, shard.keys) for shard in shards(spec, config.size.num_tokens, config.ranks)]
    ranks = ring_ranks(spec, parts)

    @cache
    def forward() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return fd.attend(problem.q, problem.k, problem.v, spec.pattern(), return_lse=True)

    jobs = [each.job(f"rank {rank}", problem, forward) for rank, each in enumerate(ranks)]
    together = Contestant("all ranks", as_attention(spec, ranks), problem, spec)
    contestants = [_one_call(spec, problem), together]
    found = compare(contestants, where, part="backward", repeats=config.size.repeats, extra=jobs)
    detail: dict[str, Any] = {"shards_of_each_rank": [len(each.shards) for each in ranks]}
    return _row(f"{_label(config)}, ring backward", _RING, found, jobs, detail)


def _row(name: str, target: Target, found: Comparison, jobs: Sequence[Job], detail: dict[str, Any]) -> Row | Gap:
    """The ranks' times, summed up in each round, over one call's."""
    measure = f"{name}: ranks' time over one call's"
    if reason := found.missing("one call", "all ranks", *(job.name for job in jobs)):
        return Gap(measure, target, reason)
    ranks = [found.timings[job.name] for job in jobs]
    timings = (found.timings["one call"], _sum(ranks))
    detail |= {"median_s_of_each_rank": [timing.median_s for timing in ranks], "first_call_s": found.first_call_s}
    return Row(measure, target, timings[1].median_s / timings[0].median_s, timings, detail, found.objections)


def _one_call(spec: LongNet, problem: Problem) -> Contestant:
    return Contestant("one call", spec.attention(), problem, spec)


def _alone(shard: Shard, spec: LongNet) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: shard.attend(q, k, v, spec)


def _sum(ranks: Sequence[Timing]) -> Timing:
    """All ranks of each round."""
    return Timing("sum over ranks", tuple(map(sum, zip(*(timing.seconds for timing in ranks), strict=True))))


def _label(config: Config) -> str:
    return f"{config.spec.label}, {config.size}, {config.ranks} ranks on one device"
