"""page: one HTML file that draws a pattern at any scale and explains its pairs, by evaluating its traced rule."""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any
from zlib import compress

import torch

from ..masks.core import (
    Bound,
    Box,
    Expression,
    Pattern,
    Progression,
    outside_torch_modes,
    require_below,
    require_expression,
    require_int,
    shortened,
)
from ..masks.orders import residue_rate
from ..masks.text import parse
from ._traced_rule import TracedProgram, traced_rule

LARGEST_PAGE = 4_000_000  # bytes
_MOST_RESIDUES = 4096  # more residue classes than screen pixels would look like noise
_LONGEST_PATTERN = 400
_TILES = 256  # along each side of the picture
_MOST_GRIDS = 16  # grids of tiles, over all branches and heads
_SCRIPTS = ("view", "program", "density", "picture", "panel", "app")  # in order of dependence


@outside_torch_modes
def page(
    pattern: Expression,
    num_tokens: int,
    *,
    num_heads: int = 1,
    num_keys: int | None = None,
    head: int = 0,
    batch: int = 0,
    title: str | None = None,
) -> str:
    """Return the text of an interactive HTML file that draws the pattern at any scale; the file needs no network.

    num_tokens: number of queries.
    num_keys: number of keys; None: num_tokens.
    num_heads: number of heads, over all devices.
    head: the global head shown first.
    batch: index of the batch entry, for run-time tensors.
    title: heading of the page; None for a default.

    Raises ValueError for sizes that the pattern does not accept, for a head or batch entry out of range, for a custom
    function with operations beyond integer arithmetic, comparisons and tables, and for a page above 4 MB, whose tables
    are too large to embed; TypeError for arguments of other types.

    >>> html = viewer.page(masks.longnet((64, 256), (1, 4)), 4096, num_heads=4)
    """
    keys = num_tokens if num_keys is None else num_keys
    require_expression(pattern)
    for name, value in (("num_tokens", num_tokens), ("num_keys", keys), ("num_heads", num_heads)):
        require_int(name, value, minimum=1)
    bound = pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=keys)
    bound = bound.entry(require_below("batch", batch, bound.batch, "batch entries"))
    require_below("head", head, num_heads, "heads")
    if not isinstance(title, str | None):
        raise TypeError(f"title must be a string or None; got {title!r:.80}")
    data = {"head": head, **_page_data(pattern, bound), "tiles": _tiles(bound, head)}
    text = _page_html(data, "Who attends to whom" if title is None else title)
    size = len(text.encode())
    if size > LARGEST_PAGE:
        raise ValueError(
            f"a page must hold the whole rule in {LARGEST_PAGE:,} bytes; got {size:,}, because of large tables in "
            f"{pattern!r}: take fewer tokens, or one head"
        )
    return text


def _page_data(pattern: Expression, bound: Bound) -> dict[str, Any]:
    most = min(_MOST_RESIDUES, bound.num_queries, bound.num_keys)
    rate = residue_rate(pattern.union, most)
    program = TracedProgram((bound.num_heads, bound.num_queries, bound.num_keys))
    pairs = zip(pattern.unpadded.branches(), bound.pattern.branches(), strict=True)
    return {
        "phrase": shortened(pattern.phrase().text, _LONGEST_PATTERN),
        "command": _command(pattern, bound),
        "num_queries": bound.num_queries,
        "num_keys": bound.num_keys,
        "num_heads": bound.num_heads,
        "residue": rate if rate > 1 else None,
        "branches": [traced_rule(program, written, branch, bound.num_heads) for written, branch in pairs],
        "program": program.to_data(),
    }


def _command(pattern: Expression, bound: Bound) -> str | None:
    """Return a command line that runs `python -m flexdilated explain` on this pattern; the page appends a pair.

    Returns None if the pattern cannot be read back from its text, if the text has more than _LONGEST_PATTERN
    characters, if the pattern has run-time tensors, or if queries and keys do not have equal positions.
    """
    text = repr(pattern)
    try:
        same = len(text) <= _LONGEST_PATTERN and parse(text) == pattern
    except ValueError:  # a custom function, or a table that is not written out
        return None
    if not same or pattern.varies or not bound.is_self_attention:
        return None
    return shlex.join(
        ["python", "-m", "flexdilated", "explain", text, "-n", str(bound.num_queries), "--heads", str(bound.num_heads)]
    )


def _tiles(bound: Bound, first_head: int) -> dict[str, Any]:
    """Return a dict with the allowed fraction of each tile of the (queries x keys) mask, for the page to draw.

    "sides": tokens of a tile along queries and along keys.
    "grids": for each of up to _MOST_GRIDS different rules, one number per tile, row by row: the fraction of allowed
        pairs, to four digits, if their number is known; -1 if only bounds of it are known; -2 if these bounds are 0 and
        all pairs.
    "grid_of"[branch][head]: index of the rule's grid; None if it has none.

    first_head: the head whose grids are made first.
    """
    sides = [max(1, -(-tokens // _TILES)) for tokens in (bound.num_queries, bound.num_keys)]
    grids: dict[Pattern, int] = {}
    grid_of: list[list[int | None]] = [[None] * bound.num_heads for _ in bound.pattern.branches()]
    tiles = []
    for head in sorted(range(bound.num_heads), key=lambda head: head != first_head):
        for branch, rule in enumerate(bound.pattern.branches()):
            of_head = rule.for_head(head, bound.num_heads)  # many heads share one rule
            if of_head not in grids and len(grids) < _MOST_GRIDS:
                grids[of_head] = len(grids)
                tiles.append(_tile_fractions(rule, head, bound, sides))
            grid_of[branch][head] = grids.get(of_head)
    return {"sides": sides, "grids": tiles, "grid_of": grid_of}


def _tile_fractions(rule: Pattern, head: int, bound: Bound, sides: list[int]) -> list[float]:
    queries, keys = (
        torch.arange(0, tokens, side) for tokens, side in zip((bound.num_queries, bound.num_keys), sides, strict=True)
    )
    q, k = queries.repeat_interleave(len(keys)), keys.repeat(len(queries))
    rows = Progression(q, 1, (bound.num_queries - q).clamp(max=sides[0]))
    box = Box(torch.full_like(q, head), rows, Progression(k, 1, (bound.num_keys - k).clamp(max=sides[1])))
    found = rule.count(box, num_heads=bound.num_heads)
    unknown = torch.where((found.low == 0) & (found.high == box.area), -2.0, -1.0)
    share = torch.where(found.low == found.high, found.low / box.area, unknown)
    share = torch.where((share > 0) & (share < 1), share.clamp(max=0.9999), share)
    values, places = share.double().unique(return_inverse=True)
    return torch.tensor([float(f"{each:.4g}") for each in values.tolist()], dtype=torch.float64)[places].tolist()


def _page_html(data: dict[str, Any], title: str) -> str:
    """Return the HTML page made of the files in `web/` and the data.

    Its content security policy permits only its own script and style, by digest.
    """
    folder = files("flexdilated.viewer").joinpath("web")
    html, style, *scripts = (
        folder.joinpath(name).read_text("utf-8")
        for name in ("viewer.html", "style.css", *(f"{name}.js" for name in _SCRIPTS))
    )
    script = f'"use strict";\n{"".join(scripts)}'
    sources = f"script-src {_digest(script)}; style-src {_digest(style)}"
    packed = compress(json.dumps(data, separators=(",", ":")).encode())
    values = {
        "policy": f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'",
        "title": escape(title),
        "style": style,
        "data": b64encode(packed).decode(),
        "script": script,
    }
    head, *rest = html.split("{{")
    parts = (part.partition("}}") for part in rest)
    return head + "".join(values[name] + after for name, _, after in parts)


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
