"""`plan`: what it can be told."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
