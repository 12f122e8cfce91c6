"""Head parallelism: each rank attends over the whole sequence for some heads; two all-to-alls redistribute.

The op from tokens to heads and the op from heads to tokens are each other's gradient.
"""

from ._heads import attend_heads

__all__ = ["attend_heads"]
