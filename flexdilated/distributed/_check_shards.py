"""Checks on this rank's shard of q, k and v, before anything is sent: each error states the rule and what came."""

from __future__ import annotations

from operator import index

from torch import Tensor

from .._validate import check_tensors
from ._agreement import check_device
from ._ranks import Ranks
from ._sharding import Sharding

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim


def check_shards(q: Tensor, k: Tensor, v: Tensor, *, ranks: Ranks, sharding: Sharding, enable_gqa: bool) -> None:
    """q (B, H, L, D) and k, v (B, G, L, D) must fit together, the ranks, and the sharding; L may be 0."""
    check_tensors(*_with_a_token(q, k, v), enable_gqa=enable_gqa)
    check_sharding(sharding, ranks)
    check_device(ranks, q)
    length = sharding.length(ranks.rank)
    if not q.shape[2] == k.shape[2] == length:
        raise ValueError(
            f"q, k and v must be this rank's shard: the sharding gives rank {ranks.rank} of {ranks.size} {length} "
            f"of {sharding.num_tokens} tokens; got {q.shape[2]} queries and {k.shape[2]} keys"
        )


def check_sharding(sharding: object, ranks: Ranks) -> Sharding:
    """The sharding itself, if it is one over these ranks."""
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding must be a flexdilated.distributed.Sharding or None; got {type(sharding).__name__}")
    if sharding.num_ranks != ranks.size:
        raise ValueError(f"the sharding must be over the ranks of the mesh, {ranks.size}; got {sharding.num_ranks}")
    return sharding


def equal_shards(length: int, ranks: Ranks) -> Sharding:
    """What no sharding stands for where a rank has this many tokens: all have as many, rank by rank."""
    length = index(length)  # a constant of a compiled graph
    if not length:
        raise ValueError("without a sharding all ranks hold as many tokens; a rank without any needs a `Sharding`")
    return Sharding(length * ranks.size, ranks.size)


def _with_a_token(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same, or, of a shard without tokens, what it would be with one: only attention itself needs tokens."""
    if any(not isinstance(x, Tensor) or x.dim() != 4 or x.shape[2] for x in tensors):
        return tensors
    return tuple(x.new_empty(*x.shape[:2], 1, x.shape[3]) for x in tensors)
