"""Measure, and print one table: `python -m bench [NAME ...] [--small] [--out DIR]`.

Two more commands: `python -m bench guard` fails if something became twice as slow, and `python -m bench device`
measures on an accelerator; `--help` after each says more.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import _guard, device
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
    # These have arguments of their own.
    commands = {"guard": _guard.main, "device": measure_device}
    if first in commands:
        return commands[first](rest)
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = "measures, as --list has them, or their codes, such as C4; all, if none is named"
    words = "; or one word: pages puts the results into README.md and docs/, pictures draws the catalogue's"
    parser.add_argument("names", nargs="*", metavar="NAME", type=_name, help=f"{names}{words}")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    folder = f"folder of the results ({_RESULTS}; none with --small)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--list", action="store_true", help="print the measures, with the question of each")
    options = parser.parse_args(arguments)
    if options.list:
        for name, each in MEASURES.items():
            print(f"{name}\t{each.question}")
        return 0
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


def _name(text: str) -> str:
    words = ("pages", "pictures")
    known = {code.lower(): each.name for each in MEASURES.values() for code in (each.name, each.code) if code}
    known |= {word: word for word in words}
    if text.lower() in known:
        return known[text.lower()]
    raise argparse.ArgumentTypeError(f"a name must be one of {', '.join((*MEASURES, *words))}; got {text!r}")


def measure_device(arguments: Sequence[str]) -> int:
    """Exit status: 0, 1 if a name gave no number or a check failed, or 2 for a call that is wrong.

    A JSON file for each name, and summary.json, which holds them all, are written as rows end.
    """
    parser = argparse.ArgumentParser(prog="python -m bench device", description=device.__doc__)
    known = f"as --list has them, and {device.CORRECTNESS}; all, if none is named"
    parser.add_argument("names", nargs="*", metavar="NAME", type=_device_name, help=known)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, with --small")
    folder = f"folder of the results ({_RESULTS}; none with --small)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--limit", type=float, default=_DEVICE_LIMIT_S, metavar="S", help="seconds for all of it")
    parser.add_argument("--commit", metavar="ID", help="the commit to record where there is no git")
    unpack = "only write the rows of a summary.json to files"
    parser.add_argument("--unpack", type=_summary, metavar="FILE", help=unpack)
    parser.add_argument("--list", action="store_true", help="print the questions")
    options = parser.parse_args(arguments)
    results = options.out or (None if options.small else _RESULTS)
    if options.list:
        for row in device.ROWS:
            print(f"{row.name}\t{row.question}")
        return 0
    if options.unpack is not None:
        for document in options.unpack:
            write(document, options.out or _RESULTS)
        print(terminal_table(options.unpack))
        return 0
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
            write({"name": "summary", "documents": list(documents.values())}, results)

    names = [name for name in device.NAMES if not options.names or name in options.names]
    device.measure_all(device.Device(options.device, options.small), names, keep, limit_s=options.limit)
    print(terminal_table(documents.values()))
    print(f"\n{condition(documents[names[-1]])}")
    return 1 if any(map(device.is_failed, documents.values())) else 0


def _device_name(text: str) -> str:
    name = device.CODES.get(text.upper(), text.lower())
    if name in device.NAMES:
        return name
    raise argparse.ArgumentTypeError(f"a name must be one of {', '.join(device.NAMES)}; got {text!r}")


def _summary(text: str) -> list[Document]:
    try:
        return json.loads(Path(text).read_text(encoding="utf-8"))["documents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"it must be a summary.json of this suite; got {text} ({error!r})") from error


if __name__ == "__main__":
    sys.exit(main())
