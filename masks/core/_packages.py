"""Patterns of other installed packages: modules that entry points of the group `flexdilated.patterns` name."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points
from typing import TypeVar

from ._ambient import plans

T = TypeVar("T")

_GROUP = "flexdilated.patterns"
_QUOTED = 200  # characters quoted from the error of an import


def registered(registry: dict[str, T], name: str) -> T | None:
    """Return registry[name], after importing the modules of other packages if the name is unknown; None without one.

    registry: KINDS or CONSTRUCTORS, in which these modules register their patterns.
    """
    if name not in registry:
        failed_imports()
    return registry.get(name)


@lru_cache(maxsize=1)
@plans
def failed_imports() -> str:
    """Import each module that an entry point of the group `flexdilated.patterns` names, once in a process.

    Returns one sentence for each module whose import raised, with its package and its error; "" if none did.
    """
    failures = []
    for point in sorted(entry_points(group=_GROUP)):
        try:
            point.load()
        except Exception as error:  # the code of another package may raise anything
            package = point.name if point.dist is None else point.dist.name
            raised = f"{type(error).__name__}: {error}"[:_QUOTED]
            failures.append(f"Package {package!r} has patterns in {point.value}, whose import raises {raised}. ")
    return "".join(failures)
