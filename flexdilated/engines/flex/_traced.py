"""What a trace needs beside what it can trace: a store that it can read, and functions that it takes as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._call_key import CallKey
from ._selected_flex import gathered
from ._slots import put, take


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


def keep_traced(name: str, make: Callable[[], Any]) -> None:
    """Put what is made where a trace finds it, unless it is there."""
    let_trace()
    if name in vars(Traced):
        return
    made = make()
    known = [each for each in vars(Traced) if not each.startswith("__")]
    for oldest in known[: len(known) - _MOST_TRACED + 1]:
        delattr(Traced, oldest)
    setattr(Traced, name, made)


@cache
def let_trace() -> None:
    """To be called before a graph is traced: an autograd.Function is then taken as it is, by the functions around it.

    Tracing into one fails where kernels' own graphs follow. Not at import, as that would import the whole compiler.
    """
    for function in (take, put, gathered):
        torch.compiler.allow_in_graph(function)
