"""Head parallelism: each rank takes the whole sequence of some heads, in two all-to-alls.

The ops that move tokens and heads are each other's gradient.
"""

from ._heads import attend_heads

__all__ = ["attend_heads"]
