"""A pattern's rule as a table of all pairs below some number of tokens: what its other claims are held to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..masks import Pattern

# H heads, T tokens

_CPU = torch.device("cpu")
_ALONE = 100


@dataclass(frozen=True, eq=False)
class DenseRule:
    """A pattern for `num_heads` heads, and which pairs `mask_mod` allows: table[h, q, k]."""

    pattern: Pattern
    num_heads: int
    table: Tensor

    @classmethod
    def of(cls, pattern: Pattern, num_heads: int, max_tokens: int) -> DenseRule:
        heads, tokens = torch.arange(num_heads, device=_CPU), torch.arange(max_tokens, device=_CPU)
        try:
            table = ask(pattern, num_heads, heads[:, None, None], tokens[:, None], tokens)
        except IndexError as error:
            rule = f"{pattern!r} must have an answer for {num_heads} heads and positions below {max_tokens=}"
            raise ValueError(f"{rule}: {error}") from error
        return cls(pattern, num_heads, table)

    @property
    def num_tokens(self) -> int:
        return self.table.shape[1]

    def for_head(self, head: int) -> DenseRule:
        """What the pattern's rule for one head must be, whatever head it is asked about."""
        one = self.pattern.for_head(head, self.num_heads)
        return replace(self, pattern=one, table=self.table[head].expand_as(self.table))


def ask(pattern: Pattern, num_heads: int, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The rule elementwise, in the broadcast shape of heads and positions."""
    mod = pattern.mask_mod(num_heads=num_heads, device=_CPU)
    shape = torch.broadcast_shapes(h.shape, q.shape, k.shape)
    return mod(torch.zeros((), dtype=torch.int64, device=_CPU), h, q, k).expand(shape)


def check_elementwise(dense: DenseRule, examples: int, generator: torch.Generator) -> None:
    """Pairs in a row, and alone, must get the answers that they get in a table."""
    number = max(examples, _ALONE)
    h = torch.randint(dense.num_heads, (number,), generator=generator, device=_CPU)
    q, k = torch.randint(dense.num_tokens, (2, number), generator=generator, device=_CPU)
    cells = [slice(None), *range(_ALONE)]
    for cell in cells:
        found = ask(dense.pattern, dense.num_heads, h[cell], q[cell], k[cell])
        wrong = (found != dense.table[h, q, k][cell]).flatten().nonzero().flatten().tolist()
        if wrong:
            head, query, key = (int(side[cell].flatten()[wrong[0]]) for side in (h, q, k))
            rule = f"{dense.pattern!r}: mask_mod must look at each pair by itself"
            raise AssertionError(f"{rule}; for head {head}, query {query}, key {key} it depends on the others asked")
