"""What `show` is asked: a pattern, a window and a form, checked once."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from .. import masks
from ..distributed.group import Order
from ..masks.orders._layout import Layout
from ._asked_pattern import AskedPattern
from ._extras import find, missing_line
from ._pattern_arguments import asked_from
from ._sizes import tokens_of
from ._terminal import Terminal, terminal_of
from ._usage import UsageError

MOST_CELLS = 1 << 12  # a side
_PICTURES = (".png", ".svg")
_PAGES = (".html", ".htm")
_WINDOW = re.compile(r"([^:]*):([^:]*)")
_CELLS = re.compile(r"([0-9]{1,9})x([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ShowSettings:
    """`asked` is of one batch entry; `cells` is None for as many as fit, `ranks` for one device."""

    asked: AskedPattern
    head: int
    order: str
    queries: range
    keys: range
    cells: tuple[int, int] | None
    terminal: Terminal
    brief: bool
    as_json: bool
    plot: Path | None
    html: Path | None
    ranks: int | None
    sharding: Order

    @property
    def layout(self) -> Layout | None:
        """The order of the slots; None for the natural one."""
        return masks.layout(self.asked.pattern, self.asked.num_tokens) if self.order == "residue" else None


def settings_from(options: argparse.Namespace) -> ShowSettings:
    """Raises UsageError for what does not read and for what does not fit together."""
    asked = asked_from(options)
    asked.require(head=options.head, batch=options.batch)
    _check_outputs(options)
    return ShowSettings(
        asked=asked.entry(options.batch),
        head=options.head,
        order=options.order,
        queries=_window("--rows", options.rows, asked.num_tokens),
        keys=_window("--cols", options.cols, asked.num_tokens),
        cells=_cells(options.cells),
        terminal=terminal_of(sys.stdout, colour=options.color),
        brief=options.brief,
        as_json=options.json,
        plot=options.plot,
        html=options.html,
        ranks=options.ranks,
        sharding=options.sharding or "contiguous",
    )


def _check_outputs(options: argparse.Namespace) -> None:
    """Files of kinds that can be written, in folders that there are."""
    for name, kinds in (("plot", _PICTURES), ("html", _PAGES)):
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        if path.suffix.lower() not in kinds:
            raise UsageError(f"--{name} writes {' or '.join(kinds)} files; got {path}")
        if not path.parent.is_dir():
            raise UsageError(f"--{name} must be in a folder that exists; got {path}")
    if options.plot and find("matplotlib") is None:
        raise UsageError(missing_line("matplotlib"))


def _window(flag: str, text: str | None, size: int) -> range:
    if text is None:
        return range(size)
    found = _WINDOW.fullmatch(text.strip())
    first, stop = (
        (tokens_of(part) if part.strip() else default)
        for part, default in zip(found.groups() if found else ("?", "?"), (0, size), strict=True)
    )
    if first is None or stop is None or not first < stop <= size:
        raise UsageError(f"{flag} takes A:B with 0 <= A < B <= {size}, such as 0:{min(size, 64)}; got {text!r}")
    return range(first, stop)


def _cells(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = _CELLS.fullmatch(text.strip().lower())
    rows, columns = map(int, found.groups()) if found else (0, 0)
    if not (1 <= rows <= MOST_CELLS and 1 <= columns <= MOST_CELLS):
        raise UsageError(
            f"--cells takes ROWSxCOLUMNS from 1x1 to {MOST_CELLS}x{MOST_CELLS}, such as 40x80; got {text!r}"
        )
    return rows, columns
