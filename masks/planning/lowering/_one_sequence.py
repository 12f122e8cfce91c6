"""Batch entries as one sequence: documents of all entries, packed, where each entry has rows of its own."""

from __future__ import annotations

from typing import Any

import torch

from ...core import Expression, Pattern
from ...patterns import PADDING, PerDocument, Spans, Table, tables


def one_after_another(pattern: Expression, num_tokens: int, batch: int) -> Any:
    """The rule of all batch entries of so many tokens, one after the other; None where it is no rule of one sequence.

    Documents keep entries apart, and the rest must repeat from entry to entry.
    """
    if not all(_is_one(branch, num_tokens) for branch in pattern.branches()):
        return None

    def joined(leaf: Pattern) -> Pattern:
        if not isinstance(leaf, Table):
            return leaf
        rows = leaf.rows.expand(batch, -1)
        if isinstance(leaf, Spans):
            rows = torch.where(rows == PADDING, PADDING, rows + torch.arange(batch)[:, None] * num_tokens)
        return type(leaf).of(rows.reshape(1, -1), leaf.reach)

    return pattern.map_leaves(joined)


def _is_one(branch: Pattern, num_tokens: int) -> bool:
    spans = [factor for factor in branch.factors() if isinstance(factor, Spans | PerDocument)]
    rest = [factor for factor in branch.factors() if not isinstance(factor, Table | PerDocument)]
    return bool(spans) and all(_repeats(factor, num_tokens) for factor in rest)


def _repeats(factor: Pattern, num_tokens: int) -> bool:
    period = None if tables(factor) else factor.period()
    return period is not None and num_tokens % period == 0
