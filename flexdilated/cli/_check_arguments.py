"""`check`: what it can be told."""

from __future__ import annotations

import argparse

from ._command_parser import CommandParser
from ._pattern_arguments import PATTERN

_HEADS = 4
_MOST_PAIRS = 1 << 22  # over all heads: the tables in which each is looked at then fill most of a gigabyte
_SEEDS = 1 << 62  # torch's generators take 64 bits, and the number of the example is added


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Hold a pattern to its definition: all it says of itself (bounds, period, block lists, JSON) to its rule, pair "
        "by pair, and attend's output, lse and gradients on it to dense attention in float64, over drawn sizes. "
        "The exit status is 1 if a counterexample is found; the smallest is printed."
    )
    add = parser.argument
    add("pattern", metavar="PATTERN", help=PATTERN)
    add("--examples", type=int, default=500, metavar="E", help="to draw, of boxes and of calls (%(default)s)")
    add("--heads", type=int, metavar="H", help=f"query heads ({_HEADS}, or per_head's)")
    add("--max-tokens", type=int, default=96, metavar="N", help="the longest sequence (%(default)s)")
    add("--seed", type=int, default=0, help="of what is drawn (%(default)s)")
    add("--json", action="store_true", help="print plain data")
    parser.set_defaults(command=_check)


def _check(options: argparse.Namespace) -> int:
    from ._check import check
    from ._fixed_sizes import fitting_heads
    from ._read_pattern import read_pattern
    from ._usage import UsageError

    for name in ("examples", "heads", "max_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
    if abs(options.seed) >= _SEEDS:
        raise UsageError(f"--seed must be of less than 63 bits; got {options.seed}")
    pattern = read_pattern(options.pattern)
    heads = fitting_heads(pattern, _HEADS) if options.heads is None else options.heads
    pairs = heads * options.max_tokens**2
    if pairs > _MOST_PAIRS:
        raise UsageError(
            f"every pair is looked at: --heads times --max-tokens squared must be at most {_MOST_PAIRS}; "
            f"got {heads} heads and {options.max_tokens} tokens, which make {pairs}"
        )
    sizes = {"num_heads": heads, "max_tokens": options.max_tokens}
    return check(pattern, examples=options.examples, **sizes, seed=options.seed, as_json=options.json)
