"""What all modules say of themselves in a repr: their pattern, the engine, and how ranks share the work."""

from __future__ import annotations

from ..masks import Mixture, Pattern
from ..masks.core import shortened
from ._over_ranks import OverRanks

LONGEST = 400  # characters of a pattern: a module stands among others


def pattern_text(pattern: Pattern | Mixture) -> str:
    """The expression, or its beginning."""
    return shortened(repr(pattern), LONGEST)


def engine_text(engine: str | None) -> str:
    """The engine, and what None stands for."""
    return f"engine={engine!r}{' (tiles on CPU, flex elsewhere)' if engine is None else ''}"


def ranks_text(over_ranks: OverRanks | None) -> str:
    """The mesh with schedule and pool, to go behind all else; nothing without one."""
    return "" if over_ranks is None else f", {over_ranks}"
