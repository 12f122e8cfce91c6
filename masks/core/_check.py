"""Checks of parameters, whose errors state the rule and the value; formatting of numbers and expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from torch import SymInt

# Kernels count positions in int32. The product of two positions, plus a position, fits into int64.
LARGEST = 2**31 - 1


def require_int(name: str, value: object, *, minimum: int, maximum: int = LARGEST) -> int:
    """Return the value if it is an integer in [minimum, maximum]; raise TypeError or ValueError otherwise.

    A bool and other subclasses of int are rejected; a symbolic size of a traced graph is accepted.
    """
    # Integers of other classes, such as enums, have another repr.
    if type(value) is not int and not isinstance(value, SymInt):
        raise TypeError(f"{name} must be an integer; got {name}={value!r:.80} of type {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {name}={shown(value)}")
    if value > maximum:
        raise ValueError(f"{name} must be at most {maximum}; got {name}={shown(value)}")
    return value  # pyright: ignore[reportReturnType]


def require_ints(name: str, values: object, *, minimum: int) -> tuple[int, ...]:
    """Return a sequence of integers in [minimum, 2**31 - 1] as a tuple; raise TypeError or ValueError for other values.

    The sequence may be empty.
    """
    if not isinstance(values, Sequence) or isinstance(values, str):
        write = f"{name}.tolist()" if hasattr(values, "tolist") else f"({values},)" if isinstance(values, int) else ""
        advice = f": write {name}={write}" if write else ""
        raise TypeError(f"{name} must be a sequence of integers; got {name}={values!r}{advice}")
    return tuple(require_int(f"{name}[{index}]", value, minimum=minimum) for index, value in enumerate(values))


def require_below(name: str, value: object, stop: int, what: str) -> int:
    """Return the value if it is an integer in [0, stop); raise TypeError or ValueError otherwise.

    name: name of the parameter, for the error.
    what: plural noun for the error, such as "heads" if `stop` is the number of heads.
    """
    found = require_int(name, value, minimum=0)
    if found >= stop:
        raise ValueError(f"{name} must be below the number of {what}, {stop}; got {name}={found}")
    return found


def require_bool(name: str, value: object) -> bool:
    """Return the value if it is True or False; raise TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {name}={value!r:.80}")
    return value


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return the value if it is one of the choices; raise a ValueError that lists them otherwise."""
    if type(value) is not str or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {name}={value!r:.80}")
    return value


def require_finite(name: str, value: object) -> float:
    """Return the value as a float if it is a finite int or float; raise TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a real number; got {name}={value!r:.80} of type {type(value).__name__}")
    # The largest float as a literal: with dynamic=True, sys.float_info.max would become a symbolic float of the graph.
    if not abs(value) <= 1.7976931348623157e308:
        raise ValueError(f"{name} must be finite; got {name}={shown(value)}")
    return float(value)


def require_probability(name: str, value: object) -> float:
    """Return the value as a float if it is an int or float in [0, 1); raise TypeError or ValueError otherwise."""
    number = require_finite(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{name} must be at least 0 and below 1; got {name}={number}")
    return number


def shown(value: object) -> str:
    """Return the first 80 characters of the repr of a value, for an error text.

    For an integer above 1e40 in magnitude, return its number of bits as text instead.
    """
    # Python refuses to format thousands of digits.
    if isinstance(value, int) and abs(value) > 1e40:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.80}"


# From the loosest to the tightest, as in Python: `+` binds tighter than `&`, and `&` tighter than `|`.
OR, AND, SUM, NOT, CALL = range(5)
_OPERATORS = {OR: " | ", AND: " & ", SUM: " + "}

# A longer text is cut: nobody reads it, and a table of blocks would fill the screen.
LONGEST = 4096
CUT = "…"
QUOTED = 1000  # characters quoted from another error
_LONG, _EVEN = 1 << 12, 1 << 6  # windows at least _LONG, or a multiple of _EVEN, have ticks at powers of two
_LAST_WORD = re.compile(r"[^\s,()\[\]]+$")


@dataclass(frozen=True)
class Phrase:
    """Source text of an expression, with the precedence (OR, AND, SUM, NOT or CALL) of its outermost operator."""

    text: str
    binding: int = CALL

    def inside(self, binding: int) -> str:
        """Return the text as an operand of an operator of precedence `binding`, in parentheses if it needs them."""
        return self.text if self.binding >= binding else f"({self.text})"


def call(name: str, /, *values: object, **named: object) -> Phrase:
    arguments = [*map(repr, values), *(f"{key}={value!r}" for key, value in named.items())]
    return Phrase(f"{name}({', '.join(arguments)})")


def chain(phrases: Iterable[Phrase], operator: int) -> Phrase:
    """Return the phrases joined by one operator, OR, AND or SUM; a single phrase is returned unchanged."""
    first, *others = phrases
    if not others:
        return first
    return Phrase(_OPERATORS[operator].join(each.inside(operator) for each in (first, *others)), operator)


def shortened(text: str, longest: int = LONGEST) -> str:
    """Return the text if it has at most `longest` characters, else its first words within this limit, then "…".

    A first word that does not fit is cut after `longest` characters.
    """
    if len(text) <= longest:
        return text
    words = _LAST_WORD.sub("", text[: longest + 1])[:longest]
    return f"{words or text[:longest]}{CUT}"


def bytes_text(number: float) -> str:
    """Return a number of bytes as text with a binary unit up to TiB, such as 1.5 GiB.

    The number before the unit is an integer for bytes and from 100 on, else it has up to three significant digits.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:,.0f} TiB" if number >= 100 else f"{number:.3g} TiB"


def seconds_text(number: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if number >= size), ("us", 1e-6))
    return f"{number / size:,.0f} {unit}" if number / size >= 100 else f"{number / size:.3g} {unit}"


def tokens_format(numbers: Collection[int]) -> Callable[[int], str]:
    """Return a function that formats any of these token counts, all in one unit, such as 16K.

    The unit is the largest of M (2**20), K (2**10) and 1 that divides all `numbers`.
    """
    units = (("M", 1 << 20), ("K", 1 << 10))
    divides = ((unit, size) for unit, size in units if all(number % size == 0 for number in numbers))
    unit, size = next(divides, ("", 1))
    return lambda number: f"{number // size:,}{unit}" if number else "0"


def tokens_text(number: int) -> str:
    """Return a number of tokens as text: multiples of 1024 as 16K, of 1024**2 as 1M; other numbers in full."""
    return tokens_format((number,))(number)


def round_places(window: range, most: int) -> range:
    """Return the ticks of an axis over `window`: all multiples of a round step in [window.start, window.stop].

    The step is the smallest round number with which the window has at most `most` steps. Round numbers are powers of
    two if the window has at least 4096 positions or a multiple of 64 of them, else 1, 2 or 5 times a power of 10.

    most: a number below 1 counts as 1.
    """
    binary = len(window) >= _LONG or len(window) % _EVEN == 0
    base, factors = (2, (1,)) if binary else (10, (1, 2, 5))
    steps = (factor * base**power for power in count() for factor in factors)
    step = next(step for step in steps if len(window) <= max(most, 1) * step)
    return range(-(-window.start // step) * step, window.stop + 1, step)
