"""The ring: keys and values travel shard by shard, while a rank attends to the shard that it has received.

_plan: the shards of each turn. _transfers: their transfer. _op: the op for autograd and torch.compile.
"""

from ._op import ring_op

__all__ = ["ring_op"]
