"""Arguments in, exit status out."""

from __future__ import annotations

import argparse
import os
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
        if os.environ.get("LOCAL_RANK", "0") == "0":  # of the processes that torchrun starts, one a machine says it
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
    plan = commands.add_parser("plan", help="say how a pattern is computed, what it takes, and what fits into memory")
    _add_plan(plan)
    _add_tune(commands.add_parser("tune", help="measure this device, or the ways to compute one pattern"))
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a byte-level LongNet language model on the source text of Python's own standard library, and "
        "measure it. Ctrl-C ends the training early, with all results so far; --resume goes on. Under torchrun all "
        "processes train one model, each on its part of every text."
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


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "How a pattern is computed at a size: the terms chosen, the ways weighed, pairs, FLOPs and memory. With "
        "--budget the longest sequence that fits, in inference and in training, with checkpointing and without. With "
        "--ranks what many ranks would send each other, compute and hold; nothing is started for it."
    )
    add = parser.add_argument
    add("pattern", metavar="PATTERN", help="an expression, or a .json file, such as masks.to_json writes")
    add("-n", "--tokens", default="64K", metavar="N", help="queries, and as many keys (%(default)s)")
    add("--heads", type=int, default=8, metavar="H", help="query heads (%(default)s)")
    add("--kv-heads", type=int, metavar="G", help="key/value heads, a divisor of H (H)")
    add("--head-dim", type=int, metavar="D", help="(64, or E / H where --embed-dim is given)")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of tensors and weights (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda is predicted, and needs none (%(default)s)")
    add("--batch", type=int, default=1, metavar="B", help="sequences at once (%(default)s)")
    add("--layers", type=int, metavar="L", help="of the LongNet whose memory is told (12)")
    add("--embed-dim", type=int, metavar="E", help="of that LongNet (H * D)")
    budget = "the longest N that fits into so much memory; without a SIZE a table of budgets"
    add("--budget", nargs="?", const="table", metavar="SIZE", help=budget)
    add("--measure", action="store_true", help="time the ways to compute it on this machine, besides")
    add("--json", action="store_true", help="print plain data instead of tables")
    _add_ranks(parser)
    parser.set_defaults(command=_plan)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("many ranks").add_argument
    add("--ranks", type=int, metavar="W", help="ranks that share the sequence, 4096 at most")
    add("--sharding", choices=("contiguous", "zigzag"), help="which tokens a rank holds (contiguous)")
    add("--codec", choices=("none", "bf16", "int8"), help="of keys and values on their way (none)")
    add("--link", metavar="SPEED", help="what a rank sends, and receives, a second, such as 50GB/s: predicts times")
    add("--ranks-per-node", type=int, metavar="R", help="consecutive ranks with links of that speed (all)")
    add("--link-between", metavar="SPEED", help="the same to ranks of other nodes")
    add("--latency", metavar="TIME", help="of each message, such as 5us (0)")
    add("--picture", type=Path, metavar="FILE", help="draw who gets what from whom as a .png")


def _plan(options: argparse.Namespace) -> int:
    if options.ranks is not None:
        from ._plan_ranks import plan_ranks
        from ._ranks_settings import ranks_settings_from

        return plan_ranks(ranks_settings_from(options))
    from ._plan import plan
    from ._plan_settings import settings_from
    from ._ranks_settings import refuse_without_ranks

    refuse_without_ranks(options)
    return plan(settings_from(options))


def _add_tune(parser: argparse.ArgumentParser) -> None:
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


def _demo(options: argparse.Namespace) -> int:
    from ._demo import demo
    from ._settings import Settings

    given = {name: value for name, value in vars(options).items() if name != "command"}
    demo(Settings(**given))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from ._doctor import doctor

    return doctor()
