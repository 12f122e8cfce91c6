"""`demo`: what it can be told."""

from __future__ import annotations

import argparse
from pathlib import Path

from ._command_parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Train a byte-level LongNet language model on the source text of Python's own standard library, and "
        "measure it. Ctrl-C ends the training early, with all results so far; --resume goes on. Under torchrun all "
        "processes train one model, each on its part of every text."
    )
    add = parser.argument
    add(
        "--context",
        type=int,
        default=16384,
        metavar="BYTES",
        help="bytes the model sees at once (%(default)s)",
    )
    add("--steps", type=int, default=200, help="training steps, one window of text each (%(default)s)")
    add("--minutes", type=float, default=4.0, help="most time to train in this run (%(default)s)")
    add("--seed", type=int, default=0, help="draws the parameters and the order of the text (%(default)s)")
    add("--device", default="cpu", help="cpu, or an accelerator such as cuda (%(default)s)")
    add("--out", type=Path, default=Path("demo-out"), metavar="FOLDER", help="where results go (%(default)s)")
    add("--data", type=Path, metavar="PATH", help="a file or folder to train on instead")
    add("--resume", action="store_true", help="go on from the checkpoint in --out; --steps may be raised")
    sample = "let the model continue a held-out text by this many bytes (%(const)s if no number is given)"
    add("--sample", type=int, nargs="?", const=400, default=0, metavar="BYTES", help=sample)
    parser.set_defaults(command=_demo)


def _demo(options: argparse.Namespace) -> int:
    from ._demo import demo
    from ._settings import Settings

    given = {name: value for name, value in vars(options).items() if name != "command"}
    demo(Settings(**given))
    return 0
