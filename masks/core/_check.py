"""Checks on parameters, with errors that state the rule and the value."""

import sys

from torch import SymInt

# Kernels count positions in int32. The product of two positions, plus a position, fits into int64.
LARGEST = 2**31 - 1


def require_int(name: str, value: object, *, minimum: int, maximum: int = LARGEST) -> int:
    """Return the value if it is an integer in [minimum, maximum]; raise TypeError or ValueError otherwise.

    A symbolic size of a traced graph is accepted.
    """
    # Integers of other classes, such as enums, have another repr.
    if type(value) is not int and not isinstance(value, SymInt):
        raise TypeError(f"{name} must be an integer; got {name}={value!r:.80} of type {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {name}={shown(value)}")
    if value > maximum:
        raise ValueError(f"{name} must be at most {maximum}; got {name}={shown(value)}")
    return value  # pyright: ignore[reportReturnType]


def require_below(name: str, value: object, stop: int, what: str) -> int:
    """Return the value if it is an integer in [0, stop), the number of `what`, such as heads; raise otherwise."""
    found = require_int(name, value, minimum=0)
    if found >= stop:
        raise ValueError(f"{name} must be below the number of {what}; got {name}={found} of {stop}")
    return found


def require_bool(name: str, value: object) -> bool:
    """Return the value if it is True or False; raise TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {name}={value!r:.80}")
    return value


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return the value if it is one of the choices; raise ValueError that lists them otherwise."""
    if type(value) is not str or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {name}={value!r:.80}")
    return value


def require_finite(name: str, value: object) -> float:
    """Return the value as a float if it is a finite real number; raise TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a real number; got {name}={value!r:.80} of type {type(value).__name__}")
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be finite; got {name}={shown(value)}")
    return float(value)


def shown(value: object) -> str:
    """Text of a number; Python refuses to format an integer of thousands of digits."""
    if isinstance(value, int) and abs(value) > 1e40:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.80}"
