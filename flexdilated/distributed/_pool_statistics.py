"""What a pool holds, and what it has leased: numbers that add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ._traffic import Role


@dataclass
class PoolStatistics:
    """Bytes are those of now, except the peaks; counts and peaks begin with the pool, or at its last `reset`.

    allocated_bytes: held by the pool, leased and idle. idle_bytes: of these. leased_bytes: what open leases asked for.
    num_leases: those that the pool served; num_allocations: for how many of them it asked torch for memory; num_plain:
    tensors that torch made instead. By role: leases, and bytes they asked for.
    """

    allocated_bytes: int = 0
    idle_bytes: int = 0
    leased_bytes: int = 0
    peak_bytes: int = 0
    peak_leased_bytes: int = 0
    num_leases: int = 0
    num_allocations: int = 0
    num_plain: int = 0
    leases_by_role: Counter[Role] = field(default_factory=Counter)
    bytes_by_role: Counter[Role] = field(default_factory=Counter)

    @property
    def reuse_rate(self) -> float:
        """The share of leases that got a buffer which was there already; 0 before the first."""
        return 1 - self.num_allocations / self.num_leases if self.num_leases else 0.0

    @property
    def fragmentation(self) -> float:
        """Bytes held for each byte leased now: 1 where nothing is held, infinite where all of it is idle."""
        if self.leased_bytes:
            return self.allocated_bytes / self.leased_bytes
        return float("inf") if self.allocated_bytes else 1.0
