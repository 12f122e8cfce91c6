"""Rule: a pattern over the slots of two layouts, as boxes for the builder and elementwise to settle a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._box import Box, Progression
from ._layout import Pieces
from ._pattern import Pattern


@dataclass(frozen=True)
class Run:
    """Slots [start, stop) within one piece, for n nodes."""

    piece: Tensor
    start: Tensor
    stop: Tensor

    def select(self, index: Tensor) -> Run:
        return Run(self.piece[index], self.start[index], self.stop[index])

    def num_blocks(self, block: int) -> Tensor:
        return (self.stop - 1) // block - self.start // block + 1


@dataclass(frozen=True)
class Nodes:
    table: Tensor
    q: Run
    k: Run

    def __len__(self) -> int:
        return len(self.table)

    def select(self, index: Tensor) -> Nodes:
        return Nodes(self.table[index], self.q.select(index), self.k.select(index))


@dataclass(frozen=True)
class Rule:
    """A pattern over the slots of two layouts: what the builder classifies and settles.

    `heads` are the global heads that need a table each; `q` and `k` hold a row of firsts for each of them.
    """

    pattern: Pattern
    num_heads: int
    heads: tuple[int, ...]
    q: Pieces
    k: Pieces

    def boxes(self, nodes: Nodes) -> Box:
        heads = torch.tensor(self.heads)
        return Box(heads[nodes.table], _span(self.q, nodes.table, nodes.q), _span(self.k, nodes.table, nodes.k))

    def allowed(self, table: Tensor, q_slot: Tensor, k_slot: Tensor) -> Tensor:
        """The rule elementwise, over broadcast tables and slots; ValueError where a table in it ends too early."""
        mod = self.pattern.mask_mod(num_heads=self.num_heads, device=torch.device("cpu"))
        heads = torch.tensor(self.heads)[table]
        q, k = self.q.position(table, q_slot), self.k.position(table, k_slot)
        try:
            return mod(torch.zeros_like(heads), heads, q, k)
        except IndexError as error:
            names = ("heads", "queries", "keys")
            asked = [f"{name} {int(x.min())} to {int(x.max())}" for name, x in zip(names, (heads, q, k), strict=True)]
            raise ValueError(f"{self.pattern!r} has no answer for {', '.join(asked)}: {error}") from error


def _span(pieces: Pieces, table: Tensor, run: Run) -> Progression:
    first = pieces.firsts[table, run.piece] + pieces.step * (run.start - pieces.starts[run.piece])
    return Progression(first, pieces.step, run.stop - run.start)
