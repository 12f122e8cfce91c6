"""`doctor`: what it can be told."""

from __future__ import annotations

import argparse

from ._command_parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Say what works on this machine, and what is missing. The exit status is 0 where attention works, else 1."
    )
    add = parser.argument
    add("--verify", action="store_true", help="run a small job for each engine and module, and compare with float64")
    add("--json", action="store_true", needs=("verify",), help="with --verify: print what came out as JSON")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.verify:
        from ._verify import verify

        return verify(as_json=options.json)
    from ._doctor import doctor

    return doctor()
