"""Scores of key blocks for rows of queries: by pools of the keys, or by shares of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from ._boxes import Boxes, HeadRule, OwnPools, Rows, found_in
from ._choose import masked_lse
from ._pools import end_of, ends_of, in_rows, mean_of, summaries

# b batch entries, h query heads, g key/value heads, N queries, M keys, C blocks of keys, n rows, L blocks to choose
# from, o boxes with separate pools, p groups of w such boxes, D head dim

LOGS = ("mass", "antidiagonal")  # scorers whose scores are logarithms of shares
_AT_ONCE = 1 << 21  # most numbers of an intermediate tensor


@dataclass(frozen=True)
class Scorer:
    """A named score with its scale and stride, for all rows and heads of a call."""

    name: str
    scale: float
    stride: int

    def pools(self, k: Float[Tensor, "b g M D"], block: int) -> tuple[Float[Tensor, "b g C D"], ...]:
        """The pools that the score needs, computed once for all rows."""
        if self.name == "mean":
            return (mean_of(k, block),)
        return ends_of(k, block) if self.name == "minmax" else ()

    def scores(
        self,
        q: Float[Tensor, "b h N D"],
        k: Float[Tensor, "b g M D"],
        pools: tuple[Float[Tensor, "b g C D"], ...],
        rule: HeadRule,
        boxes: Boxes,
        rows: Rows,
        part: range,
        lists: Int64[Tensor, "b x n L"] | None,
    ) -> Float[Tensor, "b h n L"]:
        """Scores of some rows over all blocks, or over the listed blocks; only candidates' scores are defined."""
        if self.name in LOGS:
            exact = _mass if self.name == "mass" else _antidiagonal
            found = [exact(self, q, k, rule, rows, few) for few in _few_rows(q, rows, part, self.stride)]
            return at_lists(torch.cat(found, 2), lists)
        queries = summaries(q, rows, part, boxes.sees) * self.scale
        sides = zip(self._parts_of(queries), pools, strict=True)
        scores = sum(_products(x, pool) if lists is None else _listed(x, pool, lists) for x, pool in sides)
        assert isinstance(scores, Tensor)
        if boxes.own is None:
            return scores
        return _put(scores, self._own(queries, k, boxes.own, rows.block), boxes.own, rows, lists)

    def _parts_of(self, queries: Tensor) -> tuple[Tensor, ...]:
        """The factor of each pool; in sum_d max(q_d * greatest_d, q_d * least_d) the sign of q_d decides the pool."""
        return (queries,) if self.name == "mean" else _by_sign(queries)

    def _own(
        self, queries: Float[Tensor, "b h n D"], k: Float[Tensor, "b g M D"], own: OwnPools, block: int
    ) -> Float[Tensor, "b h o"]:
        """Scores of boxes with hidden keys, by pools over the visible keys."""
        p, w = own.row.shape
        wide = k.shape[3] if self.name == "minmax" else queries.shape[1]
        few = max(1, _AT_ONCE // (k.shape[0] * w * block * wide))
        found = []
        for some in torch.arange(p, device=k.device).split(few):
            at = own.block[some, None] * block + torch.arange(block, device=k.device)
            keys = k[:, :, at.clamp(max=k.shape[2] - 1)].to(queries.dtype)  # (b, g, p, block, D)
            rows = queries[:, :, own.row[some]].unflatten(1, (k.shape[1], -1))  # (b, g, h, p, w, D)
            mask = own.mask[some]
            if self.name == "mean":
                products = (rows @ keys.unsqueeze(2).mT).masked_fill(~mask, 0.0)
                scores = products.sum(-1) / mask.sum(-1).clamp(min=1)
            else:
                hidden = ~mask[..., None]
                least, greatest = (
                    end_of(keys.unsqueeze(3).masked_fill(hidden, value), 4, reduce).unsqueeze(2)
                    for reduce, value in ((torch.amin, torch.inf), (torch.amax, -torch.inf))
                )
                blind = ~mask.any(-1, keepdim=True)  # padding of a group
                least, greatest = least.masked_fill(blind, 0.0), greatest.masked_fill(blind, 0.0)
                negative, positive = _by_sign(rows)
                scores = (negative * least + positive * greatest).sum(-1)
            found.append(scores.flatten(1, 2).flatten(2))
        return torch.cat(found, 2)[:, :, own.at]


def _by_sign(q: Tensor) -> tuple[Tensor, Tensor]:
    """(negative part, positive part) of q.

    A zero of q is in both parts, with half the gradient in each: the derivative of max(q * greatest, q * least) there
    is the mean of greatest and least.
    """
    halved = torch.where(q == 0, 0.5 * q, q)
    return halved.masked_fill(q > 0, 0.0), halved.masked_fill(q < 0, 0.0)


def at_lists(scores: Float[Tensor, "b h n C"], lists: Int64[Tensor, "b x n L"] | None) -> Float[Tensor, "b h n L"]:
    """Gather the scores of the listed blocks."""
    return (
        scores if lists is None else scores.gather(-1, for_heads(lists, scores.shape[1]).clamp(0, scores.shape[-1] - 1))
    )


def for_heads(x: Tensor, heads: int) -> Tensor:
    """Expand dim 1 from groups of heads to heads."""
    if x.shape[1] == 1:
        return x.expand(-1, heads, *x.shape[2:])
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _put(
    scores: Float[Tensor, "b h n L"],
    own: Float[Tensor, "b h o"],
    boxes: OwnPools,
    rows: Rows,
    lists: Int64[Tensor, "b x n L"] | None,
) -> Float[Tensor, "b h n L"]:
    """Replace the scores of boxes with hidden keys by `own`."""
    if lists is None:
        return scores.flatten(2).index_copy(2, boxes.place, own).view_as(scores)
    row = torch.arange(lists.shape[2], device=lists.device)[:, None]
    at, known = (for_heads(x, scores.shape[1]) for x in found_in(boxes.place, row * rows.blocks + lists))
    return torch.where(known, own.gather(2, at.flatten(2)).view_as(scores), scores)


def _products(q: Float[Tensor, "b h n D"], k: Float[Tensor, "b g m D"]) -> Float[Tensor, "b h n m"]:
    """Dot products of every query with every key of its key/value head."""
    groups = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return (groups @ k.to(q.dtype).mT).view(*q.shape[:3], k.shape[2])


def _listed(
    q: Float[Tensor, "b h n D"], pool: Float[Tensor, "b g C D"], lists: Int64[Tensor, "b x n L"]
) -> Float[Tensor, "b h n L"]:
    """Dot products of every query with the listed pools of its key/value head, which are gathered."""
    lists = for_heads(lists, max(lists.shape[1], pool.shape[1]))
    heads = for_heads(pool, lists.shape[1])
    at = lists.clamp(0, pool.shape[2] - 1).flatten(2)[..., None].expand(-1, -1, -1, q.shape[3])
    gathered = heads.gather(2, at).unflatten(2, lists.shape[2:])
    return torch.einsum("bxhnd,bxnld->bxhnl", q.unflatten(1, (lists.shape[1], -1)), gathered).flatten(1, 2)


def _few_rows(q: Tensor, rows: Rows, part: range, stride: int) -> list[range]:
    """Chunks of rows that bound the scores of single keys, or of stride x stride tiles."""
    each = q.shape[0] * q.shape[1] * (rows.query_block if rows.whole else 1) * rows.num_keys // stride**2
    few = max(1, _AT_ONCE // max(1, each))
    return [range(at, min(at + few, part.stop)) for at in range(part.start, part.stop, few)]


def _mass(scorer: Scorer, q: Tensor, k: Tensor, rule: HeadRule, rows: Rows, part: range) -> Float[Tensor, "b h n C"]:
    """log of each block's share of a softmax over all visible keys, averaged over the row's queries."""
    if rows.whole:
        queries = in_rows(q, rows, part).flatten(2, 3)
        positions, group = _positions(rows, part, 0, 1, q.device), rows.query_block
    else:
        queries, positions, group = summaries(q, rows, part, None), rows.queries_of(part)[0].to(q.device), 1
    shown = _sees(rule, rows, positions, torch.arange(k.shape[2], device=k.device))
    scores, more = _products(queries, k) * scorer.scale, rows.blocks * rows.block - k.shape[2]
    return _shares(pad(scores, (0, more)), pad(shown, (0, more)), rows.block, group)


def _antidiagonal(
    scorer: Scorer, q: Tensor, k: Tensor, rule: HeadRule, rows: Rows, part: range
) -> Float[Tensor, "b h n C"]:
    """Log shares as from `_mass`, over stride x stride tiles; a tile's score is the mean of its antidiagonal."""
    stride = scorer.stride
    queries = in_rows(q, rows, part).flatten(2, 3)
    keys = pad(k.to(queries.dtype), (0, 0, 0, rows.blocks * rows.block - k.shape[2]))
    total, number = 0, 0
    for step in range(stride):
        positions = _positions(rows, part, stride - 1 - step, stride, q.device)
        at = torch.arange(step, keys.shape[2], stride, device=k.device)
        shown = _sees(rule, rows, positions, at)
        products = _products(queries[:, :, stride - 1 - step :: stride], keys[:, :, step::stride])
        total, number = total + products.masked_fill(~shown, 0.0), number + shown.long()
    assert isinstance(number, Tensor)
    scores = total * scorer.scale / number.clamp(min=1)
    return _shares(scores, number > 0, rows.block // stride, rows.query_block // stride)


def _positions(rows: Rows, part: range, step: int, stride: int, device: torch.device) -> Int64[Tensor, " n"]:
    """Positions of every stride-th query from `step`, as if no row were cut off."""
    start = rows.q_offset - rows.lead
    first, stop = (start + edge * rows.query_block for edge in (part.start, part.stop))
    return torch.arange(first + step, stop, stride, device=device)


def _sees(rule: HeadRule, rows: Rows, queries: Int64[Tensor, " n"], keys: Int64[Tensor, " m"]) -> Bool[Tensor, "n m"]:
    """Mask of the pairs that `within` allows; False for positions outside the call."""
    last = rows.q_offset + rows.num_queries - 1
    inside = ((queries >= rows.q_offset) & (queries <= last))[:, None] & (keys < rows.num_keys)
    q, k = queries.clamp(rows.q_offset, last)[:, None], keys.clamp(max=rows.num_keys - 1)
    return rule.sees(q, k) & inside


def _shares(
    scores: Float[Tensor, "b h m t"], shown: Bool[Tensor, "m t"], per: int, group: int
) -> Float[Tensor, "b h n C"]:
    """log of each block's share of the softmax over `shown` entries, averaged over the `group` lines of a row.

    per: columns of a block. Lines without shown entries are left out of the mean.
    """
    blocks = masked_lse(scores.unflatten(-1, (-1, per)), shown.unflatten(-1, (-1, per)))
    total = masked_lse(blocks, blocks > -torch.inf)
    blind = total == -torch.inf
    logs = (blocks - total.masked_fill(blind, 0.0).unsqueeze(-1)).unflatten(2, (-1, group)).transpose(-1, -2)
    number = (~blind).unflatten(2, (-1, group)).sum(-1, keepdim=True).clamp(min=1)
    return masked_lse(logs, logs > -torch.inf) - number.to(logs.dtype).log()
