"""Packed documents, beside the same rule as chunks of equal length."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from flexdilated import masks

from ._checks import TOLERANCE, check_training
from ._jobs import Attention, Problem, Size, interleave, ratio, train, training_job
from ._measures import Row, at_most, measure
from ._rules import LongNet, attention_by

# N tokens


@measure("C15", lengths=(1, 17), size=Size(512, num_heads=2, repeats=1))
def many_documents(lengths: tuple[int, ...] = (1, 4, 17, 128), size: Size = Size(65536, num_heads=1)) -> Iterator[Row]:
    """Do many short documents take no longer than the same rule written as chunks of equal length?

    Forward and backward, causal; with ids that a call before had, and with ids that are planned anew.
    """
    for length in lengths:
        problem, rule = Problem.draw(size), LongNet("chunks", (length,), (1,), causal=True)
        packed = masks.causal() & masks.documents(torch.arange(size.num_tokens) // length)
        chunks, documents = attention_by(masks.chunked(length) & masks.causal()), attention_by(packed)
        for attention in (chunks, documents):
            if length > 1:
                check_training(attention, problem, rule)
            else:
                _check_alone(attention, problem)
        jobs = (
            training_job("chunks", chunks, problem),
            training_job("documents, known ids", documents, problem),
            replace(
                training_job("documents, new ids", documents, problem), prepare=partial(masks.cache().forget, packed)
            ),
        )
        written, known, new = interleave(jobs, repeats=size.repeats)
        what, target = f"{size}, documents of {length} tokens, causal, forward + backward", at_most(2, "×")
        yield Row(f"{what}: time over chunks", target, ratio(known, written), (known, written))
        yield Row(f"{what}, planned anew: time over chunks", target, ratio(new, written), (new, written))


def _check_alone(attention: Attention, problem: Problem) -> None:
    """Raise AssertionError unless each token sees itself alone: out is v, dv is grad, dq and dk are 0.

    Nothing is relative to a gradient of 0, so these are held against dv.
    """
    out = attention(problem.q, problem.k, problem.v)
    dq, dk, dv = train(attention, problem)
    errors = {"out": out - problem.v, "dq": dq, "dk": dk, "dv": dv - problem.grad}
    for name, error in errors.items():
        off = float(error.norm() / problem.grad.norm())
        assert off <= TOLERANCE, f"{name} must be within {TOLERANCE} of the definition; it is off by {off:.2e}"
