"""What `show` draws, read back: the lines for a question, and what stands inside the frame."""

import re
from collections.abc import Sequence
from unittest.mock import patch

from flexdilated.cli._show import add_show_arguments, show
from flexdilated.cli._terminal import CommandParser


def drawn(*arguments: str) -> list[str]:
    """The lines that `show` prints of a pattern."""
    parser = CommandParser()
    add_show_arguments(parser)
    with patch("builtins.print") as printed:
        assert show(parser.parse_args([*arguments, "--brief"])) == 0
    return list(printed.call_args.args[0].lines)


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
