"""Page: a pattern as one HTML file that draws it at any scale, evaluates its rule and explains its pairs."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any
from zlib import compress

from ..masks.core._bound import Bound
from ..masks.core._check import require_below, require_int
from ..masks.core._pattern import Expression, require_expression
from ..masks.core._spelling import shortened
from ..masks.orders._layout import residue_rate
from ._ranks import Ranks, ranks_data
from ._rule_data import rule_data

LARGEST_PAGE = 300_000  # bytes
_MOST_RESIDUES = 4096  # more classes than a screen has pixels would be drawn as noise
_LONGEST_PATTERN = 400
# Each builds on those before it.
_SCRIPTS = (
    *("numbers", "words", "progressions", "counting", "order", "random_draw", "grid_rectangles"),
    *("rules_distance", "rules_segments", "rules_tokens", "rules_blocks", "rules_grid", "rules_algebra", "rules"),
    *("colours", "estimates", "density", "viewport", "link", "ranks", "drawing", "reasons", "panel", "controls"),
    *("app", "start"),
)


def page(
    pattern: Expression,
    num_tokens: int,
    *,
    num_heads: int = 1,
    num_keys: int | None = None,
    head: int = 0,
    batch: int = 0,
    ranks: Ranks | None = None,
    title: str | None = None,
) -> str:
    """One HTML file, for a browser without a network: the pattern over `num_tokens` queries, at any scale.

    `num_keys` defaults to as many keys as queries. `head` is the global head that it shows first, and `batch` the
    entry whose run-time tensors it holds. `ranks` adds who holds which tokens, and the bytes between ranks.

    Raises ValueError for a custom function, which has no JSON; for sizes that the pattern does not bind to; for a
    head, a batch entry or ranks that do not fit; and for a page above 300 kB, whose tables are too large to embed.
    """
    keys = num_tokens if num_keys is None else num_keys
    bound = _bound(pattern, num_tokens, keys, num_heads, batch)
    require_below("head", head, num_heads, "heads")
    if not isinstance(title, str | None):
        raise TypeError(f"title must be a string or None; got {title!r:.80}")
    data = {"head": head, **_data(pattern, bound), "ranks": None if ranks is None else ranks_data(bound, ranks)}
    text = _assembled(data, "Who attends to whom" if title is None else title)
    size = len(text.encode())
    if size > LARGEST_PAGE:
        raise ValueError(
            f"a page must hold the whole rule in {LARGEST_PAGE:,} bytes; got {size:,}, because of large tables in "
            f"{pattern!r}: take fewer tokens, or one head's table"
        )
    return text


def _bound(pattern: Expression, num_queries: int, num_keys: int, num_heads: int, batch: int) -> Bound:
    """One batch entry of the pattern, with its run-time tensors' values."""
    require_expression(pattern)
    for name, value in (("num_tokens", num_queries), ("num_keys", num_keys), ("num_heads", num_heads)):
        require_int(name, value, minimum=1)
    bound = pattern.bind(num_heads=num_heads, num_queries=num_queries, num_keys=num_keys)
    return bound.entry(require_below("batch", batch, bound.batch, "batch entries"))


def _data(pattern: Expression, bound: Bound) -> dict[str, Any]:
    """What the page knows of the pattern."""
    most = min(_MOST_RESIDUES, bound.num_queries, bound.num_keys)
    rate = residue_rate(pattern.union, most)
    pairs = zip(pattern.branches(), bound.pattern.branches(), strict=True)
    return {
        "phrase": shortened(pattern.phrase().text, _LONGEST_PATTERN),
        "num_queries": bound.num_queries,
        "num_keys": bound.num_keys,
        "num_heads": bound.num_heads,
        "residue": rate if rate > 1 else None,
        "branches": [rule_data(written, branch) for written, branch in pairs],
    }


def _assembled(data: dict[str, Any], title: str) -> str:
    """The files of `web/` with the data. What may run, and which style holds, is said by their digests alone."""
    script = f'"use strict";\n{"".join(_text(f"{name}.js") for name in _SCRIPTS)}'
    style = _text("style.css")
    sources = f"script-src {_digest(script)}; style-src {_digest(style)}"
    packed = compress(json.dumps(data, separators=(",", ":")).encode())
    values = {
        "policy": f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'",
        "title": escape(title),
        "style": style,
        "data": b64encode(packed).decode(),
        "script": script,
    }
    head, *rest = _text("viewer.html").split("{{")
    parts = (part.partition("}}") for part in rest)
    return head + "".join(values[name] + after for name, _, after in parts)


def _text(name: str) -> str:
    return files("flexdilated.viewer").joinpath("web", name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
