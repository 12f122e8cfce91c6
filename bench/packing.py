"""Packed documents: beside the same rule as equal chunks, beside the documents apart, and planned anew."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

import flexdilated as fd
from flexdilated import masks

from ._checks import TOLERANCE, assert_near, check_training
from ._jobs import Attention, Job, Problem, Size, interleave, ratio, train, training_job
from ._measures import Row, at_most, measure
from ._rules import LONGNET_4, LongNet

# N tokens


@measure(
    "C15",
    full={"lengths": (1, 4, 17, 128), "size": Size(65536, num_heads=1)},
    small={"lengths": (1, 17), "size": Size(512, num_heads=2, repeats=1)},
)
def many_documents(lengths: tuple[int, ...], size: Size) -> Iterator[Row]:
    """Do many short documents take no longer than the same rule written as chunks of equal length?

    Forward and backward, causal; with ids that a call before had, and with ids that are planned anew.
    """
    for length in lengths:
        problem, rule = Problem.draw(size), LongNet("chunks", (length,), (1,), causal=True)
        packed = masks.causal() & masks.documents(torch.arange(size.num_tokens) // length)
        chunks, documents = _attention(masks.chunked(length) & masks.causal()), _attention(packed)
        for attention in (chunks, documents):
            if length > 1:
                check_training(attention, problem, rule)
            else:
                _check_alone(attention, problem)
        jobs = (
            training_job("chunks", chunks, problem),
            training_job("documents, known ids", documents, problem),
            Job("documents, new ids", training_job("", documents, problem).run, _forget(packed)),
        )
        written, known, new = interleave(jobs, repeats=size.repeats)
        what, target = f"{size}, documents of {length} tokens, causal, forward + backward", at_most(2, "×")
        yield Row(f"{what}: time over chunks", target, ratio(known, written), (known, written))
        yield Row(f"{what}, planned anew: time over chunks", target, ratio(new, written), (new, written))


def _attention(pattern: masks.Pattern | masks.Mixture) -> Attention:
    return lambda q, k, v: fd.attend(q, k, v, pattern)


def _forget(pattern: masks.Pattern):
    return lambda: masks.cache().forget(pattern)


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


@dataclass(frozen=True)
class Case:
    """A pattern, as `masks.to_json` writes it, over documents of about so many tokens."""

    name: str
    pattern: str
    mean_length: int

    def __str__(self) -> str:
        return f"{self.name}, documents of about {self.mean_length} tokens"


def _cases(*, shrunk: int = 1) -> tuple[Case, ...]:
    spec = LONGNET_4.shrunk(shrunk).as_causal() if shrunk > 1 else LONGNET_4.as_causal()
    window = masks.causal() & masks.local_window(left=1024 // shrunk - 1, right=0)
    named = {spec.label: spec.pattern(), f"window of {1024 // shrunk}, causal": window}
    return tuple(
        Case(name, masks.to_json(pattern), mean // shrunk) for name, pattern in named.items() for mean in (500, 2000)
    )


class Packing:
    """Documents between half and one and a half of the mean length, drawn anew by each `draw`."""

    def __init__(self, mean_length: int, num_tokens: int) -> None:
        self._mean_length, self._num_tokens = mean_length, num_tokens
        self._generator = torch.Generator().manual_seed(0)
        self.lengths: list[int] = []
        self.draw()

    def draw(self) -> None:
        self.lengths, left = [], self._num_tokens
        while left:
            low, high = self._mean_length // 2, self._mean_length * 3 // 2
            self.lengths.append(min(left, int(torch.randint(low, high + 1, (), generator=self._generator))))
            left -= self.lengths[-1]

    @property
    def ids(self) -> Int64[Tensor, " N"]:
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))


@measure(
    full={"cases": _cases(), "size": Size(16384, num_heads=8, repeats=9)},
    small={"cases": _cases(shrunk=32)[1::2], "size": Size(256, num_heads=2, head_dim=16, repeats=1)},
)
def packing(cases: tuple[Case, ...], size: Size) -> Iterator[Row]:
    """Do packed documents take no longer than the same ones apart, and new documents little longer than known ones?

    Training steps, with planning: the lengths of a round are new to the calls that come first in it.
    """
    for case in cases:
        yield from _packed(case, size)


def _packed(case: Case, size: Size) -> Iterator[Row]:
    problem, drawn = Problem.draw(size), Packing(case.mean_length, size.num_tokens)
    pattern = masks.from_json(case.pattern)

    def packed(_: object = None) -> tuple[Tensor, ...]:
        return train(_attention(pattern.per_document(drawn.ids)), problem)

    def apart(_: object = None) -> tuple[Tensor, ...]:
        whole = (problem.q, problem.k, problem.v, problem.grad)
        parts = zip(*(x.split(drawn.lengths, dim=2) for x in whole), strict=True)
        grads = [train(_attention(pattern), Problem(*part)) for part in parts]
        return tuple(torch.cat(each, dim=2) for each in zip(*grads, strict=True))

    for name, found, wanted in zip(("dq", "dk", "dv"), packed(), apart(), strict=True):
        assert_near(name, found, wanted)
    jobs = (Job("new documents", packed, drawn.draw), Job("the same again", packed), Job("apart", apart))
    new, known, separate = interleave(jobs, repeats=size.repeats)
    what, target = f"{case}, {size}, forward + backward", at_most(1.1, "×")
    yield Row(f"{what}: time packed over time apart", target, ratio(new, separate), (new, separate))
    yield Row(f"{what}: time for new documents over known ones", target, ratio(new, known), (new, known))
