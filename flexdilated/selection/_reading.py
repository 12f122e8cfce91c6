"""Reading: attention over what a selector chose, as calls of `attend` around a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .._attend import attend
from .._validate import run_time_tensors
from ..engines import merge
from ..masks import Pattern, selected_blocks
from ..masks.patterns import names
from ._select_op import selection_pairs
from ._selector import BlockSelector

# B batch, H query heads, N queries, M keys, D head dim, T tables, R rows


class Reading(NamedTuple):
    """What reads a choice: patterns around a table, and the options of its calls.

    rule: what holds in the call. beyond: what `always` does not allow; None without it. table: the name of the table,
    which is that of no other tensor.
    """

    rule: Pattern
    own: BlockSelector
    beyond: Pattern | None
    table: str
    bindings: dict[str, Tensor]
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        own: BlockSelector,
        beyond: Pattern | None,
        rule: Pattern,
        bindings: Mapping[str, Tensor] | None,
        **options: Any,
    ) -> Reading:
        """options: scale, q_offset and engine of `attend`."""
        table = "chosen"
        needed = names(rule if own.always is None else rule | own.always)
        while table in needed:
            table += "_"
        given = {} if bindings is None else {name: x for name, x in bindings.items() if name in needed}
        return cls(rule, own, beyond, table, given, {**options, "enable_gqa": True})

    @property
    def always(self) -> Pattern:
        """What is read in any case."""
        return self.rule if self.own.always is None else self.own.always & self.rule

    @property
    def read(self) -> Pattern:
        """(chosen | always) & within."""
        chosen = self._leaf(self.own.choose.most)
        return (chosen if self.own.always is None else chosen | self.own.always) & self.rule

    def added(self, most: int) -> Pattern:
        """What is read because it is chosen, by a table of this width."""
        chosen = self._leaf(most) & self.rule
        return chosen if self.beyond is None else chosen & self.beyond

    def _leaf(self, most: int) -> Pattern:
        return selected_blocks(self.table, block=(self.own.query_block, self.own.block), most=most)

    def pairs(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"]) -> Int64[Tensor, ""]:
        """How many pairs `rule` allows, over all heads and batch entries: what a density is a share of."""
        call = self.own.call(self.rule, self.options["q_offset"], 1.0)
        both = self.rule if self.own.always is None else self.rule | self.own.always
        return selection_pairs(q, k, run_time_tensors(both, self.bindings, has_values=not q.is_meta), *call)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, blocks: Int64[Tensor, "B T R most"] | None = None
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
        """(out in the dtype of lse, lse) over a pattern, and a table where it names one."""
        known = names(pattern)
        bindings = {name: x for name, x in self.bindings.items() if name in known}
        bindings |= {} if blocks is None else {self.table: blocks}
        out, lse = attend(q, k, v, pattern, bindings=bindings or None, return_lse=True, **self.options)
        return out.to(lse.dtype), lse

    def chosen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Int64[Tensor, "B T R most"],
        scores: Float[Tensor, "B T R most"] | None,
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
        """(out, lse) over what `added` allows; with scores each block's logits are raised by its own."""
        if scores is None:
            return self.attend(q, k, v, self.added(blocks.shape[-1]), blocks)
        biases = self._of_queries(scores.masked_fill(blocks < 0, 0.0), q)
        one, found = self.added(1), []
        for place in range(blocks.shape[-1]):
            out, lse = self.attend(q, k, v, one, blocks[..., place : place + 1])
            found.append((out, lse + biases[..., place].to(lse.dtype)))
        out, lse = found[0]
        for part in found[1:]:
            out, lse = merge(out, lse, *part)
        return out, lse

    def _of_queries(self, scores: Float[Tensor, "B T R most"], q: Tensor) -> Float[Tensor, "B H N most"]:
        """The scores of each query's row, for each head."""
        side, first = self.own.query_block, self.options["q_offset"]
        row = (torch.arange(q.shape[2], device=q.device) + first % side) // side
        return scores.repeat_interleave(q.shape[1] // scores.shape[1], 1)[:, :, row]
