"""Does the module go through torch.compile: in one graph, with the same values, and without one graph a length?"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ._module_subject import DoesNotApply, Failure, Subject
from ._rounding import expected
from ._words import rough, tokens

_GRAPHS = 3  # of one length, of all lengths, and of one token, which torch treats apart
_numbers = count()


def check_compile(subject: Subject) -> str:
    """fullgraph=True, forward and backward: as eager."""
    length = subject.lengths[len(subject.lengths) // 2]
    module = subject.module()
    q, k, v = (x.requires_grad_() for x in subject.inputs(length))
    compiled = _compiled(subject, module, backend="aot_eager")
    right, _ = subject.run(module, q, k, v)
    found = _traced(lambda: compiled(q, k, v), f"{tokens(length)}")
    truth = expected(subject.problem(q, k, v), gradients=True, through_lse=False)
    pairs = {"out": (found, right)}
    if right.requires_grad:
        sent = torch.ones_like(right)
        compiled_grads = torch.autograd.grad(found, (q, k, v), sent)
        pairs |= {
            f"d{name}": pair
            for name, *pair in zip("qkv", compiled_grads, torch.autograd.grad(right, (q, k, v), sent), strict=True)
        }
    for name, (x, y) in pairs.items():
        off = (x - y).double().abs()
        if not (off <= truth[name].budget + torch.finfo(x.dtype).eps * (y.abs() if name != "out" else 0)).all():
            raise Failure(f"{tokens(length)}: {name} compiled and eager differ by {rough(off.amax())}")
    return f"{tokens(length)}: one graph, the same values and gradients as eager"


def check_recompilation(subject: Subject) -> str:
    """Left alone, torch.compile makes a graph for the first length and one for all others."""
    lengths = [length for length in subject.lengths if length > 1][:10]
    if len(lengths) < 2:
        raise DoesNotApply("there are no two lengths above 1 to compare")
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(now)
        return graph.forward

    compiled = _compiled(subject, subject.module(), backend=counting)
    for now in lengths:
        q, k, v = subject.inputs(now)
        _traced(lambda q=q, k=k, v=v: compiled(q, k, v), f"{tokens(now)}")
        if len(graphs) > _GRAPHS:
            made = ", ".join(map(str, graphs))
            raise Failure(
                f"{len(graphs)} graphs for {lengths.index(now) + 1} lengths; new ones were made at {made} tokens"
            )
    return f"{len(graphs)} graphs for {len(lengths)} lengths"


def _compiled(subject: Subject, module: Any, *, backend: Any) -> Callable[..., Tensor]:
    """The call as a function with a code object of its own: what else was compiled counts towards no limit."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return subject.run(module, q, k, v)[0]

    code: CodeType = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    own = FunctionType(code, call.__globals__, code.co_name, call.__defaults__, call.__closure__)
    return torch.compile(own, fullgraph=True, backend=backend)


def _traced(call: Callable[[], Tensor], where: str) -> Tensor:
    try:
        return call()
    except Failure:
        raise
    except Exception as error:  # whatever torch's compiler raises: a graph break, a guard, a limit
        first = str(error).strip().partition("\n")[0]
        raise Failure(f"{where}: torch.compile(fullgraph=True) raises {type(error).__name__}: {first}") from error
