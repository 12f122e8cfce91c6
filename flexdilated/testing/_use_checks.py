"""Checks of use: several lengths, repeated calls, state_dict, decoding, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ._closeness import expected
from ._module import DoesNotApply, Failure, Subject, hold_rows
from ._problem import num_lengths, number, rough, tokens


def check_lengths(subject: Subject) -> str:
    """A module after calls at other lengths must equal a new one."""
    used = subject.module()
    new, order = subject.alike(used), _back_and_forth(subject.lengths)
    for before, length in zip((None, *order), order, strict=False):
        q, k, v = subject.inputs(length)
        problem = subject.problem(q, k, v)
        right, _ = subject.run(subject.alike(new), q, k, v)
        try:
            found, _ = subject.run(used, q, k, v)
        except Failure:
            raise
        except Exception as error:
            raise Failure(f"{tokens(length)} after {before}: {type(error).__name__}: {error}") from error
        budget = expected(problem)["out"].budget
        wrong = ~(((found - right).double().abs() <= budget) | (found.isnan() & right.isnan()))
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            pair, where = (number(found[place]), number(right[place])), f"head {place[1]}, query {place[2]}"
            rows = f"({where}; {int(wrong.any(-1).sum())} of {wrong[..., 0].numel()} rows differ)"
            if before is None:
                raise Failure(f"{tokens(length)}: a new module gives {pair[0]}, and a copy of it {pair[1]} {rows}")
            raise Failure(
                f"{tokens(length)} after {before}: a used module gives {pair[0]} where a new one gives {pair[1]} "
                f"{rows}: something of the other length is kept"
            )
    return f"{len(order)} calls of one module, longer and shorter in turn: as a new one at each"


def _back_and_forth(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Lengths alternating from both ends, longest first, then ascending."""
    turns = [length for pair in zip(reversed(lengths), lengths, strict=True) for length in pair]
    return (*turns[: len(lengths) + 1], *lengths)


def check_determinism(subject: Subject) -> str:
    """Two calls with equal inputs must give identical bits and leave the inputs unchanged."""
    for length, kind in subject.cases():
        inputs = subject.inputs(length, kind)
        given, module = [x.clone() for x in inputs], subject.module()
        first, _ = subject.run(module, *inputs)
        second, _ = subject.run(module, *inputs)
        for name, x, before in zip("qkv", inputs, given, strict=True):
            if not torch.equal(x, before):
                raise Failure(f"{tokens(length)}, {kind}: the call changes {name}")
        if not _same_bits(first, second):
            off = rough((first - second).abs().amax())
            raise Failure(f"{tokens(length)}, {kind}: two calls with the same inputs differ by {off}")
    return f"two calls each at {num_lengths(subject.lengths)}: bit for bit the same, inputs left as they were"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def check_state_dict(subject: Subject) -> str:
    """load_state_dict must reproduce a module's output; a call must not change the names in state_dict."""
    first = subject.module()
    if not isinstance(first, nn.Module):
        raise DoesNotApply(f"{type(first).__name__} is no nn.Module")
    with torch.no_grad():  # distinct parameters, so that state outside the state_dict is noticed
        for parameter in first.parameters():
            parameter.add_(0.01 * torch.arange(parameter.numel(), device=parameter.device).view_as(parameter).cos())
    names = sorted(first.state_dict())
    shortest, longest = subject.lengths[0], subject.lengths[-1]
    subject.run(first, *subject.inputs(shortest))
    if sorted(first.state_dict()) != names:
        added = sorted(set(first.state_dict()) ^ set(names))
        raise Failure(f"a call at {tokens(shortest)} changes the names in state_dict: {', '.join(added)}")
    second = subject.module()
    subject.run(second, *subject.inputs(shortest))  # so that a cache of its old parameters is noticed
    try:
        second.load_state_dict(first.state_dict())
    except RuntimeError as error:
        raise Failure(f"a used module's state_dict does not load into a new one: {error}") from None
    q, k, v = subject.inputs(longest)
    found, right = (subject.run(module, q, k, v)[0] for module in (second, first))
    if not _same_bits(found, right):
        off = rough((found - right).abs().amax())
        raise Failure(f"{tokens(longest)}: after load_state_dict the output differs by {off}")
    return f"{len(names)} names; loaded into another module it gives the same bits"


def check_decoding(subject: Subject) -> str:
    """Decoding token by token must give the outputs of one call with all tokens."""
    if subject.calls.decoded is None:
        raise DoesNotApply("no call that decodes is given (Calls.decoded)")
    for length in subject.lengths:
        q, k, v = subject.inputs(length)
        with torch.no_grad():
            out, _ = subject.run(subject.module(), q, k, v, call="decoded")
        hold_rows(f"{tokens(length)}, one by one", subject.problem(q, k, v), out)
    return f"{num_lengths(subject.lengths)} token by token: as all at once"


_GRAPHS = 3  # for the first length, for dynamic lengths, and for one token, which torch specializes
_numbers = count()


def check_compile(subject: Subject) -> str:
    """torch.compile with fullgraph=True must match eager, forward and backward."""
    length = subject.lengths[len(subject.lengths) // 2]
    module = subject.module()
    q, k, v = (x.requires_grad_() for x in subject.inputs(length))
    compiled = _compiled(subject, module, backend="aot_eager")
    right, _ = subject.run(module, q, k, v)
    found = _traced(lambda: compiled(q, k, v), f"{tokens(length)}")
    truth = expected(subject.problem(q, k, v), gradients=True)
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
    """torch.compile with default options must make at most _GRAPHS graphs for all lengths."""
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
    """Compiled call with a separate code object, so other compilations do not count towards its recompile limit."""

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
    except Exception as error:  # any error of torch's compiler: a graph break, a guard, a limit
        first = str(error).strip().partition("\n")[0]
        raise Failure(f"{where}: torch.compile(fullgraph=True) raises {type(error).__name__}: {first}") from error
