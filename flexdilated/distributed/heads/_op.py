"""Ops from shards of tokens with all heads to whole sequences of some heads, and back; each is the other's gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ...engines import own_op
from ..group import Ranks, Sharding, check_agreement, communicating, group_of, record

# B batch, X all heads of a tensor, Y heads that this rank receives, L tokens of its shard, N all tokens, D head dim

Takers = tuple[range, ...]  # by rank: the heads of one tensor that it receives
Pieces = list[list[Tensor]]  # by rank: views into this rank's tensors


def encoded(tensors: Sequence[Takers]) -> list[int]:
    """Heads as integers for an op: (start, stop) for each tensor and rank."""
    return [bound for takers in tensors for heads in takers for bound in (heads.start, heads.stop)]


@own_op("flexdilated::tokens_to_heads")
def tokens_to_heads(
    shards: list[Tensor], heads: list[int], sharding: list[int], group: str, pattern: str, widen: bool
) -> list[Tensor]:
    """From (B, X, L, D), all heads of this rank's tokens, to (B, Y, N, D), this rank's heads of all tokens, in order.

    The tensors have one dtype and are sent in one all-to-all; a head goes to every rank that takes it. If `pattern`, in
    JSON, is not empty, the ranks first check that they make the same call. With `widen`, tensors whose heads go to
    several ranks are returned in float32 or wider, so that their gradients are sent and summed in that dtype.
    """
    rank, split, tensors = _read(heads, sharding, group)
    if pattern:
        check_agreement(Ranks.named(group, shards[0].device.type), _facts(shards, split, pattern))
    wholes = [_whole(x, takers, split, rank, widen) for x, takers in zip(shards, tensors, strict=True)]
    _swap(_of_shards(shards, tensors, split, rank), _of_wholes(wholes, split), like=shards[0], group=group, add=False)
    return wholes


@tokens_to_heads.register_fake
def _(shards, heads, sharding, group, pattern, widen):
    rank, split, tensors = _read(heads, sharding, group)
    return [_whole(x, takers, split, rank, widen) for x, takers in zip(shards, tensors, strict=True)]


@own_op("flexdilated::heads_to_tokens")
def heads_to_tokens(
    wholes: list[Tensor], heads: list[int], num_heads: list[int], sharding: list[int], group: str
) -> list[Tensor]:
    """Inverse of `tokens_to_heads`: from (B, Y, N, D) to (B, X, L, D); num_heads holds X of each tensor.

    If several ranks have one head, their tensors are summed, in float32 or wider and in the order of the ranks.
    """
    rank, split, tensors = _read(heads, sharding, group)
    dtype, length = wholes[0].dtype, split.length(rank)
    shared = sum(len(taken) for takers in tensors for taken in takers) > sum(num_heads)
    wide = torch.promote_types(dtype, torch.float32) if shared else dtype
    shards = [
        x.new_zeros(x.shape[0], X, length, x.shape[3], dtype=wide) for x, X in zip(wholes, num_heads, strict=True)
    ]
    _swap(_of_wholes(wholes, split), _of_shards(shards, tensors, split, rank), like=wholes[0], group=group, add=shared)
    return [shard.to(dtype) for shard in shards]


@heads_to_tokens.register_fake
def _(wholes, heads, num_heads, sharding, group):
    rank, split, _ = _read(heads, sharding, group)
    return [x.new_empty(x.shape[0], X, split.length(rank), x.shape[3]) for x, X in zip(wholes, num_heads, strict=True)]


def _remember_shards(ctx, inputs, output) -> None:
    shards, *ctx.options, _, _ = inputs
    ctx.num_heads, ctx.dtype = [x.shape[1] for x in shards], shards[0].dtype


def _shards_backward(ctx, grads):
    heads, sharding, group = ctx.options
    size = len(heads) // len(grads)
    taken = [heads[first : first + size] for first in range(0, len(heads), size)]
    returned = {}
    for dtype in dict.fromkeys(grad.dtype for grad in grads):  # one transfer per dtype
        some = [index for index, grad in enumerate(grads) if grad.dtype == dtype]
        bounds = [bound for index in some for bound in taken[index]]
        num_heads = [ctx.num_heads[index] for index in some]
        back = heads_to_tokens([grads[index] for index in some], bounds, num_heads, sharding, group)
        returned |= {index: grad.to(ctx.dtype) for index, grad in zip(some, back, strict=True)}
    return [returned[index] for index in range(len(grads))], None, None, None, None, None


def _remember_wholes(ctx, inputs, output) -> None:
    _, *ctx.options = inputs


def _wholes_backward(ctx, grads):
    heads, _, sharding, group = ctx.options
    return tokens_to_heads(list(grads), heads, sharding, group, "", False), None, None, None, None


tokens_to_heads.register_autograd(_shards_backward, setup_context=_remember_shards)
heads_to_tokens.register_autograd(_wholes_backward, setup_context=_remember_wholes)


def _read(heads: list[int], sharding: list[int], group: str) -> tuple[int, Sharding, tuple[Takers, ...]]:
    """(this rank, the sharding, the heads of each tensor by rank)."""
    return group_of(group).rank(), *_decoded(tuple(map(int, heads)), tuple(map(int, sharding)))


@lru_cache(maxsize=1024)
def _decoded(heads: tuple[int, ...], sharding: tuple[int, ...]) -> tuple[Sharding, tuple[Takers, ...]]:
    split = Sharding.of(sharding)
    each = [range(first, stop) for first, stop in zip(heads[::2], heads[1::2], strict=True)]
    W = split.num_ranks
    return split, tuple(tuple(each[i : i + W]) for i in range(0, len(each), W))


def _facts(shards: Sequence[Tensor], split: Sharding, pattern: str) -> dict[str, object]:
    """Call arguments that must be equal on all ranks for their messages to match."""
    batch, heads, _, head_dim = shards[0].shape
    return {
        "schedule": "heads",
        "pattern": pattern,
        "sharding": split,
        "batch": batch,
        "heads": heads,
        "key/value heads": shards[-1].shape[1],
        "head dim": head_dim,
        "dtype": shards[0].dtype,
    }


def _whole(shard: Tensor, takers: Takers, split: Sharding, rank: int, widen: bool) -> Tensor:
    """Uninitialised tensor for all tokens of this rank's heads."""
    shared = sum(map(len, takers)) > shard.shape[1]
    dtype = torch.promote_types(shard.dtype, torch.float32) if widen and shared else shard.dtype
    return shard.new_empty(shard.shape[0], len(takers[rank]), split.num_tokens, shard.shape[3], dtype=dtype)


def _of_shards(shards: Sequence[Tensor], tensors: Sequence[Takers], split: Sharding, rank: int) -> Pieces:
    """For each rank: the heads that it takes, of this rank's tokens, range by range."""
    bounds = [0, *accumulate(map(len, split.ranges(rank)))]
    return [
        [
            x[:, takers[peer].start : takers[peer].stop, begin:end]
            for x, takers in zip(shards, tensors, strict=True)
            for begin, end in pairwise(bounds)
        ]
        for peer in range(split.num_ranks)
    ]


def _of_wholes(wholes: Sequence[Tensor], split: Sharding) -> Pieces:
    """For each rank: its tokens, of this rank's heads, range by range."""
    return [
        [x[:, :, run.start : run.stop] for x in wholes for run in split.ranges(peer)] for peer in range(split.num_ranks)
    ]


def _swap(sources: Pieces, targets: Pieces, *, like: Tensor, group: str, add: bool) -> None:
    """Send each rank its sources in one all-to-all; copy what arrives to the targets, or add it in rank order."""
    ranks = Ranks.named(group, like.device.type)
    sizes, expected = (
        [0 if peer == ranks.rank else sum(piece.numel() for piece in pieces) for peer, pieces in enumerate(side)]
        for side in (sources, targets)
    )
    sent, received = like.new_empty(sum(sizes)), like.new_empty(sum(expected))
    for place, pieces in zip(sent.split(sizes), sources, strict=True):
        for part, piece in _cut(place, pieces):
            part.copy_(piece)
    with communicating("the exchange of heads", ranks):
        dist.all_to_all_single(received, sent, expected, sizes, group=group_of(group))
    record("heads", sent=sent.nbytes, received=received.nbytes)
    for peer, place in enumerate(received.split(expected)):
        arrived = zip(sources[peer], targets[peer], strict=True) if peer == ranks.rank else _cut(place, targets[peer])
        for piece, target in arrived:
            target.add_(piece) if add else target.copy_(piece)


def _cut(flat: Tensor, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair each piece with its part of a flat tensor, in the piece's shape; nothing if `flat` is empty."""
    if flat.numel():
        for part, piece in zip(flat.split([piece.numel() for piece in pieces]), pieces, strict=True):
            yield part.view(piece.shape), piece
