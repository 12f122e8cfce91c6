"""Patterns as JSON: what a checkpoint stores and a custom op receives."""

from collections.abc import Callable
from typing import Any

from ..core._algebra import And, Every, Not, Or
from ..core._pattern import DEEPEST, Expression, Mixture, Pattern, require_expression
from ..core._per_head import HeadGroups, PerHead
from ..core._spelling import QUOTED, shortened
from ..patterns._block_list import BlockList
from ..patterns._blockwise import Blockwise
from ..patterns._causal import Causal
from ..patterns._dilated import Dilated
from ..patterns._dilated_window import DilatedWindow
from ..patterns._fixed import Fixed
from ..patterns._global_tokens import GlobalTokens
from ..patterns._landmark_tokens import LandmarkTokens
from ..patterns._local_window import LocalWindow
from ..patterns._neighborhood import Neighborhood
from ..patterns._per_document import PerDocument
from ..patterns._random_blocks import RandomBlocks
from ..patterns._strided import Strided
from ..patterns.custom._custom import read_custom
from ..patterns.run_time._documents import Documents
from ..patterns.run_time._lengths import Lengths
from ..patterns.run_time._visible_keys import VisibleKeys
from ._plain_json import read_json


def to_json(pattern: Expression) -> str:
    """Canonical JSON of a pattern or mixture; `from_json` gives an equal value back.

    Raises TypeError where a custom function takes part: code has no JSON.
    """
    text = require_expression(pattern).text
    if _NAMES_A_FUNCTION in text:
        raise TypeError(f"a custom function has no JSON: store what it is made from, and make it anew; got {pattern!r}")
    return text


def from_json(text: str) -> Pattern | Mixture:
    """The pattern or mixture that `to_json` wrote. Raises ValueError for anything else, naming the fault."""
    pattern = read_text(text)
    if _NAMES_A_FUNCTION in pattern.text:
        raise ValueError(f"a custom function has no JSON: make it anew with masks.custom; got {pattern!r}")
    return pattern


def read_text(text: str) -> Pattern | Mixture:
    """The pattern of a text of this process, in which custom functions are named by their digests."""
    if not isinstance(text, str):
        raise TypeError(f"a pattern's JSON must be a string; got {type(text).__name__}")
    try:
        data = read_json(text)
    except ValueError as error:
        raise ValueError(f"a pattern must be JSON as to_json writes it; got {text[:80]!r}: {error}") from error
    try:
        return _read(data, depth=0)
    except RecursionError:
        raise ValueError(f"a pattern must nest at most {DEEPEST} levels; got {text[:80]!r}") from None


def kept_functions(text: str) -> object:
    """What to hold on to for as long as this text is in use: the custom functions that it only names."""
    return read_text(text) if _NAMES_A_FUNCTION in text else None


_NAMES_A_FUNCTION = '"kind":"custom"'


def _read(data: Any, *, depth: int) -> Pattern | Mixture:
    if depth > DEEPEST:
        raise ValueError(f"a pattern must nest at most {DEEPEST} levels")
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "custom":
        return read_custom(data)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"a pattern is an object whose kind is one of {', '.join(_FIELDS)}; got {data!r:.80}")
    build, fields = _FIELDS[kind]
    if set(data) != {"kind", *fields}:
        raise ValueError(f"a pattern of kind {kind!r} has the fields {list(fields)}; got {sorted(data)!r:.200}")
    values = [_value(data[field], field, depth) for field in fields]
    try:
        return build(*values)
    except (TypeError, ValueError) as error:
        says = shortened(str(error), QUOTED)
        raise ValueError(f"a pattern of kind {kind!r} has wrong values: {says}") from error


def _value(value: Any, field: str, depth: int) -> Any:
    if field in ("part", "spans"):
        return _read(value, depth=depth + 1)
    if field == "parts":
        if not isinstance(value, list):
            raise ValueError(f"parts must be a list of patterns; got {value!r:.80}")
        return tuple(_read(part, depth=depth + 1) for part in value)
    return value


def _documents(name: str, longest: int | None) -> Documents:
    return Documents(name, longest=longest)


def _block_list(rows: Any, block: int) -> BlockList:
    """With rows in ascending order only, as `to_json` writes them."""
    made = BlockList(rows, block)
    given, kept = (rows, made.rows) if made.by_head else ([rows], (made.rows,))
    if any(tuple(row) != ascending for pair in zip(given, kept, strict=True)
           for row, ascending in zip(*pair, strict=True)):  # fmt: skip
        raise ValueError("each row must name its blocks in ascending order")
    return made


def _lengths(name: str, padding: str) -> Lengths:
    return Lengths(name, padding=padding)


_FIELDS: dict[str, tuple[Callable[..., Pattern | Mixture], tuple[str, ...]]] = {
    "causal": (Causal, ()),
    "dilated": (Dilated, ("segment", "rate", "offset")),
    "local_window": (LocalWindow, ("left", "right")),
    "dilated_window": (DilatedWindow, ("left", "right", "rate")),
    "global_tokens": (GlobalTokens, ("tokens", "rows", "columns")),
    "strided": (Strided, ("stride",)),
    "landmark_tokens": (LandmarkTokens, ("stride", "rows", "columns")),
    "blockwise": (Blockwise, ("part", "block")),
    "fixed": (Fixed, ("stride", "summary")),
    "random_blocks": (RandomBlocks, ("num_tokens", "block", "count", "seed", "head")),
    "block_list": (_block_list, ("rows", "block")),
    "neighborhood": (Neighborhood, ("grid", "radius", "rate")),
    "documents": (_documents, ("name", "longest")),
    "lengths": (_lengths, ("name", "padding")),
    "visible_keys": (VisibleKeys, ("name",)),
    "per_document": (PerDocument, ("part", "spans")),
    "every": (Every, ()),
    "and": (And, ("parts",)),
    "or": (Or, ("parts",)),
    "not": (Not, ("part",)),
    "per_head": (PerHead, ("parts",)),
    "head_groups": (HeadGroups, ("parts",)),
    "mixture": (Mixture, ("parts",)),
}
