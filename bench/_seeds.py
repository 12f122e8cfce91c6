"""Figures of several seeds: differences are taken seed by seed, and an interval says how far they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev

_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # 97.5 % of so many seeds


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Of the mean, with 95 % confidence, by Student's distribution; ends that are not known are infinite."""
    if len(differences) < 2:
        return float("-inf"), float("inf")
    half = _STUDENT[len(differences)] * stdev(differences) / sqrt(len(differences))
    return mean(differences) - half, mean(differences) + half


def beyond(these: Sequence[float], those: Sequence[float]) -> tuple[float, float]:
    """How much more these are than those of the same seeds."""
    return interval([a - b for a, b in zip(these, those, strict=True)])
