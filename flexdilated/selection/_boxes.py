"""Arguments of a selection as plain values, and its boxes: pairs of a query block and a key block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int32, Int64, UInt8
from torch import Tensor

from .._torch_private import tree_leaves, tree_map_only
from ..engines import read_constants, write_constants
from ..masks import Mixture, Pattern, cache
from ..masks.blocks import allowed_pairs
from ..masks.core import And, Box, Extent, Progression, device_kind, outside_torch_modes
from ..masks.patterns import names
from ..masks.text import read_text

# M keys, C key blocks, n query blocks, x listed boxes, o boxes with separate pools, p groups of w such boxes

# States of a box, which `Boxes` explains; boxes in one of the last three are listed.
NOTHING, PLAIN, WHOLE, PARTIAL_VIEW, UNCHOSEN = range(5)

_PAIRS_AT_ONCE = 1 << 20  # pairs evaluated at once
_MOST_BOXES_IN_GROUP = 64  # most boxes of one key block that are scored by one product
_MOST_CACHED_BOXES = 1 << 26  # most boxes of a call for which they are cached; with more, each call builds them


class QueryBlocks(NamedTuple):
    """Query blocks and key blocks of a call; the first and last query block may be partial.

    Query block 0 has the first query, key block 0 has position 0.

    q_offset: position of the first query; keys begin at position 0, and query blocks at multiples of query_block.
    block, query_block: tokens of a key block and of a query block.
    all_queries: True if a query block is scored by all its queries, False if by its first query.
    """

    num_queries: int
    num_keys: int
    q_offset: int
    block: int
    query_block: int
    all_queries: bool

    @property
    def lead(self) -> int:
        """Number of positions in the first query block that precede query 0."""
        return self.q_offset % self.query_block

    @property
    def num_query_blocks(self) -> int:
        return -(-(self.lead + self.num_queries) // self.query_block)

    @property
    def num_key_blocks(self) -> int:
        return -(-self.num_keys // self.block)

    def queries_of(self, part: range) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
        """Return (first position, number) of the queries of each query block in `part`, a range of their indices."""
        begin = torch.arange(part.start, part.stop) * self.query_block - self.lead
        first, stop = begin.clamp(min=0), (begin + self.query_block).clamp(max=self.num_queries)
        return first + self.q_offset, stop - first

    def keys_of(self) -> tuple[Int64[Tensor, " C"], Int64[Tensor, " C"]]:
        """Return (first position, number) of the keys of each key block."""
        first = torch.arange(self.num_key_blocks) * self.block
        return first, (self.num_keys - first).clamp(max=self.block)

    def portions(self, numbers: int) -> Iterator[range]:
        """Yield consecutive ranges of query block indices that together cover all query blocks, short to bound memory.

        numbers: values that each query block needs, besides a mask of all keys.
        """
        most = min((1 << 20) // max(numbers, self.num_key_blocks), (1 << 25) // self.num_keys)
        step = 1 << max(0, most.bit_length() - 1)
        yield from (range(at, min(at + step, self.num_query_blocks)) for at in range(0, self.num_query_blocks, step))


class SelectionCall(NamedTuple):
    """Arguments of a `BlockSelector` call except tensors; patterns as JSON, with "" for no `always`.

    block, query_block, all_queries, q_offset: as in `QueryBlocks`.
    scorer: name of the scorer, or "module".
    stride: size of the tiles of "antidiagonal", else 1.
    kind, amount, most: rule of the choice, as in `choose`.
    share: query heads with one table of chosen blocks: "head", one; "group", those of a key/value head; "all", all.
    coarse_block, coarse_query_block: block sizes of the coarse selector; 0 without one.
    scale: factor on scores.
    """

    within: str
    always: str
    block: int
    query_block: int
    all_queries: bool
    scorer: str
    stride: int
    kind: str
    amount: float
    most: int
    share: str
    coarse_block: int
    coarse_query_block: int
    scale: float
    q_offset: int

    @property
    def arguments(self) -> tuple[str, int]:
        """(all fields except q_offset as one text, q_offset): the form in which custom ops take them."""
        return write_constants(self[:2], self[2:-1]), self.q_offset

    @classmethod
    def of(cls, constants: str, q_offset: int) -> SelectionCall:
        """Build a call from its `arguments`; q_offset may be symbolic."""
        return cls._make((*read_constants(constants), q_offset))

    def query_blocks(self, q: Tensor, k: Tensor) -> QueryBlocks:
        return QueryBlocks(q.shape[2], k.shape[2], self.q_offset, self.block, self.query_block, self.all_queries)

    def tables(self, q: Tensor, k: Tensor) -> int:
        """Return the number of tables of chosen blocks in each batch entry: query heads, key/value heads, or 1."""
        return {"head": q.shape[1], "group": k.shape[1], "all": 1}[self.share]

    def patterns_with_values(self, bindings: Sequence[Tensor], extent: Extent) -> Pattern | Mixture:
        """Return the mixture `within` + `always`, or `within` if there is no `always`, with values of run-time tensors.

        No attention is computed with the mixture: its branches are read separately.

        bindings: the run-time tensors that the patterns name, sorted by name.
        extent: one past the last query position, and one past the last key position.
        """
        patterns: list[Any] = [read_text(text) for text in (self.within, self.always) if text]
        both = Mixture.of(*patterns)
        return both.resolve(dict(zip(names(both), bindings, strict=True)), extent)


class SelectionRule(NamedTuple):
    """Patterns of some batch entries and heads: pairs that may be attended to, and pairs that need no choice.

    within: pairs that may be attended to.
    always: pairs that are attended to, if `within` allows them, without being chosen; None for none.
    head: one of these heads, for which the patterns are evaluated; num_heads: number of all query heads.
    """

    within: Pattern
    always: Pattern | None
    head: int
    num_heads: int

    @property
    def needs_choice(self) -> Pattern:
        """Pairs that are attended to only if their block is chosen: within & ~always."""
        return self.within if self.always is None else And.of(self.within, ~self.always)

    @property
    def text(self) -> str:
        return self.within.text + ("" if self.always is None else self.always.text)

    def sees(self, q: Tensor, k: Tensor) -> Tensor:
        """Return a mask, True for pairs that `within` allows; q and k are positions, which broadcast."""
        return self._holds(self.within, q, k)

    def without_always(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        """Return the mask `seen` with False for pairs that `always` allows; q and k are positions, which broadcast."""
        return seen if self.always is None else seen & ~self._holds(self.always, q, k)

    def _holds(self, pattern: Pattern, q: Tensor, k: Tensor) -> Tensor:
        if device_kind(q.device).on_host:
            return allowed_pairs(pattern, self.num_heads, torch.tensor(self.head), q, k)
        mod = pattern.mask_mod(num_heads=self.num_heads, device=q.device)
        head = torch.full((), self.head, device=q.device)
        return mod(torch.zeros_like(head), head, q, k)


class PartialViews(NamedTuple):
    """Candidate boxes with keys that their query block does not see; a box is scored by pools of only the seen keys.

    The boxes of a key block are in groups of w boxes; a group with fewer boxes is padded. Query blocks are numbered
    from 0 in the chunk.

    place: query block * C + key block of each box, ascending; C: number of key blocks.
    at: for each box, in the order of `place`, its index in the flattened groups.
    block: key block of each group.
    row: query block of each box in the groups; 0 for padding.
    mask: for each box in the groups, the keys of the block that the query block sees; False for padding.
    """

    place: Int64[Tensor, " o"]
    at: Int64[Tensor, " o"]
    block: Int64[Tensor, " p"]
    row: Int64[Tensor, "p w"]
    mask: Bool[Tensor, "p w block"]


class Boxes(NamedTuple):
    """Boxes (query block, key block) of a chunk under one rule; query blocks are numbered from 0 in the chunk.

    A query block sees the keys that are visible to one of the queries by which it is scored.

    state: state of each box. NOTHING: choosing it adds no pair; PLAIN: a candidate that adds all its pairs; WHOLE: a
        candidate that adds only some of its pairs, and of which the query block sees all keys; PARTIAL_VIEW: a
        candidate of which it does not see all keys; UNCHOSEN: not a candidate, although it would add pairs.
    place: query block * C + key block of each listed box (the last three states), ascending; C: number of key blocks.
    gain: number of pairs that choosing each listed box adds.
    partial: the boxes with state PARTIAL_VIEW; None if there are none.
    sees: mask of the queries by which query blocks are scored, True for those that see a key; None if all do. Index i
        is for position i of the query block; where a query block is scored by its first query, there is no other index.
    seen: mask of the keys that some query block of the chunk sees; None if all are seen.
    pairs: number of the chunk's pairs that `within` allows, in one head of one batch entry.
    pairs_to_choose: number of these pairs that are attended to only if their box is chosen.
    """

    state: UInt8[Tensor, "n C"]
    place: Int64[Tensor, " x"]
    gain: Int32[Tensor, " x"]
    partial: PartialViews | None
    sees: Bool[Tensor, "n query_block"] | Bool[Tensor, "n 1"] | None
    seen: Bool[Tensor, " M"] | None
    pairs: int
    pairs_to_choose: int

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in tree_leaves(self) if isinstance(x, Tensor))

    def on(self, device: torch.device) -> Boxes:
        return tree_map_only(Tensor, lambda x: x.to(device), self)

    def gains(self, rows: QueryBlocks, part: range, blocks: Int64[Tensor, "B T n most"]) -> Int64[Tensor, "B T n most"]:
        """Return the number of pairs that each chosen block adds for one head; 0 for block -1.

        part: the query blocks of this chunk.
        blocks: chosen blocks of each of these query blocks, padded with -1.
        """
        row = torch.arange(len(part), device=blocks.device)[:, None]
        queries, keys = rows.queries_of(part)[1].to(blocks.device), rows.keys_of()[1].to(blocks.device)
        known = blocks.clamp(min=0)
        state = self.state[row, known].masked_fill(blocks < 0, NOTHING)
        area = (queries[:, None] * keys[known]).masked_fill(state != PLAIN, 0)
        if not len(self.place):
            return area
        at, _ = found_in(self.place, row * rows.num_key_blocks + known)
        return torch.where(state > PLAIN, self.gain[at].long(), area)


def found_in(
    ascending: Int64[Tensor, " x"], places: Int64[Tensor, "*some"]
) -> tuple[Int64[Tensor, "*some"], Bool[Tensor, "*some"]]:
    """Return (index in `ascending`, True if present) for each of `places`; the index of an absent place is arbitrary.

    `ascending` must not be empty.
    """
    at = torch.searchsorted(ascending, places).clamp(max=len(ascending) - 1)
    return at, ascending[at] == places


def boxes_of(rule: SelectionRule, rows: QueryBlocks, part: range, device: torch.device) -> Boxes:
    """Return the boxes (query block, key block) of the query blocks in `part`, on the device.

    They are cached, unless `rows` has more than 2^26 boxes in total.
    """

    def built() -> Boxes:
        return _build_boxes(rule, rows, part)

    if rows.num_query_blocks * rows.num_key_blocks > _MOST_CACHED_BOXES:
        return outside_torch_modes(built)().on(device)
    key = ("selection_boxes", rule.text, rule.head, rule.num_heads, rows, part)
    found = cache().get(key, built, lambda boxes: boxes.nbytes, pattern=rule.within)
    if device_kind(device).on_host:
        return found
    return cache().get((*key, device), lambda: found.on(device), lambda x: x.nbytes, pattern=rule.within, device=device)


class _EvaluatedBoxes(NamedTuple):
    """Boxes (query block, key block) whose state does not follow from bounds, evaluated pair by pair.

    row, block: query block and key block of each box.
    pairs: number of pairs in the box that `within` allows; gain: number of these that `always` does not allow.
    candidate: True if the box may be chosen.
    view: mask of the keys of the block that the query block sees.
    queries: mask of the queries of the query block that see a key of the key block; index i is the i-th query that the
        query block has in the call.
    """

    row: Int64[Tensor, " x"]
    block: Int64[Tensor, " x"]
    pairs: Int64[Tensor, " x"]
    gain: Int64[Tensor, " x"]
    candidate: Bool[Tensor, " x"]
    view: Bool[Tensor, "x block"]
    queries: Bool[Tensor, "x query_block"]


def _build_boxes(rule: SelectionRule, rows: QueryBlocks, part: range) -> Boxes:
    """Return the boxes of the query blocks in `part`; states that bounds leave open are evaluated pair by pair."""
    (q_first, q_count), (k_first, k_count) = rows.queries_of(part), rows.keys_of()
    n, C = len(part), rows.num_key_blocks
    r, j = torch.arange(n).repeat_interleave(C), torch.arange(C).repeat(n)
    head = torch.full_like(r, rule.head)
    box = Box(head, Progression(q_first[r], 1, q_count[r]), Progression(k_first[j], 1, k_count[j]))
    within, rest = (each.count(box, num_heads=rule.num_heads) for each in (rule.within, rule.needs_choice))
    full = within.low == box.area
    # Covered: all pairs are attended to without a choice.
    plain, covered = full & (rest.low == box.area), full & (rest.high == 0)
    doubtful = (~plain & ~covered & (within.high > 0)).nonzero().squeeze(1)
    some = _evaluate_boxes(rule, rows, box.select(doubtful), r[doubtful], j[doubtful])
    state = torch.where(plain, PLAIN, NOTHING).to(torch.uint8)
    whole = some.view.sum(1) == k_count[some.block]
    kind = torch.where(some.candidate, torch.where(whole, WHOLE, PARTIAL_VIEW), UNCHOSEN)
    area = q_count[some.row] * k_count[some.block]
    kind[some.candidate & whole & (some.gain == area)] = PLAIN
    kind[~some.candidate & (some.gain == 0)] = NOTHING
    state[doubtful] = kind.to(torch.uint8)
    listed, partial = kind > PLAIN, (kind == PARTIAL_VIEW).nonzero().squeeze(1)
    sees, seen = _visibility(rows, part, (plain | covered).view(n, C), some)
    return Boxes(
        state=state.view(n, C),
        place=doubtful[listed],
        gain=some.gain[listed].int(),
        partial=_partial_views(some, partial, C) if len(partial) else None,
        sees=sees,
        seen=seen,
        pairs=int(box.area[plain | covered].sum() + some.pairs.sum()),
        pairs_to_choose=int(box.area[plain].sum() + some.gain.sum()),
    )


def _evaluate_boxes(rule: SelectionRule, rows: QueryBlocks, box: Box, r: Tensor, j: Tensor) -> _EvaluatedBoxes:
    found = []
    for some in torch.arange(len(r)).split(max(1, _PAIRS_AT_ONCE // (rows.query_block * rows.block))):
        q = (box.q.first[some, None] + torch.arange(rows.query_block))[:, :, None]
        k = (box.k.first[some, None] + torch.arange(rows.block))[:, None, :]
        q_stop, k_stop = (side.last[some, None, None] for side in (box.q, box.k))
        inside = (q <= q_stop) & (k <= k_stop)
        q, k = q.minimum(q_stop), k.minimum(k_stop)
        seen = rule.sees(q, k) & inside
        left = rule.without_always(q, k, seen)
        view, choice = (seen.any(1), left) if rows.all_queries else (seen[:, 0], left[:, :1])
        found.append((seen.sum((1, 2)), left.sum((1, 2)), choice.any(2).any(1), view, seen.any(2)))
    return _EvaluatedBoxes(r, j, *(torch.cat(parts) for parts in zip(*found, strict=True)))


def _visibility(
    rows: QueryBlocks, part: range, whole: Bool[Tensor, "n C"], some: _EvaluatedBoxes
) -> tuple[Bool[Tensor, "n query_block"] | Bool[Tensor, "n 1"] | None, Bool[Tensor, " M"] | None]:
    """Return the masks `sees` and `seen` of `Boxes`.

    whole: mask of the boxes outside `some` in which `within` allows every pair.
    some: the boxes that were evaluated pair by pair; boxes in neither have no pair.
    """
    num_queries, num_keys = rows.queries_of(part)[1], rows.keys_of()[1]
    queries = whole.any(1).long()[:, None].repeat(1, rows.query_block)
    queries.index_add_(0, some.row, some.queries.long())
    keys = whole.any(0).long()[:, None].repeat(1, rows.block)
    keys.index_add_(0, some.block, some.view.long())
    inside = torch.arange(rows.query_block) < num_queries[:, None]
    shown = (queries > 0) & inside
    if not rows.all_queries:
        shown, inside = shown[:, :1], inside[:, :1]
    elif rows.lead and part.start == 0:  # query 0 is at position `lead` of the first query block
        shown[0] = shown[0].roll(rows.lead)
        inside[0] = inside[0].roll(rows.lead)
    seen = (keys > 0).flatten()[: int(num_keys.sum())]
    all_see = bool((shown | ~inside).all())
    return None if all_see else shown, None if bool(seen.all()) else seen


def _partial_views(some: _EvaluatedBoxes, partial: Int64[Tensor, " o"], C: int) -> PartialViews:
    """Return the boxes with state PARTIAL_VIEW, in groups of one key block and at most 64 boxes each.

    partial: indices of these boxes in `some`; at least one.
    C: number of key blocks.
    """
    row, block = some.row[partial], some.block[partial]
    order = (block * (int(row.max()) + 1) + row).argsort()
    blocks, number = block[order].unique_consecutive(return_counts=True)
    w = min(_MOST_BOXES_IN_GROUP, int(number.max()))
    in_block = torch.arange(len(order)) - (number.cumsum(0) - number).repeat_interleave(number)
    pieces = -(-number // w)
    piece = (pieces.cumsum(0) - pieces).repeat_interleave(number) + in_block // w
    at = piece * w + in_block % w
    rows = torch.zeros(int(pieces.sum()) * w, dtype=torch.int64)
    mask = torch.zeros(len(rows), some.view.shape[1], dtype=torch.bool)
    rows[at], mask[at] = row[order], some.view[partial[order]]
    place, ascending = (row * C + block)[order].sort()
    return PartialViews(
        place, at[ascending], blocks.repeat_interleave(pieces), rows.view(-1, w), mask.unflatten(0, (-1, w))
    )
