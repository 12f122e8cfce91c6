"""Checks on parameters, with errors that state the rule and the value."""

from math import isfinite


def require_int(name: str, value: object, *, minimum: int) -> int:
    """The value itself, if it is an integer of at least `minimum`; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer; got {name}={value!r} of type {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {name}={value}")
    return value


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """The value itself, if it is one of the choices; ValueError that lists them otherwise."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {name}={value!r}")
    return value


def require_finite(name: str, value: object) -> float:
    """The value as a float, if it is a finite real number; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a real number; got {name}={value!r} of type {type(value).__name__}")
    if not isfinite(value):
        raise ValueError(f"{name} must be finite; got {name}={value}")
    return float(value)
