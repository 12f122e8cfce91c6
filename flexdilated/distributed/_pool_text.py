"""What a pool says of itself in its repr."""

from __future__ import annotations

from sys import maxsize
from typing import TYPE_CHECKING

from ..masks.core._bytes_text import bytes_text

if TYPE_CHECKING:
    from ._pool import BufferPool, Lease


def lease_text(lease: Lease) -> str:
    """What is leased, and of whom."""
    whose = "torch" if lease._pool is None else lease._pool.name
    if lease._tensor is None:
        return f"Lease(of {whose}, which has ended)"
    return f"Lease({tuple(lease._tensor.shape)}, {lease._tensor.dtype}, of {whose})"


def pool_text(pool: BufferPool) -> str:
    """Its name, which the log has too, its settings where they are not the usual ones, and what it holds."""
    where = "any device" if pool.device is None else pool.device
    least = "never leases" if pool.threshold_bytes == maxsize else f"leases from {bytes_text(pool.threshold_bytes)}"
    budget = "" if pool.budget_bytes is None else f", budget {bytes_text(pool.budget_bytes)}"
    traits = "".join(f", {name}" for name in ("pinned", "debug") if getattr(pool, name))
    now = pool.statistics
    held = f"holds {bytes_text(now.allocated_bytes)}, of which {bytes_text(now.leased_bytes)} are leased"
    return f"BufferPool({pool.name}, {where}, {least}{budget}{traits}: {held})"
