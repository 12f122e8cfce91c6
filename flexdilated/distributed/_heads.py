"""Head parallelism (as in DeepSpeed-Ulysses): all-to-alls from token shards to head shards and back.

Each rank attends over the whole sequence with some of the heads. `heads_to_tokens` is the gradient of
`tokens_to_heads`, and vice versa.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import index

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from .._attend import autocast
from .._engine_choice import choose_engine, feature_tensors
from .._validate import (
    Place,
    Scale,
    check_score_mod,
    check_sinks,
    check_sizes,
    check_zero_keys,
    expand_batch,
    run_time_tensors,
    scaled,
)
from ..engines import (
    Call,
    Features,
    ScoreMod,
    fixed_score_mod,
    one_width,
    own_op,
    run,
    sum_dtype,
    with_padding_keys,
    without_keys,
)
from ..masks import Mixture, Pattern
from ..masks.core import require_expression
from ..masks.planning import block_sides
from .group import (
    Ranks,
    Sharding,
    check_agreement,
    check_shards,
    communicating,
    constant_probability,
    group_of,
    record,
    shared_dropout,
)

# B batch, X all heads of a tensor, Y heads that this rank receives, H query heads, G key/value heads,
# L tokens of this rank's shard, N all tokens, D head dim


def heads_of_ranks(num_heads: int, num_tensor_heads: int, num_ranks: int) -> tuple[range, ...]:
    """Return, for each rank, the range of a tensor's heads that its query heads use; (4, 2, 4) -> heads 0, 0, 1, 1.

    num_heads: number of query heads, split evenly, in order, over the ranks; a multiple of num_ranks.
    num_tensor_heads: heads of the tensor: num_heads for queries; for keys and values a divisor of it, and then several
        ranks may use one head.
    """
    share, group = num_heads // num_ranks, num_heads // num_tensor_heads
    return tuple(range(at // group, (at + share - 1) // group + 1) for at in range(0, num_heads, share))


def attend_heads(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "#B G L D"],
    v: Float[Tensor, "#B G L D"],
    pattern: Pattern | Mixture,
    *,
    ranks: Ranks,
    sharding: Sharding,
    dropout_p: float = 0.0,
    scale: Scale = None,
    enable_gqa: bool = False,
    score_mod: ScoreMod | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    bindings: Mapping[str, Tensor] | None = None,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    engine: str | None = None,
    block_size: int | tuple[int, int] | None = None,
    return_lse: bool = False,
) -> Float[Tensor, "B H L D"] | tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"]]:
    """Compute attention over a sequence sharded by `sharding`, where each of W ranks computes H / W heads.

    q, k, v are this rank's tokens; returns their output (B, H, L, E), for v of head dim E, or, if return_lse is True,
    (output, lse). A first all-to-all sends q, k and v, so that each rank has its heads for the whole sequence.
    A second sends the output back to the ranks that hold the queries, and a third the lse, if it is needed. The load is
    balanced if the rules of the heads have equal work.

    bindings, dropout_p: as in `distributed.attend`.
    sinks: for all heads of q. Gradients of sinks, of a scale and of tensors that score_mod captures must be summed over
        the ranks.

    Other arguments: as in `flexdilated.attend`.

    Raises ValueError unless W divides H, and for other arguments as `distributed.attend` does.
    """
    padded, dropout_p = require_expression(pattern), constant_probability("dropout_p", dropout_p)
    pattern, needs_lse = pattern.unpadded, return_lse or pattern.pads
    q, k, v = expand_batch(*autocast(q, k, v))
    check_shards(q, k, v, ranks=ranks, sharding=sharding, enable_gqa=enable_gqa)
    check_sinks(sinks, q)
    check_score_mod(score_mod)
    check_zero_keys(padded, score_mod)
    heads = check_sizes(pattern, q, Place(head_offset=head_offset, num_heads_global=num_heads_global))
    tensors = run_time_tensors(pattern, bindings, batch=q.shape[0])
    if 0 in q.shape[:2]:  # on all ranks, so no rank waits
        out, lse = without_keys(q, k, v, sinks)
        return (out, lse) if return_lse else out
    H, G, W = index(q.shape[1]), index(k.shape[1]), ranks.size
    if H % W:
        fitting = " or ".join(str(number) for number in range(1, H + 1) if H % number == 0)
        raise ValueError(
            f"head parallelism needs a number of query heads that is a multiple of the number of ranks; got {H} "
            f"heads and {W} ranks: {H} heads go on {fitting} ranks, and schedule='exchange' or 'ring' takes any number"
        )
    mine, place = heads_of_ranks(H, H, W)[ranks.rank], (list(sharding.numbers()), ranks.name)
    sinks = None if sinks is None else sinks[mine.start : mine.stop]
    score_mod = fixed_score_mod(score_mod, torch.float64 if engine == "reference" else sum_dtype(q), q.device)
    q, factor = scaled(q, scale, q.shape[-1])
    features = Features(factor, score_mod, sinks, dropout_p, return_lse=needs_lse)
    chosen, width = choose_engine(engine, q, k, v, pattern, features), v.shape[-1]
    shards = list(one_width(q, k, v))
    wants = [needs_lse, _wants_gradients(shards), _wants_gradients(feature_tensors(features, q))]
    q, k, v = tokens_to_heads(shards, H, *place, pattern.text, dropout_p, wants, chosen == "aten")
    dropout = shared_dropout(dropout_p, ranks, q)
    read = [head * G // H - mine.start * G // H for head in mine]
    if len({read.count(head) for head in read}) > 1:  # unequal groups: repeat key/value heads for query heads
        k, v = (torch.stack([x[:, head] for head in read], dim=1) for x in (k, v))
    # Keys and values may be float32, so that their gradients are float32, too.
    sides = () if block_size is None else block_sides(block_size)
    call = Call.at(q, k, pattern.text, head_offset=head_offset + mine.start, num_heads_global=heads, block_size=sides)
    out, lse = run(chosen, q, k, v, tensors, call, features.with_dropout(dropout))
    (out,) = heads_to_tokens([out[..., :width]], [H], H, *place)
    if not needs_lse or lse is None:
        return out
    (column,) = heads_to_tokens([lse.unsqueeze(-1)], [H], H, *place)
    row_lse = column.squeeze(-1)
    if padded.pads:
        positions, tokens = sharding.positions(ranks.rank, q.device), sharding.num_tokens
        out, row_lse = with_padding_keys(
            out, row_lse, padded, positions, head_offset=head_offset, num_heads=heads, num_tokens=tokens
        )
    return (out, row_lse) if return_lse else out


def _wants_gradients(inputs: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


HeadsByRank = tuple[range, ...]  # by rank: the heads of one tensor that it receives
PiecesByRank = list[list[Tensor]]  # by rank: views into this rank's tensors


@own_op("flexdilated::tokens_to_heads")
def tokens_to_heads(
    shards: list[Tensor],
    num_heads: int,
    sharding: list[int],
    group: str,
    pattern: str,
    dropout_p: float,
    wants: list[bool],
    widen: bool,
) -> list[Tensor]:
    """Return a tensor (B, Y, N, D), this rank's heads of all tokens by position, for each shard (B, X, L, D).

    A shard has all heads of this rank's tokens. The shards, such as q, k and v, have one dtype and are sent in one
    all-to-all. The num_heads query heads are split evenly over the ranks; each head of a shard is sent to the ranks
    that need it, see `heads_of_ranks`.

    sharding: `Sharding.numbers()`.
    group: a process group's name.
    pattern: in JSON; ranks first check that pattern, sharding, sizes, dtype, dropout_p and wants are equal on all
        ranks. "" skips the check.
    wants: three flags, read in the check only: the call sends back an lse; the shards have gradients; sinks, or tensors
        that score_mod reads, have gradients.
    widen: if True, a tensor of which some head is sent to several ranks is returned in float32 or wider, so that its
        gradients are sent and summed in that dtype.
    """
    rank, split, heads_of_tensors = _rank_sharding_and_heads(num_heads, [x.shape[1] for x in shards], sharding, group)
    if pattern:
        check_agreement(Ranks.named(group, shards[0].device.type), _facts(shards, split, pattern, dropout_p, wants))
    wholes = [_empty_whole(x, heads, split, rank, widen) for x, heads in zip(shards, heads_of_tensors, strict=True)]
    sources = _pieces_of_shards(shards, heads_of_tensors, split, rank)
    targets = _pieces_of_wholes(wholes, split)
    _all_to_all(sources, targets, like=shards[0], group=group, add=False)
    return wholes


@tokens_to_heads.register_fake
def _(shards, num_heads, sharding, group, pattern, dropout_p, wants, widen):
    rank, split, heads_of_tensors = _rank_sharding_and_heads(num_heads, [x.shape[1] for x in shards], sharding, group)
    return [_empty_whole(x, heads, split, rank, widen) for x, heads in zip(shards, heads_of_tensors, strict=True)]


@own_op("flexdilated::heads_to_tokens")
def heads_to_tokens(
    wholes: list[Tensor], heads: list[int], num_heads: int, sharding: list[int], group: str
) -> list[Tensor]:
    """Return a tensor (B, X, L, D), all heads of this rank's tokens, for each of `wholes` (B, Y, N, D).

    The wholes have this rank's heads of all tokens, and one dtype, in which the results are returned. If several ranks
    have the same head, their values for it are summed, in float32 or wider and in the order of the ranks.

    heads: number X of heads of each returned tensor.

    Other arguments: as in `tokens_to_heads`.
    """
    rank, split, heads_of_tensors = _rank_sharding_and_heads(num_heads, heads, sharding, group)
    dtype, length = wholes[0].dtype, split.length(rank)
    shared = sum(len(taken) for heads_by_rank in heads_of_tensors for taken in heads_by_rank) > sum(heads)
    wide = sum_dtype(wholes[0]) if shared else dtype
    shards = [x.new_zeros(x.shape[0], X, length, x.shape[3], dtype=wide) for x, X in zip(wholes, heads, strict=True)]
    sources = _pieces_of_wholes(wholes, split)
    targets = _pieces_of_shards(shards, heads_of_tensors, split, rank)
    _all_to_all(sources, targets, like=wholes[0], group=group, add=shared)
    return [shard.to(dtype) for shard in shards]


@heads_to_tokens.register_fake
def _(wholes, heads, num_heads, sharding, group):
    length = Sharding.of(sharding).length(group_of(group).rank())
    return [x.new_empty(x.shape[0], X, length, x.shape[3]) for x, X in zip(wholes, heads, strict=True)]


def _remember_tokens_to_heads(ctx, inputs, output) -> None:
    shards, *ctx.options, _, _, _, _ = inputs
    ctx.heads, ctx.dtype = [x.shape[1] for x in shards], shards[0].dtype


def _tokens_to_heads_backward(ctx, grads):
    returned = {}
    for dtype in dict.fromkeys(grad.dtype for grad in grads):  # one transfer per dtype
        some = [place for place, grad in enumerate(grads) if grad.dtype == dtype]
        back = heads_to_tokens([grads[place] for place in some], [ctx.heads[place] for place in some], *ctx.options)
        returned |= {place: grad.to(ctx.dtype) for place, grad in zip(some, back, strict=True)}
    return [returned[place] for place in range(len(grads))], *[None] * 7


def _remember_heads_to_tokens(ctx, inputs, output) -> None:
    _, _, *ctx.options = inputs


def _heads_to_tokens_backward(ctx, grads):
    return tokens_to_heads(list(grads), *ctx.options, "", 0.0, [], False), None, None, None, None


tokens_to_heads.register_autograd(_tokens_to_heads_backward, setup_context=_remember_tokens_to_heads)
heads_to_tokens.register_autograd(_heads_to_tokens_backward, setup_context=_remember_heads_to_tokens)


def _rank_sharding_and_heads(
    num_heads: int, heads: Sequence[int], sharding: list[int], group: str
) -> tuple[int, Sharding, tuple[HeadsByRank, ...]]:
    """Return (this rank, the sharding, for each tensor the heads that each rank needs).

    num_heads: number of query heads.
    heads: number of heads of each tensor.
    """
    split = Sharding.of(sharding)
    return group_of(group).rank(), split, tuple(heads_of_ranks(num_heads, each, split.num_ranks) for each in heads)


def _facts(
    shards: Sequence[Tensor], split: Sharding, pattern: str, dropout_p: float, wants: Sequence[bool]
) -> dict[str, object]:
    """Return {name: value} of what the ranks compare before they send q, k and v.

    Some arguments that must be equal, such as scale and head_offset, are not compared.

    shards: [q, k, v].
    pattern: in JSON.
    wants: as in `tokens_to_heads`.
    """
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
        "dropout_p": dropout_p,
        **dict(zip(("lse wanted", "gradients wanted", "gradients wanted by sinks or score_mod"), wants, strict=True)),
    }


def _empty_whole(shard: Tensor, heads_by_rank: HeadsByRank, split: Sharding, rank: int, widen: bool) -> Tensor:
    """Return an uninitialised tensor (B, Y, N, D) for this rank's heads of all tokens.

    It is in float32 or wider if `widen` is True and some head goes to several ranks.

    shard: (B, X, L, D), all heads of this rank's tokens.
    heads_by_rank: for each rank, the heads that it receives.
    """
    shared = sum(map(len, heads_by_rank)) > shard.shape[1]
    dtype = sum_dtype(shard) if widen and shared else shard.dtype
    return shard.new_empty(shard.shape[0], len(heads_by_rank[rank]), split.num_tokens, shard.shape[3], dtype=dtype)


def _pieces_of_shards(
    shards: Sequence[Tensor], heads_of_tensors: Sequence[HeadsByRank], split: Sharding, rank: int
) -> PiecesByRank:
    """Return, for each rank r, views of this rank's tokens in the heads that r needs.

    There is one view for each shard and contiguous range of positions, in this order.

    heads_of_tensors: for each shard, the heads that each rank needs.
    """
    bounds = [0, *accumulate(map(len, split.ranges(rank)))]
    return [
        [
            x[:, heads_by_rank[peer].start : heads_by_rank[peer].stop, begin:end]
            for x, heads_by_rank in zip(shards, heads_of_tensors, strict=True)
            for begin, end in pairwise(bounds)
        ]
        for peer in range(split.num_ranks)
    ]


def _pieces_of_wholes(wholes: Sequence[Tensor], split: Sharding) -> PiecesByRank:
    """Return, for each rank r, views of the tokens of r in this rank's heads.

    There is one view for each of `wholes` and contiguous range of positions, in this order.
    """
    return [
        [x[:, :, run.start : run.stop] for x in wholes for run in split.ranges(peer)] for peer in range(split.num_ranks)
    ]


def _all_to_all(sources: PiecesByRank, targets: PiecesByRank, *, like: Tensor, group: str, add: bool) -> None:
    """Send sources[r] to each rank r in one all-to-all; copy the data from rank r into targets[r].

    add: True to add the data to the targets, in the order of the ranks.
    like: any tensor with the dtype and device of the data.
    """
    ranks = Ranks.named(group, like.device.type)
    sizes, expected = (
        [0 if peer == ranks.rank else sum(piece.numel() for piece in pieces) for peer, pieces in enumerate(side)]
        for side in (sources, targets)
    )
    sent, received = like.new_empty(sum(sizes)), like.new_empty(sum(expected))
    for place, pieces in zip(sent.split(sizes), sources, strict=True):
        for part, piece in _parts_by_piece(place, pieces):
            part.copy_(piece)
    with communicating("the exchange of heads", ranks):
        dist.all_to_all_single(received, sent, expected, sizes, group=group_of(group))
    record("heads", sent=sent.nbytes, received=received.nbytes)
    for peer, place in enumerate(received.split(expected)):
        arrived = (
            zip(sources[peer], targets[peer], strict=True)
            if peer == ranks.rank
            else _parts_by_piece(place, targets[peer])
        )
        for piece, target in arrived:
            target.add_(piece) if add else target.copy_(piece)


def _parts_by_piece(flat: Tensor, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (consecutive part of `flat` in the piece's shape, piece) for each piece; nothing if `flat` is empty."""
    if flat.numel():
        for part, piece in zip(flat.split([piece.numel() for piece in pieces]), pieces, strict=True):
            yield part.view(piece.shape), piece
