"""The kernel of engine "portable": attention under a BlockMask or over lists of single keys, in plain torch operations.

The scores of a query block are matrix products with its listed key blocks. Chunks of query blocks bound the scores that
exist at one time; the backward computes them again, so memory is linear in tokens. Autograd can also record
`attention`, for graphs of torch.compile and for second derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import e, log2, prod
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from .._merge import sum_dtype
from .._score_mod import ScoreMod, apply_score_mod
from ._key_lists import META_CHUNKS, ListChunk, ListProblems, PaddedProblems, few_of_each_kind

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values
# T lists, one for each query block of a mask's heads and batch entries, W blocks of the longest; Q, K tokens of a block
# in a chunk: t lists with L entries, each shared by x problems: pairs of a batch entry and a query head

_SCORES_AT_ONCE = 1 << 20
_SCORES_AT_ONCE_IN_GRAPHS = 1 << 24  # a graph has the operations of each chunk, which take long to compile


class Weighting(NamedTuple):
    """The steps from q · k of a pair to its weight: scale, score_mod and dropout.

    score_mod: as in FlexAttention, with indices as in the BlockMask's mask_mod; over lists of single keys, with the
        global head and positions.
    learned: tensors that score_mod reads and that require a gradient.
    shares: for dropout, a function (score, b, h, q, k) -> number of branches in which the pair is kept, of the equal
        branches that are computed as one; indices broadcast. None for no dropout.
    factor: multiplies all weights, after `shares`; 1 without dropout.
    """

    scale: float
    score_mod: ScoreMod | None = None
    learned: Sequence[Tensor] = ()
    shares: ScoreMod | None = None
    factor: float = 1.0


class Span(NamedTuple):
    """Consecutive block lists that are computed together, in one chunk or several.

    begin, stop: range of these lists, in descending order of length.
    length: upper bound of the number of blocks in a list.
    masked: upper bound of the number of blocks with a mask in a list; a block that the end of the tokens cuts off
        always has a mask.
    has_gaps: True if a list is known to have fewer than `length` blocks.
    problems: a chunk computes each list for at most this many of the pairs (batch entry, query head) that use it.
    """

    begin: int
    stop: int
    length: int
    masked: int
    has_gaps: bool
    problems: int


class ListLengths(NamedTuple):
    """Lengths of a BlockMask's block lists, or upper bounds of them, the longest list first.

    counts: number of blocks in each list.
    partials: number of blocks with a mask in each list.
    """

    counts: list[int]
    partials: list[int]

    @classmethod
    def of(cls, mask: BlockMask) -> ListLengths:
        """Return the lengths of a BlockMask's lists; on an accelerator, reading them waits for the device."""
        partial, count = _block_counts(mask)
        counts, order = count.sort(descending=True, stable=True)
        return cls(counts.tolist(), partial[order].tolist())

    @classmethod
    def at_most(cls, longest: int, lists: int) -> ListLengths:
        """Return bounds for `lists` lists of at most `longest` blocks, each of which may have a mask."""
        return cls([longest] * lists, [longest] * lists)


def spans_of(mask: BlockMask, lengths: ListLengths, problems: int, *, in_graph: bool = False) -> tuple[Span, ...]:
    """Return the spans of a BlockMask's non-empty block lists, such that chunks have a bounded number of scores.

    A chunk exceeds the bound only if it has a single problem.

    lengths: lengths of the mask's lists, or upper bounds of them.
    problems: batch entries times query heads.
    in_graph: True for the larger chunks of a graph.
    """
    counts, partials = lengths
    entries, own_heads, _ = mask.kv_num_blocks.shape
    at_once, scores = _SCORES_AT_ONCE_IN_GRAPHS if in_graph else _SCORES_AT_ONCE, prod(mask.BLOCK_SIZE)
    found, begin, total = [], 0, sum(each > 0 for each in counts)
    while begin < total:
        length = counts[begin]
        # problems / (entries * own_heads) problems use a list, on average.
        lists = max(1, at_once * entries * own_heads // (scores * length * problems))
        stop = min(total, begin + lists)
        together = max(1, at_once // (scores * length * (stop - begin)))
        masked, has_gaps = max(partials[begin:stop]), counts[stop - 1] < length
        found.append(Span(begin, stop, length, masked=masked, has_gaps=has_gaps, problems=together))
        begin = stop
    return tuple(found)


def _block_counts(mask: BlockMask) -> tuple[Int64[Tensor, " T"], Int64[Tensor, " T"]]:
    """Return (number of blocks with a mask, number of all blocks) of each block list of a BlockMask."""
    assert mask.full_kv_num_blocks is not None, "the masks of this package list full blocks apart"
    partial = mask.kv_num_blocks.flatten().long()
    return partial, partial + mask.full_kv_num_blocks.flatten()


@dataclass(frozen=True, eq=False)
class _BlockChunk:
    """Attention problems that are computed at once: a problem is one query block over its listed key blocks.

    t block lists, padded to L blocks, are each used by x problems: pairs of a batch entry and a head with the list.

    problem: index of the query block in the flattened (batch, heads, query blocks), as a tuple of one.
    block: indices of key blocks in the flattened (batch, key/value heads, blocks).
    hidden: True for pairs that are not allowed, of each problem (y = x) or equal for all that share a list (y = 1);
        None if all are allowed.
    places: (batch entry, head, queries, keys) of the problems; tokens after the last one count as the last.
    """

    problem: tuple[Int64[Tensor, "x t"]]
    block: Int64[Tensor, "x t L"]
    hidden: Bool[Tensor, "y t _ LK"] | None
    places: tuple[Int64[Tensor, "x t"], Int64[Tensor, "x t"], Int64[Tensor, "t Q"], Int64[Tensor, "t LK"]]
    absent = None  # each place names a key

    def with_score_mod(self, score_mod: ScoreMod, scores: Float[Tensor, "x t Q LK"]) -> Float[Tensor, "x t Q LK"]:
        return apply_score_mod(score_mod, scores, *self.places, self.hidden)

    def shares_of_pairs(self, shares: ScoreMod) -> Shaped[Tensor, "x t Q LK"]:
        """Return the results of `shares`, a function as in `Weighting`, for all pairs of the chunk."""
        b, h, q, k = self.places
        # The function reads no score: q takes its place.
        return shares(q, b[..., None, None], h[..., None, None], q[:, :, None], k[:, None])


@dataclass(frozen=True, eq=False)
class BlockProblems:
    """Block lists of a BlockMask, one for each query block of its batch entries and heads, and the sizes of q and k.

    columns: key blocks of each list, first `partial` blocks with a mask, then full ones, `count` in all. Padding
        repeats the first; in an empty list it is any block.
    order: indices of the lists in descending order of length, in which `spans` are counted.
    sizes: (batch, query heads, key/value heads, queries, keys).
    is_meta: True for meta tensors, which are run only to find the peak memory.
    """

    mask: BlockMask
    columns: Int64[Tensor, "T W"]
    partial: Int64[Tensor, " T"]
    count: Int64[Tensor, " T"]
    order: Int64[Tensor, " T"]
    spans: Sequence[Span]
    sizes: tuple[int, int, int, int, int]  # B, H, G, N, M
    is_meta: bool

    @classmethod
    def of(cls, mask: BlockMask, spans: Sequence[Span], q: Tensor, k: Tensor) -> BlockProblems:
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        partial, count = _block_counts(mask)
        place = torch.arange(spans[0].length if spans else 1, device=count.device).expand(len(count), -1)
        first, whole = mask.kv_indices.flatten(0, 2).long(), mask.full_kv_indices
        assert whole is not None
        behind = (place - partial[:, None]).clamp(0, whole.shape[-1] - 1)
        first = first.gather(1, place.clamp(max=first.shape[1] - 1))
        columns = torch.where(place < partial[:, None], first, whole.flatten(0, 2).long().gather(1, behind))
        # A shorter list of a chunk reads its first block again: other blocks may hold NaN that no query sees.
        columns = torch.where(place < count[:, None], columns, columns[:, :1])
        order = count.argsort(descending=True, stable=True)
        return cls(mask, columns, partial, count, order, spans, sizes, q.is_meta)

    @property
    def sides(self) -> tuple[int, int]:
        return self.mask.BLOCK_SIZE

    def by_query_block(self, x: Float[Tensor, "B H N ..."], value: float = 0.0) -> Float[Tensor, "BHR Q ..."]:
        return _blocks(x, self.sides[0], value)

    def by_key_block(self, x: Float[Tensor, "B G M ..."]) -> Float[Tensor, "BGC K ..."]:
        return _blocks(x, self.sides[1])

    def queries(self, x: Float[Tensor, "BHR Q ..."]) -> Float[Tensor, "B H N ..."]:
        batch, heads, _, number, _ = self.sizes
        return x.unflatten(0, (batch, heads, -1)).flatten(2, 3)[:, :, :number]

    def keys(self, x: Float[Tensor, "BGC K ..."]) -> Float[Tensor, "B G M ..."]:
        batch, _, groups, _, number = self.sizes
        return x.unflatten(0, (batch, groups, -1)).flatten(2, 3)[:, :, :number]

    def chunks(self) -> Iterator[_BlockChunk]:
        """Yield chunks that together have every query block with a non-empty list, the longest lists first.

        For meta tensors, yield only the first few chunks of similar spans.
        """
        device, (batch, heads, groups, queries, keys) = self.count.device, self.sizes
        side, k_side = self.sides
        own_batch, own_heads, rows = self.mask.kv_num_blocks.shape
        shared, blocks = (batch // own_batch) * (heads // own_heads), -(-keys // k_side)
        spans = few_of_each_kind(self.spans, _kind_of_span) if self.is_meta else self.spans
        for span in spans:
            at, length = self.order[span.begin : span.stop], span.length
            row, head, entry = at % rows, at // rows % own_heads, at // (rows * own_heads)
            slots = torch.arange(side, device=device) + row[:, None] * side
            column = self.columns[at, :length]
            key_slots = (column[..., None] * k_side + torch.arange(k_side, device=device)).flatten(1)
            many_heads = torch.arange(heads // own_heads, device=device)[:, None] + head
            many_entries = torch.arange(batch // own_batch, device=device)[:, None] + entry
            b = many_entries.repeat_interleave(len(many_heads), 0)
            h = many_heads.repeat(len(many_entries), 1)
            problem = (b * heads + h) * rows + row
            block = ((b * groups + h // (heads // groups)) * blocks)[..., None] + column.clamp(max=blocks - 1)
            places = slots.clamp(max=queries - 1), key_slots.clamp(max=keys - 1)
            beyond = (key_slots >= keys) | (
                self.count[at][:, None] <= torch.arange(length, device=device)
            ).repeat_interleave(k_side, 1)
            for first in range(0, shared, span.problems)[: META_CHUNKS if self.is_meta else None]:
                part = slice(first, first + span.problems)
                own = b[part], h[part], *places
                yield _BlockChunk(
                    (problem[part],), block[part], self._hidden_pairs(span, self.partial[at], beyond, *own), own
                )

    def _hidden_pairs(
        self,
        span: Span,
        partial: Int64[Tensor, " t"],
        beyond: Bool[Tensor, "t LK"],
        b: Tensor,
        h: Tensor,
        q: Tensor,
        k: Tensor,
    ) -> Bool[Tensor, "y t _ LK"] | None:
        """Return a mask, True for pairs that the BlockMask's mask does not allow or whose key is True in `beyond`.

        None if every pair is allowed: no list has a block with a mask, and none is shorter than the span's length.

        partial: number of blocks with a mask, which come first in each list.
        beyond: True for keys after the last block of a list or the last key.
        b, h, q, k: places of a `_BlockChunk`.

        y is 1 if the mask reads neither b nor h, so that all problems that share a list agree.
        """
        masked = span.masked * self.sides[1]
        if not masked:
            return beyond[None, :, None] if span.has_gaps else None
        allowed = self.mask.mask_mod(b[..., None, None], h[..., None, None], q[:, :, None], k[:, None, :masked])
        allowed = allowed[(None,) * (4 - allowed.dim())]  # a mask that reads neither b nor h holds for all problems
        whole = partial[:, None] <= torch.arange(masked, device=partial.device) // self.sides[1]
        hidden = ~(allowed | whole[:, None]) | beyond[:, None, :masked]
        rest = beyond[None, :, None, masked:].expand(*hidden.shape[:1], -1, hidden.shape[2], -1)
        return torch.cat([hidden, rest], 3) if rest.shape[3] else hidden


Problems = BlockProblems | ListProblems | PaddedProblems


def _kind_of_span(span: Span) -> tuple[int, int]:
    return span.stop - span.begin, span.length.bit_length()


def attention(
    problems: Problems,
    weighting: Weighting,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M E"],
    *,
    dtype: torch.dtype | None = None,
    recorded: bool = False,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Return (out, natural lse) of attention over these problems, computed in the dtype of lse: float32 or wider.

    G divides H. A query without keys has output 0 and lse -inf.

    dtype: of out; None: that of lse.
    recorded: True where autograd or a graph records the operations; in a graph, chunks are computed again in the
        backward.
    """
    queries, keys, values = problems.by_query_block(q), problems.by_key_block(k), problems.by_key_block(v)
    rows_of = queries.shape[:-1]
    out = q.new_zeros(*rows_of, v.shape[3], dtype=sum_dtype(q) if dtype is None else dtype)
    lse = q.new_full(rows_of, -torch.inf, dtype=sum_dtype(q))
    found = []
    for chunk in problems.chunks():
        given = chunk, weighting, queries, keys, values
        if torch.compiler.is_compiling():
            rows, some = checkpoint(_chunk_attention, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            rows, some = _chunk_attention(*given)
        rows = rows.to(out.dtype)
        if recorded:
            problem = [each.expand(some.shape[: each.dim()]) for each in chunk.problem]
            found.append([x.flatten(0, 1) for x in (*problem, rows, some)])
        else:
            out[chunk.problem], lse[chunk.problem] = rows, some
    if found:  # at once: autograd copies a tensor for each of several writes
        *problem, rows, some = (torch.cat(each) for each in zip(*found, strict=True))
        out, lse = out.index_put(tuple(problem), rows), lse.index_put(tuple(problem), some)
    return problems.queries(out), problems.queries(lse)


def _chunk_attention(
    chunk: _BlockChunk | ListChunk,
    weighting: Weighting,
    queries: Float[Tensor, "*places D"],
    keys: Float[Tensor, "BGC K D"],
    values: Float[Tensor, "BGC K E"],
) -> tuple[Float[Tensor, "x t Q E"], Float[Tensor, "x t Q"]]:
    """Return (out, natural lse) of a chunk's problems.

    queries, keys, values: those of all chunks, which chunk.problem and chunk.block index.
    """
    scores = _chunk_scores(chunk, weighting, queries, keys)
    top = scores.detach().amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = _exp_(scores.sub_(top))
    total = weights.sum(-1, keepdim=True)
    if weighting.shares is not None:
        weights = weights * chunk.shares_of_pairs(weighting.shares)
    empty = total == 0
    some = total.masked_fill(empty, 1.0)
    rows = (weights @ _gather_blocks(values, chunk)) * (weighting.factor / some)
    return rows, (some.log() + top).masked_fill(empty, -torch.inf).squeeze(-1)


def _chunk_scores(
    chunk: _BlockChunk | ListChunk,
    weighting: Weighting,
    queries: Float[Tensor, "*places D"],
    keys: Float[Tensor, "BGC K D"],
) -> Float[Tensor, "x t Q LK"]:
    """Return the scores of a chunk's problems after score_mod, -inf for pairs that are not allowed.

    The arguments are those of `_chunk_attention`. The result may be written to.
    """
    scores = (queries[chunk.problem].to(sum_dtype(queries)) @ _gather_blocks(keys, chunk).mT).mul_(weighting.scale)
    if weighting.score_mod is not None:  # its result is not written to: autograd may keep it
        scores = chunk.with_score_mod(weighting.score_mod, scores)
        return scores.clone() if chunk.hidden is None else scores.masked_fill(chunk.hidden, -torch.inf)
    return scores if chunk.hidden is None else scores.masked_fill_(chunk.hidden, -torch.inf)


@torch.no_grad()
def largest_scores(
    q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"], mask: BlockMask, scale: float, score_mod: ScoreMod | None
) -> Float[Tensor, "B H N"]:
    """Return each query's largest score after score_mod, in float32 or wider; -inf for a query without keys.

    mask: a BlockMask that lists full blocks apart from partial ones.
    scale, score_mod: as in `Weighting`.

    The result has no gradient. Memory is linear in tokens.
    """
    weighting = Weighting(scale, score_mod)
    problems = BlockProblems.of(mask, spans_of(mask, ListLengths.of(mask), q.shape[0] * q.shape[1]), q, k)
    queries, keys = problems.by_query_block(q), problems.by_key_block(k)
    found = q.new_full(queries.shape[:-1], -torch.inf, dtype=sum_dtype(q))
    with torch.autocast(q.device.type, enabled=False):
        for chunk in problems.chunks():
            found[chunk.problem] = _chunk_scores(chunk, weighting, queries, keys).amax(-1)
    return problems.queries(found)


def gradients(
    problems: Problems,
    weighting: Weighting,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M E"],
    lse: Float[Tensor, "B H N"],
    grad_out: Float[Tensor, "B H N E"],
    delta: Float[Tensor, "B H N"],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return (dq, dk, dv, [gradient of each learned tensor]) of attention over these problems.

    dk and dv are in float32 or wider, dq is in the dtype of q. The problems may have only some keys of a query; lse,
    grad_out and delta (see `WholeRows`) are over all its keys, and lse is inf for a query without keys.
    """
    queries, grad_outs, deltas = (problems.by_query_block(x) for x in (q, grad_out, delta))
    lses = problems.by_query_block(lse, torch.inf)
    keys, values = problems.by_key_block(k), problems.by_key_block(v)
    wide = sum_dtype(q)
    dq, (dk, dv) = torch.zeros_like(queries), (torch.zeros_like(x, dtype=wide) for x in (keys, values))
    of_learned = [torch.zeros_like(x) for x in weighting.learned]
    for chunk in problems.chunks():
        own, own_lse, own_grad, own_delta = (x[chunk.problem].to(wide) for x in (queries, lses, grad_outs, deltas))
        parts, found = _chunk_gradients(chunk, weighting, own, own_lse, own_grad, own_delta, keys, values)
        dq[chunk.problem] = parts[0].to(dq.dtype)
        for total, part in zip((dk, dv), parts[1:], strict=True):
            total.index_add_(0, chunk.block.flatten(), part.unflatten(2, (-1, total.shape[1])).flatten(0, 2))
        for total, part in zip(of_learned, found, strict=True):
            total += 0 if part is None else part
    return problems.queries(dq), problems.keys(dk), problems.keys(dv), of_learned


def _chunk_gradients(
    chunk: _BlockChunk | ListChunk,
    weighting: Weighting,
    queries: Float[Tensor, "x t Q D"],
    lse: Float[Tensor, "x t Q"],
    grad_out: Float[Tensor, "x t Q E"],
    delta: Float[Tensor, "x t Q"],
    keys: Float[Tensor, "BGC K D"],
    values: Float[Tensor, "BGC K E"],
) -> tuple[tuple[Tensor, Tensor, Tensor], Sequence[Tensor | None]]:
    """Return ((dq, dk, dv), gradient of each learned tensor or None for 0) of a chunk's problems.

    dq has the shape of `queries`. dk and dv have a vector for each listed key of each problem, (x, t, LK, D or E); the
    caller sums the vectors of one key.

    keys, values: blocks of all problems, from which chunk.block chooses. All other arguments are of this chunk alone.
    """
    learns, keys = weighting.score_mod is not None, _gather_blocks(keys, chunk)
    with torch.set_grad_enabled(learns):
        plain = (queries @ keys.mT).mul_(weighting.scale).requires_grad_(learns)
        new = plain if weighting.score_mod is None else chunk.with_score_mod(weighting.score_mod, plain)
    weights = new.detach() - lse[..., None]
    weights = _exp_(weights if chunk.hidden is None else weights.masked_fill_(chunk.hidden, -torch.inf))
    of_scores, kept = grad_out @ _gather_blocks(values, chunk).mT, weights
    if weighting.shares is not None:
        shares = chunk.shares_of_pairs(weighting.shares).to(weights.dtype).mul_(weighting.factor)
        of_scores, kept = of_scores.mul_(shares), shares.mul_(weights)
    of_values = kept.mT @ grad_out
    of_scores, of_learned = of_scores.sub_(delta[..., None]).mul_(weights), ()
    if learns:
        found: Sequence[Tensor | None] = (None,) * (1 + len(weighting.learned))
        if new.requires_grad:  # a score_mod may return a constant
            found = torch.autograd.grad(new, (plain, *weighting.learned), of_scores, allow_unused=True)
        of_scores, of_learned = torch.zeros_like(plain) if found[0] is None else found[0], found[1:]
    of_scores = of_scores * weighting.scale
    return (of_scores @ keys, of_scores.mT @ queries, of_values), of_learned


def _exp_(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x after an in-place exp, computed by exp2."""
    # On CPU, torch's exp takes up to 40 times as long where results underflow.
    return x.mul_(log2(e)).exp2_()


def _gather_blocks(x: Float[Tensor, "n K D"], chunk: _BlockChunk | ListChunk) -> Float[Tensor, "x t LK D"]:
    """Return the chunk's blocks of x in float32 or wider, with 0 where `chunk.absent` is True."""
    found = x.index_select(0, chunk.block.flatten()).view(*chunk.block.shape[:2], -1, x.shape[2]).to(sum_dtype(x))
    return found if chunk.absent is None else found.masked_fill(chunk.absent[..., None], 0.0)


def _blocks(x: Float[Tensor, "B H N ..."], side: int, value: float = 0.0) -> Float[Tensor, "n side ..."]:
    """Return the tokens of x in n = batch * heads * blocks blocks of `side`, each head's last padded with `value`."""
    missing = -x.shape[2] % side
    x = pad(x, (0, 0) * (x.dim() - 3) + (0, missing), value=value) if missing else x
    return x.unflatten(2, (-1, side)).flatten(0, 2)
