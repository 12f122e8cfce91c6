"""A few queries over the keys that each sees, without a plan."""

from ._head_groups import Branch, GroupedBranch, branch_rules, group_heads
from ._row_attention import row_forward
from ._row_parts import MOST_ROWS, row_parts
