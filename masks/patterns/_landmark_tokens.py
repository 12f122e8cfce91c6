"""Landmark tokens: at regular places, tokens that see every token, and that every token sees."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core._box import Bounds, Box, Counts, Progression, count_residue
from ..core._check import require_int
from ..core._pattern import MaskMod, Pattern
from ..core._ranges import Ranges, among, as_ranges
from ..core._reason import Pair, Reason
from ..core._spelling import Phrase, call
from ._global_tokens import check_sides


@dataclass(frozen=True)
class LandmarkTokens(Pattern):
    """Allowed iff the query (`rows`) or the key (`columns`) stands at a multiple of the stride."""

    stride: int
    rows: bool
    columns: bool

    def __post_init__(self) -> None:
        require_int("stride", self.stride, minimum=1)
        check_sides("landmark tokens", rows=self.rows, columns=self.columns)
        super().__post_init__()

    def to_data(self) -> dict[str, Any]:
        return {"kind": "landmark_tokens", "stride": self.stride, "rows": self.rows, "columns": self.columns}

    def phrase(self) -> Phrase:
        less = {name: False for name in ("rows", "columns") if not getattr(self, name)}
        return call("landmark_tokens", self.stride, **less)

    def period(self) -> int:
        return self.stride

    def rates(self) -> tuple[int, ...]:
        # In residue-major order of this rate all landmarks stand side by side.
        return (self.stride,)

    def reason(self, pair: Pair) -> Reason:
        asked = [(self.rows, pair.the_query, pair.query), (self.columns, pair.the_key, pair.key)]
        places = [(name, position % self.stride) for counts, name, position in asked if counts]
        where = [f"{name} is {f'{past} past ' if past else ''}a multiple of {self.stride}" for name, past in places]
        return Reason(self, any(past == 0 for _, past in places), " and ".join(where))

    def row(self, query: int, keys: range) -> Ranges:
        if self.rows and query % self.stride == 0:
            return as_ranges(keys)
        return among([range(0, keys.stop, self.stride)], keys) if self.columns else ()

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        stride = torch.tensor(self.stride, device=device)
        if self.rows and self.columns:
            return _either_at_multiples(stride)
        return _query_at_multiples(stride) if self.rows else _key_at_multiples(stride)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        # Pairs outside are those of a query and a key that are both no landmarks.
        queries = box.q.count - self._landmarks(box.q) if self.rows else box.q.count
        keys = box.k.count - self._landmarks(box.k) if self.columns else box.k.count
        pairs = box.area - queries * keys
        return Bounds(pairs, pairs)

    def _landmarks(self, progression: Progression) -> Counts:
        return count_residue(progression, self.stride, torch.zeros_like(progression.first))


def landmark_tokens(stride: int, *, rows: bool = True, columns: bool = True) -> Pattern:
    """The tokens at positions 0, `stride`, 2 * `stride`, ... see every token (`rows`) and are seen by all (`columns`).

    Either alone is allowed; neither is a ValueError, as is a stride below 1.
    """
    return LandmarkTokens(stride, rows, columns)


def _either_at_multiples(stride: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return (q % stride == 0) | (k % stride == 0)

    return mask_mod


def _query_at_multiples(stride: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return (q % stride == 0) & (k == k)

    return mask_mod


def _key_at_multiples(stride: Tensor) -> MaskMod:
    def mask_mod(b, h, q, k):
        return (k % stride == 0) & (q == q)

    return mask_mod
