"""Shards: from a tensor that every rank has to this rank's tokens of it and back, and checks on shards of q, k, v."""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..._validate import check_tensors
from ...engines import own_op
from ...masks.core import Ranges, advises, require_int
from ._agreement import check_agreement, check_device
from ._messages import Message, post
from ._ranks import Ranks, group_of
from ._sharding import Sharding

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim


@advises()
def shard(x: Tensor, mesh: DeviceMesh, sharding: Sharding | None = None, *, dim: int = 2) -> Tensor:
    """This rank's tokens of x, a copy: x must be the same on all ranks, with all N tokens along dim. Nothing is sent.

    mesh: of one dimension. sharding: None stands for `Sharding(N, W)`, over the W ranks of the mesh.

    Gradients are those of the sum of all ranks' losses, with each rank's x a variable of its own: x.grad holds the
    gradient of this rank's tokens, and 0 for the others. Summed over the ranks it is the gradient of the one x, and so
    are the gradients of parameters before it: DDP sums them (and divides by W).

    >>> x = fd.distributed.shard(torch.randn(1, 4, 256, 64), mesh)
    """
    ranks = Ranks.of(mesh)
    dim = _checked_dim(x, dim)
    split = Sharding(x.shape[dim], ranks.size) if sharding is None else check_sharding(sharding, ranks)
    if x.shape[dim] != split.num_tokens:
        raise ValueError(f"x must hold all {split.num_tokens} tokens of the sharding; got {x.shape[dim]} along {dim=}")
    runs = split.ranges(ranks.rank) or (range(0),)
    return torch.cat([x.narrow(dim, run.start, len(run)) for run in runs], dim)


@advises()
def unshard(x: Tensor, mesh: DeviceMesh, sharding: Sharding | None = None, *, dim: int = 2) -> Tensor:
    """All N tokens in the order of their positions, on every rank, from each rank's shard x, L tokens along dim.

    mesh: of one dimension. sharding: None stands for equal shards, `Sharding(W * L, W)`. The ranks' x have one dtype,
    and apart from dim one shape; a rank may hold no token.

    Gradients are those of the sum of all ranks' losses, as `shard`'s are: x.grad is the sum of what all ranks have for
    these tokens, taken in float32 or wider, in the order of the ranks. So every rank has to go backward. Where all W
    ranks compute the same loss from the whole, the sum is W times its gradient: divide by W, or let DDP do it.

    Raises ValueError, on all ranks, if they disagree, and torch.distributed.DistError if another rank fails.

    >>> fd.distributed.unshard(torch.randn(1, 4, 256, 64), mesh).shape
    torch.Size([1, 4, 256, 64])
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


@own_op("flexdilated::all_tokens")
def all_tokens(x: Tensor, dim: int, sharding: list[int], group: str) -> Tensor:
    """The whole sequence along dim, in order, from this rank's tokens and the others'."""
    split, ranks = Sharding.of(sharding), Ranks.named(group, x.device.type)
    _check(ranks, "unshard", x, dim, split)
    own = x.movedim(dim, 0).contiguous()
    whole = own.new_empty(split.num_tokens, *own.shape[1:])
    runs = split.ranges(ranks.rank)
    for run, rows in zip(runs, _cut(own, runs), strict=True):
        whole[run.start : run.stop] = rows
    _swap(
        ranks,
        send=[(rows, peer) for peer in ranks.others for rows in _cut(own, runs)],
        receive=[(whole[run.start : run.stop], peer) for peer in ranks.others for run in split.ranges(peer)],
    )
    return whole.movedim(0, dim).contiguous()


@own_op("flexdilated::own_tokens_sum")
def own_tokens_sum(whole: Tensor, dim: int, sharding: list[int], group: str) -> Tensor:
    """This rank's tokens of the sum of all ranks' wholes, added in the order of the ranks."""
    split, ranks = Sharding.of(sharding), Ranks.named(group, whole.device.type)
    _check(ranks, "the gradient of unshard", whole, dim, split)
    rows = whole.movedim(dim, 0).contiguous()
    runs = split.ranges(ranks.rank)
    own = torch.cat([rows[:0], *(rows[run.start : run.stop] for run in runs)])
    parts = [own if peer == ranks.rank else torch.empty_like(own) for peer in range(ranks.size)]
    _swap(
        ranks,
        send=[(rows[run.start : run.stop], peer) for peer in ranks.others for run in split.ranges(peer)],
        receive=[(part, peer) for peer in ranks.others for part in _cut(parts[peer], runs)],
    )
    total = torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
    for part in parts:
        total += part
    return total.to(own.dtype).movedim(0, dim).contiguous()


@all_tokens.register_fake
def _(x, dim, sharding, group):
    return x.new_empty(*x.shape[:dim], Sharding.of(sharding).num_tokens, *x.shape[dim + 1 :])


@own_tokens_sum.register_fake
def _(whole, dim, sharding, group):
    length = Sharding.of(sharding).length(group_of(group).rank())
    return whole.new_empty(*whole.shape[:dim], length, *whole.shape[dim + 1 :])


def _remember(ctx, inputs, output) -> None:
    _, *ctx.options = inputs


all_tokens.register_autograd(
    lambda ctx, grad: (own_tokens_sum(grad, *ctx.options), None, None, None), setup_context=_remember
)
own_tokens_sum.register_autograd(
    lambda ctx, grad: (all_tokens(grad, *ctx.options), None, None, None), setup_context=_remember
)


def _check(ranks: Ranks, call: str, x: Tensor, dim: int, split: Sharding) -> None:
    """What the ranks must have alike for their messages to fit."""
    others = (*x.shape[:dim], *x.shape[dim + 1 :])
    check_agreement(ranks, {"call": call, "sharding": split, "dim": dim, "other dims": others, "dtype": x.dtype})


def _cut(rows: Tensor, runs: Ranges) -> tuple[Tensor, ...]:
    """A rank's rows, run by run: what travels is one run, as it has one place in the whole."""
    return rows.split([len(run) for run in runs])


def _swap(ranks: Ranks, *, send: list[Message], receive: list[Message]) -> None:
    """All messages at once; empty ones are left out, on both sides."""
    posted = post(
        "shards",
        ranks,
        send=[(x, peer) for x, peer in send if x.numel()],
        receive=[(x, peer) for x, peer in receive if x.numel()],
    )
    try:
        posted.wait_for_all()
    finally:
        posted.drop()


def check_shards(q: Tensor, k: Tensor, v: Tensor, *, ranks: Ranks, sharding: Sharding, enable_gqa: bool) -> None:
    """q (B, H, L, D) and k, v (B, G, L, D) must fit together, the ranks, and the sharding; L may be 0."""
    check_tensors(*_with_a_token(q, k, v), enable_gqa=enable_gqa)
    check_sharding(sharding, ranks)
    check_device(ranks, q)
    length = sharding.length(ranks.rank)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            "q, k and v must be this rank's shards of one sequence; to attend to another one, gather its keys, as "
            "flexdilated.attend(q, unshard(k, mesh), unshard(v, mesh), pattern, q_offset=position of this rank's first "
            f"query); got {q.shape[2]} queries and {k.shape[2]} keys"
        )
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
    """The sharding that None stands for, where this rank has so many tokens: all ranks have as many, in order."""
    length = index(length)  # a constant of a compiled graph
    if not length:
        raise ValueError("without a sharding all ranks hold as many tokens; a rank without any needs a `Sharding`")
    return Sharding(length * ranks.size, ranks.size)


def _with_a_token(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same, or, of a shard without tokens, what it would be with one: only attention itself needs tokens."""
    if any(not isinstance(x, Tensor) or x.dim() != 4 or x.shape[2] for x in tensors):
        return tensors
    return tuple(x.new_empty(*x.shape[:2], 1, x.shape[3]) for x in tensors)
