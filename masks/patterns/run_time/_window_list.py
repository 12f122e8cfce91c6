"""Windows: rectangles of query and key positions into which a table cuts a branch, and those that look alike."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Int64
from torch import Tensor

from ...core import numbered

# W windows


@dataclass(frozen=True)
class Windows:
    """Rectangles without overlap: queries q_start[i] to q_stop[i] - 1 with keys k_start[i] to k_stop[i] - 1.

    `origin` is the position from which the rule inside counts.
    """

    q_start: Int64[Tensor, " W"]
    q_stop: Int64[Tensor, " W"]
    k_start: Int64[Tensor, " W"]
    k_stop: Int64[Tensor, " W"]
    origin: Int64[Tensor, " W"]

    @classmethod
    def squares(cls, start: Int64[Tensor, " W"], stop: Int64[Tensor, " W"]) -> Windows:
        """Runs of positions that see themselves."""
        return cls(start, stop, start, stop, torch.zeros_like(start))

    def __len__(self) -> int:
        return len(self.q_start)

    def select(self, index: Tensor | slice) -> Windows:
        return Windows(*(getattr(self, field.name)[index] for field in fields(self)))

    def from_start(self) -> Windows:
        """The same, with a rule that counts from where the queries begin."""
        return Windows(self.q_start, self.q_stop, self.k_start, self.k_stop, self.q_start)

    def within(self, queries: range, keys: range) -> Windows:
        """What lies in these ranges, without windows that are left empty."""
        q_start, q_stop = (edge.clamp(queries.start, queries.stop) for edge in (self.q_start, self.q_stop))
        k_start, k_stop = (edge.clamp(keys.start, keys.stop) for edge in (self.k_start, self.k_stop))
        cut = Windows(q_start, q_stop, k_start, k_stop, self.origin)
        return cut.select((q_start < q_stop) & (k_start < k_stop))

    def counted_from(self, period: int | None) -> Int64[Tensor, " W"]:
        """The position from which the rule may count as well, so that no window lies a period or more behind it."""
        if period is None:
            return self.origin
        ahead = torch.minimum(self.q_start, self.k_start) - self.origin
        return self.origin + ahead // period * period

    def kinds(self, period: int | None) -> tuple[Int64[Tensor, " n"], ...]:
        """The windows in which a rule of this period looks the same: an ascending index for each kind, by its first."""
        start, queries = self.counted_from(period), self.q_stop - self.q_start
        ahead, keys = self.k_start - self.q_start, self.k_stop - self.k_start
        kind, _ = numbered(queries, keys - queries, ahead, self.q_start - start)
        found = kind.argsort(stable=True).split(kind.bincount().tolist()) if len(self) else ()
        return tuple(sorted(found, key=lambda index: int(index[0])))
