"""Measure, and print one table: `python -m bench [NAME ...] [--small] [--out DIR]`.

Two commands beside: `python -m bench compare A B` sets two sets of results side by side, and `python -m bench guard`
sees what has become slower; `--help` after either says more.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import _compare, _guard
from ._pages import PAGES
from ._report import markdown_table, plot_sweep, terminal_table, write_pages
from ._run import MEASURES, Document, ask
from .catalogue import draw_all

_RESULTS = Path("bench/results")
_PICTURES = Path("docs/images/catalogue")
_WORDS = ("table", "pages", "pictures")
# These have arguments of their own.
_COMMANDS = {"compare": _compare.main, "guard": _guard.main}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a measure failed. A target that is not met is an answer, not a failure."""
    first, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if first in _COMMANDS:
        return _COMMANDS[first](rest)
    options = _parser().parse_args(arguments)
    if options.list:
        for name, each in MEASURES.items():
            print(f"{name}\t{each.question}")
        return 0
    if options.names == ["table"]:
        print(markdown_table(options.out or _RESULTS))
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
    if results is not None:
        _draw(documents, results)
    failed = [name for name, document in answers.items() if document is None]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", type=_name,
        help="what to measure (all, if none is named), as --list has it, or by its earlier code, such as C4; or one "
        "word: table prints the results in Markdown, pages puts them into README.md and the pages of docs/, pictures "
        "draws those of the catalogue",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"folder of the results ({_RESULTS}; none with --small)"
    )
    parser.add_argument("--list", action="store_true", help="print the measures, with the question of each")
    return parser


def _name(text: str) -> str:
    known = {code.lower(): each.name for each in MEASURES.values() for code in (each.name, each.code) if code}
    known |= {word: word for word in _WORDS}
    if text.lower() in known:
        return known[text.lower()]
    raise argparse.ArgumentTypeError(f"a name must be one of {', '.join((*MEASURES, *_WORDS))}; got {text!r}")


def _draw(documents: Sequence[Document], results: Path) -> None:
    for document in documents:
        if document["points"]:
            try:
                plot_sweep(document, results / f"{document['name']}.png")
            except ImportError:
                print("no plot: it needs matplotlib (pip install 'flexdilated[plot]')", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
