"""`show`: what it can be told."""

from __future__ import annotations

import argparse
from pathlib import Path

from ._pattern_arguments import add_pattern_arguments
from ._terminal import COLOUR_CHOICES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A pattern as a heat map that fits the terminal, at any number of tokens and in any window of them, down to "
        "single pairs; then what it allows and costs, as `masks.describe` tells it."
    )
    add_pattern_arguments(parser)
    add = parser.add_argument
    add("--head", type=int, default=0, metavar="h", help="the head that is shown (%(default)s)")
    add("--order", choices=("natural", "residue"), default="natural", help="of queries and keys (%(default)s)")
    add("--rows", metavar="A:B", help="queries A to B - 1 only, such as 64K:128K; slots, in residue order")
    add("--cols", metavar="A:B", help="the same of keys")
    add("--cells", metavar="ROWSxCOLUMNS", help="cut the window into so many cells (as many as fit)")
    add("--batch", type=int, default=0, metavar="b", help="the batch entry, where --bind gives several (%(default)s)")
    add("--color", "--colour", choices=COLOUR_CHOICES, default="auto", help="auto: on a terminal (%(default)s)")
    add("--brief", action="store_true", help="print the heat map alone")
    add("--json", action="store_true", help="print plain data: the cells, and what describe tells")
    add("--plot", type=Path, metavar="FILE", help="draw the window as a .png or .svg instead")
    add("--html", type=Path, metavar="FILE", help="write a page to zoom and pan in instead")
    add("--ranks", type=int, metavar="W", help="with --html: what so many ranks would send each other")
    add("--sharding", choices=("contiguous", "zigzag"), help="with --ranks: which tokens a rank holds (contiguous)")
    parser.set_defaults(command=_show)


def _show(options: argparse.Namespace) -> int:
    from ._show import show
    from ._show_settings import settings_from

    return show(settings_from(options))
