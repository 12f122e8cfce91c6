"""Scores of key blocks for query blocks: by mean, minimum or maximum keys, or by shares of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from ..engines import sum_dtype
from ._boxes import Boxes, PartialViews, QueryBlocks, SelectionCall, SelectionRule, found_in
from ._choose import masked_lse

# B batch, H query heads, G key/value heads, N queries, M keys, C key blocks, n query blocks, D head dim


class Pools(NamedTuple):
    """Mean, minimum and maximum of each channel over the keys of each block, in float32 or wider."""

    mean: Float[Tensor, "B G C D"]
    least: Float[Tensor, "B G C D"]
    greatest: Float[Tensor, "B G C D"]


def pools_of(k: Float[Tensor, "B G M D"], block: int) -> Pools:
    """Return mean, minimum and maximum of each block of `block` consecutive keys; the last block may be shorter."""
    return Pools(mean_of(k, block), *extrema_of(k, block))


def mean_of(k: Float[Tensor, "B G M D"], block: int) -> Float[Tensor, "B G C D"]:
    """Return the mean of each block of `block` consecutive keys, in float32 or wider; the last block may be shorter."""
    return torch.cat([part.mean(3, dtype=sum_dtype(k)) for part in _split_into_blocks(k, block)], 2)


def extrema_of(k: Float[Tensor, "B G M D"], block: int) -> tuple[Float[Tensor, "B G C D"], Float[Tensor, "B G C D"]]:
    """Return (minimum, maximum) of each channel over each key block; tied keys share the gradient equally."""
    parts = _split_into_blocks(k, block)
    least, greatest = (
        torch.cat([extremum_of(part, 3, reduce) for part in parts], 2) for reduce in (torch.amin, torch.amax)
    )
    return least, greatest


def extremum_of(x: Tensor, dim: int, reduce: Callable[..., Tensor]) -> Tensor:
    """Return torch.amin or torch.amax of x over `dim`, in float32 or wider; ties share the gradient equally."""
    # torch's own gradient is shared equally, too, but its rule for ties may change between versions.
    if not (x.requires_grad and torch.is_grad_enabled()):
        return reduce(x, dim).to(sum_dtype(x))
    end = reduce(x.detach(), dim, keepdim=True)
    at = x == end
    mean = torch.where(at, x, 0.0).sum(dim, dtype=sum_dtype(x)) / at.sum(dim)  # equals the end up to rounding
    return end.squeeze(dim) + (mean - mean.detach())


def _split_into_blocks(k: Tensor, block: int) -> list[Tensor]:
    """Return the keys as [all whole blocks (B, G, C, block, D), shorter last block (B, G, 1, n, D)].

    Either tensor is left out if it has no keys.
    """
    whole = k.shape[2] // block
    parts = [k[:, :, : whole * block].unflatten(2, (whole, block))] if whole else []
    return parts if whole * block == k.shape[2] else [*parts, k[:, :, whole * block :].unsqueeze(2)]


def summaries(
    q: Float[Tensor, "B H N D"], rows: QueryBlocks, part: range, sees: Bool[Tensor, "*#heads n #query_block"] | None
) -> Float[Tensor, "B H n D"]:
    """Return one query for each query block in `part`, in float32 or wider.

    With `rows.all_queries` it is the mean of the query block's queries that see a key, else the query block's first
    query; it is 0 if none of these sees a key.

    part: range of query block indices.
    sees: mask of queries that see a key, as in `Boxes`; None counts each query as one that does.
    """
    if not rows.all_queries:
        at = (torch.arange(part.start, part.stop, device=q.device) * rows.query_block - rows.lead).clamp(min=0)
        first = q if rows.query_block == 1 and len(part) == q.shape[2] else q[:, :, at]
        first = first.to(sum_dtype(q))
        return first if sees is None else first.masked_fill(~sees[..., :1], 0.0)
    queries = queries_by_block(q, rows, part)
    if sees is None:
        return queries.sum(3) / rows.queries_of(part)[1].to(queries)[:, None]
    return queries.masked_fill(~sees[..., None], 0.0).sum(3) / sees.sum(-1, keepdim=True).clamp(min=1)


def queries_by_block(
    q: Float[Tensor, "B H N D"], rows: QueryBlocks, part: range
) -> Float[Tensor, "B H n query_block D"]:
    """Return the queries of the query blocks in `part`, in float32 or wider; 0 outside the call."""
    start, stop = (edge * rows.query_block - rows.lead for edge in (part.start, part.stop))
    shown = q[:, :, max(start, 0) : min(stop, q.shape[2])].to(sum_dtype(q))
    if shown.shape[2] != stop - start:
        shown = pad(shown, (0, 0, max(-start, 0), max(stop - q.shape[2], 0)))
    return shown.unflatten(2, (len(part), rows.query_block))


# b batch entries, h query heads, g key/value heads, N queries, M keys, C key blocks, n query blocks, L blocks to choose
# from, o boxes with separate pools, p groups of w such boxes, D head dim

LOG_SCORERS = ("mass", "antidiagonal")  # scorers whose scores are logarithms of shares
_MOST_ELEMENTS = 1 << 21  # largest number of elements of an intermediate tensor


def pools_for(scorer: str, k: Float[Tensor, "b g M D"], block: int) -> tuple[Float[Tensor, "b g C D"], ...]:
    """Return the pooled keys of each block: (mean,) for scorer "mean", (minimum, maximum) for "minmax", else ()."""
    if scorer == "mean":
        return (mean_of(k, block),)
    return extrema_of(k, block) if scorer == "minmax" else ()


def scores_of(
    call: SelectionCall,
    q: Float[Tensor, "b h N D"],
    k: Float[Tensor, "b g M D"],
    pools: tuple[Float[Tensor, "b g C D"], ...],
    rule: SelectionRule,
    boxes: Boxes,
    rows: QueryBlocks,
    part: range,
    lists: Int64[Tensor, "b x n L"] | None,
) -> Float[Tensor, "b h n L"]:
    """Return the score of each key block for each query block in `part`, by the scorer that `call` names.

    pools: result of `pools_for`.
    boxes: the boxes of these query blocks under `rule`.
    lists: the L key blocks to score for each query block; None scores all C blocks.

    Scores of blocks that may not be chosen are arbitrary.
    """
    if call.scorer in LOG_SCORERS:
        found = [
            _log_shares_of_blocks(call, q, k, rule, rows, few)
            for few in _chunks_of_query_blocks(q, rows, part, call.stride)
        ]
        return scores_at_lists(torch.cat(found, 2), lists)
    queries = summaries(q, rows, part, boxes.sees) * call.scale
    # In sum_d max(q_d * greatest_d, q_d * least_d) the sign of q_d decides the pool.
    factors = (queries,) if call.scorer == "mean" else _split_by_sign(queries)
    sides = zip(factors, pools, strict=True)
    scores = sum(_products(x, pool) if lists is None else _products_at_lists(x, pool, lists) for x, pool in sides)
    assert isinstance(scores, Tensor)
    if boxes.partial is None:
        return scores
    own = _scores_of_partial_views(call.scorer, queries, k, boxes.partial, rows.block)
    return _replace_scores(scores, own, boxes.partial, rows, lists)


def _scores_of_partial_views(
    scorer: str, queries: Float[Tensor, "b h n D"], k: Float[Tensor, "b g M D"], boxes: PartialViews, block: int
) -> Float[Tensor, "b h o"]:
    """Return the score of each box, in the order of `boxes.place`, by pools of only the keys that its query block sees.

    queries: one for each query block, with the scale applied.
    """
    p, w = boxes.row.shape
    wide = k.shape[3] if scorer == "minmax" else queries.shape[1]
    few = max(1, _MOST_ELEMENTS // (k.shape[0] * w * block * wide))
    found = []
    for some in torch.arange(p, device=k.device).split(few):
        at = boxes.block[some, None] * block + torch.arange(block, device=k.device)
        keys = k[:, :, at.clamp(max=k.shape[2] - 1)].to(queries.dtype)  # (b, g, p, block, D)
        rows = queries[:, :, boxes.row[some]].unflatten(1, (k.shape[1], -1))  # (b, g, h, p, w, D)
        mask = boxes.mask[some]
        if scorer == "mean":
            products = (rows @ keys.unsqueeze(2).mT).masked_fill(~mask, 0.0)
            scores = products.sum(-1) / mask.sum(-1).clamp(min=1)
        else:
            hidden, blind = ~mask[..., None], ~mask.any(-1, keepdim=True)  # blind: padding of a group
            least, greatest = (
                extremum_of(keys.unsqueeze(3).masked_fill(hidden, value), 4, reduce)
                .unsqueeze(2)
                .masked_fill(blind, 0.0)
                for reduce, value in ((torch.amin, torch.inf), (torch.amax, -torch.inf))
            )
            negative, positive = _split_by_sign(rows)
            scores = (negative * least + positive * greatest).sum(-1)
        found.append(scores.flatten(1, 2).flatten(2))
    return torch.cat(found, 2)[:, :, boxes.at]


def _split_by_sign(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return (negative part, positive part) of q; a zero is in both, with half the gradient in each."""
    # The derivative of max(q * greatest, q * least) at 0 is taken to be the mean of greatest and least.
    halved = torch.where(q == 0, 0.5 * q, q)
    return halved.masked_fill(q > 0, 0.0), halved.masked_fill(q < 0, 0.0)


def scores_at_lists(
    scores: Float[Tensor, "b h n C"], lists: Int64[Tensor, "b x n L"] | None
) -> Float[Tensor, "b h n L"]:
    """Return the scores of the blocks in `lists`, arbitrary for block -1; all scores if `lists` is None."""
    return (
        scores if lists is None else scores.gather(-1, for_heads(lists, scores.shape[1]).clamp(0, scores.shape[-1] - 1))
    )


def for_heads(x: Tensor, heads: int) -> Tensor:
    """Return x with `heads` indices in dim 1: each index of x is repeated for equally many consecutive heads."""
    if x.shape[1] == 1:
        return x.expand(-1, heads, *x.shape[2:])
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _replace_scores(
    scores: Float[Tensor, "b h n L"],
    own: Float[Tensor, "b h o"],
    boxes: PartialViews,
    rows: QueryBlocks,
    lists: Int64[Tensor, "b x n L"] | None,
) -> Float[Tensor, "b h n L"]:
    """Return `scores` with the scores of `boxes` replaced by `own`, which has them in the order of `boxes.place`.

    lists: the L blocks of each query block; None if `scores` has all blocks.
    """
    if lists is None:
        return scores.flatten(2).index_copy(2, boxes.place, own).view_as(scores)
    row = torch.arange(lists.shape[2], device=lists.device)[:, None]
    at, known = (for_heads(x, scores.shape[1]) for x in found_in(boxes.place, row * rows.num_key_blocks + lists))
    return torch.where(known, own.gather(2, at.flatten(2)).view_as(scores), scores)


def _products(q: Float[Tensor, "b h n D"], k: Float[Tensor, "b g m D"]) -> Float[Tensor, "b h n m"]:
    """Return the dot products of every query with every key of its key/value head."""
    groups = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return (groups @ k.to(q.dtype).mT).view(*q.shape[:3], k.shape[2])


def _products_at_lists(
    q: Float[Tensor, "b h n D"], pool: Float[Tensor, "b g C D"], lists: Int64[Tensor, "b x n L"]
) -> Float[Tensor, "b h n L"]:
    """Return the dot products of each query block's query and the pooled keys of its blocks in `lists`, for each head.

    They are arbitrary for block -1.
    """
    lists = for_heads(lists, max(lists.shape[1], pool.shape[1]))
    heads = for_heads(pool, lists.shape[1])
    at = lists.clamp(0, pool.shape[2] - 1).flatten(2)[..., None].expand(-1, -1, -1, q.shape[3])
    gathered = heads.gather(2, at).unflatten(2, lists.shape[2:])
    return torch.einsum("bxhnd,bxnld->bxhnl", q.unflatten(1, (lists.shape[1], -1)), gathered).flatten(1, 2)


def _chunks_of_query_blocks(q: Tensor, rows: QueryBlocks, part: range, stride: int) -> list[range]:
    """Return consecutive ranges that make up `part`, each of few query blocks, to bound the memory of its scores.

    There is one score for each tile of stride x stride pairs.
    """
    each = q.shape[0] * q.shape[1] * (rows.query_block if rows.all_queries else 1) * rows.num_keys // stride**2
    few = max(1, _MOST_ELEMENTS // max(1, each))
    return [range(at, min(at + few, part.stop)) for at in range(part.start, part.stop, few)]


def _log_shares_of_blocks(
    call: SelectionCall, q: Tensor, k: Tensor, rule: SelectionRule, rows: QueryBlocks, part: range
) -> Float[Tensor, "b h n C"]:
    """Return the log of the share of attention that each query block in `part` gives to each key block.

    With rows.all_queries, a query block's share is the mean of the shares of those of its queries that see a key; else
    it is the share of its first query.

    With stride 1 shares are exact. A larger stride, for rows.all_queries only, estimates them from tiles of stride x
    stride pairs: for each run of `stride` queries, a softmax over its tiles is summed over each key block, and the
    sums are averaged over the runs. A tile's score is the mean score of the visible pairs on its antidiagonal; tiles
    and runs without such a pair are left out. The log of a share of 0 is -inf.
    """
    stride, group, columns = call.stride, 1, rows.num_key_blocks * rows.block // call.stride
    if rows.all_queries:
        queries, group = queries_by_block(q, rows, part).flatten(2, 3), rows.query_block // stride
        positions = _positions(rows, part, q.device)
    else:
        queries, positions = summaries(q, rows, part, None), rows.queries_of(part)[0].to(q.device)
    total, number = 0, 0
    for step in range(stride):
        of_line = slice(stride - 1 - step, None, stride)  # with the keys from `step` on: the antidiagonal of each tile
        at = torch.arange(min(step, k.shape[2]), k.shape[2], stride, device=k.device)
        shown = _sees(rule, rows, positions[of_line], at)
        products = _products(queries[:, :, of_line], k[:, :, step::stride])
        if len(at) < columns:
            shown, products = (pad(x, (0, columns - len(at))) for x in (shown, products))
        if stride == 1:
            return _log_mean_shares(products * call.scale, shown, rows.block, group)
        total, number = total + products.masked_fill(~shown, 0.0), number + shown.long()
    assert isinstance(number, Tensor)
    return _log_mean_shares(total * call.scale / number.clamp(min=1), number > 0, rows.block // stride, group)


def _positions(rows: QueryBlocks, part: range, device: torch.device) -> Int64[Tensor, " n"]:
    """Return positions of the queries of the blocks in `part`, as if each block had all of its query_block queries."""
    start = rows.q_offset - rows.lead
    return torch.arange(start + part.start * rows.query_block, start + part.stop * rows.query_block, device=device)


def _sees(
    rule: SelectionRule, rows: QueryBlocks, queries: Int64[Tensor, " n"], keys: Int64[Tensor, " m"]
) -> Bool[Tensor, "n m"]:
    """Return a mask of the pairs that `within` allows; False for positions outside the call."""
    last = rows.q_offset + rows.num_queries - 1
    inside = ((queries >= rows.q_offset) & (queries <= last))[:, None] & (keys < rows.num_keys)
    q, k = queries.clamp(rows.q_offset, last)[:, None], keys.clamp(max=rows.num_keys - 1)
    return rule.sees(q, k) & inside


def _log_mean_shares(
    scores: Float[Tensor, "b h m t"], shown: Bool[Tensor, "m t"], per: int, group: int
) -> Float[Tensor, "b h n C"]:
    """Return the log of each key block's share of a softmax over dim t, averaged over dim m within each query block.

    The average is of shares, before the log. It excludes indices of dim m without shown scores; if all are excluded,
    the result is -inf.

    shown: True for scores in the softmax.
    per: number of indices of dim t in a block.
    group: number of indices of dim m in a query block.
    """
    blocks = masked_lse(scores.unflatten(-1, (-1, per)), shown.unflatten(-1, (-1, per)))
    total = masked_lse(blocks, blocks > -torch.inf)
    blind = total == -torch.inf
    logs = (blocks - total.masked_fill(blind, 0.0).unsqueeze(-1)).unflatten(2, (-1, group)).transpose(-1, -2)
    number = (~blind).unflatten(2, (-1, group)).sum(-1, keepdim=True).clamp(min=1)
    return masked_lse(logs, logs > -torch.inf) - number.to(logs.dtype).log()
