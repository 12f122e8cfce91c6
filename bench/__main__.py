"""Measure, and print one table: `python -m bench [NAME ...] [--small] [--out DIR]`.

Two more commands: `python -m bench guard` fails if something became twice as slow, and `python -m bench device`
measures on an accelerator; `--help` after each says more.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from . import _guard, device
from ._measures import Measure
from ._pages import PAGES
from ._report import condition, plot_sweep, terminal_table, write_pages
from ._run import MEASURES, Document, ask, write
from .catalogue import draw_all

_RESULTS = Path("bench/results")
_PICTURES = Path("docs/images/catalogue")
_DEVICE_LIMIT_S = 520.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a measure failed. A target that is not met is an answer, not a failure."""
    first, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if first in ("guard", "device"):  # which have arguments of their own
        return (_guard.main if first == "guard" else measure_device)(rest)
    words = ("pages", "pictures")
    names = {code: each.name for each in MEASURES.values() for code in (each.name, each.code) if code}
    more = "; or one word: pages puts the results into README.md and docs/, pictures draws the catalogue's"
    parser = _parser("python -m bench", str(__doc__), names | {word: word for word in words}, "codes, such as C4", more)
    options = parser.parse_args(arguments)
    if options.list:
        return _print_questions(MEASURES.values())
    if options.names == ["pages"]:
        write_pages(PAGES, options.out or _RESULTS)
        return 0
    if options.names == ["pictures"]:
        draw_all(options.out or _PICTURES)
        return 0
    # Numbers at tiny sizes mean nothing: they are kept only where asked.
    results = options.out or (None if options.small else _RESULTS)
    answers = {name: ask(name, small=options.small, results=results) for name in options.names or MEASURES}
    documents = [document for document in answers.values() if document is not None]
    print(terminal_table(documents))
    for document in documents:
        if results is not None and document["points"]:
            try:
                plot_sweep(document, results / f"{document['name']}.png")
            except ImportError:
                print("no plot: it needs matplotlib (pip install 'flexdilated[plot]')", file=sys.stderr)
    if results == _RESULTS:
        write_pages(PAGES, _RESULTS)
    failed = [name for name, document in answers.items() if document is None]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parser(
    prog: str, description: str, names: Mapping[str, str], codes: str, more: str = ""
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description)
    what = f"measures, as --list has them, or their {codes}; all, if none is named{more}"
    parser.add_argument("names", nargs="*", metavar="NAME", type=partial(_name, names), help=what)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    folder = f"folder of the results ({_RESULTS}; none with --small)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--list", action="store_true", help="print the measures, with the question of each")
    return parser


def _name(names: Mapping[str, str], text: str) -> str:
    for known, name in names.items():
        if text.lower() == known.lower():
            return name
    raise argparse.ArgumentTypeError(f"a name must be one of {', '.join(dict.fromkeys(names.values()))}; got {text!r}")


def _print_questions(measures: Iterable[Measure | device.DeviceRow]) -> int:
    for each in measures:
        print(f"{each.name}\t{each.question}")
    return 0


def measure_device(arguments: Sequence[str]) -> int:
    """Exit status: 0, 1 if a name gave no number or a check failed, or 2 for a call that is wrong.

    The JSON file of each name is written again as its rows end.
    """
    names = {name: name for name in device.NAMES} | device.CODES
    parser = _parser("python -m bench device", str(device.__doc__), names, "codes, such as G5")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, with --small")
    parser.add_argument("--limit", type=float, default=_DEVICE_LIMIT_S, metavar="S", help="seconds for all of it")
    parser.add_argument("--commit", metavar="ID", help="the commit to record where there is no git")
    options = parser.parse_args(arguments)
    results = options.out or (None if options.small else _RESULTS)
    if options.list:
        return _print_questions(device.ROWS)
    if options.limit <= 0:
        parser.error(f"the limit must be above 0 seconds; got {options.limit}")
    if results is not None and results.is_file():
        parser.error(f"the results need a folder; {results} is a file")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here; --device cpu --small goes through the same rows")
    if options.device == "cpu" and not options.small:
        parser.error("the sizes of the targets are for an accelerator; --device cpu needs --small")
    documents: dict[str, Document] = {}

    def keep(document: Document) -> None:
        documents[document["name"]] = document | {"commit": options.commit or document["commit"]}
        if results is not None:
            write(documents[document["name"]], results)

    asked = [name for name in device.NAMES if not options.names or name in options.names]
    device.measure_all(device.Device(options.device, options.small), asked, keep, limit_s=options.limit)
    print(terminal_table(documents.values()))
    print(f"\n{condition(documents[asked[-1]])}")
    return 1 if any(map(device.is_failed, documents.values())) else 0


if __name__ == "__main__":
    sys.exit(main())
