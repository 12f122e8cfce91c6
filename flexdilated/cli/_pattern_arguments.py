"""What the commands that take a pattern share: which pattern, how many tokens and heads, and run-time tensors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._command_parser import CommandParser

if TYPE_CHECKING:
    from ._asked_pattern import AskedPattern

PATTERN = "an expression, a .json file, such as masks.to_json writes, or FILE.py:NAME, a pattern that this file makes"
HEADS = 8


def add_pattern_arguments(
    parser: CommandParser,
    *,
    tokens: str = "64K",
    heads: int = HEADS,
    no_size: Sequence[str] = (),
    needs: Sequence[str] = (),
    **how: Any,
) -> None:
    """PATTERN, --tokens, --heads and --bind, which `asked_from` reads.

    `tokens` and `heads` are taken where neither the pattern nor a run-time tensor fixes them. Options of `no_size` look
    at other sizes, and take neither --tokens nor --bind. All but PATTERN need what `needs` names.
    """
    add = parser.argument
    add("pattern", metavar="PATTERN", help=PATTERN, **how)
    size = f"queries, and as many keys, such as 5000, 64K or 1M (those of --bind's values, or of a grid; else {tokens})"
    add("-n", "--tokens", metavar="N", excludes=no_size, needs=needs, help=size)
    add("--heads", type=int, metavar="H", needs=needs, help=f"query heads, over all devices ({heads}, or per_head's)")
    bind = (
        "a run-time tensor: the lengths of packed documents, as in documents=100,200,300; of padded sequences, as in "
        "lengths=500; the visible keys, as in visible_keys=0:100,200:300; or the tensor itself from a .json or .pt "
        "file. Batch entries are separated by /"
    )
    add("--bind", action="append", default=(), metavar="NAME=VALUE", excludes=no_size, needs=needs, help=bind)
    parser.set_defaults(usual=(tokens, heads))


def asked_from(options: argparse.Namespace) -> AskedPattern:
    """The pattern with the values of its run-time tensors in place, and its sizes; it binds to them.

    Raises UsageError for a pattern that does not read, for sizes, and for values that are missing or do not fit.
    """
    from ._asked_pattern import ask

    return ask(options.pattern, options.tokens, options.heads, options.bind, usual=options.usual)
