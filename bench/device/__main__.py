"""Measure on an accelerator: the odd cases first, then row by row, and a table last.

A row that fails is reported, and the others go on. One JSON file a row and summary.json, which holds them all, are
written as the rows end.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flexdilated.cli._flash import other_implementations

from .._report import condition, terminal_table
from .._run import write
from ._device import Where
from ._suite import CODES, CORRECTNESS, NAMES, SUITE, Document, Suite

_RESULTS = Path("bench/results")
_LIMIT_S = 520.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a row gave no number where there should be one or a check failed."""
    options = _parser().parse_args(arguments)
    if options.list:
        for name, row in SUITE.items():
            print(f"{name}\t{row.question}")
        return 0
    if options.unpack is not None:
        for document in options.unpack:
            write(document, options.out or _RESULTS)
        print(terminal_table(options.unpack))
        return 0
    if reason := _unfit(options.device, options.small, options.flash_impl):
        print(reason, file=sys.stderr)
        return 2
    names = tuple(name for name in NAMES if not options.names or name in options.names)
    suite = Suite(Where(options.device), options.small, names, options.flash_impl, options.commit)
    documents: list[Document] = []

    def keep(document: Document) -> None:
        documents.append(document)
        if results is not None:
            write(document, results)
            write({"name": "summary", "documents": documents}, results)

    # Numbers at tiny sizes mean nothing: they are kept only where asked.
    results = options.out or (None if options.small else _RESULTS)
    suite.run(options.limit, keep)
    print(terminal_table(documents))
    print(f"\n{condition(documents[-1])}")
    return 1 if any(is_failed(document) for document in documents) else 0


def is_failed(document: Document) -> bool:
    """Whether it gave no number at all, or one that a failed check stands against."""
    rows = document["rows"]
    wrong = document["name"] == CORRECTNESS and any(row["met"] is False for row in rows)
    return wrong or all(row["measured"] is None for row in rows) or any("not_verified" in row for row in rows)


def _unfit(device: str, small: bool, flash_impl: str | None) -> str | None:
    """Why the suite cannot run so."""
    kind = torch.device(device).type
    if kind == "cuda" and not torch.cuda.is_available():
        return "PyTorch finds no CUDA device here; --device cpu --small goes through the same rows"
    if kind == "cpu" and not small:
        return "the sizes of the targets are for an accelerator; --device cpu needs --small"
    if flash_impl is not None and flash_impl not in (known := other_implementations()):
        return f"--flash-impl must be one that PyTorch lists ({', '.join(known) or 'none'}); got {flash_impl!r}"
    return None


def _device(text: str) -> str:
    if text in ("cuda", "cpu"):
        return text
    raise argparse.ArgumentTypeError(f"the device must be cuda or cpu; got {text!r}")


def _limit(text: str) -> float:
    seconds = float(text)
    if seconds > 0:
        return seconds
    raise argparse.ArgumentTypeError(f"the limit must be above 0 seconds; got {text}")


def _folder(text: str) -> Path:
    if not Path(text).exists() or Path(text).is_dir():
        return Path(text)
    raise argparse.ArgumentTypeError(f"the results need a folder; {text} is a file")


def _summary(text: str) -> list[Document]:
    try:
        return json.loads(Path(text).read_text())["documents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"it must be a summary.json of this suite; got {text} ({error!r})") from error


def _name(text: str) -> str:
    name = CODES.get(text.upper(), text.lower())
    if name in NAMES:
        return name
    raise argparse.ArgumentTypeError(f"a name must be one of {', '.join(NAMES)}; got {text!r}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/h200.sh", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", type=_name, help=f"rows to measure, as --list has them, and {CORRECTNESS}"
    )
    parser.add_argument("--device", type=_device, default="cuda", help="cuda, or cpu for a dry run with --small")
    parser.add_argument(
        "--out", type=_folder, metavar="DIR", help=f"folder of the results ({_RESULTS}; none with --small)"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--limit", type=_limit, default=_LIMIT_S, metavar="S", help="seconds for the whole suite")
    parser.add_argument("--commit", metavar="ID", help="the commit to record where there is no git")
    parser.add_argument(
        "--flash-impl", metavar="NAME",
        help="have each of the suite's own processes activate this flash attention of PyTorch's list, such as FA3",
    )  # fmt: skip
    parser.add_argument(
        "--unpack", type=_summary, metavar="FILE", help="only write the rows of a summary.json to files"
    )
    parser.add_argument("--list", action="store_true", help="print the questions")
    return parser


if __name__ == "__main__":
    sys.exit(main())
