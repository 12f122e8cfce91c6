"""Operands in the form that kernels need: vectors contiguous in memory, hidden slots zeroed.

Hidden slots are queries of a term that see no key, and keys that no query sees; their values must not affect a result.
Kernels compute whole blocks, in which a weight of 0 times NaN is NaN, so hidden slots are zeroed first. A NaN in a key
that only some queries of its block see can still spread to other rows of the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int32, Int64, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ..masks.blocks import Blocks, Nodes, Rule, SlotRun, dense_masks, mask_classes, owners_and_places
from ..masks.core import device_kind
from ..masks.planning import CountedPairs, SharedListTerm, Term, entry_terms

# n problems, E listed blocks, U distinct masks

_MASK_BYTES = 64 << 20  # most bytes of distinct masks that are kept; above, each call evaluates its masks


def distinct_masks(rule: Rule, blocks: Blocks) -> tuple[Int64[Tensor, " E"], Bool[Tensor, "U q_block k_block"] | None]:
    """Return (index of each listed block's mask, distinct masks): a mask is True for the pairs that `rule` allows.

    Mask 0, of full blocks, allows every pair. If the distinct masks exceed _MASK_BYTES, they are None and all indices
    are 0.
    """
    partial = (~blocks.full).nonzero().squeeze(1)
    distinct = [torch.ones(1, blocks.q_block, blocks.k_block, dtype=torch.bool)]
    limit = _MASK_BYTES // distinct[0].nbytes
    known: dict[int, int] = {}
    codes: list[int] = []
    look_of, first = mask_classes(rule, blocks.places(partial), blocks.shape)
    looked_at = partial[first]
    for tiles in dense_masks(rule, blocks.places(looked_at), blocks.shape):
        found = _fingerprints(tiles).tolist()
        for index, code in enumerate(found):
            if code not in known:
                known[code] = len(distinct)
                distinct.append(tiles[index : index + 1])
        codes += found
        if len(distinct) > limit:
            return torch.zeros(len(blocks.full), dtype=torch.int64), None
    ids = torch.zeros(len(blocks.full), dtype=torch.int64)
    ids[partial] = torch.tensor([known[code] for code in codes], dtype=torch.int64)[look_of]
    return ids, torch.cat(distinct)


def additive_mask(allowed: Bool[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Return an additive mask for the kernels: 0 where a pair is allowed, -inf elsewhere."""
    return torch.where(allowed, torch.zeros((), dtype=dtype), torch.full((), -torch.inf, dtype=dtype))


def random_numbers(shape: tuple[int, ...]) -> Int64[Tensor, "..."]:
    """Return a tensor of random 64-bit integers, the same in every call with this shape: the seed is fixed.

    If each number stands for a member of a set, the sum of the numbers of some members is a fingerprint of them.
    """
    bounds = torch.iinfo(torch.int64)
    return torch.randint(bounds.min, bounds.max, shape, generator=torch.Generator().manual_seed(0))


def _fingerprints(tiles: Bool[Tensor, "n q_block k_block"]) -> Int64[Tensor, " n"]:
    """Return a 64-bit fingerprint of each mask; two unequal masks have equal fingerprints with probability 2^-64."""
    return torch.where(tiles, random_numbers(tiles.shape[1:]), 0).sum((1, 2))


# E batch entries or 1 for all, X heads of a term or 1 for all, Q query slots, K key slots, n blocks, U distinct masks

_BLOCKS_AT_ONCE = 1 << 14  # most blocks in one step of `_slots_in_pairs`
_SLOTS_AT_ONCE = 1 << 18  # most slots of which bounds are computed at once
_BOUNDS_COST = 256  # pairs of blocks that are evaluated in the time of the bounds of a slot


def readable(x: Shaped[Tensor, "... D"]) -> Shaped[Tensor, "... D"]:
    """Return x if its vectors (last dim) are contiguous in memory and neighbours (dim -2) do not overlap, else a copy.

    Heads and batch entries may overlap. A negative view is resolved, into a copy.
    """
    # Kernels rely on both, and few of them check. `transpose` parts vectors, `unfold` lets tokens overlap.
    x = x.resolve_neg()
    if x.is_contiguous():  # the usual case, and the quickest to check
        return x
    is_row = x.stride(-1) == 1 or x.shape[-1] == 1
    apart = x.dim() < 2 or x.shape[-2] == 1 or x.stride(-2) >= x.shape[-1]
    return x if is_row and apart else x.contiguous()


def one_width(
    q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"], v: Float[Tensor, "B G M E"]
) -> tuple[Float[Tensor, "B H N W"], Float[Tensor, "B G M W"], Float[Tensor, "B G M W"]]:
    """Return q, k and v, padded with zeros to the wider head dim W = max(D, E), for kernels with one head dim.

    With an unchanged scale the scores are equal, and the first E channels of the kernel's output are the output.
    """
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v


# Before torch 2.15, kernels compiled for accelerators have 32-bit offsets, which overflow beyond this many elements.
MOST_ELEMENTS = (1 << 31) - 1
_HAS_WIDE_OFFSETS = torch.__version__ >= "2.15"


def within_reach(x: Shaped[Tensor, "..."], *, is_flash: bool) -> Shaped[Tensor, "..."]:
    """Return x, or a contiguous copy if its elements are too far apart in memory for kernels with 32-bit offsets.

    They are too far apart if the last element lies 2**31 - 1 or more elements after the first, as in a view of a larger
    tensor. On CPU, x itself is returned; so is a contiguous x, however large.

    is_flash: True for FlashAttention's kernels, which always have 32-bit offsets; others have them before torch 2.15.
    """
    if not device_kind(x.device).flex_trains or (_HAS_WIDE_OFFSETS and not is_flash):
        return x
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x if last < MOST_ELEMENTS else x.contiguous()


@dataclass(frozen=True, eq=False)
class HiddenSlots:
    """Masks of queries that attend to no key, and of keys that no query attends to, in a term or in a dense call.

    A mask may have either value at slots outside all listed blocks, which kernels do not read. E is the number of batch
    entries, X the number of query heads; each is 1 if all have equal masks. A mask without True may be None.
    """

    queries: Bool[Tensor, "E X Q"] | None
    keys: Bool[Tensor, "E X K"] | None

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in (self.queries, self.keys) if side is not None)

    def on(self, device: torch.device) -> HiddenSlots:
        return HiddenSlots(*(None if side is None else side.to(device) for side in (self.queries, self.keys)))

    def clear_queries(self, x: Shaped[Tensor, "B H *F Q ..."], *, dim: int, value: float = 0.0) -> Tensor:
        """Return x with `value` at hidden queries; x itself if `queries` is None.

        dim: axis of the queries in x.
        """
        return _fill_hidden(x, self.queries, dim, value)

    def clear_keys(self, x: Shaped[Tensor, "B G *F K ..."], *, dim: int) -> Tensor:
        """Return x with 0 at keys that are hidden from all query heads of their key/value head.

        A key is hidden from a head if no query of the head attends to it. If `keys` is None, x itself is returned.

        dim: axis of the keys in x.
        """
        return _fill_hidden(x, self.keys, dim, 0.0)


def _fill_hidden(x: Tensor, hidden: Bool[Tensor, "E X S"] | None, dim: int, value: float) -> Tensor:
    if hidden is None:
        return x
    if hidden.shape[1] not in (1, x.shape[1]):
        hidden = hidden.unflatten(1, (x.shape[1], -1)).all(2)
    ones = [1] * (dim - 2), [1] * (x.dim() - dim - 1)
    return x.masked_fill(hidden.to(x.device).view(*hidden.shape[:2], *ones[0], hidden.shape[2], *ones[1]), value)


def hidden_slots(
    rule: Rule,
    blocks: Blocks,
    ids: Int64[Tensor, " n"] | None = None,
    masks: Bool[Tensor, "U q_block k_block"] | None = None,
) -> HiddenSlots:
    """Return the hidden slots in listed blocks: queries that attend to no key, and keys that no query attends to.

    Kernels do not read slots outside the listed blocks. A head's mask may include slots of a block that only another
    head's table lists.

    ids, masks: index of each block's mask, and the distinct masks, from `distinct_masks`; None evaluates the rule.
    """
    row = blocks.table.long() * blocks.num_rows + blocks.row
    column = blocks.table.long() * blocks.num_columns + blocks.column
    seen_q = torch.zeros(blocks.num_tables * blocks.num_rows, blocks.q_block, dtype=torch.int32)
    seen_k = torch.zeros(blocks.num_tables * blocks.num_columns, blocks.k_block, dtype=torch.int32)
    seen_q[row[blocks.full]], seen_k[column[blocks.full]] = 1, 1
    open_q, open_k = _listed_unseen(seen_q, row), _listed_unseen(seen_k, column)
    left, most = (~blocks.full).nonzero().squeeze(1), 1
    if masks is None and len(rule.q.starts) == len(rule.k.starts) == 1:
        pairs, slots = len(left) * blocks.q_block * blocks.k_block, int(open_q.sum() + open_k.sum())
        if pairs > _BOUNDS_COST * slots:
            open_q = _decide_slots(rule, blocks, seen_q, open_q, is_key=False)
            open_k = _decide_slots(rule, blocks, seen_k, open_k, is_key=True)
    # Blocks whose queries and keys are all decided need no evaluation: the first ones of a row or column often decide.
    while len(left := left[open_q.any(1)[row[left]] | open_k.any(1)[column[left]]]):
        first = torch.ones_like(left, dtype=torch.bool)
        if masks is None:
            first = (_places_in_groups(row[left]) < most) | (_places_in_groups(column[left]) < most)
        for some, by_row, by_column in _slots_in_pairs(rule, blocks, left[first], ids, masks):
            seen_q.index_add_(0, row[some], by_row.int())
            seen_k.index_add_(0, column[some], by_column.int())
        open_q, open_k = open_q & (seen_q == 0), open_k & (seen_k == 0)
        left, most = left[~first], 4 * most
    heads = list(blocks.heads) if blocks.num_tables > 1 else [0]
    queries = _hidden_mask(seen_q, row, blocks.num_tables, heads, blocks.num_q_slots)
    keys = _hidden_mask(seen_k, column, blocks.num_tables, heads, blocks.num_k_slots)
    return HiddenSlots(queries, keys)


def _places_in_groups(groups: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """Return, for each item, how many earlier items are of its group."""
    order = groups.argsort(stable=True)
    _, places = owners_and_places(groups[order].unique_consecutive(return_counts=True)[1])
    return torch.empty_like(groups).index_copy_(0, order, places)


def _listed_unseen(seen: Int32[Tensor, "R side"], places: Int64[Tensor, " n"]) -> Bool[Tensor, "R side"]:
    """Return a mask of the slots in listed blocks for which `seen` is 0; arguments as in `_hidden_mask`."""
    listed = torch.zeros(len(seen), 1, dtype=torch.bool)
    listed[places] = True
    return listed & (seen == 0)


def _decide_slots(
    rule: Rule, blocks: Blocks, seen: Int32[Tensor, "R side"], undecided: Bool[Tensor, "R side"], *, is_key: bool
) -> Bool[Tensor, "R side"]:
    """Return `undecided` without the slots for which one look-up or bounds decide whether they are in an allowed pair.

    A query is looked up with the key at its own position, or if there is none with the one before; a key likewise. The
    decided slots that are in an allowed pair get 1 in `seen`, in place.

    seen, undecided: of queries, or with is_key of keys, in the order of `seen` in `_hidden_mask`.

    rule: its queries must be one slot run, and so must its keys.
    """
    width, left = blocks.num_rows * blocks.q_block, torch.zeros_like(undecided).view(-1)
    own, other, num_others = rule.q, rule.k, blocks.num_k_slots
    if is_key:
        width, own, other, num_others = blocks.num_columns * blocks.k_block, rule.k, rule.q, blocks.num_q_slots
    for at in undecided.view(-1).nonzero().squeeze(1).split(_SLOTS_AT_ONCE):
        table, slot = at // width, at % width
        inside = slot < rule.num_slots[is_key]
        at, table, slot = at[inside], table[inside], slot[inside]
        # Most tokens attend to themselves.
        beside = (own.position(table, slot) - other.firsts[table, 0]) // other.step
        beside = beside.clamp(0, num_others - 1)
        held = rule.allowed(table, *((beside, slot) if is_key else (slot, beside)))
        seen.view(-1)[at[held]] = 1
        at, table, slot = at[~held], table[~held], slot[~held]
        zero = torch.zeros_like(slot)
        one, all_others = SlotRun(zero, slot, zero + 1), SlotRun(zero, zero, zero + num_others)
        nodes = Nodes(table, all_others, one) if is_key else Nodes(table, one, all_others)
        pairs = rule.pattern.count(rule.boxes(nodes), num_heads=rule.num_heads)
        seen.view(-1)[at[pairs.low > 0]] = 1
        left[at[(pairs.low <= 0) & (pairs.high > 0)]] = True
    return left.view_as(undecided)


def _hidden_mask(
    seen: Int32[Tensor, "R side"], places: Int64[Tensor, " n"], num_tables: int, heads: list[int], slots: int
) -> Bool[Tensor, "1 X S"] | None:
    """Return a mask of the slots (queries or keys) of each head that are in a listed block but in no allowed pair.

    seen: number for each slot, above 0 if it is in an allowed pair. Dim 0 counts the query blocks (or key blocks) of
        the first table, then those of the second, and so on.
    places: index in dim 0 of `seen` of each listed block.
    heads: index of each head's table; [0] if all heads share one table, for a mask with X = 1.
    slots: number of slots of a head.

    The mask may include slots of a block that only another table lists. Returns None if no table lists a block with a
    slot that is in no allowed pair.
    """
    listed = torch.zeros(len(seen), 1, dtype=torch.bool)
    listed[places] = True
    unseen = (seen == 0).unflatten(0, (num_tables, -1))
    listed = listed.unflatten(0, (num_tables, -1))
    if not bool((unseen & listed).flatten(1)[:, :slots].any()):
        return None
    return (unseen & listed.any(0)).flatten(1)[None, heads, :slots]


def hidden_of_blocks(term: Term, blocks: Sequence[Blocks]) -> HiddenSlots:
    """Return masks of a term's hidden slots: queries and keys that are in no allowed pair.

    blocks: the term's block list for each batch entry, or one for all.
    """
    if isinstance(term, SharedListTerm):
        return HiddenSlots(*term.hidden())
    found = [
        hidden_slots(rule, listed)
        for each, listed in zip(entry_terms(term), blocks, strict=True)
        for rule in [each.table_rule()]
    ]
    heads = 1 if all(listed.num_tables == 1 for listed in blocks) else len(term.heads)
    queries = _join_masks([each.queries for each in found], heads, term.q.num_slots)
    return HiddenSlots(queries, _join_masks([each.keys for each in found], heads, term.k.num_slots))


def _join_masks(sides: Sequence[Tensor | None], heads: int, slots: int) -> Tensor | None:
    """Return the batch entries' masks of hidden slots as one, (entries, heads, slots); None if all are None.

    None in `sides` is an entry without hidden slots. A mask of a single head is repeated for all heads.
    """
    if all(side is None for side in sides):
        return None
    none = torch.zeros(1, heads, slots, dtype=torch.bool)
    return torch.cat([none if side is None else side.expand(1, heads, -1) for side in sides])


def hidden_of_term(term: Term) -> HiddenSlots:
    """Return the queries that attend to no key, and the keys that no query attends to, of a term without block lists.

    In a causal term, the keys after the last query are hidden. A term with CountedPairs may have hidden queries and
    keys. Other terms have neither.
    """
    if isinstance(term.weights, CountedPairs):
        seen = term.weights.counts() > 0
        return HiddenSlots(_mask_or_none(~seen.any(2)), _mask_or_none(~seen.any(1)))
    queries, keys = term.q.num_slots, term.k.num_slots
    after = term.shape == "causal" and keys > queries
    return HiddenSlots(None, (torch.arange(keys) >= queries)[None, None] if after else None)


def _mask_or_none(hidden: Bool[Tensor, "H S"]) -> Bool[Tensor, "1 H S"] | None:
    return hidden[None] if bool(hidden.any()) else None


def _slots_in_pairs(
    rule: Rule, blocks: Blocks, index: Int64[Tensor, " n"], ids: Tensor | None, masks: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (indices of n blocks, mask of queries in an allowed pair, mask of keys in an allowed pair).

    The masks have shapes (n, q_block) and (n, k_block).

    index: indices of all blocks to look at, of which each step yields n.
    ids, masks: as from `distinct_masks`; None evaluates the rule, once a step for blocks known to have equal masks.
    """
    known = None if masks is None or ids is None else (masks.any(2), masks.any(1), ids)
    for some in index.split(_BLOCKS_AT_ONCE):
        if known is not None:
            rows, columns, own = *known[:2], known[2][some]
        else:
            own, one_of_each = mask_classes(rule, blocks.places(some), blocks.shape)
            tiles = dense_masks(rule, blocks.places(some[one_of_each]), blocks.shape)
            rows, columns = map(torch.cat, zip(*((each.any(2), each.any(1)) for each in tiles), strict=True))
        yield some, rows[own], columns[own]
