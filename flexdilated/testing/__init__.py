"""Checks for patterns of your own, for use in tests."""

from ._check_pattern import check_pattern

__all__ = ["check_pattern"]
