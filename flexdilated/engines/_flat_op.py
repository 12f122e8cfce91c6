"""Custom ops of this package: what all of them do alike, and ops of one call as plain values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl

from ._transforms import refuse_transforms, refuse_vmap

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

_library = torch.library.Library("flexdilated", "FRAGMENT")


def own_op(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes a functional op: `torch.library.custom_op` whose outputs are no views, and which drops no derivative.

    autograd lets nobody write into a view among several outputs. A custom op passes no tangent on, and in
    `torch.func` neither a gradient nor a mapped dim: each is an error, eagerly and where a graph is traced.
    """

    def make(function: Callable[..., Any]) -> CustomOpDef:
        def computed(*arguments: Any) -> Any:
            found = function(*arguments)
            return found.detach() if isinstance(found, Tensor) else type(found)(x.detach() for x in found)

        computed.__signature__ = signature(function, eval_str=True)
        op = torch.library.custom_op(name, computed, mutates_args=())
        recorded = make_autograd_impl(op._opoverload, op)

        def checked(keyset: Any, *arguments: Any) -> Any:
            refuse_transforms(op._opoverload._opname, arguments)
            return recorded(keyset, *arguments)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
            _library.impl(op._opoverload._opname, checked, "Autograd", with_keyset=True, allow_override=True)
        op.register_vmap(refuse_vmap)
        _library.impl(op._opoverload._opname, refuse_vmap, "Batched")  # as autograd maps, not torch.func
        return op

    return make


def flat_op(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes an op of a function whose last argument is a named tuple: in its place the op takes the tuple's fields.

    Such an op is called with `*call`. The function gets what the tuple's class makes of the fields by `of`, as an op
    hands over lists for tuples, and where it is traced sizes that are no plain integers.
    """

    def make(function: Callable[..., Any]) -> CustomOpDef:
        given = signature(function, eval_str=True)
        *tensors, call = given.parameters.values()

        def flat(*arguments: Any) -> Any:
            return function(*arguments[: len(tensors)], call.annotation.of(*arguments[len(tensors) :]))

        flat.__signature__ = given.replace(parameters=[*tensors, *_fields(call.annotation)])
        return own_op(name)(flat)

    return make


def _fields(kind: type) -> list[Parameter]:
    """A named tuple's fields as parameters, of types that a schema can have."""
    return [
        Parameter(
            name,
            Parameter.POSITIONAL_OR_KEYWORD,
            annotation=list[get_args(hint)[0]] if get_origin(hint) is tuple else hint,
        )
        for name, hint in get_type_hints(kind).items()
    ]
