"""What the checks found of a module: a value, which prints as a table."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

from tabulate import tabulate

Verdict = Literal["passed", "failed", "does not apply", "skipped"]
_WIDTH = 88  # the table has 120 columns


@dataclass(frozen=True)
class CheckResult:
    """One check: its name, its verdict, and what was tried or, where it failed, the smallest case that fails."""

    name: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class ModuleReport:
    """All checks of one module, in the order in which they ran."""

    module: str
    pattern: str
    sizes: str
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.verdict == "failed")

    def __getitem__(self, name: str) -> CheckResult:
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(f"no check is named {name!r}; there are {', '.join(result.name for result in self.results)}")

    def __str__(self) -> str:
        applied = sum(result.verdict in ("passed", "failed") for result in self.results)
        failed = len(self.failures)
        verdict = f"{failed} of {applied} checks failed" if failed else f"{applied} of {applied} checks passed"
        table = [
            (result.name, result.verdict.upper() if result.verdict == "failed" else result.verdict, _first(result))
            for result in self.results
        ]
        head = f"{self.module}, claimed to be {self.pattern}, {self.sizes}: {verdict}"
        parts = [head, tabulate(table, headers=("check", "verdict", "detail"), maxcolwidths=[None, None, _WIDTH])]
        parts += [f"{result.name}: {result.detail}" for result in self.failures if "\n" in result.detail]
        return "\n\n".join(parts)


def _first(result: CheckResult) -> str:
    """The first line; the others stand below the table."""
    return textwrap.shorten(result.detail.partition("\n")[0], 3 * _WIDTH)
