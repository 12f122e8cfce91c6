"""Do packed documents take no longer than the same ones apart, and new documents little longer than known ones?"""

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

import flexdilated as fd
from flexdilated import masks

from ._longnets import LONGNET_4
from ._oracle import relative_error
from ._problem import Problem, Size, train
from ._result import Result, Row, at_most
from ._timing import Job, interleave, ratio

# N tokens

_TOLERANCE = 1e-5  # as for whole passes


@dataclass(frozen=True)
class Case:
    """A pattern, as `masks.to_json` writes it, over documents of about so many tokens."""

    name: str
    pattern: str
    mean_length: int

    def __str__(self) -> str:
        return f"{self.name}, documents of about {self.mean_length} tokens"


@dataclass(frozen=True)
class Config:
    """The cases, each at this size; every round packs documents of other lengths."""

    cases: tuple[Case, ...]
    size: Size


def _cases(*, shrunk: int = 1) -> tuple[Case, ...]:
    spec = LONGNET_4.shrunk(shrunk).as_causal() if shrunk > 1 else LONGNET_4.as_causal()
    window = masks.causal() & masks.local_window(left=1024 // shrunk - 1, right=0)
    named = {spec.label: spec.pattern(), f"window of {1024 // shrunk}, causal": window}
    return tuple(
        Case(name, masks.to_json(pattern), mean // shrunk) for name, pattern in named.items() for mean in (500, 2000)
    )


FULL = Config(_cases(), Size(16384, num_heads=8, repeats=9))
SMALL = Config(_cases(shrunk=16), Size(1024, num_heads=4, repeats=1))


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


def run(config: Config) -> Result:
    """Training steps, with planning: the lengths of a round are new to the calls that come first in it."""
    return Result(tuple(row for case in config.cases for row in _measure(case, config.size)))


def _measure(case: Case, size: Size) -> tuple[Row, Row]:
    problem, packing = Problem.draw(size), Packing(case.mean_length, size.num_tokens)
    pattern = masks.from_json(case.pattern)

    def packed(_: object = None) -> tuple[Tensor, ...]:
        return train(lambda q, k, v: fd.attend(q, k, v, pattern.per_document(packing.ids)), problem)

    def apart(_: object = None) -> tuple[Tensor, ...]:
        whole = (problem.q, problem.k, problem.v, problem.grad)
        parts = zip(*(x.split(packing.lengths, dim=2) for x in whole), strict=True)
        grads = [train(lambda q, k, v: fd.attend(q, k, v, pattern), Problem(*part)) for part in parts]
        return tuple(torch.cat(each, dim=2) for each in zip(*grads, strict=True))

    for name, found, wanted in zip(("dq", "dk", "dv"), packed(), apart(), strict=True):
        error = relative_error(found, wanted)
        assert error <= _TOLERANCE, f"{name} must be within {_TOLERANCE}; got {error}"
    jobs = (Job("new documents", packed, packing.draw), Job("the same again", packed), Job("apart", apart))
    new, known, separate = interleave(jobs, repeats=size.repeats)
    measure = f"{case}, {size}, forward + backward"
    return (
        Row(f"{measure}: time packed over time apart", at_most(1.1, "×"), ratio(new, separate), (new, separate)),
        Row(f"{measure}: time for new documents over known ones", at_most(1.1, "×"), ratio(new, known), (new, known)),
    )
