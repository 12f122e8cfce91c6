"""What does it cost to ask how much attention each key got, beside the forward pass it follows?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks

from ._longnets import LONGNET_5, LongNet
from ._memory import peak_bytes
from ._problem import Problem, Size, tokens_text
from ._result import Result, Row, at_most
from ._timing import Job, interleave, ratio, say

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Config:
    """A LongNet at some sizes; at `verified` its sums are held to dense float64 attention."""

    spec: LongNet
    sizes: tuple[Size, ...]
    verified: Size


FULL = Config(LONGNET_5, (Size(16384, num_heads=4), Size(65536, num_heads=4, repeats=3)), Size(2048, num_heads=2))
SMALL = Config(LONGNET_5.shrunk(64), (Size(512, num_heads=2, repeats=1),), Size(256, num_heads=2))


@torch.no_grad()
def run(config: Config) -> Result:
    """Time over that of a forward pass with lse, and peak memory over that pass's."""
    pattern = config.spec.pattern()
    error = _error(pattern, config.verified)
    assert error <= _TOLERANCE, f"sums must be within {_TOLERANCE} of dense float64 attention; they are off by {error}"
    return Result(tuple(row for size in config.sizes for row in _measure(config, pattern, size, error)))


def _measure(config: Config, pattern: masks.Mixture | masks.Pattern, size: Size, error: float) -> tuple[Row, Row]:
    problem = Problem.draw(size)
    _, lse = fd.attend(problem.q, problem.k, problem.v, pattern, return_lse=True)
    jobs = [
        Job("forward", lambda _: fd.attend(problem.q, problem.k, problem.v, pattern, return_lse=True)),
        Job("attention_received", lambda _: fd.attention_received(problem.q, problem.k, lse, pattern)),
    ]
    jobs[1].seconds()
    timings = interleave(jobs, repeats=size.repeats)
    peaks = {name: peak_bytes(_prepared, name, pattern.text, size) for name in ("forward", "received")}
    say(", ".join(f"{name}: peak {peak / 2**20:.0f} MiB" for name, peak in peaks.items()))
    what = f"{config.spec.label}, {size.num_heads} heads, {tokens_text(size.num_tokens)}: attention_received"
    matrix = 4 * size.num_heads * size.num_tokens**2
    detail = {"error": error, "peak_bytes": peaks, "matrix_bytes": matrix}
    return (
        Row(f"{what}, time over a forward pass", at_most(3.5, "×"), ratio(timings[1], timings[0]), timings, detail),
        Row(
            f"{what}, peak memory over a forward pass",
            at_most(6, "×"),
            peaks["received"] / peaks["forward"],
            (),
            detail,
        ),
    )


def _prepared(name: str, pattern: str, size: Size) -> Callable[[], object]:
    """The work whose memory is measured, after one run of it at a small size."""
    rule = masks.from_json(pattern)
    lse: Tensor | None = None
    for some in (Size(256, size.num_heads, size.head_dim), size):
        problem = Problem.draw(some)
        if name == "received":
            lse = torch.full((1, some.num_heads, some.num_tokens), 8.0)

        def work(problem: Problem = problem, lse: Tensor | None = lse) -> object:
            if lse is None:
                return fd.attend(problem.q, problem.k, problem.v, rule, return_lse=True)
            return fd.attention_received(problem.q, problem.k, lse, rule)

        if some is not size:
            work()
    return work


def _error(pattern: masks.Mixture | masks.Pattern, size: Size) -> float:
    """The largest difference of the sums from those of dense attention in float64, over the largest sum."""
    problem = Problem.draw(size)
    _, lse = fd.attend(problem.q, problem.k, problem.v, pattern, return_lse=True)
    found = fd.attention_received(problem.q, problem.k, lse, pattern)[0].double()
    position = torch.arange(size.num_tokens)
    expected = []
    for head in range(size.num_heads):
        pairs = torch.tensor(0), torch.tensor(head), position[:, None], position
        rules = [branch.mask_mod(num_heads=size.num_heads, device=position.device) for branch in pattern.branches()]
        times = torch.stack([rule(*pairs) for rule in rules]).sum(0).double()
        scores = problem.q[0, head].double() @ problem.k[0, head].double().T / size.head_dim**0.5
        expected.append((scores + times.log()).softmax(-1).nan_to_num(0.0).sum(0))
    dense = torch.stack(expected)
    return float((found - dense).abs().max() / dense.max())
