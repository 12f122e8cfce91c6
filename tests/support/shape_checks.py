"""Modules whose functions check each call against their annotations, shapes included, at a price tests can pay.

jaxtyping's own decorator checks the arguments again beside the result, and binds them to the signature besides, for
the words of an error: half of the time of the tests that call small functions often. Here beartype checks each value
once, and jaxtyping's axes mean one size in one call, as with its own. Of a function that is called often, some calls
are checked: all of them would be a quarter of the suite's time.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial, wraps
from itertools import count
from typing import Any, get_args
from unittest.mock import patch

import jaxtyping
import torch
from jaxtyping import AbstractArray, install_import_hook, jaxtyped

_FIRST, _EVERY = 100, 64  # calls of a function that are checked: the first ones, then one of so many


@contextmanager
def checked_on_import(modules: Sequence[str]) -> Iterator[None]:
    """What is imported meanwhile from one of these modules is checked from then on."""
    with install_import_hook(modules, "beartype.beartype"), patch.object(jaxtyping, "jaxtyped", _checked):
        yield


def _checked(fn: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """In the place of `jaxtyped`; generators are left to it. A graph has none of the checks."""
    if fn is None:
        return partial(_checked, typechecker=typechecker)
    if inspect.isclass(fn):
        if is_dataclass(fn) and "__init__" in vars(fn):
            fn.__init__ = _checked(fn.__init__, typechecker=typechecker)
        return fn
    if inspect.isgeneratorfunction(fn):
        return _outside_of_graphs(fn, jaxtyped(fn, typechecker=typechecker), first=0, every=1)
    checked, has_axes = typechecker(fn), any(map(_has_shape, fn.__annotations__.values()))

    def within_axes(*args: Any, **kw: Any) -> Any:
        with jaxtyped("context"):
            return checked(*args, **kw)

    return _outside_of_graphs(fn, within_axes if has_axes else checked, first=_FIRST, every=_EVERY)


def _outside_of_graphs(fn: Callable[..., Any], checked: Callable[..., Any], *, first: int, every: int) -> Any:
    """The function, of which some calls are checked, and none where Dynamo traces it."""
    calls = count()

    def eager(*args: Any, **kw: Any) -> Any:
        number = next(calls)
        return checked(*args, **kw) if number < first or number % every == 0 else fn(*args, **kw)

    @wraps(fn)
    def call(*args: Any, **kw: Any) -> Any:
        return fn(*args, **kw) if torch.compiler.is_compiling() else eager(*args, **kw)

    return call


def _has_shape(hint: Any) -> bool:
    """Or may have one: what is written as a string is known later."""
    if isinstance(hint, str) or (inspect.isclass(hint) and issubclass(hint, AbstractArray)):
        return True
    return any(map(_has_shape, get_args(hint)))
