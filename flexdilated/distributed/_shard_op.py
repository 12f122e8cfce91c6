"""All ranks' shards as one tensor, as a custom op; and its transpose, all ranks' sum for this rank's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engines._flat_op import own_op
from ..masks.core._ranges import Ranges
from ._agreement import check_agreement
from ._messages import Message, post
from ._ranks import Ranks, group_of
from ._sharding import Sharding


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
    """All messages at once; of nothing there is none, on either side."""
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
