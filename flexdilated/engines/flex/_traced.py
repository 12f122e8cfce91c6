"""What a trace needs beside what it can trace: a store that it can read, and functions that it takes as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...masks.core import own_modes
from .._call_key import CallKey
from .._ops import flat_op
from ._selected_flex import gathered
from ._slots import moved


class Traced:
    """What compiled graphs refer to, each an attribute: a trace reads those of a dict but once.

    A graph reads its tables from here, at every run. The oldest go first; a graph whose program has gone is traced
    anew.
    """


_MOST_TRACED = 256


def traced_name(what: str, key: CallKey, bindings: Sequence[Tensor], q: Tensor) -> str:
    """An attribute's name, of all that it depends on, as a string: a trace takes no tuple for the name of one.

    Sizes are made numbers: one that a graph has left open would be written as a symbol by the op's shape rule.
    """
    _, *numbers, block_size, placement = key
    shapes = [size for each in bindings for size in (each.dim(), *[int(n) for n in each.shape])]
    sizes = " ".join([f"{each}" for each in (*numbers, *block_size, *key.operands(q), "tensors", *shapes)])
    return f"{what} {q.device.type} {sizes} {placement} {key.pattern}"


# By name, (call, q, bindings) -> what a trace reads of such a call, with the values of run-time tensors left open.
MAKERS: dict[str, Callable[[CallKey, Tensor, list[Tensor]], Any]] = {}


def traced(what: str, q: Tensor, bindings: list[Tensor], key: CallKey) -> Any:
    """What the maker of this name makes of a call that is traced.

    Tracing can read an attribute but not build a plan; an op's shape rule runs while tracing, and can.
    """
    _prepare(q, bindings, what, *key)
    return getattr(Traced, traced_name(what, key, bindings, q))


@flat_op("flexdilated::prepare")
def _prepare(q: Tensor, bindings: list[Tensor], what: str, key: CallKey) -> Tensor:
    """Nothing at run time; while tracing, its shape rule puts what is made where the trace finds it."""
    return q.new_empty(0)


@_prepare.register_fake
def _(q, bindings, what, *key):
    found = CallKey.of(*key)
    name = traced_name(what, found, bindings, q)
    let_trace()
    if name not in vars(Traced):
        with own_modes():
            made = MAKERS[what](found, q, bindings)
        known = [each for each in vars(Traced) if not each.startswith("__")]
        for oldest in known[: len(known) - _MOST_TRACED + 1]:
            delattr(Traced, oldest)
        setattr(Traced, name, made)
    return q.new_empty(0)


@cache
def let_trace() -> None:
    """To be called before a graph is traced: an autograd.Function is then taken as it is, by the functions around it.

    Tracing into one fails where kernels' own graphs follow. Not at import, as that would import the whole compiler.
    """
    for function in (moved, gathered):
        torch.compiler.allow_in_graph(function)
