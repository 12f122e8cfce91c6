"""`tune`: what it can be told."""

from __future__ import annotations

import argparse
from pathlib import Path

from ._command_parser import CommandParser
from ._pattern_arguments import add_pattern_arguments


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Without a PATTERN: measure the constants by which this device's plans are made, and store them in the user's "
        "cache directory. With one: run the ways to compute it, print them, and use the fastest from now on."
    )
    of_pattern = ("pattern",)
    add_pattern_arguments(parser, tokens="16K", heads=4, needs=of_pattern, nargs="?")
    add = parser.argument
    add("--device", default="cpu", help="cpu or cuda (%(default)s)")
    add("--seconds", type=float, default=15.0, help="how long to repeat the timed runs (%(default)s)")
    add("--out", type=Path, metavar="FILE", excludes=of_pattern, help="store the constants here instead")
    add("--kv-heads", type=int, metavar="G", needs=of_pattern, help="key/value heads, a divisor of H (H)")
    add("--head-dim", type=int, default=64, metavar="D", needs=of_pattern, help="(%(default)s)")
    dtypes = ("fp32", "bf16", "fp16", "fp64")
    add("--dtype", choices=dtypes, default="fp32", needs=of_pattern, help="(%(default)s)")
    add("--forward", action="store_true", needs=of_pattern, help="time the forward alone")
    parser.set_defaults(command=_tune)


def _tune(options: argparse.Namespace) -> int:
    from ._tune import tune
    from ._tune_settings import settings_from

    return tune(settings_from(options))
