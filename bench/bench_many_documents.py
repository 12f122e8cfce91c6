"""Do many short documents take no longer than the same rule written as chunks of equal length?"""

from dataclasses import dataclass

import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks

from ._longnets import LongNet
from ._oracle import check_training
from ._problem import Attention, Problem, Size, train, training_job
from ._result import Result, Row, at_most
from ._timing import Job, interleave, ratio

_TOLERANCE = 1e-5  # as for whole passes


@dataclass(frozen=True)
class Config:
    """Documents of each of these lengths fill this size."""

    lengths: tuple[int, ...]
    size: Size


FULL = Config((1, 4, 17, 128), Size(65536, num_heads=1))
SMALL = Config((1, 17), Size(512, num_heads=2, repeats=1))


def run(config: Config) -> Result:
    """C15: forward and backward, causal; with ids that a call before had, and with ids that are planned anew."""
    return Result(tuple(row for length in config.lengths for row in _measure(length, config.size)))


def _measure(length: int, size: Size) -> tuple[Row, Row]:
    problem, rule = Problem.draw(size), LongNet("chunks", (length,), (1,), causal=True)
    chunked = masks.chunked(length) & masks.causal()
    packed = masks.causal() & masks.documents(torch.arange(size.num_tokens) // length)

    def chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fd.attend(q, k, v, chunked)

    def documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fd.attend(q, k, v, packed)

    for attention in (chunks, documents):
        if length > 1:
            check_training(attention, problem, rule)
        else:
            _check_alone(attention, problem)
    jobs = (
        training_job("chunks", chunks, problem),
        training_job("documents, known ids", documents, problem),
        Job("documents, new ids", lambda _: train(documents, problem), lambda: masks.cache().forget(packed)),
    )
    written, known, new = interleave(jobs, repeats=size.repeats)
    what = f"{size}, documents of {length} tokens, causal, forward + backward"
    return (
        Row(f"{what}: time over chunks", at_most(2, "×"), ratio(known, written), (known, written)),
        Row(f"{what}, planned anew: time over chunks", at_most(2, "×"), ratio(new, written), (new, written)),
    )


def _check_alone(attention: Attention, problem: Problem) -> None:
    """Raise AssertionError unless each token sees itself alone: out is v, dv is grad, dq and dk are 0.

    Nothing is relative to a gradient of 0, so these are held against dv.
    """
    out = attention(problem.q, problem.k, problem.v)
    dq, dk, dv = train(attention, problem)
    errors = {"out": out - problem.v, "dq": dq, "dk": dk, "dv": dv - problem.grad}
    for name, error in errors.items():
        off = float(error.norm() / problem.grad.norm())
        assert off <= _TOLERANCE, f"{name} must be within {_TOLERANCE} of the definition; it is off by {off:.2e}"
