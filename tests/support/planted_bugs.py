"""Planted bugs: what each puts in the place of what, who looks, and what is said."""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from flexdilated import masks

# Looks at what may be wrong; raises AssertionError if it is.
Look = Callable[[], object]


@dataclass(frozen=True)
class Bug:
    """One mutation: `wrong` makes of what stands at `where` ("module:name") what stands there instead.

    `look` passes without it, and with it fails with `says` in its message. `seen_in`: a library that has, or had, this
    very bug.
    """

    what: str
    where: str
    wrong: Callable[[Any], Any]
    look: Look
    says: str
    seen_in: str = ""

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        path, _, name = self.where.replace(":", ".").rpartition(".")
        module = self.where.partition(":")[0]
        holder = pkgutil.resolve_name(module if path == module else f"{module}:{path.removeprefix(module + '.')}")
        patch.setattr(holder, name, self.wrong(getattr(holder, name)))


@contextmanager
def nothing_kept() -> Iterator[None]:
    """No plan made before is used within, and none made within is used after."""
    masks.cache().clear()
    try:
        yield
    finally:
        masks.cache().clear()
