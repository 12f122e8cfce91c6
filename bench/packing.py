"""Packed documents, beside the same rule as chunks of equal length."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

import flexdilated as fd
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


@measure("C17", size=Size(2048, num_heads=1, repeats=1))
def factors_of_unions(size: Size = Size(65536, num_heads=4, repeats=5)) -> Iterator[Row]:
    """Does a run-time tensor over a union of windows leave it as fast as it is without?

    Forward and backward of a window and a dilated window, as planned and planned anew, over the rule without.
    """
    problem, small = Problem.draw(size), Problem.draw(replace(size, num_tokens=min(size.num_tokens, 1024)))
    for rule in _factors(small.q.shape[2]).values():
        x = small.q, small.k, small.v
        torch.testing.assert_close(fd.attend(*x, rule), fd.attend(*x, rule, engine="reference"), rtol=1e-3, atol=1e-4)
    jobs = [training_job(name, attention_by(rule), problem) for name, rule in _factors(size.num_tokens).items()]
    anew = [replace(job, name=f"{job.name}, planned anew", prepare=masks.cache().clear) for job in jobs]
    for target, timed in ((at_most(2, "×"), anew), (at_most(1.3, "×"), jobs)):
        for job in timed:
            job.seconds()
        without, *found = interleave(timed, repeats=size.repeats)
        for each in found:
            what = f"{size}, union of windows, forward + backward, {each.name}: time over the rule without"
            yield Row(what, target, ratio(each, without), (each, without))


def _factors(tokens: int) -> dict[str, masks.Pattern]:
    """A union, and the same with run-time tensors."""
    union = masks.local_window(left=256, right=256) | masks.dilated_window(left=64, right=64, rate=64)
    documents = torch.arange(tokens) * 4 // tokens
    return {
        "without": union,
        "lengths": union & masks.lengths(torch.tensor(tokens - tokens // 64)),
        "visible keys": union & masks.visible_keys(torch.arange(tokens) % 10 > 0),
        "documents": union & masks.documents(documents),
        "per document": union.per_document(documents),
    }


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
