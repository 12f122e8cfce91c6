"""What block sizes, the order of blocks and fused kernels are worth."""

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import linear
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks

from ._claims import BLOCK_ORDER, FUSED_KERNEL, FUSED_QKV, TUNED_BLOCKS
from ._problem import Attention, Problem, Size, forward_job
from ._result import Row, Timing
from ._timing import Job, interleave, ratio
from .peer_block_rows import block_rows

_SIDES = (64, 128, 256)
_DEFAULT = 128
_WINDOW_BLOCKS = 5


@dataclass(frozen=True)
class Kernels:
    """The size for block sides, that for rows of blocks, and tokens and width of the projections."""

    tuned: Size
    rows: Size
    projected: tuple[int, int]


def measure(config: Kernels) -> list[Row]:
    """The claims on kernels, in the order of the table."""
    return [_tuned_blocks(config.tuned), *_rows(config.rows), _projections(*config.projected, config.rows.repeats)]


def _tuned_blocks(size: Size) -> Row:
    pattern, problem = masks.recipes.bigbird(size.num_tokens), Problem.draw(size)
    attentions: dict[str, Attention] = {
        f"blocks of {side}": partial(fd.attend, pattern=pattern, block_size=side) for side in _SIDES
    }
    timings = _compared(attentions, problem, size.repeats)
    default, best = timings[_SIDES.index(_DEFAULT)], min(timings, key=lambda timing: timing.median_s)
    return TUNED_BLOCKS.row(ratio(default, best), timings, best=best.name)


def _rows(size: Size) -> list[Row]:
    rows = size.num_tokens // _DEFAULT
    first = (torch.arange(rows) - _WINDOW_BLOCKS // 2).clamp(0, rows - _WINDOW_BLOCKS)
    columns = first[:, None] + torch.arange(_WINDOW_BLOCKS)
    drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    attentions: dict[str, Attention] = {
        "ascending, flash": block_rows(columns, block=_DEFAULT),
        "drawn order, flash": block_rows(columns, block=_DEFAULT, order=drawn),
        "ascending, matmuls": block_rows(columns, block=_DEFAULT, fused=False),
    }
    ascending, shuffled, separate = _compared(attentions, Problem.draw(size), size.repeats)
    return [
        BLOCK_ORDER.row(ratio(shuffled, ascending), (ascending, shuffled)),
        FUSED_KERNEL.row(ratio(separate, ascending), (ascending, separate)),
    ]


def _compared(attentions: dict[str, Attention], problem: Problem, repeats: int) -> tuple[Timing, ...]:
    """Timings of attentions that have been seen to compute the same."""
    q, k, v = problem.q, problem.k, problem.v
    with torch.no_grad():
        first, *others = (attention(q, k, v) for attention in attentions.values())
    for other in others:
        assert_close(other, first, rtol=1e-4, atol=1e-5)
    return interleave([forward_job(name, each, problem) for name, each in attentions.items()], repeats=repeats)


def _projections(tokens: int, width: int, repeats: int) -> Row:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(tokens, width, generator=generator), torch.randn(3 * width, width, generator=generator)
    parts = [part.clone() for part in weight.chunk(3)]
    three, one = [linear(x, part) for part in parts], linear(x, weight)
    assert_close(torch.cat(three, dim=1), one, rtol=1e-4, atol=1e-3)
    jobs = (
        Job("three projections", lambda _: [linear(x, part) for part in parts]),
        Job("one projection", lambda _: linear(x, weight)),
    )
    timings = interleave(jobs, repeats=repeats)
    return FUSED_QKV.row(ratio(*timings), timings)
