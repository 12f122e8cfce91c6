"""`explain`: what it can be told."""

from __future__ import annotations

import argparse

from ._command_parser import CommandParser
from ._pattern_arguments import add_pattern_arguments


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Why a query sees a key, or why not: by each branch of a mixture and each part of a composition, in plain "
        "numbers; and in which block the pair lies, in the natural order and in residue-major order."
    )
    add_pattern_arguments(parser)
    add = parser.argument
    add("--query", type=_position, required=True, metavar="Q", help="the position of the query, such as 5000 or 64K")
    add("--key", type=_position, required=True, metavar="K", help="the position of the key")
    add("--head", type=int, default=0, metavar="H", help="counted over all devices (%(default)s)")
    add("--batch", type=int, default=0, metavar="B", help="the entry whose run-time tensors are asked (%(default)s)")
    add("--block-size", type=int, default=128, metavar="S", help="side of the blocks (%(default)s)")
    add("--json", action="store_true", help="print plain data instead of the tree")
    parser.set_defaults(command=_explain)


def _position(text: str) -> int:
    """A whole number, in full or in K or M; the library says which are too small or too large."""
    from ._sizes import tokens_of

    found = tokens_of(text.strip().removeprefix("-"))
    if found is None:
        raise argparse.ArgumentTypeError(f"a position must be a whole number, such as 5000 or 64K; got {text!r}")
    return -found if text.strip().startswith("-") else found


def _explain(options: argparse.Namespace) -> int:
    from ._explain import explain

    return explain(options)
