"""Patterns of other installed packages, found by entry points of the group `flexdilated.patterns`."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points
from typing import TypeVar

from ._torch_modes import outside_torch_modes

T = TypeVar("T")

_GROUP = "flexdilated.patterns"
_QUOTED = 200  # characters quoted from the error of an import


def registered(registry: dict[str, T], name: str) -> T | None:
    """Return registry[name]; if the name is unknown, first import the pattern modules of other packages.

    None if the name remains unknown. registry: KINDS or CONSTRUCTORS, in which the modules register their patterns.
    """
    if name not in registry:
        failed_imports()
    return registry.get(name)


@lru_cache(maxsize=1)
@outside_torch_modes
def failed_imports() -> str:
    """Import the module of each entry point of the group `flexdilated.patterns`, once per process.

    Returns text that names the package, the module and the beginning of the error of each import that raised; "" if
    none did.
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
