"""stats: statistics of the plan cache and the buffer pools, and the sources of the constants that plans use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from textwrap import indent
from typing import Any

from tabulate import tabulate

from ..engines import num_measured
from ..masks import cache
from ..masks.core import bytes_text
from ..masks.plan_cache import CacheStats
from ..masks.planning import sources_in_use

# Read from sys.modules: only a process that has imported it can have pools, and others should not load it.
_POOL_MODULE = "flexdilated.distributed.wire._pool"


@dataclass(frozen=True)
class PoolStats:
    """Settings and statistics of a live `distributed.BufferPool`; peaks and counts are since its last reset.

    device: "any" for a pool that serves all devices.
    threshold_bytes: size of the smallest tensor that it leases; None if it leases none.
    budget_bytes: memory of all buffers above which idle ones are freed; None: no budget.
    allocated_bytes: of all buffers, leased and idle.
    peak_bytes: largest value of allocated_bytes.
    leased_bytes: requested by open leases.
    num_leases: leases that have a buffer of the pool.
    num_allocations: leases that needed new memory.
    num_plain: requested tensors that torch allocated without a lease, such as those below the threshold.
    reuse_rate: share of leases without new memory; 0 without leases.
    """

    name: str
    device: str
    threshold_bytes: int | None
    budget_bytes: int | None
    allocated_bytes: int
    leased_bytes: int
    peak_bytes: int
    num_leases: int
    num_allocations: int
    num_plain: int
    reuse_rate: float


@dataclass(frozen=True)
class Stats:
    """State and history of the library in this process; print it for tables.

    cache: statistics of the cache of plans and tables.
    pools: all live pools.
    constants: (kind of device, source) of the machine constants used in plans.
    measured: number of distinct calls for which `autotune` measured the options.
    """

    cache: CacheStats
    pools: tuple[PoolStats, ...]
    constants: tuple[tuple[str, str], ...]
    measured: int

    def to_data(self) -> dict[str, Any]:
        """Return all fields as a dict of dicts, lists, numbers and text, for JSON."""
        return json.loads(json.dumps(asdict(self)))

    def __str__(self) -> str:
        """Return text with three sections: "Plan cache", "Buffer pools", and "Plans".

        "Plans" has the sources of the machine constants, and the number of calls whose options `autotune` measured.
        """
        parts = {
            "Plan cache": str(self.cache),
            "Buffer pools": _pool_table(self.pools),
            "Plans": _plan_sources(self),
        }
        return "\n\n".join(f"{name}\n{indent(text, '  ')}" for name, text in parts.items())


def stats() -> Stats:
    """Return statistics of this process now: plan cache, buffer pools, and sources of the plans' machine constants.

    Builds, imports and measures nothing. Raises ValueError if the cache's environment variables are invalid.

    >>> stats = fd.stats()  # print it
    """
    return Stats(cache().stats(), tuple(_pools()), tuple(sources_in_use().items()), num_measured())


def _pools() -> Iterable[PoolStats]:
    module = sys.modules.get(_POOL_MODULE)
    # The references are copied in one step, because other threads create and free pools.
    found = () if module is None else (reference() for reference in module.pools_by_name.valuerefs())
    for pool in (pool for pool in found if pool is not None):
        device = "any" if pool.device is None else str(pool.device)
        threshold = None if pool.threshold_bytes == sys.maxsize else pool.threshold_bytes
        taken = pool.statistics
        now = {each.name: getattr(taken, each.name) for each in fields(PoolStats)[4:]}
        yield PoolStats(pool.name, device, threshold, pool.budget_bytes, **now)


def _pool_table(pools: tuple[PoolStats, ...]) -> str:
    if not pools:
        return "none"
    head = ("pool", "device", "held", "leased", "peak", "leases", "reused")
    rows = [
        (
            pool.name.removeprefix("pool "),
            pool.device,
            *map(bytes_text, (pool.allocated_bytes, pool.leased_bytes, pool.peak_bytes)),
            f"{pool.num_leases:,}",
            f"{pool.reuse_rate:.0%}" if pool.num_leases else "",
        )
        for pool in pools
    ]
    return tabulate(rows, head, disable_numparse=True, colalign=("left", "left", *["right"] * (len(head) - 2)))


def _plan_sources(found: Stats) -> str:
    rows = [(f"constants of {kind}", source) for kind, source in found.constants] or [("constants", "none used yet")]
    rows.append(("calls that autotune chose for", f"{found.measured:,}"))
    return tabulate(rows, tablefmt="plain", disable_numparse=True)
