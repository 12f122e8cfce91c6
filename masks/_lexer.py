"""The words of a pattern expression, and faults that point into its text."""

import re
from dataclasses import dataclass
from typing import Literal

from ._spelling import CUT, QUOTED, shortened

Kind = Literal["name", "number", "string", "mark", "end"]

# Every character belongs to at most one word, so reading takes time in proportion to the text.
_WORD = re.compile(
    r"""\s+
    | (?P<name>[A-Za-z_]\w*)
    | (?P<number>\d[\w.]*)
    | (?P<string>'[^'\\\n]*' | "[^"\\\n]*")
    | (?P<mark>[-~&|+()\[\],=.])""",
    re.ASCII | re.VERBOSE,
)
_INTEGER = re.compile(r"\d+(_\d+)*", re.ASCII)
_LARGEST = 2**63 - 1
_AROUND = 40  # characters that a fault shows on either side of its place


@dataclass(frozen=True, slots=True)
class Token:
    """One word of the text, and the index of its first character."""

    kind: Kind
    text: str
    at: int


def tokens(text: str) -> list[Token]:
    """The words in order, and an end. Raises ValueError for a character that begins none and a number too large."""
    found, at = [], 0
    while at < len(text):
        match = _WORD.match(text, at)
        if match is None:
            raise fault(text, at, _no_word(text[at]))
        kind = match.lastgroup
        if kind in ("name", "number", "string", "mark"):
            found.append(Token(kind, match[0], at))
        if kind == "number":
            _check_number(text, found[-1])
        at = match.end()
    return [*found, Token("end", "", len(text))]


def fault(text: str, at: int, says: str) -> ValueError:
    """An error that says what is wrong and shows where: the text around the place, with a caret below it."""
    begin, end = max(0, at - _AROUND), at + _AROUND
    shown = "".join(character if character.isprintable() else " " for character in text[begin:end])
    before, after = CUT if begin else "", CUT if end < len(text) else ""
    caret = " " * (len(before) + at - begin) + "^"
    return ValueError(f"{shortened(says, QUOTED)}; at column {at + 1}:\n  {before}{shown}{after}\n  {caret}")


def _check_number(text: str, token: Token) -> None:
    if not _INTEGER.fullmatch(token.text):
        raise fault(text, token.at, f"a number must be an integer such as 2_048; got {token.text[:40]}")
    if int(token.text) > _LARGEST:
        raise fault(text, token.at, f"a number must be at most 2**63 - 1; got one of {len(token.text)} characters")


def _no_word(character: str) -> str:
    if character in "'\"":
        return "a string needs its closing quote on the same line, and no backslash in it"
    if character == CUT:
        return f"the expression was cut at {CUT}: to_json gives a large pattern whole"
    return f"an expression has no {character!r}"
