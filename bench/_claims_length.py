"""How much faster than dense attention at a length where that is slow."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks

from ._claims import LONG
from ._longnets import same_branch
from ._problem import Problem, Size, forward_job
from ._result import Row
from ._timing import Job, interleave, ratio
from .peer_dense import dense_attention


@dataclass(frozen=True)
class Length:
    """One branch a head: each branch has one head, but the first has what is left, too.

    As in the source, branch i starts at token i mod its rate of each segment.

    Dense attention is timed on `rows` query rows. `check_tokens` is where it is timed whole too, to see that the
    slice stands for it.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    size: Size
    rows: int
    check_tokens: int

    @property
    def branch_of_head(self) -> list[tuple[int, int, int]]:
        """(segment length, rate, branch) of each head."""
        branches = list(zip(self.segment_lengths, self.dilation_rates, range(len(self.dilation_rates)), strict=True))
        return [branches[0]] * (self.size.num_heads - len(branches)) + branches


def measure(config: Length) -> list[Row]:
    """The speed-up over dense attention, which is timed on a slice."""
    size, problem = config.size, Problem.draw(config.size)
    pattern = masks.per_head(
        [masks.dilated(length, rate, branch % rate) for length, rate, branch in config.branch_of_head]
    )
    _check(config, problem, pattern)
    ours = forward_job("flexdilated", lambda q, k, v: fd.attend(q, k, v, pattern), problem)
    timings = interleave((_dense_job(problem, size.num_tokens, config.rows), ours), repeats=size.repeats)
    speed_up = ratio(*timings) * size.num_tokens / config.rows
    return [
        LONG.row(
            speed_up,
            timings,
            rows=config.rows,
            ratio_of_pairs=_ratio_of_pairs(config),
            whole_over_multiplied_slice=_whole_over_slice(config, problem),
            whole_tokens=config.check_tokens,
        )
    ]


def _dense_job(problem: Problem, num_tokens: int, rows: int) -> Job:
    """Some query rows over all keys, of the first tokens of the problem."""
    dense = dense_attention(causal=False)
    q, k, v = (x[:, :, :num_tokens] for x in (problem.q, problem.k, problem.v))

    def run(_: None) -> Tensor:
        with torch.no_grad():
            return dense(q[:, :, :rows], k, v)

    return Job(f"dense SDPA, {rows} of {num_tokens} rows", run)


def _whole_over_slice(config: Length, problem: Problem) -> float:
    tokens = config.check_tokens
    jobs = [_dense_job(problem, tokens, rows) for rows in (tokens, config.rows)]
    whole, some = interleave(jobs, repeats=config.size.repeats)
    return ratio(whole, some) * config.rows / tokens


def _ratio_of_pairs(config: Length) -> float:
    """Pairs of dense attention over those of the branches; each segment's active tokens see one another."""
    tokens = config.size.num_tokens
    sparse = sum(tokens // length * (length // rate) ** 2 for length, rate, _ in config.branch_of_head)
    return config.size.num_heads * tokens**2 / sparse


def _check(config: Length, problem: Problem, pattern: masks.Pattern) -> None:
    """The output of some rows is that of their head's branch, in float64; rows that are not active get 0."""
    tokens = config.size.num_tokens
    rows = torch.tensor([0, 1, 7, tokens // 2 + 2, tokens - 6, tokens - 2, tokens - 1])
    with torch.no_grad():
        out = fd.attend(problem.q, problem.k, problem.v, pattern)[0, :, rows]
    for head, (length, rate, branch) in enumerate(config.branch_of_head):
        allowed = same_branch(torch.tensor(branch), rows[:, None], torch.arange(tokens)[None], length=length, rate=rate)
        q, k, v = (x[0, head].double() for x in (problem.q, problem.k, problem.v))
        scores = (q[rows] @ k.T * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
        expected = scores.softmax(-1).nan_to_num(0.0) @ v
        assert_close(out[head], expected.float(), rtol=1e-4, atol=1e-5)
