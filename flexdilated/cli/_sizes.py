"""Sizes as people write them: 8GiB, 64K."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from ..masks.core import bytes_text as bytes_text
from ..masks.core import tokens_text as tokens_text
from ._command_parser import UsageError

_BYTES = {"B": 1} | {f"{letter}{middle}B": (1024 if middle else 1000) ** power
                     for power, letter in enumerate("KMGT", start=1) for middle in ("", "i")}  # fmt: skip
_TOKENS = {"": 1, "K": 1 << 10, "M": 1 << 20}
_NUMBER = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes of "8GiB", "24GB" or "500 MB". Raises UsageError for anything else."""
    number = _parse(text, _BYTES)
    if number is None or number < 1:
        raise UsageError(f"a budget must be a number above 0 with a unit, one of {', '.join(_BYTES)}; got {text!r}")
    return int(number)


def parse_tokens(text: str) -> int:
    """Tokens of "65536", "64K" or "1M", where K is 1,024. Raises UsageError for anything else."""
    number = tokens_of(text)
    if not number:
        raise UsageError(
            f"--tokens must be a whole number above 0, in K of 1,024 or M of 1,048,576 or in full; got {text!r}"
        )
    return number


def tokens_of(text: str) -> int | None:
    """The same from 0 on; None for anything else."""
    number = _parse(text, _TOKENS)
    return None if number is None or number.denominator > 1 else int(number)


def _parse(text: str, units: Mapping[str, int]) -> Fraction | None:
    """Number times unit, in any case; None for what is no such thing."""
    found, sizes = _NUMBER.fullmatch(text.strip()), {name.lower(): size for name, size in units.items()}
    if found is None or found["unit"].lower() not in sizes or len(found["number"]) > 20:
        return None
    return Fraction(found["number"]) * sizes[found["unit"].lower()]
