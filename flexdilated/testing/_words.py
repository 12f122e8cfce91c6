"""How the reports put numbers, keys and branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from ..engines._reference import multiplicity
from ._problem import Problem

_RUNS = 8
_BRANCHES = 6


def number(x: Tensor | float) -> str:
    """Five digits."""
    return f"{x.detach().item() if isinstance(x, Tensor) else x:.5g}"


def rough(x: Tensor) -> str:
    """Two digits, for an error."""
    return f"{x.detach().item():.2g}"


def tokens(length: int) -> str:
    """So many tokens."""
    return "1 token" if length == 1 else f"{length} tokens"


def num_lengths(lengths: Sequence[int]) -> str:
    """How many there are."""
    return "1 length" if len(lengths) == 1 else f"{len(lengths)} lengths"


def runs(positions: Sequence[int]) -> str:
    """Ascending positions as runs: "0 to 3, 7"; "none" without any."""
    if not positions:
        return "none"
    starts = [0, *(index + 1 for index, (a, b) in enumerate(pairwise(positions)) if b != a + 1), len(positions)]
    written = [
        str(positions[start]) if stop - start == 1 else f"{positions[start]} to {positions[stop - 1]}"
        for start, stop in pairwise(starts)
    ]
    return ", ".join(written[:_RUNS]) + (f" and {len(written) - _RUNS} runs more" if len(written) > _RUNS else "")


def branch_lines(problem: Problem, b: int, h: int, q: int) -> list[str]:
    """The keys that each branch allows this row."""
    branches = problem.bound.pattern.branches()
    lines = []
    for index, branch in enumerate(branches[:_BRANCHES]):
        bound = replace(problem.bound, pattern=branch)
        allowed = multiplicity(bound, problem.q.device).expand(problem.q.shape[0], -1, -1, -1)[b, h, q]
        label = "keys" if len(branches) == 1 else f"branch {index}"
        lines.append(f"{label:<9} {runs(allowed.nonzero().flatten().tolist())}: {branch!r}")
    if len(branches) > _BRANCHES:
        lines.append(f"          and {len(branches) - _BRANCHES} branches more")
    return lines
