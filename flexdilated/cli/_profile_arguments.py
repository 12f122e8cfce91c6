"""`profile`: what it can be told."""

from __future__ import annotations

import argparse
from pathlib import Path

from ._command_parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Print what took most time, memory or calls in the profiles of a folder. FLEXDILATED_PROFILE=DIR has the demo, "
        "the benchmarks and the tests record them there. The traces beside them open in ui.perfetto.dev."
    )
    add = parser.argument
    add("folder", type=Path, metavar="DIR", help="the folder that FLEXDILATED_PROFILE named")
    add("--top", type=int, default=15, metavar="N", excludes=("json",), help="so many rows (%(default)s)")
    add("--sort", choices=("time", "memory", "calls"), default="time", help="by what of themselves (%(default)s)")
    add("--only", default="", metavar="TEXT", help="only recordings whose names contain this")
    add("--json", action="store_true", help="all rows, as JSON")
    parser.set_defaults(command=_profile)


def _profile(options: argparse.Namespace) -> int:
    from ._profile import print_profile

    given = {name: value for name, value in vars(options).items() if name not in ("command", "json")}
    print_profile(**given, as_json=options.json)
    return 0
