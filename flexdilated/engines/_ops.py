"""Custom ops of this package: how they are made, their constants as text, and the gradient of attention."""

from __future__ import annotations

import warnings
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, NoReturn, get_origin

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _torch_private
from .._torch_private import (
    graph_constant,
    in_forward_mode,
    is_batchedtensor,
    make_autograd_impl,
    peek_interpreter_stack,
)
from ..masks.text import kept_functions
from ._merge import WholeRows, sinks_gradient

if TYPE_CHECKING:
    from torch.library import CustomOpDef  # pyright: ignore[reportPrivateImportUsage]

_NO_TRANSFORMS = (
    "has no forward mode and no transforms of torch.func (grad, vmap, jvp); "
    "attend(..., engine='reference') has them (dense, small inputs, eagerly, one rank)"
)


@graph_constant
def is_transformed() -> bool:
    """Return True inside a torch.func transform or forward-mode AD: elsewhere `refuse_transforms` never raises."""
    return in_forward_mode() or peek_interpreter_stack() is not None


def refuse_transforms(what: str, inputs: Iterable[Any]) -> None:
    """Raise ValueError if an input is vmapped, has a tangent, or needs a gradient inside torch.func.

    what: name of the operation, with which the error begins.
    inputs: tensors, lists of them and other values.
    """
    if not is_transformed():
        return
    in_func = peek_interpreter_stack() is not None
    for x in tensors_in(inputs):
        if is_batchedtensor(x) or forward_ad.unpack_dual(x).tangent is not None or (in_func and x.requires_grad):
            raise ValueError(f"{what} {_NO_TRANSFORMS}")


def refuse_vmap(*_: Any) -> NoReturn:
    """Raise ValueError: the batching rule of an op that does not support vmap."""
    raise ValueError(f"attention {_NO_TRANSFORMS}")


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an op's arguments or results, also from lists and tuples."""
    found = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):  # dispatch modes call it for each operation: `|` takes longer
            found += tensors_in(x)
    return found


_library = torch.library.Library("flexdilated", "FRAGMENT")


def own_op(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Return a decorator that makes a function the custom op `name`, which returns no views and refuses transforms.

    It is an op of `torch.library.custom_op` that modifies no argument, with three differences:

    * Results are detached, because autograd forbids in-place writes to an output that is one of several and a view.
    * It raises ValueError, eagerly and in a trace, for inputs that have tangents (which a custom op would drop), are
      batched by vmap, or need a gradient inside `torch.func`.
    * A list argument may be None, as AOTInductor packages pass it for an empty list, unless it is the op's first
      argument, by which torch finds the kernel. If such a list has a tensor batched by vmap, torch fails with an error
      of its own before this check, so callers must check these lists.

    name: with the namespace, such as "flexdilated::aten".
    """

    def make(function: Callable[..., Any]) -> CustomOpDef:
        parameters = signature(function, eval_str=True).parameters.values()
        is_list = [get_origin(parameter.annotation) is list for parameter in parameters]

        def computed(*arguments: Any) -> Any:
            found = function(*([] if x is None and one else x for x, one in zip(arguments, is_list, strict=True)))
            return found.detach() if isinstance(found, Tensor) else type(found)(x.detach() for x in found)

        first, *others = torch.library.infer_schema(function, mutates_args=()).split(", ")
        schema = ", ".join([first, *(each.replace("[] ", "[]? ") for each in others)])
        op = torch.library.custom_op(name, computed, mutates_args=(), schema=schema)
        own = name.removeprefix("flexdilated::")
        recorded = make_autograd_impl(getattr(torch.ops.flexdilated, own).default, op)

        def checked(keyset: Any, *arguments: Any) -> Any:
            refuse_transforms(own, arguments)
            return recorded(keyset, *arguments)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
            _library.impl(own, checked, "Autograd", with_keyset=True, allow_override=True)
        op.register_vmap(refuse_vmap)
        _library.impl(own, refuse_vmap, "Batched")  # the legacy vmap of autograd; torch.func uses the rule above
        return op

    return make


# JSON and repr escape it. Inductor writes constants into comments of its code, which a line break would end.
_SEPARATOR = "\t"


def write_constants(texts: Sequence[str], values: Iterable[str | int | float | tuple[int, ...] | None]) -> str:
    """Return constants of a call as one text, which `read_constants` reads.

    Custom ops take the text as an argument, because a text is a constant of graphs and exported programs.

    texts: strings without tabs, such as patterns in JSON, which are stored unchanged.
    values: other constants, stored by their repr.
    """
    return _SEPARATOR.join([", ".join([f"{each!r}" for each in values]), *texts])


def read_constants(constants: str) -> tuple[Any, ...]:
    """Return (*texts, *values), the arguments from which `write_constants` made this text."""
    values, *texts = constants.split(_SEPARATOR)
    return *texts, *_parsed_values(values)


@lru_cache(maxsize=1024)
def _parsed_values(line: str) -> tuple[Any, ...]:
    return tuple(literal_eval(f"[{line}]"))


def functions_in(constants: str) -> object:
    """Return an object that keeps the Python functions in the constants' patterns alive while it is referenced.

    constants: a text made by `write_constants`. Custom patterns in it name functions.
    """
    return [kept_functions(text) for text in constants.split(_SEPARATOR)[1:]]


def set_gradient(op: CustomOpDef, backward_op: CustomOpDef, *, refusal: str | None, over_ranks: bool = False) -> None:
    """Register `backward_op` as the gradient of `op`; a second derivative raises RuntimeError(refusal).

    op: (q, k, v, sinks, bindings, *options) -> (out, lse, *kept). `bindings` are run-time tensors, which get no
        gradient; `kept` are tensors for the backward only; the first option is the text of the call's constants.
    backward_op: (grad_out, grad_lse, q, k, v, out, lse, *kept, bindings, *options) -> (dq, dk, dv). The gradient of
        sinks is that of `sinks_gradient`.
    refusal: None for a backward_op that has a gradient itself.
    over_ranks: run the backward even without an incoming gradient, as other ranks wait for data from this one.
    """

    def remember(ctx, inputs, output) -> None:
        q, k, v, sinks, bindings, *options = inputs
        ctx.save_for_backward(q, k, v, sinks, *output, *copies(bindings))
        ctx.options, ctx.num_outputs = options, len(output)
        ctx.functions = functions_in(options[0])  # of custom patterns: kept alive until the backward
        ctx.set_materialize_grads(False)

    def backward(ctx, grad_out, grad_lse, *_):
        q, k, v, sinks, *rest = ctx.saved_tensors
        (out, lse, *kept), bindings = rest[: ctx.num_outputs], rest[ctx.num_outputs :]
        without = no_gradients(bindings, ctx.options)
        if grad_out is None and grad_lse is None and not over_ranks:
            return None, None, None, None, *without
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = backward_op(grad_out, grad_lse, q, k, v, out, lse, *kept, bindings, *ctx.options)
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            grad_sinks = sinks_gradient(sinks, WholeRows(out, lse, grad_out, grad_lse))
        return *grads, grad_sinks, *without

    op.register_autograd(backward, setup_context=remember)
    if refusal is not None:
        backward_op.register_autograd(refusing_backward(refusal))


@contextmanager
def autograd_on() -> Iterator[None]:
    """Context manager that lets autograd record in a custom op's kernel, where `torch.enable_grad` alone does not.

    A kernel runs without autograd's dispatch keys, as the op registers its own backward. Torch operations inside the
    kernel can be differentiated only with these keys.
    """
    keys, excluded = _torch_private.DispatchKey, _torch_private.dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    included = _torch_private.dispatch_tls_local_include_set()
    with _torch_private.ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def copies(bindings: Sequence[Tensor]) -> list[Tensor]:
    """Return detached copies of run-time tensors, to be saved for the backward.

    A later write to an original does not always raise its version counter, so autograd might not notice that a saved
    original had changed.
    """
    return [x.detach().clone() for x in bindings]


def no_gradients(bindings: Sequence[Tensor], options: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of an op's backward for its last arguments, which get no gradient: ([None, ...], None, ...).

    bindings: the op's list of run-time tensors; its gradient is a list with one None for each tensor.
    options: the arguments after that list; the gradient of each is None, or [] for an option that is an empty list.
    """
    # autograd takes an empty list, such as a default block size, for a list of tensors, whose gradient is a list.
    return [None] * len(bindings), *([] if isinstance(option, list) and not option else None for option in options)


def refusing_backward(words: str) -> Callable[..., NoReturn]:
    """Return the backward of an op without a gradient, a function that raises RuntimeError(words)."""

    def backward(ctx, *grads) -> NoReturn:
        raise RuntimeError(words)

    return backward
