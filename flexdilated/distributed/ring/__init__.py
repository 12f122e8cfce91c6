"""The ring: keys and values travel shard by shard, while a rank attends to those that are there.

The plan says whose shard comes in which turn, the transfers move it, the op is what autograd and torch.compile see.
"""

from ._op import ring_op

__all__ = ["ring_op"]
