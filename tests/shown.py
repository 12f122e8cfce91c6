"""What `show` draws, read back: the lines for a question, and what stands inside the frame."""

from __future__ import annotations

import re
from collections.abc import Sequence
from unittest.mock import patch

from flexdilated.cli._command_parser import CommandParser
from flexdilated.cli._show import _heat_map, add_arguments, show
from flexdilated.masks.inspection._show import HeatMap


def drawn(*arguments: str) -> list[str]:
    """The lines that `show` prints of a pattern."""
    parser, found = CommandParser(), []
    add_arguments(parser)

    def kept(*given, **options) -> HeatMap:
        found.append(_heat_map(*given, **options))
        return found[-1]

    with patch("flexdilated.cli._show._heat_map", kept), patch("builtins.print"):
        assert show(parser.parse_args([*arguments, "--brief"])) == 0
    return list(found[0].lines)


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
