"""Support for torch.compile: a store of objects that a trace can read, and functions that it must not trace into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...masks.core import suspended_torch_modes
from .._call import Call
from .._ops import own_op
from ._selected_flex import gather_vectors
from ._slots import take_or_put


class Traced:
    """Namespace whose attributes are the objects, such as programs with their tables, that compiled graphs use.

    The oldest objects are evicted first; a graph whose program was evicted is traced again.
    """

    # Attributes, not entries of a dict: a trace reads these only once, and a graph must read its tables at every run.


_MOST_TRACED = 256


def traced_name(what: str, call: Call, bindings: Sequence[Tensor], q: Tensor) -> str:
    """Return the name of the attribute of `Traced` for a call's object.

    The name has the object's kind, the device, every field of the call, the numbers of `Call.operands`, and the shapes
    of the run-time tensors. It has neither the batch size nor what `tune` measured, which decide how a graph computes
    and not what.

    what: the kind of object, a key of `MAKERS`.
    """
    # A trace does not support tuples here, and a fake implementation would format a dynamic size as a symbol.
    shapes = [size for each in bindings for size in (each.dim(), *each.shape)]
    sizes = " ".join([f"{int(each)}" for each in (*call.sizes_and_offsets, *call.operands(q), *shapes)])
    return f"{what} {q.device.type} {q.device.index} {sizes} {call.arguments[0]}"


# For each kind of object, a function (call, q, bindings) -> the object for a trace of the call, which does not depend
# on the values of run-time tensors.
MAKERS: dict[str, Callable[[Call, Tensor, list[Tensor]], Any]] = {}


def traced(what: str, q: Tensor, k: Tensor, bindings: list[Tensor], call: Call) -> Any:
    """Return the object that MAKERS[what] builds for a call, inside a torch.compile trace."""
    # A trace can read an attribute but not build a plan; the fake implementation of an op runs during tracing and can.
    _store_traced(q, k, bindings, what, *call.arguments)
    return getattr(Traced, traced_name(what, call, bindings, q))


@own_op("flexdilated::prepare")
def _store_traced(
    q: Tensor, k: Tensor, bindings: list[Tensor], what: str, constants: str, q_offset: int, k_offset: int
) -> Tensor:
    """Return an empty tensor; during tracing, the fake implementation stores an object in `Traced` if it is not there.

    what: kind of the object, a key of `MAKERS`.
    constants, q_offset, k_offset: `Call.arguments`.
    """
    return q.new_empty(0)


@_store_traced.register_fake
def _(q, k, bindings, what, *arguments):
    found = Call.of(q, k, *arguments)
    name = traced_name(what, found, bindings, q)
    allow_gathers_in_graph()
    if name not in vars(Traced):
        with suspended_torch_modes():
            made = MAKERS[what](found, q, bindings)
        known = [each for each in vars(Traced) if not each.startswith("__")]
        for oldest in known[: len(known) - _MOST_TRACED + 1]:
            delattr(Traced, oldest)
        setattr(Traced, name, made)
    return q.new_empty(0)


@cache
def allow_gathers_in_graph() -> None:
    """Make torch.compile put `take_or_put` and `gather_vectors` into graphs without tracing into them.

    Call this before a trace. Tracing into their autograd.Function fails if a call of flex_attention follows, which has
    subgraphs.
    """
    # Not at import of this module: it imports the whole compiler.
    for function in (take_or_put, gather_vectors):
        torch.compiler.allow_in_graph(function)
