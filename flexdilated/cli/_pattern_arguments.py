"""What the commands that look at a pattern share: which pattern, how many tokens and heads, and run-time tensors."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._asked_pattern import AskedPattern


def add_pattern_arguments(parser: argparse.ArgumentParser, *, heads: int = 8) -> None:
    """PATTERN, --tokens, --heads and --bind, which `asked_from` reads."""
    add = parser.add_argument
    add("pattern", metavar="PATTERN", help="an expression, or a .json file, such as masks.to_json writes")
    tokens = "queries, and as many keys, such as 5000, 64K or 1M (as many as --bind's documents have; else 64K)"
    add("-n", "--tokens", metavar="N", help=tokens)
    add("--heads", type=int, default=heads, metavar="H", help="query heads, over all devices (%(default)s)")
    bind = (
        "a run-time tensor: the lengths of packed documents, as in documents=100,200,300; of padded sequences, as in "
        "lengths=500; the visible keys, as in visible_keys=0:100,200:300; or the tensor itself from a .json or .pt "
        "file. Batch entries are separated by /"
    )
    add("--bind", action="append", default=[], metavar="NAME=VALUE", help=bind)


def asked_from(options: argparse.Namespace) -> AskedPattern:
    """The pattern with the values of its run-time tensors in place, and its sizes; it binds to them.

    Raises UsageError for a pattern that does not read, for sizes, and for values that are missing or do not fit.
    """
    from ._asked_pattern import ask

    return ask(options.pattern, options.tokens, options.heads, options.bind)
