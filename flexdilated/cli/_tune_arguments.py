"""`tune`: what it can be told."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Without a PATTERN: measure the constants by which this device's plans are made, and store them in the user's "
        "cache directory. With one: run the ways to compute it, print them, and use the fastest from now on."
    )
    add = parser.add_argument
    add("pattern", nargs="?", metavar="PATTERN", help="an expression, or a .json file, such as masks.to_json writes")
    add("--device", default="cpu", help="cpu or cuda (%(default)s)")
    add("--seconds", type=float, default=15.0, help="how long to repeat the timed runs (%(default)s)")
    add("--out", type=Path, metavar="FILE", help="store the constants here instead")
    add("-n", "--tokens", default="16K", metavar="N", help="queries, and as many keys (%(default)s)")
    add("--heads", type=int, default=4, metavar="H", help="query heads (%(default)s)")
    add("--kv-heads", type=int, metavar="G", help="key/value heads, a divisor of H (H)")
    add("--head-dim", type=int, default=64, metavar="D", help="(%(default)s)")
    add("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), default="fp32", help="(%(default)s)")
    add("--forward", action="store_true", help="time the forward alone")
    parser.set_defaults(command=_tune)


def _tune(options: argparse.Namespace) -> int:
    from ._tune import TuneSettings, tune

    given = {name: value for name, value in vars(options).items() if name != "command"}
    return tune(TuneSettings(**given))
