"""Custom ops that score and choose blocks; torch.compile sees only their output shapes and the backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ..engines import autograd_on, copies, functions_in, no_gradients, own_op, refusing_backward, sum_dtype
from ..masks import Pattern
from ..masks.core import Extent, outside_torch_modes
from ..masks.patterns import rules_of_entries
from ._boxes import NOTHING, PARTIAL_VIEW, UNCHOSEN, Boxes, SelectionCall, SelectionRule, boxes_of
from ._choose import choose, comparable, log_shares, masked_lse
from ._scores import LOG_SCORERS, for_heads, pools_for, scores_at_lists, scores_of

# B batch, H query heads, G key/value heads


class HeadPart(NamedTuple):
    """Batch entries and query heads with one rule, and the key/value heads that they read.

    heads: all query heads, or a single one.
    """

    entries: slice
    heads: slice
    key_heads: slice
    rule: SelectionRule

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.entries, self.heads]

    def of_keys(self, x: Tensor) -> Tensor:
        return x[self.entries, self.key_heads]

    def of_tables(self, x: Tensor, heads: int) -> Tensor:
        """Return a view of x with only this part's batch entries and, in dim 1, only the tables that serve its heads.

        Dim 1 of x has the tables, each of which serves equally many consecutive query heads.

        heads: total number of query heads.
        """
        own = x[self.entries]
        if self.heads == slice(None):
            return own
        at = self.heads.start * x.shape[1] // heads
        return own[:, at : at + 1]


@outside_torch_modes
def head_parts_of(call: SelectionCall, bindings: Sequence[Tensor], q: Tensor, k: Tensor) -> list[HeadPart]:
    """Return parts of the batch entries and query heads of a call, with one rule each, that together cover the call.

    bindings: run-time tensors of the patterns, sorted by name.

    Raises ValueError if a pattern does not fit the sizes, or tensors are missing.
    """
    batch, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    extent = Extent(call.q_offset + q.shape[2], k.shape[2])
    sizes = {"num_heads": heads, "num_queries": q.shape[2], "num_keys": k.shape[2], "q_offset": call.q_offset}
    found: list[HeadPart] = []
    for entries, both in rules_of_entries(call.patterns_with_values(bindings, extent), batch):
        rules = [each.bind(**sizes).union for each in both.branches()]
        of_head: dict[tuple[Pattern, ...], SelectionRule] = {}
        made = []
        for head in range(heads):
            own = tuple(rule.for_head(head, heads) for rule in rules)
            made.append(of_head.setdefault(own, SelectionRule(own[0], own[1] if len(own) > 1 else None, head, heads)))
        if len(of_head) == 1:
            found.append(HeadPart(entries, slice(None), slice(None), made[0]))
            continue
        for head, rule in enumerate(made):
            key_head = head * groups // heads
            found.append(HeadPart(entries, slice(head, head + 1), slice(key_head, key_head + 1), rule))
    return found


# B batch, H query heads, G key/value heads, N queries, M keys, R query blocks, n of them in a chunk, C key blocks,
# T tables, L blocks that a query block may choose from, D head dim


Scored = tuple[Float[Tensor, "B T n L"], Bool[Tensor, "B T n L"]]  # scores and candidates of a chunk, by table
HeadBoxes = list[tuple[HeadPart, Boxes]]  # of a chunk of query blocks, by rule


def query_block_chunks(
    call: SelectionCall, bindings: Sequence[Tensor], q: Tensor, k: Tensor, coarse: Tensor | None = None
) -> Iterator[tuple[range, Int64[Tensor, "B x n L"] | None, HeadBoxes]]:
    """Yield (range of query blocks, lists, boxes) for chunks that together cover the call's query blocks.

    Query blocks are numbered from the call's first. `lists` has, for each query block of the chunk, the key blocks
    inside its coarse blocks, -1 for none, in x tables as `coarse`; it is None without `coarse`. `boxes` has
    (part, boxes of the part's rule) for each part of `head_parts_of`.

    bindings: run-time tensors of the patterns, sorted by name.
    coarse: key blocks chosen by the coarse selector; None without one.
    """
    rows, parts, lists = call.query_blocks(q, k), head_parts_of(call, bindings, q, k), None
    numbers, ratio = q.shape[0] * q.shape[1] * rows.num_key_blocks, 1
    if coarse is not None:
        ratio = call.coarse_block // call.block
        numbers = q.shape[0] * q.shape[1] * coarse.shape[3] * ratio * max(1, q.shape[3] // 4)
    for some in rows.portions(numbers):
        if coarse is not None:
            first = call.q_offset // call.query_block
            at = torch.arange(first + some.start, first + some.stop, device=q.device) * call.query_block
            lists = coarse[:, :, at // call.coarse_query_block - call.q_offset // call.coarse_query_block, :, None]
            lists = torch.where(lists < 0, -1, lists * ratio + torch.arange(ratio, device=q.device)).flatten(3)
            lists = lists.masked_fill(lists >= rows.num_key_blocks, -1)
        yield some, lists, [(part, boxes_of(part.rule, rows, some, q.device)) for part in parts]


def _scores_and_candidates(
    call: SelectionCall,
    some: range,
    lists: Tensor | None,
    boxes: HeadBoxes,
    q: Tensor,
    k: Tensor,
    pools: tuple[Tensor, ...],
    given: Tensor | None,
) -> Scored:
    """Return (scores, mask of candidates), each (B, T, n, L), of the query blocks `some` for each table.

    lists, boxes: of these query blocks, from `query_block_chunks`.
    pools: result of `pools_for`.
    given: a module's scores of all query blocks; None computes scores from q, k and pools.
    """
    rows, found = call.query_blocks(q, k), []
    for part, own in boxes:
        listed = None if lists is None else part.of_tables(lists, q.shape[1])
        if given is None:
            operands = part.of_queries(q), part.of_keys(k), tuple(map(part.of_keys, pools))
            scores = scores_of(call, *operands, part.rule, own, rows, some, listed)
        else:
            here = for_heads(given[:, :, some.start : some.stop], q.shape[1])
            scores = scores_at_lists(part.of_queries(here), listed)
        found.append((scores, _candidates(own, listed, scores, only_whole=given is not None)))
    if len(found) == 1:
        scores, candidates = found[0]
    else:
        scores, candidates = (x.new_empty(*q.shape[:2], *x.shape[2:]) for x in found[0])
        for (part, _), (x, able) in zip(boxes, found, strict=True):
            scores[part.entries, part.heads], candidates[part.entries, part.heads] = x, able
    return _combine_heads(call, (scores, candidates), call.tables(q, k), (q if given is None else given).shape[1])


def _candidates(boxes: Boxes, lists: Tensor | None, scores: Tensor, *, only_whole: bool) -> Bool[Tensor, "b h n L"]:
    state = boxes.state
    able = (state > NOTHING) & (state < (PARTIAL_VIEW if only_whole else UNCHOSEN))
    if lists is None:
        return able.expand(scores.shape)
    row = torch.arange(len(able), device=able.device)[:, None]
    return for_heads(able[row, lists.clamp(min=0)] & (lists >= 0), scores.shape[1]).expand(scores.shape)


def _combine_heads(call: SelectionCall, scored: Scored, tables: int, own: int) -> Scored:
    """Return (scores, candidates) of `tables` tables, each of which combines H / tables query heads.

    A block is a candidate of a table if it is a candidate for at least one of the table's heads. With one table per
    head, `scored` is returned unchanged. Else the score of a block is

    * for top_k with scores that are not logarithms: the sum of the scores of the heads for which the block is a
      candidate; heads that share scores count once;
    * for all others: the log of the mean of exp(score) over all heads of the table, where a head for which the block is
      no candidate counts as 0. top_p and threshold first normalize exp(score) over the candidates of each head.

    own: number of heads with scores of their own: H, or G if the query heads of a key/value head share them.
    """
    scores, candidates = scored
    if tables == scores.shape[1]:
        return scored
    able = candidates.unflatten(1, (tables, -1))
    if call.kind == "top_k" and call.scorer not in LOG_SCORERS:
        counted = candidates.unflatten(1, (own, -1)).any(2)
        once = scores.unflatten(1, (own, -1))[:, :, 0].masked_fill(~counted, 0.0)
        return (once.unflatten(1, (tables, -1)).sum(2), able.any(2))
    normalized = call.kind in ("top_p", "threshold")
    logs = log_shares(comparable(scores), candidates) if normalized else scores
    heads = logs.unflatten(1, (tables, -1)).movedim(2, -1)
    return (masked_lse(heads, able.movedim(2, -1)) - log(heads.shape[-1]), able.any(2))


def choose_blocks(
    q: Tensor,
    k: Tensor,
    given: Tensor | None,
    coarse: Tensor | None,
    bindings: Sequence[Tensor],
    call: SelectionCall,
    pools: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (blocks, indices, scores, density, cut): chosen blocks, their indices in dim L, and their scores.

    Each of these three is (B, T, R, most); blocks and indices are padded with -1, scores with -inf. Dim L has the
    blocks that a query block may choose from, all C or those inside its coarse blocks. density and cut are as in
    `Selection`.

    given: scores from a module, or None.
    coarse: blocks chosen by the coarse selector, or None.
    bindings: run-time tensors of the patterns, sorted by name.
    pools: result of `pools_for`; None computes it.
    """
    rows, tables = call.query_blocks(q, k), call.tables(q, k)
    shape = (q.shape[0], tables, rows.num_query_blocks, call.most)
    blocks, places = (torch.full(shape, -1, device=q.device) for _ in range(2))
    found = torch.full(shape, -torch.inf, dtype=sum_dtype(q), device=q.device)
    added, cut = (torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))
    pairs = left = 0
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        if pools is None:
            pools = pools_for(call.scorer, k, call.block)
        for some, lists, boxes in query_block_chunks(call, bindings, q, k, coarse):
            scores, candidates = _scores_and_candidates(call, some, lists, boxes, q, k, pools, given)
            ids = torch.arange(rows.num_key_blocks, device=q.device) if lists is None else for_heads(lists, tables)
            ids, here = ids.expand(scores.shape), slice(some.start, some.stop)
            how = {"kind": call.kind, "amount": call.amount, "most": call.most}
            places[:, :, here], more = choose(scores, candidates, ids, **how)
            none, at, cut = places[:, :, here] < 0, places[:, :, here].clamp(min=0), cut + more
            blocks[:, :, here] = ids.gather(-1, at).masked_fill(none, -1)
            found[:, :, here] = scores.gather(-1, at).to(found.dtype).masked_fill(none, -torch.inf)
            for part, own in boxes:
                read = part.of_tables(blocks[:, :, here], q.shape[1])
                heads = part.of_queries(q).shape[:2].numel()
                added = added + own.gains(rows, some, read).sum() * (heads // read.shape[:2].numel())
                pairs, left = pairs + own.pairs * heads, left + own.pairs_to_choose * heads
    density = (added + (pairs - left)).to(found.dtype) / max(1, pairs)
    return blocks, places, found, density, cut.to(found.dtype) / max(1, blocks.shape[:3].numel())


@own_op("flexdilated::select_blocks")
def select_blocks(
    q: Tensor,
    k: Tensor,
    given: Tensor | None,
    coarse: Tensor | None,
    bindings: list[Tensor],
    constants: str,
    q_offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (blocks, indices, scores, density, cut) of `choose_blocks`, as a custom op.

    given, coarse, bindings: as in `choose_blocks`.
    constants, q_offset: `SelectionCall.arguments`.
    """
    # Boxes are looked up here, at run time, so other sizes need no retracing.
    return choose_blocks(q, k, given, coarse, bindings, SelectionCall.of(constants, q_offset))


@select_blocks.register_fake
def _(q, k, given, coarse, bindings, *arguments):
    call = SelectionCall.of(*arguments)
    shape = (q.shape[0], call.tables(q, k), call.query_blocks(q, k).num_query_blocks, call.most)
    blocks, places = (q.new_empty(shape, dtype=torch.int64) for _ in range(2))
    found = q.new_empty(shape, dtype=sum_dtype(q))
    return blocks, places, found, *(found.new_empty(()) for _ in range(2))


@own_op("flexdilated::select_blocks_backward")
def select_blocks_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    given: Tensor | None,
    coarse: Tensor | None,
    places: Tensor,
    bindings: list[Tensor],
    constants: str,
    q_offset: int,
) -> list[Tensor]:
    """Return [gradient of q, gradient of k], or [gradient of `given`] if a module made the scores.

    grad: gradient of the chosen scores.
    places: indices of the chosen blocks, the second result of `select_blocks`; other arguments are those of
        `select_blocks`.
    """
    call = SelectionCall.of(constants, q_offset)
    leaves = [x.detach().requires_grad_() for x in ((q, k) if given is None else (given,))]
    totals = [torch.zeros_like(x, dtype=sum_dtype(x)) for x in leaves]
    for some, lists, boxes in query_block_chunks(call, bindings, q, k, coarse):
        at, wanted = (x[:, :, some.start : some.stop] for x in (places, grad))
        with autograd_on(), torch.autocast(q.device.type, enabled=False):
            shown, own = (_zero_where_blind(call, some, boxes, *leaves), None) if given is None else ((q, k), leaves[0])
            pools = pools_for(call.scorer, shown[1], call.block)
            scores, _ = _scores_and_candidates(call, some, lists, boxes, *shown, pools, own)
            chosen = scores.gather(-1, at.clamp(min=0)).masked_fill(at < 0, 0.0)
            wanted = wanted.masked_fill(at < 0, 0.0)
            for total, x in zip(totals, torch.autograd.grad(chosen, leaves, wanted.to(chosen)), strict=True):
                total += x
    return [total.to(x.dtype) for total, x in zip(totals, leaves, strict=True)]


@select_blocks_backward.register_fake
def _(grad, q, k, given, *others):
    return [torch.empty_like(x) for x in ((q, k) if given is None else (given,))]


def _zero_where_blind(
    call: SelectionCall, some: range, boxes: HeadBoxes, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (q, k) with zeros at the queries and keys at which the masks of `_visibility` are False.

    NaN in them would otherwise reach gradients.
    """
    sees, seen = _visibility(call, some, boxes, q, k)
    if sees is not None:
        rows = call.query_blocks(q, k)
        start = some.start * rows.query_block - rows.lead
        shown = sees.flatten(2)[:, :, max(0, -start) :][:, :, : q.shape[2] - max(0, start)]
        blind = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
        blind[:, :, max(0, start) : max(0, start) + shown.shape[2]] = ~shown
        q = q.masked_fill(blind.unsqueeze(-1), 0.0)
    return q, k if seen is None else k.masked_fill(~seen.unsqueeze(-1), 0.0)


def _visibility(
    call: SelectionCall, some: range, boxes: HeadBoxes, q: Tensor, k: Tensor
) -> tuple[Bool[Tensor, "B H n query_block"] | None, Bool[Tensor, "B G M"] | None]:
    """Return (mask of queries that see a key, mask of keys that some query block sees), for the query blocks `some`.

    None stands for a mask of True only. Where query blocks are scored by their first query, the first mask has
    this query's value at all queries of its query block. Its values at positions outside the call are arbitrary.
    """
    sees = seen = None
    if any(own.sees is not None for _, own in boxes):
        sees = torch.ones(*q.shape[:2], len(some), call.query_block, dtype=torch.bool, device=q.device)
    if any(own.seen is not None for _, own in boxes):
        seen = torch.zeros(*k.shape[:3], dtype=torch.bool, device=k.device)
    for part, own in boxes:
        if sees is not None and own.sees is not None:
            sees[part.entries, part.heads] = own.sees
        if seen is not None:
            seen[part.entries, part.key_heads] |= seen.new_ones(()) if own.seen is None else own.seen
    return sees, seen


def _remember(ctx, inputs, output) -> None:
    q, k, given, coarse, bindings, *ctx.arguments = inputs
    ctx.save_for_backward(q, k, given, coarse, output[1], *copies(bindings))
    ctx.kept = functions_in(ctx.arguments[0])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_blocks, grad_places, grad_scores, *_):
    q, k, given, coarse, places, *bindings = ctx.saved_tensors
    without = no_gradients(bindings, ctx.arguments)
    dq = dk = of_given = None
    if grad_scores is not None:
        grads = select_blocks_backward(grad_scores, q, k, given, coarse, places, bindings, *ctx.arguments)
        if given is None:
            dq, dk = grads
        else:
            (of_given,) = grads
    return dq, dk, of_given, None, *without


select_blocks.register_autograd(_backward, setup_context=_remember)
select_blocks_backward.register_autograd(refusing_backward("the scores of a selection have no second derivative"))


@own_op("flexdilated::selection_visibility")
def selection_visibility(
    q: Tensor, k: Tensor, bindings: list[Tensor], constants: str, q_offset: int
) -> tuple[Tensor, Tensor]:
    """Return (mask (B, H, R, query_block) of queries that see a key, mask (B, G, M) of keys that a query block sees).

    The first mask is False at positions outside the call's queries. But where query blocks are scored by their first
    query, it has this query's value at all positions of its query block.

    bindings: run-time tensors of the patterns, sorted by name.
    constants, q_offset: `SelectionCall.arguments`.
    """
    call = SelectionCall.of(constants, q_offset)
    rows = call.query_blocks(q, k)
    places = torch.arange(rows.num_query_blocks * rows.query_block, device=q.device) - rows.lead
    # False outside the call's queries; but a query block scored by its first query uses the first query in the call.
    inside = ((places >= 0) & (places < rows.num_queries)) | (not rows.all_queries)
    sees = inside.view(rows.num_query_blocks, rows.query_block).repeat(*q.shape[:2], 1, 1)
    seen = torch.zeros(*k.shape[:3], dtype=torch.bool, device=k.device)
    for some, _, boxes in query_block_chunks(call, bindings, q, k):
        here = _visibility(call, some, boxes, q, k)
        if here[0] is not None:
            sees[:, :, some.start : some.stop] &= here[0]
        seen |= seen.new_ones(()) if here[1] is None else here[1]
    return sees, seen


@selection_visibility.register_fake
def _(q, k, bindings, *arguments):
    call = SelectionCall.of(*arguments)
    sees = q.new_empty((*q.shape[:2], call.query_blocks(q, k).num_query_blocks, call.query_block), dtype=torch.bool)
    return sees, k.new_empty(k.shape[:3], dtype=torch.bool)


@own_op("flexdilated::selection_pairs")
def selection_pairs(q: Tensor, k: Tensor, bindings: list[Tensor], constants: str, q_offset: int) -> Tensor:
    """Return the number of pairs that the call's `within` allows, over all heads and batch entries, int64 of shape ().

    Arguments are as in `selection_visibility`.
    """
    if 0 in q.shape or 0 in k.shape:
        return torch.zeros((), dtype=torch.int64, device=q.device)
    call = SelectionCall.of(constants, q_offset)
    every = (each for *_, boxes in query_block_chunks(call, bindings, q, k) for each in boxes)
    number = sum(own.pairs * part.of_queries(q).shape[:2].numel() for part, own in every)
    return torch.tensor(number, device=q.device)


@selection_pairs.register_fake
def _(q, *others):
    return q.new_empty((), dtype=torch.int64)
