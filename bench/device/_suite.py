"""The rows, in the order in which they are measured, and how long each may take."""

from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from .._result import Result
from . import (
    row_backward,
    row_branch_loop,
    row_forward,
    row_gathers,
    row_matmul,
    row_memory,
    row_merge,
    row_million_tokens,
    row_natural,
    row_ranks,
    row_window,
)
from ._where import Where


class Question(Protocol):
    """A module that asks one question, its docstring; two frozen configurations; a function to a Result.

    NEEDS names what must be right for its figures to count.
    """

    __doc__: str
    FULL: Any
    SMALL: Any
    NEEDS: tuple[str, ...]

    def run(self, config: Any, where: Where) -> Result:
        """Verify, measure, answer."""
        ...


@dataclass(frozen=True)
class Entry:
    """A question, and its limit in seconds. `rehearsed`: it is run once beforehand, beside others, to compile.

    Those that compile what another one does are not, nor those that need the device's memory for themselves.
    """

    question: Question
    limit_s: float
    rehearsed: bool = False

    def rehearsals(self, *, small: bool) -> list[Any]:
        """Configurations of one part each, so that the parts compile side by side; none if it is not rehearsed."""
        config = self.question.SMALL if small else self.question.FULL
        if not self.rehearsed:
            return []
        config = replace(config, size=replace(config.size, repeats=1))
        for field in ("specs", "windows", "branches"):
            if parts := getattr(config, field, ()):
                return [replace(config, **{field: (part,)}) for part in parts]
        return [config]


def _entry(module: Any, limit_s: float, *, rehearsed: bool = False) -> Entry:
    return Entry(cast(Question, module), limit_s, rehearsed)


SUITE: dict[str, Entry] = {
    "G1": _entry(row_forward, 90, rehearsed=True),
    "G2": _entry(row_backward, 120, rehearsed=True),
    "G3": _entry(row_matmul, 60),
    "G4": _entry(row_window, 45, rehearsed=True),
    "G5": _entry(row_gathers, 45),
    "G6": _entry(row_natural, 60, rehearsed=True),
    "G7": _entry(row_branch_loop, 90),
    "G8": _entry(row_merge, 45),
    "G9": _entry(row_memory, 60),
    "G10": _entry(row_million_tokens, 150),
    "G11": _entry(row_ranks, 150, rehearsed=True),
}
NAMES = ("G0", *SUITE)
