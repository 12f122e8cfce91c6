"""What `show` draws, read back: the lines for a question, and what stands inside the frame."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout

from flexdilated.cli import main


def drawn(*arguments: str) -> list[str]:
    """The lines that `show` prints of a pattern."""
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["show", *arguments, "--brief"]) == 0
    return printed.getvalue().splitlines()


def body(lines: Sequence[str]) -> list[str]:
    """What stands inside the frame."""
    first = next(index for index, line in enumerate(lines) if re.search("[┌+][┴─+-]+[┐+]$", line))
    framed = lines[first + 1 :]
    height = next(index for index, line in enumerate(framed) if re.search("^ *[└+][─-]+[┘+]$", line))
    return [_inside(line) for line in framed[:height]]


def _inside(line: str) -> str:
    found = re.fullmatch("[0-9KM, ]* [┤│|+](.*)[│|]", line)
    assert found, line
    return found[1]
