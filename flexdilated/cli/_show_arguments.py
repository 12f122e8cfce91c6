"""`show`: what it can be told."""

from __future__ import annotations

import argparse
from pathlib import Path

from ._command_parser import CommandParser
from ._pattern_arguments import add_pattern_arguments
from ._terminal import COLOUR_CHOICES


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "A pattern as a heat map that fits the terminal, at any number of tokens and in any window of them, down to "
        "single pairs; then what it allows and costs, as `masks.describe` tells it."
    )
    add_pattern_arguments(parser)
    add = parser.argument
    add("--head", type=int, default=0, metavar="h", help="the head that is shown (%(default)s)")
    order = "of queries and keys (%(default)s); a page has both"
    add("--order", choices=("natural", "residue"), default="natural", excludes=("html",), help=order)
    rows = "queries A to B - 1 only, such as 64K:128K; slots, in residue order; a page holds every window"
    add("--rows", metavar="A:B", excludes=("html",), help=rows)
    add("--cols", metavar="A:B", excludes=("html",), help="the same of keys")
    cells = "cut the window into so many cells (as many as fit)"
    add("--cells", metavar="ROWSxCOLUMNS", excludes=("plot", "html"), help=cells)
    add("--batch", type=int, default=0, metavar="b", help="the batch entry, where --bind gives several (%(default)s)")
    colour, files = "on the map: auto is on a terminal (%(default)s)", ("json", "plot", "html")
    add("--color", "--colour", choices=COLOUR_CHOICES, default="auto", excludes=files, help=colour)
    add("--brief", action="store_true", excludes=files, help="print the heat map alone")
    add("--json", action="store_true", excludes=files[1:], help="print plain data: the cells, and what describe tells")
    add("--plot", type=Path, metavar="FILE", excludes=("html",), help="draw the window as a .png or .svg instead")
    add("--html", type=Path, metavar="FILE", help="write a page to zoom and pan in instead")
    add("--ranks", type=int, metavar="W", needs=("html",), help="what so many ranks would send each other")
    sharding = "which tokens a rank holds (contiguous)"
    add("--sharding", choices=("contiguous", "zigzag"), needs=("ranks",), help=sharding)
    parser.set_defaults(command=_show)


def _show(options: argparse.Namespace) -> int:
    from ._show import show
    from ._show_settings import settings_from

    return show(settings_from(options))
