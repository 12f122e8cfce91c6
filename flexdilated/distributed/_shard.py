"""From a tensor that every rank has to this rank's shard of it, and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..masks.core._check import require_int
from ._agreement import check_device
from ._check_shards import check_sharding, equal_shards
from ._ranks import Ranks
from ._shard_op import all_tokens
from ._sharding import Sharding


def shard(x: Tensor, mesh: DeviceMesh, sharding: Sharding | None = None, *, dim: int = 2) -> Tensor:
    """This rank's tokens of x, a copy: x must be the same on all ranks, with all N tokens along dim. Nothing is sent.

    mesh: of one dimension. sharding: None stands for `Sharding(N, W)`, over the W ranks of the mesh.

    Gradients are those of the sum of all ranks' losses, with each rank's x a variable of its own: x.grad holds the
    gradient of this rank's tokens, and 0 for the others. Summed over the ranks it is the gradient of the one x, and so
    are the gradients of parameters before it: DDP sums them (and divides by W).
    """
    ranks = Ranks.of(mesh)
    dim = _checked_dim(x, dim)
    split = Sharding(x.shape[dim], ranks.size) if sharding is None else check_sharding(sharding, ranks)
    if x.shape[dim] != split.num_tokens:
        raise ValueError(f"x must hold all {split.num_tokens} tokens of the sharding; got {x.shape[dim]} along {dim=}")
    runs = split.ranges(ranks.rank) or (range(0),)
    return torch.cat([x.narrow(dim, run.start, len(run)) for run in runs], dim)


def unshard(x: Tensor, mesh: DeviceMesh, sharding: Sharding | None = None, *, dim: int = 2) -> Tensor:
    """All N tokens in the order of their positions, on every rank, from each rank's shard x, L tokens along dim.

    mesh: of one dimension. sharding: None stands for equal shards, `Sharding(W * L, W)`. The ranks' x have one dtype,
    and apart from dim one shape; a rank may hold no token.

    Gradients are those of the sum of all ranks' losses, as `shard`'s are: x.grad is the sum of what all ranks have for
    these tokens, taken in float32 or wider, in the order of the ranks. So every rank has to go backward. Where all W
    ranks compute the same loss from the whole, the sum is W times its gradient: divide by W, or let DDP do it.

    Raises ValueError, on all ranks, if they disagree, and torch.distributed.DistError if another rank fails.
    """
    ranks = Ranks.of(mesh)
    dim = _checked_dim(x, dim)
    check_device(ranks, x)
    split = equal_shards(x.shape[dim], ranks) if sharding is None else check_sharding(sharding, ranks)
    length = split.length(ranks.rank)
    if x.shape[dim] != length:
        raise ValueError(
            f"x must be this rank's shard: the sharding gives rank {ranks.rank} of {ranks.size} {length} "
            f"of {split.num_tokens} tokens; got {x.shape[dim]} along {dim=}"
        )
    return all_tokens(x, dim, list(split.numbers()), ranks.name)


def _checked_dim(x: object, dim: int) -> int:
    """Counted from the front."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor; got {type(x).__name__}")
    if x.dim() == 0:
        raise ValueError("x must have a dimension of tokens; got a tensor of none")
    return require_int("dim", dim, minimum=-x.dim(), maximum=x.dim() - 1) % x.dim()
