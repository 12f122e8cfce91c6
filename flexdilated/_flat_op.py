"""flat_op: a custom op of tensors and of one call as plain values, whose fields are spelled in one place."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import torch

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


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
        return torch.library.custom_op(name, flat, mutates_args=())

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
