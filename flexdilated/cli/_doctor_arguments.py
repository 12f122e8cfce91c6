"""`doctor`: what it can be told."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what works on this machine, and what is missing. The exit status is 0 where attention works, else 1."
    )
    add = parser.add_argument
    add("--verify", action="store_true", help="run a small job for each engine and module, and compare with float64")
    add("--json", action="store_true", help="with --verify: print what came out as JSON")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ._usage import UsageError

    if options.verify:
        from ._verify import verify

        return verify(as_json=options.json)
    if options.json:
        raise UsageError("--json is of doctor --verify; got it alone")
    from ._doctor import doctor

    return doctor()
