"""show: a pattern as a heat map and in numbers."""

from __future__ import annotations

import json
from io import BytesIO
from math import isqrt
from pathlib import Path
from textwrap import shorten, wrap
from typing import Any

import torch

from ..masks.inspection import MOST_DESCRIBED, Cells, Description, count_cells, describe
from ._heat_map import Grid, grid_for, heat_map, legend
from ._out import replace
from ._show_settings import ShowSettings
from ._sizes import tokens_text
from ._usage import UsageError

_BESIDE = 7  # lines beside the cells: the pattern, facts, labels, a frame, a legend and the prompt
_LEAST_LINES = 4
_JSON_CELLS = 64  # a side
_MOST_JSON_CELLS = 1 << 18  # of each, counts of every branch are printed


def show(settings: ShowSettings) -> int:
    """Print or write what was asked for. Raises UsageError for what the pattern has no answer to."""
    try:
        if settings.html:
            _write_page(settings, settings.html)
        elif settings.plot:
            _write_picture(settings, settings.plot)
        elif settings.as_json:
            print(json.dumps(show_data(settings), indent=1, ensure_ascii=False))
        else:
            print("\n".join(map_lines(settings)), flush=True)  # the numbers may take a moment longer
            if not settings.brief:
                described = _described(settings)
                columns = settings.terminal.columns
                print(f"\n{_undescribed() if described is None else described.to_text(columns=columns)}")
    except UnicodeEncodeError:  # of the output, not of what was asked
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    return 0


def map_lines(settings: ShowSettings) -> list[str]:
    """The heat map and what belongs to it, in at most the lines and columns of the terminal."""
    # Lower by what does not fit, as texts are longer here and shorter there. One line is the prompt's.
    free = settings.terminal.lines - 1
    lines, most = [""] * (free + 1), free - _BESIDE + 1
    while len(lines) > free:
        grid = _grid(settings, most)
        lines = _drawn(settings, grid)
        if settings.cells or most == _LEAST_LINES:
            break
        most = max(_LEAST_LINES, most - (len(lines) - free))
    return lines


def _drawn(settings: ShowSettings, grid: Grid) -> list[str]:
    terminal, cells = settings.terminal, _count(settings, grid.shape)
    above = [shorten(repr(settings.asked.pattern), terminal.columns, placeholder=" ..."), *_facts(settings, cells)]
    return [*above, *heat_map(cells, grid, terminal), *legend(cells, terminal), *_notes(settings, cells)]


def show_data(settings: ShowSettings) -> dict[str, Any]:
    """All of it as plain data; counts by rows of cells, an estimate only where bounds differ."""
    shape = settings.cells or (_JSON_CELLS, _JSON_CELLS)
    shape = min(shape[0], len(settings.queries)), min(shape[1], len(settings.keys))
    if shape[0] * shape[1] > _MOST_JSON_CELLS:
        side = isqrt(_MOST_JSON_CELLS)
        raise UsageError(
            f"--json prints at most {_MOST_JSON_CELLS} cells, such as --cells {side}x{side}; got {shape[0]}x{shape[1]}"
        )
    cells = _count(settings, shape)
    layout = settings.layout
    return {
        "pattern": repr(settings.asked.pattern),
        "num_tokens": settings.asked.num_tokens,
        "num_heads": settings.asked.num_heads,
        "head": settings.head,
        "order": settings.order,
        "rate": 1 if layout is None else layout.rate,
        "row_edges": cells.row_edges.tolist(),
        "column_edges": cells.column_edges.tolist(),
        "low": cells.low.tolist(),
        "high": cells.high.tolist(),
        "likely": None if bool(cells.exact.all()) else cells.likely.tolist(),
        "branches": _branches(settings, cells),
        "description": None if (described := _described(settings)) is None else described.to_data(),
    }


def _branches(settings: ShowSettings, cells: Cells) -> list[dict[str, Any]]:
    named = zip(settings.asked.pattern.branches(), cells.branches, strict=True)
    return [
        {"pattern": repr(branch), "low": found.low.tolist(), "high": found.high.tolist()} for branch, found in named
    ]


def _grid(settings: ShowSettings, lines: int) -> Grid:
    if settings.cells is None:
        return grid_for((settings.queries, settings.keys), settings.terminal, lines)
    rows, columns = settings.cells
    return Grid(min(rows, len(settings.queries)), min(columns, len(settings.keys)))


def _count(settings: ShowSettings, shape: tuple[int, int]) -> Cells:
    asked = settings.asked
    window = {"queries": settings.queries, "keys": settings.keys, "order": settings.layout}
    sizes = {"head": settings.head, "num_heads": asked.num_heads}
    return count_cells(asked.pattern, asked.num_tokens, **sizes, **window, shape=shape)


def _described(settings: ShowSettings) -> Description | None:
    if settings.asked.num_tokens > MOST_DESCRIBED:
        return None
    return describe(settings.asked.pattern, settings.asked.num_tokens, num_heads=settings.asked.num_heads)


def _undescribed() -> str:
    return f"Density, blocks and work are counted up to {tokens_text(MOST_DESCRIBED)} tokens."


def _facts(settings: ShowSettings, cells: Cells) -> list[str]:
    asked, layout = settings.asked, settings.layout
    order = "natural order" if layout is None else f"residue order mod {layout.rate}"
    down, across = _side(cells.row_edges, "query", "queries"), _side(cells.column_edges, "key", "keys")
    facts = f"head {settings.head} of {asked.num_heads}, {tokens_text(asked.num_tokens)} tokens, {order}; "
    facts += f"cells of {down} x {across}"
    return wrap(facts, settings.terminal.columns, break_on_hyphens=False)


def _side(edges: torch.Tensor, one: str, many: str) -> str:
    """How long cells are: one length, or two that differ by 1."""
    least, most = (int(size) for size in edges.diff().aminmax())
    return f"{tokens_text(least)}{f' to {tokens_text(most)}' if most > least else ''} {one if most == 1 else many}"


def _notes(settings: ShowSettings, cells: Cells) -> list[str]:
    """What the picture does not say by itself."""
    notes = []
    if len(cells.branches) > 1 and bool((cells.area > 1).any()):
        notes.append("A pair counts once for each branch that allows it.")
    doubtful = int((~cells.exact).sum())
    if doubtful:
        notes.append(
            f"{doubtful:,} of {cells.area.numel():,} cells are estimates within bounds, from a look at some of their "
            "pairs; the others are counted."
        )
    return [line for note in notes for line in wrap(note, settings.terminal.columns)]


def _write_page(settings: ShowSettings, path: Path) -> None:
    from ..viewer import Ranks, page

    asked = settings.asked
    ranks = None if settings.ranks is None else Ranks(num_ranks=settings.ranks, sharding=settings.sharding)
    text = page(asked.pattern, asked.num_tokens, num_heads=asked.num_heads, head=settings.head, ranks=ranks)
    _write(path, text.encode())


def _write_picture(settings: ShowSettings, path: Path) -> None:
    from ..masks import plot

    asked = settings.asked
    sizes = {"num_heads": asked.num_heads, "head": settings.head}
    window = {"queries": settings.queries, "keys": settings.keys, "order": settings.order}
    figure = plot(asked.pattern, asked.num_tokens, **sizes, **window)
    buffer = BytesIO()
    figure.savefig(buffer, format=path.suffix[1:].lower())
    _write(path, buffer.getvalue())


def _write(path: Path, content: bytes) -> None:
    replace(path, lambda partial: partial.write_bytes(content))
    print(f"wrote {path}: {len(content):,} bytes")
