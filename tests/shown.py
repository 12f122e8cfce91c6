"""What `show` draws, read back: the lines for a question, and what stands inside the frame."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flexdilated.cli._command_parser import CommandParser
from flexdilated.cli._show_arguments import add_arguments
from flexdilated.cli._show_settings import ShowSettings, settings_from


def asked(*arguments: str) -> ShowSettings:
    parser = CommandParser()
    add_arguments(parser)
    return settings_from(parser.parse_args(arguments))


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
