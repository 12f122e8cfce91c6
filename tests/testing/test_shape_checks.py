"""The suite's checks of shapes bite: wrong kinds, sizes that differ within one call, results, fields of dataclasses."""

import importlib

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError

from flexdilated.masks.core._box import Bounds, Progression, count_residue
from tests.support.shape_checks import _EVERY, _FIRST, checked_on_import

CODE = """
from collections.abc import Iterator
from dataclasses import dataclass
from jaxtyping import Float, Int64
from torch import Tensor

def plain(number: int) -> str:
    return str(number) if number else number

def product(x: Float[Tensor, "M N"], y: Float[Tensor, "N K"]) -> Float[Tensor, "M K"]:
    return (x @ y) if x.shape != y.shape else (x @ y)[:-1]

def twice(x: Float[Tensor, " N"]) -> Float[Tensor, " N+N"]:
    return product(x[:, None], x[None])[:2].flatten()

def each(x: Float[Tensor, "M N"]) -> Iterator[Float[Tensor, " N"]]:
    yield from x

class Holder:
    def rows(self, x: list[Float[Tensor, " N"]] | None) -> Int64[Tensor, " 2"] | None:
        return None if x is None else x[0]

@dataclass(frozen=True)
class Pair:
    first: Float[Tensor, " N"]
    second: Float[Tensor, " N"]

    @property
    def both(self) -> "Pair":
        return self
"""
X, Y = torch.ones(2, 3), torch.ones(3, 4)
WRONG = {
    "kind of an argument": lambda module: module.plain("1"),
    "kind of a result": lambda module: module.plain(0),
    "dtype": lambda module: module.product(X.long(), Y.long()),
    "number of axes": lambda module: module.product(X[0], Y),
    "sizes that differ": lambda module: module.product(X, X),
    "size of a result": lambda module: module.product(torch.ones(3, 3), torch.ones(3, 3)),
    "a method": lambda module: module.Holder().rows([X]),
    "a method's result": lambda module: module.Holder().rows([X[0]]),
    "a field": lambda module: module.Pair(X[0], 3),
    "fields of two sizes": lambda module: module.Pair(X[0], X[:, 0]),
    "argument of a generator": lambda module: module.each(X[0]),
}


@pytest.fixture(params=["", "from __future__ import annotations"], ids=["values", "strings"])
def module(request, tmp_path, monkeypatch):
    """Under a name of its own in each test: what was imported once is not imported again."""
    name = f"checked_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(request.param + CODE)
    monkeypatch.syspath_prepend(tmp_path)
    with checked_on_import([name]):
        return importlib.import_module(name)


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_an_error(module, wrong) -> None:
    with pytest.raises((BeartypeCallHintViolation, TypeCheckError)):
        WRONG[wrong](module)


def test_what_is_right_passes(module) -> None:
    """An axis means one size in one call: the next call, and a call within, have sizes of their own."""
    assert module.plain(1) == "1"
    for size in (1, 2):
        assert module.product(X[:size], Y).shape == (size, 4)
    assert module.twice(torch.ones(2)).shape == (4,)
    assert module.Holder().rows(None) is None
    assert module.Pair(X[0], X[1]).both.first.shape == (3,)
    assert len(list(module.each(X))) == 2


def often(call) -> None:
    """As often as one of a function's calls is checked, however often it was called before."""
    for _ in range(_EVERY):
        call()


def test_of_many_calls_some_are_checked(module) -> None:
    for _ in range(2 * _FIRST):
        module.plain(1)
    with pytest.raises(BeartypeCallHintViolation):
        often(lambda: module.plain("1"))


def test_the_library_is_checked() -> None:
    one, two = torch.ones(1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    for wrong in (
        lambda: Bounds(one, two),
        lambda: Progression(one.float(), 1, one),
        lambda: count_residue(Progression(one, 1, one), 3, two[None]),
    ):
        with pytest.raises(BeartypeCallHintViolation):
            often(wrong)
    assert count_residue(Progression(one, 1, two[:1]), 3, one).tolist() == [1]
