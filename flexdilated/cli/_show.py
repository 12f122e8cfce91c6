"""Commands `show` (heat map, counts, JSON, picture or HTML page of a pattern) and `explain` (one pair)."""

from __future__ import annotations

import argparse
import json
import re
import sys
from io import BytesIO
from math import isqrt
from pathlib import Path

from .. import masks
from ..masks.core import tokens_text
from ..masks.inspection import MOST_CELLS, MOST_DESCRIBED, Description, describe
from ..viewer import page
from ._pattern import AskedPattern, add_pattern_arguments, as_usage_errors, asked_from
from ._terminal import COLOR_CHOICES, CommandParser, UsageError, require_file, size_of, terminal_of, write_file

_WINDOW = re.compile(r"([^:]*):([^:]*)")
_CELLS = re.compile(r"([0-9]{1,9})x([0-9]{1,9})", re.ASCII)
_JSON_CELLS = 64  # a side
_MOST_JSON_CELLS = 1 << 18  # for each cell the counts of every branch are printed


def add_show_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Draw a pattern as a heat map that fits the terminal, at any number of tokens and in any window, down to "
        "single pairs; then print its pairs, blocks and costs, as `masks.describe` counts them."
    )
    add_pattern_arguments(parser)
    add = parser.argument
    add("--head", type=int, default=0, metavar="h", help="the head that is shown (%(default)s)")
    order = "of queries and keys (%(default)s); a page has both"
    add("--order", choices=("natural", "residue"), default="natural", excludes=("html",), help=order)
    rows = "queries A to B - 1 only, such as 64K:128K; slots, in residue order; a page holds every window"
    add("--rows", metavar="A:B", excludes=("html",), help=rows)
    add("--cols", metavar="A:B", excludes=("html",), help="the same of keys")
    cells = "number of cells that the window is cut into (as many as fit)"
    add("--cells", type=_cells, metavar="ROWSxCOLUMNS", excludes=("plot", "html"), help=cells)
    add("--batch", type=int, default=0, metavar="b", help="the batch entry, if tensors differ by entry (%(default)s)")
    color, files = "on the map: auto is on a terminal (%(default)s)", ("json", "plot", "html")
    add("--color", "--colour", choices=COLOR_CHOICES, default="auto", excludes=files, help=color)
    add("--brief", action="store_true", excludes=files, help="print the heat map alone")
    add(
        "--json",
        action="store_true",
        excludes=files[1:],
        help="print plain data: the cells, and counts of describe",
    )
    add("--plot", type=Path, metavar="FILE", excludes=("html",), help="draw the window as a .png or .svg instead")
    add("--html", type=Path, metavar="FILE", help="write a page to zoom and pan in instead")
    parser.set_defaults(command=show)


def show(options: argparse.Namespace) -> int:
    """Run the command `show`: print a heat map or JSON, or write a picture or HTML page; return exit status 0.

    Raises UsageError for invalid arguments, such as a window out of range, and for a file that cannot be written.
    """
    asked = asked_from(options)
    asked.require_in_range(head=options.head, batch=options.batch)
    require_file("--plot", options.plot, (".png", ".svg"))
    require_file("--html", options.html, (".html", ".htm"))
    asked = asked.entry(options.batch)
    rows, columns = _window("--rows", options.rows, asked.num_tokens), _window("--cols", options.cols, asked.num_tokens)
    sizes = {"num_tokens": asked.num_tokens, "num_heads": asked.num_heads, "head": options.head}
    window = {"queries": rows, "keys": columns, "order": options.order}
    with as_usage_errors():
        if options.html:
            _write(options.html, page(asked.pattern, **sizes).encode())
        elif options.plot:
            buffer = BytesIO()
            masks.plot(asked.pattern, **sizes, **window).savefig(buffer, format=options.plot.suffix[1:].lower())
            _write(options.plot, buffer.getvalue())
        elif options.json:
            cells = _json_cells(options.cells, rows, columns)
            data = masks.show(asked.pattern, **sizes, **window, cells=cells).to_data()
            data["description"] = described.to_data() if (described := _description(asked)) else None
            print(json.dumps(data, indent=1, ensure_ascii=False))
        else:
            *size, color, shapes = terminal_of(sys.stdout, color=options.color)
            how = {"size": tuple(size), "color": color, "ascii": not shapes}
            # The numbers may take a moment longer.
            print(masks.show(asked.pattern, **sizes, **window, cells=options.cells, **how), flush=True)
            if not options.brief:
                most = f"Density, blocks and work are counted up to {tokens_text(MOST_DESCRIBED)} tokens."
                print(f"\n{_description(asked) or most}")
    return 0


def _json_cells(cells: tuple[int, int] | None, queries: range, keys: range) -> tuple[int, int]:
    rows, columns = cells or (_JSON_CELLS, _JSON_CELLS)
    rows, columns = min(rows, len(queries)), min(columns, len(keys))
    if rows * columns > _MOST_JSON_CELLS:
        side = isqrt(_MOST_JSON_CELLS)
        raise UsageError(
            f"--json prints at most {_MOST_JSON_CELLS} cells, such as --cells {side}x{side}; got {rows}x{columns}"
        )
    return rows, columns


def _description(asked: AskedPattern) -> Description | None:
    if asked.num_tokens > MOST_DESCRIBED:
        return None
    return describe(asked.pattern, asked.num_tokens, num_heads=asked.num_heads)


def _write(path: Path, content: bytes) -> None:
    write_file(path, content)
    print(f"wrote {path}: {len(content):,} bytes")


def _window(flag: str, text: str | None, size: int) -> range:
    if text is None:
        return range(size)
    found = _WINDOW.fullmatch(text.strip())
    first, stop = (
        (size_of(part) if part.strip() else default)
        for part, default in zip(found.groups() if found else ("?", "?"), (0, size), strict=True)
    )
    if first is None or stop is None or not first < stop <= size:
        raise UsageError(f"{flag} takes A:B with 0 <= A < B <= {size}, such as 0:{min(size, 64)}; got {text!r}")
    return range(first, stop)


def _cells(text: str) -> tuple[int, int]:
    found = _CELLS.fullmatch(text.strip().lower())
    rows, columns = map(int, found.groups()) if found else (0, 0)
    if not (1 <= rows <= MOST_CELLS and 1 <= columns <= MOST_CELLS):
        raise UsageError(
            f"--cells takes ROWSxCOLUMNS from 1x1 to {MOST_CELLS}x{MOST_CELLS}, such as 40x80; got {text!r}"
        )
    return rows, columns


def add_explain_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Explain why a query sees a key, or why not, by each branch of a mixture and each part of a composition; and "
        "name the block of the pair, in the natural order and in residue-major order."
    )
    add_pattern_arguments(parser)
    add = parser.argument
    add("--query", type=_position, required=True, metavar="Q", help="the position of the query, such as 5000 or 64K")
    add("--key", type=_position, required=True, metavar="K", help="the position of the key")
    add("--head", type=int, default=0, metavar="H", help="counted over all devices (%(default)s)")
    add("--batch", type=int, default=0, metavar="B", help="the entry whose run-time tensors are asked (%(default)s)")
    add("--block-size", type=int, default=128, metavar="S", help="side of the blocks (%(default)s)")
    add("--json", action="store_true", help="print plain data instead of the tree")
    parser.set_defaults(command=explain)


def explain(options: argparse.Namespace) -> int:
    """Run the command `explain`: print why a pair is allowed or not, as a tree or JSON; return exit status 0.

    Raises UsageError for invalid arguments, such as a pair out of range.
    """
    asked = asked_from(options)
    asked.require_in_range(head=options.head, batch=options.batch)
    pair = {"query": options.query, "key": options.key, "head": options.head, "batch": options.batch}
    sizes = {"num_heads": asked.num_heads, "num_tokens": asked.num_tokens, "block_size": options.block_size}
    with as_usage_errors():
        found = masks.explain(asked.pattern, **pair, **sizes)
    print(json.dumps(found.to_data(), indent=2) if options.json else found)
    return 0


def _position(text: str) -> int:
    """Return the position in a text such as "5000", "64K" or "-1", whose range is not checked; K is 1,024.

    Raises ArgumentTypeError for other text.
    """
    found = size_of(text.strip().removeprefix("-"))
    if found is None:
        raise argparse.ArgumentTypeError(f"a position must be a whole number, such as 5000 or 64K; got {text!r}")
    return -found if text.strip().startswith("-") else found
