"""Checks for patterns and attention modules, of this library or of any other, for use in tests."""

from ._check_pattern import check_pattern
from ._closeness import assert_attention_close

__all__ = ["assert_attention_close", "check_pattern"]
