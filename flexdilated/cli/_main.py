"""Arguments in, exit status out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ._usage import UsageError

_INTERRUPTED = 130  # what shells report of a process that SIGINT ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. The exit status: 0 done, 1 does not work here, 2 bad usage, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except UsageError as error:
        print(f"flexdilated: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; a checkpoint written so far stays", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flexdilated", description="Sparse attention over long sequences.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="train a small LongNet on Python's own source text"))
    doctor = commands.add_parser("doctor", help="say what works on this machine, and what is missing")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a byte-level LongNet language model on the source text of Python's own standard library, and "
        "measure it. Ctrl-C ends the training early, with all results so far; --resume goes on."
    )
    add = parser.add_argument
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


def _doctor(options: argparse.Namespace) -> int:
    from ._doctor import doctor

    return doctor()
