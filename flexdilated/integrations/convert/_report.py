"""What convert did: the modules that attend by a pattern now, and those that were left, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate

from ...masks import Mixture, Pattern
from ...masks.core import shortened


@dataclass(frozen=True)
class Replaced:
    """An attention module that attends by a pattern: its name in the model, its kind, its heads, the pattern."""

    name: str
    kind: str
    num_heads: int
    pattern: Pattern | Mixture


@dataclass(frozen=True)
class Left:
    """An attention module that computes what it did: its name in the model, its kind, and why it was left."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What `convert` replaced and what it left, in the order of `model.named_modules()`; printed as two tables."""

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        done = [(each.name, each.kind, each.num_heads, shortened(repr(each.pattern))) for each in self.replaced]
        rest = [(each.name, each.kind, each.reason) for each in self.left]
        tables = []
        if done:
            tables.append(tabulate(done, ("replaced", "kind", "heads", "pattern"), disable_numparse=True))
        if rest:
            tables.append(tabulate(rest, ("left", "kind", "why"), disable_numparse=True))
        return "\n\n".join(tables) or "no attention module"
