"""Attention of a few queries over the keys that each sees, without a plan."""

from ._row_attention import row_forward
from ._row_parts import MOST_ROWS, Branch, GroupedBranch, branch_rules, group_heads, row_parts
