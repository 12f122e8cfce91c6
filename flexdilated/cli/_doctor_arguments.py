"""`doctor`: what it can be told."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ._doctor import doctor

    return doctor()
