"""Modules whose functions check each call against their annotations, shapes included, at a price tests can pay.

jaxtyping's own decorator checks the arguments again beside the result, and binds them to the signature besides, for
the words of an error: half of the time of the tests that call small functions often. Here beartype checks each value
once, and jaxtyping's axes mean one size in one call, as with its own.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial, wraps
from typing import Any, get_args
from unittest.mock import patch

import jaxtyping
from jaxtyping import AbstractArray, install_import_hook, jaxtyped


@contextmanager
def checked_on_import(modules: Sequence[str]) -> Iterator[None]:
    """What is imported meanwhile from one of these modules is checked from then on."""
    with install_import_hook(modules, "beartype.beartype"), patch.object(jaxtyping, "jaxtyped", _checked):
        yield


def _checked(fn: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """In the place of `jaxtyped`; generators are left to it."""
    if fn is None:
        return partial(_checked, typechecker=typechecker)
    if inspect.isclass(fn):
        if is_dataclass(fn) and "__init__" in vars(fn):
            fn.__init__ = _checked(fn.__init__, typechecker=typechecker)
        return fn
    if inspect.isgeneratorfunction(fn):
        return jaxtyped(fn, typechecker=typechecker)
    return _with_axes(typechecker(fn)) if any(map(_has_shape, fn.__annotations__.values())) else typechecker(fn)


def _with_axes(fn: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fn)
    def call(*args: Any, **kw: Any) -> Any:
        with jaxtyped("context"):
            return fn(*args, **kw)

    return call


def _has_shape(hint: Any) -> bool:
    """Or may have one: what is written as a string is known later."""
    if isinstance(hint, str) or (inspect.isclass(hint) and issubclass(hint, AbstractArray)):
        return True
    return any(map(_has_shape, get_args(hint)))
