"""Wires: where the rows of one rank's exchange come from and where they go, as indices into its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Int64
from torch import Tensor

from ..masks.core._pattern import Expression
from ..masks.core._ranges import Ranges
from ..masks.orders._placement import Placement
from ..masks.plan_cache._cache import cache
from ._exchange_plan import ExchangePlan
from ._sharding import Sharding

# S rows sent, R rows received: each a token of one key/value head


@dataclass(frozen=True, eq=False)
class Wires:
    """The keys that a rank attends to stand in one tensor a head: first its own, then what it receives.

    Heads that receive less than others have room to spare at the end, which nobody reads. `num_sent` and
    `num_received` are rows by rank.
    """

    placement: Placement
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    sent_heads: Int64[Tensor, " S"]
    sent_tokens: Int64[Tensor, " S"]
    received_heads: Int64[Tensor, " R"]
    received_slots: Int64[Tensor, " R"]
    _on: dict[torch.device, Wires] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        rule: Expression,
        sharding: Sharding,
        rank: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_offset: int,
        num_heads_global: int,
    ) -> Wires:
        """The wires of a pattern with the values of its run-time tensors in place, from the cache if they are there."""
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_offset": head_offset}

        def build() -> Wires:
            plan = ExchangePlan.of(rule, sharding, rank, **heads, num_heads_global=num_heads_global)
            return _laid(plan, sharding.ranges(rank), num_kv_heads, sharding.num_tokens)

        key = ("wires", rule.text, sharding, rank, *heads.values(), num_heads_global)
        return cache().get(key, build, lambda wires: wires.nbytes, pattern=rule)

    def on(self, device: torch.device) -> Wires:
        """The same with its indices on a device, where they are put once."""
        if device.type == "cpu":
            return self
        if device not in self._on:
            names = ("sent_heads", "sent_tokens", "received_heads", "received_slots")
            self._on[device] = replace(self, **{name: getattr(self, name).to(device) for name in names})
        return self._on[device]

    @property
    def nbytes(self) -> int:
        """About what the indices and ranges take."""
        indices = (self.sent_heads, self.sent_tokens, self.received_heads, self.received_slots)
        return sum(x.nbytes for x in indices) + 160 * sum(map(len, self.placement.keys))

    @property
    def num_keys(self) -> int:
        """Tokens of the tensor that holds own and received keys."""
        return self.placement.num_keys


def _laid(plan: ExchangePlan, own: Ranges, num_kv_heads: int, num_tokens: int) -> Wires:
    ranks, num_own = range(len(plan.received)), sum(map(len, own))
    counts = [[sum(map(len, plan.received[source][head])) for head in range(num_kv_heads)] for source in ranks]
    each = torch.tensor(counts, dtype=torch.int64)
    before = each.cumsum(0) - each  # received by a head from earlier ranks
    heads = torch.arange(num_kv_heads).repeat(len(ranks)).repeat_interleave(each.flatten())
    row = torch.arange(len(heads)) - (each.flatten().cumsum(0) - each.flatten()).repeat_interleave(each.flatten())
    slots = num_own + before.flatten().repeat_interleave(each.flatten()) + row
    by_head = [
        (*own, *(run for source in ranks for run in plan.received[source][head])) for head in range(num_kv_heads)
    ]
    return Wires(
        Placement(own, tuple(by_head), complete=True, num_tokens=num_tokens),
        tuple(plan.num_sent),
        tuple(plan.num_received),
        plan.sent_heads,
        plan.sent_tokens,
        heads,
        slots,
    )
