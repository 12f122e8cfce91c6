"""explain: one pair of a pattern, rule by rule."""

from __future__ import annotations

import argparse
import json

from .. import masks
from ._command_parser import CommandParser
from ._pattern import add_pattern_arguments, asked_from, refusals
from ._sizes import tokens_of


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
    parser.set_defaults(command=explain)


def explain(options: argparse.Namespace) -> int:
    """Print the tree of reasons, or the same as plain data. Status 0 whether the pair is allowed or not."""
    asked = asked_from(options)
    asked.require(head=options.head, batch=options.batch)
    pair = {"query": options.query, "key": options.key, "head": options.head, "batch": options.batch}
    sizes = {"num_heads": asked.num_heads, "num_tokens": asked.num_tokens, "block_size": options.block_size}
    with refusals():
        found = masks.explain(asked.pattern, **pair, **sizes)
    print(json.dumps(found.to_data(), indent=2) if options.json else found)
    return 0


def _position(text: str) -> int:
    """A whole number, in full or in K or M; the library says which are too small or too large."""
    found = tokens_of(text.strip().removeprefix("-"))
    if found is None:
        raise argparse.ArgumentTypeError(f"a position must be a whole number, such as 5000 or 64K; got {text!r}")
    return -found if text.strip().startswith("-") else found
