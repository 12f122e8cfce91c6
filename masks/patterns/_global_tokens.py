"""Global tokens: the first few tokens see every token, and every token sees them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core._box import Bounds, Box, Progression, clip
from ..core._check import require_bool, require_int
from ..core._pattern import MaskMod, Pattern
from ..core._ranges import Ranges, as_ranges
from ..core._reason import Pair, Reason
from ..core._spelling import Phrase, call


@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """Allowed iff the query (`rows`) or the key (`columns`) is one of the first `tokens` tokens."""

    tokens: int
    rows: bool
    columns: bool

    def __post_init__(self) -> None:
        require_int("tokens", self.tokens, minimum=1)
        check_sides("global tokens", rows=self.rows, columns=self.columns)
        super().__post_init__()

    def to_data(self) -> dict[str, Any]:
        return {"kind": "global_tokens", "tokens": self.tokens, "rows": self.rows, "columns": self.columns}

    def phrase(self) -> Phrase:
        if not self.rows:
            return call("first_tokens", self.tokens)
        return call("global_tokens", self.tokens, **({} if self.columns else {"columns": False}))

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        tokens = torch.tensor(self.tokens, device=device)
        if self.rows and self.columns:
            return _either_below(tokens)
        return _query_below(tokens) if self.rows else _key_below(tokens)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        # Pairs outside are those of a query and a key that are both not global.
        queries = box.q.count - self._below(box.q) if self.rows else box.q.count
        keys = box.k.count - self._below(box.k) if self.columns else box.k.count
        pairs = box.area - queries * keys
        return Bounds(pairs, pairs)

    def reason(self, pair: Pair) -> Reason:
        sees, is_seen = self.rows and pair.query < self.tokens, self.columns and pair.key < self.tokens
        first = f"the first {self.tokens}"
        if sees or is_seen:
            chosen = [(sees, pair.the_query, "which see every key"), (is_seen, pair.the_key, "which every query sees")]
            text = "; ".join(f"{name} is one of {first}, {what}" for holds, name, what in chosen if holds)
        else:
            names = [name for asked, name in ((self.rows, pair.the_query), (self.columns, pair.the_key)) if asked]
            text = f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} not among {first}"
        return Reason(self, sees or is_seen, text)

    def row(self, query: int, keys: range) -> Ranges:
        if self.rows and query < self.tokens:
            return as_ranges(keys)
        return as_ranges(range(keys.start, min(self.tokens, keys.stop))) if self.columns else ()

    def _below(self, progression: Progression) -> Tensor:
        begin = torch.zeros_like(progression.first)
        return clip(progression, begin, begin + self.tokens).count


def global_tokens(count: int, *, rows: bool = True, columns: bool = True) -> Pattern:
    """The first `count` tokens see every token (`rows`) and are seen by every token (`columns`).

    Either alone is allowed; neither is a ValueError, as is a count below 1. Source: Longformer (arXiv
    2004.05150) and BigBird (arXiv 2007.14062), whose global tokens do both.
    """
    return GlobalTokens(require_int("count", count, minimum=1), rows, columns)


def first_tokens(count: int) -> Pattern:
    """Every query sees the first `count` tokens: keys that are always visible, such as attention sinks.

    Source: StreamingLLM, arXiv 2309.17453. Raises ValueError for a count below 1.
    """
    return global_tokens(count, rows=False)


def check_sides(tokens: str, *, rows: object, columns: object) -> None:
    """At least one of two booleans must be True: tokens that neither see nor are seen are no rule."""
    if not (require_bool("rows", rows) | require_bool("columns", columns)):
        raise ValueError(
            f"{tokens} see everyone (rows), are seen by everyone (columns), or both; got {rows=} and {columns=}"
        )


def _either_below(tokens: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return (q < tokens) | (k < tokens)

    return mask_mod


def _query_below(tokens: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return (q < tokens) & (k == k)

    return mask_mod


def _key_below(tokens: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return (k < tokens) & (q == q)

    return mask_mod
