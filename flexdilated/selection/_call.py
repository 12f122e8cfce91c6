"""SelectionCall: a call of a selector as plain values, and the rules of its heads and batch entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..engines import read_written, written
from ..masks import Mixture, Pattern
from ..masks.core import Extent, plans
from ..masks.patterns import alike, names
from ..masks.text import read_text
from ._boxes import HeadRule, Rows

# B batch, H query heads, G key/value heads


class SelectionCall(NamedTuple):
    """Arguments of a choice except tensors; patterns as JSON, "" for no `always`.

    coarse_block, coarse_query_block: block sides of the coarse selector; 0 without one.
    """

    within: str
    always: str
    block: int
    query_block: int
    whole: bool
    scorer: str
    stride: int
    kind: str
    amount: float
    most: int
    share: str
    coarse_block: int
    coarse_query_block: int
    scale: float
    q_offset: int

    @property
    def arguments(self) -> tuple[str, int]:
        """(constants of the call as text, q_offset): the arguments of an op."""
        return written(self[:-1]), self.q_offset

    @classmethod
    def of(cls, constants: str, q_offset: int) -> SelectionCall:
        """From an op's arguments; in a trace q_offset is symbolic."""
        return cls._make((*read_written(constants), q_offset))

    def rows(self, q: Tensor, k: Tensor) -> Rows:
        return Rows(q.shape[2], k.shape[2], self.q_offset, self.block, self.query_block, self.whole)

    def tables(self, q: Tensor, k: Tensor) -> int:
        """T, the number of tables of each batch entry."""
        return {"head": q.shape[1], "group": k.shape[1], "all": 1}[self.share]

    def both(self, bindings: Sequence[Tensor], extent: Extent) -> Pattern | Mixture:
        """Mixture of `within` and then `always`, resolved with run-time tensors, which are sorted by name."""
        patterns: list[Any] = [read_text(text) for text in (self.within, self.always) if text]
        both = Mixture.of(*patterns)
        return both.resolve(dict(zip(names(both), bindings, strict=True)), extent)


class HeadPart(NamedTuple):
    """Batch entries and query heads with one rule, and the key/value heads that they read."""

    entries: slice
    heads: slice
    key_heads: slice
    rule: HeadRule

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.entries, self.heads]

    def of_keys(self, x: Tensor) -> Tensor:
        return x[self.entries, self.key_heads]

    def shared(self, x: Tensor, heads: int) -> Tensor:
        """The part of x for these entries and heads; dim 1 of x has one entry per group of the `heads` heads."""
        own = x[self.entries]
        if self.heads == slice(None):
            return own
        at = self.heads.start * x.shape[1] // heads
        return own[:, at : at + 1]


@plans
def parts_of(call: SelectionCall, bindings: Sequence[Tensor], q: Tensor, k: Tensor) -> list[HeadPart]:
    """Rules of a call. Raises ValueError if a pattern does not fit the sizes, or tensors are missing."""
    batch, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    extent = Extent(call.q_offset + q.shape[2], k.shape[2])
    sizes = {"num_heads": heads, "num_queries": q.shape[2], "num_keys": k.shape[2], "q_offset": call.q_offset}
    found: list[HeadPart] = []
    for entries, both in alike(call.both(bindings, extent), batch):
        rules = [each.bind(**sizes).union for each in both.branches()]
        of_head: dict[tuple[Pattern, ...], int] = {}
        firsts = [
            of_head.setdefault(tuple(rule.for_head(head, heads) for rule in rules), head) for head in range(heads)
        ]
        made = {
            first: HeadRule(own[0], own[1] if len(own) > 1 else None, first, heads) for own, first in of_head.items()
        }
        if len(made) == 1:
            found.append(HeadPart(entries, slice(None), slice(None), made[0]))
            continue
        for head, first in enumerate(firsts):
            key_head = head * groups // heads
            found.append(HeadPart(entries, slice(head, head + 1), slice(key_head, key_head + 1), made[first]))
    return found
