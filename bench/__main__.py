"""Ask the questions and print one table: `python -m bench [NAME ...] [--small] [--out DIR]`.

Two commands beside: `python -m bench compare A B` sets two sets of results side by side, and `python -m bench guard`
sees what has become slower; `--help` after either says more.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import _compare, _guard
from ._page import PAGE, write_pages
from ._pictures import draw_all
from ._plot import plot_sweep
from ._questions import QUESTIONS
from ._run import Document, ask, question_text
from ._table import markdown_table, terminal_table

_RESULTS = Path("bench/results")
_WORDS = ("table", "pages", "pictures")
# These have arguments of their own.
_COMMANDS = {"compare": _compare.main, "guard": _guard.main}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a question failed. A target that is not met is an answer, not a failure."""
    first, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if first in _COMMANDS:
        return _COMMANDS[first](rest)
    options = _parser().parse_args(arguments)
    if options.list:
        for name in QUESTIONS:
            print(f"{name}\t{question_text(name)}")
        return 0
    if options.names == ["table"]:
        print(markdown_table(options.out or _RESULTS))
        return 0
    if options.names == ["pages"]:
        write_pages(options.out or _RESULTS)
        return 0
    if options.names == ["pictures"]:
        draw_all(options.out or PAGE.parent / "images" / "catalogue")
        return 0
    # Numbers at tiny sizes mean nothing: they are kept only where asked.
    results = options.out or (None if options.small else _RESULTS)
    answers = {name: ask(name, small=options.small, results=results) for name in options.names or QUESTIONS}
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
        help="questions to ask (all, if none is named); or one word: table prints the results in Markdown, "
        "pages puts them into README.md and the pages of docs/, pictures draws those of the catalogue",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"folder of the results ({_RESULTS}; none with --small)"
    )
    parser.add_argument("--list", action="store_true", help="print the questions")
    return parser


def _name(text: str) -> str:
    for name in (*QUESTIONS, *_WORDS):
        if text.lower() == name.lower():
            return name
    raise argparse.ArgumentTypeError(f"a name must be one of {', '.join((*QUESTIONS, *_WORDS))}; got {text!r}")


def _draw(documents: Sequence[Document], results: Path) -> None:
    for document in documents:
        if document["points"]:
            try:
                plot_sweep(document, results / f"{document['name']}.png")
            except ImportError:
                print("no plot: it needs matplotlib (pip install 'flexdilated[plot]')", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
