"""What the cache did and holds, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tabulate import tabulate

from ._cache_store import Entry, Limits


@dataclass(frozen=True)
class Holding:
    """Some entries together, under the name of what they have in common."""

    name: str
    entries: int
    bytes: int

    @classmethod
    def of(cls, name: str, entries: Iterable[Entry]) -> Holding:
        sizes = [entry.nbytes for entry in entries]
        return cls(name, len(sizes), sum(sizes))


@dataclass(frozen=True)
class CacheStats:
    """Look-ups since the last `clear`, and what is held now.

    A hit found its value, or another thread building it. `build_seconds` counts a build within a build once.
    `masters` are plans and block lists, on the CPU; `copies` are the tables made of them, one holding a
    device; `pinned` are those of both that stay.
    """

    hits: int
    misses: int
    evictions: int
    build_seconds: float
    masters: Holding
    copies: tuple[Holding, ...]
    pinned: Holding
    limits: Limits

    @classmethod
    def of(
        cls, hits: int, misses: int, evictions: int, build_seconds: float, held: list[Entry], limits: Limits
    ) -> CacheStats:
        """From the counts, and all entries."""
        devices = sorted({str(entry.device) for entry in held if entry.device is not None})
        copies = {device: [entry for entry in held if str(entry.device) == device] for device in devices}
        return cls(
            hits,
            misses,
            evictions,
            build_seconds,
            Holding.of("masters", (entry for entry in held if entry.device is None)),
            tuple(Holding.of(f"copies on {device}", entries) for device, entries in copies.items()),
            Holding.of("pinned", (entry for entry in held if entry.pins)),
            limits,
        )

    @property
    def entries(self) -> int:
        """All entries."""
        return self.masters.entries + sum(holding.entries for holding in self.copies)

    @property
    def bytes(self) -> int:
        """Their bytes: those of the tables, without what Python adds."""
        return self.masters.bytes + sum(holding.bytes for holding in self.copies)

    @property
    def hit_rate(self) -> float:
        """Hits over look-ups, 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    def __str__(self) -> str:
        """Two tables: what was looked up, and what is held."""
        lookups = [
            ("hits", f"{self.hits:,}"),
            ("misses", f"{self.misses:,}"),
            ("hit rate", f"{self.hit_rate:.1%}"),
            ("evictions", f"{self.evictions:,}"),
            ("time to build", f"{1e3 * self.build_seconds:,.1f} ms"),
        ]
        total = Holding("all", self.entries, self.bytes)
        budget = Holding("budget", self.limits.entries, self.limits.bytes)
        held = [
            (holding.name, f"{holding.entries:,}", f"{holding.bytes:,}")
            for holding in (self.masters, *self.copies, total, self.pinned, budget)
        ]
        right = ("left", "right", "right")
        return "\n\n".join(
            (
                tabulate(lookups, tablefmt="plain", disable_numparse=True, colalign=right[:2]),
                tabulate(held, ("held", "entries", "bytes"), disable_numparse=True, colalign=right),
            )
        )
