"""`plan`: what it can be told."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ._command_parser import CommandParser
from ._pattern_arguments import add_pattern_arguments


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "How a pattern is computed at a size: the terms chosen, the ways weighed, pairs, FLOPs and memory. With "
        "--budget the longest sequence that fits, in inference and in training, with checkpointing and without. With "
        "--ranks what many ranks would send each other, compute and hold; nothing is started for it."
    )
    add_pattern_arguments(parser, no_size=("budget",))
    add = parser.argument
    add("--kv-heads", type=int, metavar="G", help="key/value heads, a divisor of H (H)")
    head_dim = "(64, or E / H where --embed-dim is given)"
    add("--head-dim", type=int, metavar="D", help=head_dim)
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of tensors and weights (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda is predicted, and needs none (%(default)s)")
    add("--batch", type=int, default=1, metavar="B", help="sequences at once (%(default)s)")
    layers, embed_dim = "of the LongNet whose memory is told (12)", "of that LongNet (H * D)"
    add("--layers", type=int, metavar="L", excludes=("ranks",), help=layers)
    add("--embed-dim", type=int, metavar="E", excludes=("head_dim",), help=embed_dim)
    budget = "the longest N that fits into so much memory; without a SIZE a table of budgets"
    alone = ("measure", "ranks")
    add("--budget", nargs="?", const="table", metavar="SIZE", excludes=alone, help=budget)
    measure = "time the ways to compute it on this machine's CPU, besides"
    add("--measure", action="store_true", excludes=("ranks", "device=cuda"), help=measure)
    add("--json", action="store_true", help="print plain data instead of tables")
    _add_ranks(parser)
    parser.set_defaults(command=_plan)


def _add_ranks(parser: CommandParser) -> None:
    add = partial(parser.argument, group=parser.add_argument_group("many ranks"))
    add("--ranks", type=int, metavar="W", help="ranks that share the sequence, 4096 at most")
    order = "which tokens a rank holds (contiguous)"
    add("--sharding", choices=("contiguous", "zigzag"), needs=("ranks",), help=order)
    codec = "of keys and values on their way (none)"
    add("--codec", choices=("none", "bf16", "int8"), needs=("ranks",), help=codec)
    link = "what a rank sends, and receives, a second, such as 50GB/s: predicts times"
    add("--link", metavar="SPEED", needs=("ranks",), help=link)
    node = "consecutive ranks with links of that speed (all)"
    add("--ranks-per-node", type=int, metavar="R", needs=("link", "link_between"), help=node)
    between = "the same to ranks of other nodes"
    add("--link-between", metavar="SPEED", needs=("link", "ranks_per_node"), help=between)
    add("--latency", metavar="TIME", needs=("link",), help="of each message, such as 5us (0)")
    add("--picture", type=Path, metavar="FILE", needs=("ranks",), help="draw who gets what from whom as a .png")


def _plan(options: argparse.Namespace) -> int:
    if options.ranks is not None:
        from ._plan_ranks import plan_ranks, ranks_settings_from

        return plan_ranks(ranks_settings_from(options))
    from ._plan import plan
    from ._plan_settings import settings_from

    return plan(settings_from(options))
