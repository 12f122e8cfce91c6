"""Checks on parameters, with errors that state the rule and the value."""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from torch import SymInt, Tensor

# Kernels count positions in int32. The product of two such numbers, and any position plus it, fits into int64.
LARGEST = 2**31 - 1

_Function = TypeVar("_Function", bound=Callable[..., Any])


def require_int(name: str, value: object, *, minimum: int, maximum: int = LARGEST) -> int:
    """The value itself, if it is an integer in [minimum, maximum]; TypeError or ValueError otherwise.

    A size that varies in a graph being traced is one.
    """
    # An integer of another class, such as an enum's, is written in another way.
    if type(value) is not int and not isinstance(value, SymInt):
        raise TypeError(f"{name} must be an integer; got {name}={value!r:.80} of type {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {name}={shown(value)}")
    if value > maximum:
        raise ValueError(f"{name} must be at most {maximum}; got {name}={shown(value)}")
    return value  # pyright: ignore[reportReturnType]


def require_below(name: str, value: object, stop: int, what: str) -> int:
    """The value itself, if it is an integer in [0, stop), the number of such things as heads; an error otherwise."""
    found = require_int(name, value, minimum=0)
    if found >= stop:
        raise ValueError(f"{name} must be below the number of {what}; got {name}={found} of {stop}")
    return found


def require_bool(name: str, value: object) -> bool:
    """The value itself, if it is True or False; TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {name}={value!r:.80}")
    return value


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """The value itself, if it is one of the choices; ValueError that lists them otherwise."""
    if type(value) is not str or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {name}={value!r:.80}")
    return value


def require_finite(name: str, value: object) -> float:
    """The value as a float, if it is a finite real number; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a real number; got {name}={value!r:.80} of type {type(value).__name__}")
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be finite; got {name}={shown(value)}")
    return float(value)


def advises(*, keywords: Mapping[str, str], positional: str = "") -> Callable[[_Function], _Function]:
    """Make a function answer these keywords, which it does not have, by a TypeError with the text for each.

    positional: the text for positional arguments, of a function that has none.
    """

    def advising(function: _Function) -> _Function:
        @wraps(function)
        def advised(*args: Any, **named: Any) -> Any:
            if args and positional:
                raise TypeError(f"{function.__name__} has no positional arguments: {positional}; got {args!r:.80}")
            for name in named:
                if name in keywords:
                    called = function.__qualname__.removesuffix(".__init__")
                    raise TypeError(f"{called} has no {name}: {keywords[name]}")
            return function(*args, **named)

        return advised  # type: ignore[return-value]

    return advising


def instead_of_pattern(value: object) -> str:
    """The end of an error: what to write for other ways to say who attends to whom."""
    if value is None:
        return ": masks.every() is dense attention"
    if isinstance(value, str):
        return ": masks.parse reads a pattern from text, as masks.parse('causal()')"
    if isinstance(value, list | tuple):
        return ": join patterns by `|`, `&` or `+`, or give one to each head by masks.per_head(patterns)"
    if type(value).__name__ == "BlockMask":
        return ": give it to masks.custom, which reads its function, as masks.custom(block_mask)"
    if isinstance(value, Tensor) or type(value).__name__ == "ndarray":
        return ": give masks.custom a function that reads it as a tensor, masks.custom(lambda b, h, q, k: mask[q, k])"
    if not callable(value) or isinstance(value, type):
        return ""
    if getattr(value, "__module__", "").startswith("flexdilated.masks"):
        return f": call it, as masks.{getattr(value, '__name__', '')}(...)"
    return ": give it to masks.custom, as masks.custom(fn)"


def shown(value: object) -> str:
    """A number as text; Python refuses to write an integer of thousands of digits."""
    if isinstance(value, int) and abs(value) > 1e40:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.80}"
