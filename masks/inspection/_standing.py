"""Where a pair stands: its slots in an order of the tokens, and the block of pairs around it that kernels compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core._pattern import Expression, Pattern
from ..core._reason import Pair
from ..orders._layout import Layout, residue_rate

_PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Standing:
    """A pair in one order: residue-major of this rate, or natural for rate 1.

    The block that holds it covers `block_pairs` pairs, of which the head may see `allowed_pairs`; kernels leave out
    a block where these are none, and need no mask where they are all.
    """

    rate: int
    query_slot: int
    key_slot: int
    row: int
    column: int
    allowed_pairs: int
    block_pairs: int

    @property
    def order(self) -> str:
        return "natural" if self.rate == 1 else "residue"

    @property
    def computed(self) -> bool:
        """Whether a list of blocks in this order names the block."""
        return self.allowed_pairs > 0

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        slots = {"order": self.order, "rate": self.rate, "query_slot": self.query_slot, "key_slot": self.key_slot}
        held = {"allowed_pairs": self.allowed_pairs, "block_pairs": self.block_pairs, "computed": self.computed}
        return {**slots, "block": [self.row, self.column], **held}

    def __str__(self) -> str:
        slots = f"residue-major order of rate {self.rate}, slots {self.query_slot} and {self.key_slot}"
        where = f"{'natural order' if self.rate == 1 else slots}: block ({self.row}, {self.column})"
        if not self.allowed_pairs:
            return f"{where} allows none of its {self.block_pairs} pairs and is left out"
        if self.allowed_pairs == self.block_pairs:
            return f"{where} allows all of its {self.block_pairs} pairs and is computed without a mask"
        return f"{where} allows {self.allowed_pairs} of its {self.block_pairs} pairs and is computed with a mask"


def standings(
    rule: Expression, pair: Pair, num_queries: int, num_keys: int, block_size: tuple[int, int]
) -> tuple[Standing, ...]:
    """In the natural order, and for as many keys as queries in the residue-major one, if the rule has rates for it."""
    whole = rule.union
    rate = residue_rate(whole, num_queries) if num_queries == num_keys else 1
    rates = (1, rate) if rate > 1 else (1,)
    return tuple(_standing(whole, pair, num_queries, num_keys, block_size, each) for each in rates)


def _standing(
    rule: Pattern, pair: Pair, num_queries: int, num_keys: int, block_size: tuple[int, int], rate: int
) -> Standing:
    sides = [
        _side(Layout(size, rate), position, side)
        for size, position, side in zip((num_queries, num_keys), (pair.query, pair.key), block_size, strict=True)
    ]
    (q_slot, row, queries), (k_slot, column, keys) = sides
    mod = rule.mask_mod(num_heads=pair.num_heads, device=torch.device("cpu"))
    zero, head = torch.tensor(0), torch.tensor(pair.head)
    some = queries.split(max(1, _PAIRS_AT_ONCE // len(keys)))
    allowed = sum(int(mod(zero, head, few[:, None], keys[None, :]).sum()) for few in some)
    return Standing(rate, q_slot, k_slot, row, column, allowed, len(queries) * len(keys))


def _side(layout: Layout, position: int, side: int) -> tuple[int, int, torch.Tensor]:
    """(slot, number of its block, positions in that block) of one token."""
    slot = int(layout.slot_of(torch.tensor(position)))
    block = slot // side
    slots = torch.arange(block * side, min((block + 1) * side, layout.num_tokens))
    # By the runs of its residue classes: nothing here is as long as the sequence.
    return slot, block, layout.pieces(0).position(torch.tensor(0), slots)
