"""Attention mass per (query block, key block): exact, from the lse of a call; or estimated, by pooled scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from .._attend import autocast, checked_call
from .._validate import Place, Scale, check_lse, check_tensors, expand_batch, resolve_scale
from ..engines import Call, refuse_transforms, sum_dtype
from ..masks import Bound, Mixture, Pattern
from ..masks.blocks import Blocks
from ..masks.core import Expression, advises, outside_torch_modes, require_expression
from ..masks.patterns import rules_of_entries
from ..masks.planning import block_sides, bound_blocks, shared_terms, term_blocks

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim, R rows and C columns of blocks

_Allowed = Callable[[Tensor, Tensor], Tensor]  # (query positions, key positions) -> allowed pairs

_PAIRS_AT_ONCE = 1 << 22  # pairs computed at once, over all batch entries and heads


@torch.no_grad()
@advises()
def block_mass(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "#B G M D"],
    lse: Float[Tensor, "B H N"],
    pattern: Pattern | Mixture,
    *,
    block: int | tuple[int, int],
    scale: Scale = None,
    enable_gqa: bool = False,
    bindings: Mapping[str, Tensor] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    head_offset: int = 0,
    num_heads_global: int | None = None,
) -> Float[Tensor, "H R C"]:
    """Return the mean share of attention that each query block gives to each key block, per head.

    The share of one query is the sum over the block's keys of multiplicity * exp(score - lse), where the multiplicity
    of a pair is the number of branches of the pattern that allow it. A query block has the mean of the shares of its
    queries with lse > -inf, over all batch entries. So the shares of a query block sum to 1, less the share of sinks
    and of keys added as padding, if the lse includes them; they sum to 0 if no query has keys. For separate batch
    entries, call it once per entry.

    lse: as `attend(q, k, v, pattern, return_lse=True)` returns it.
    scale, enable_gqa, bindings, q_offset, k_offset, head_offset, num_heads_global: as in that call; offsets are
        numbers, not tensors. If k has only some of the keys in the lse, shares are still relative to all of them.
    block: tokens of a block, or (of queries, of keys). Block i starts at position i * block, as in `masks.block_list`.
        The result begins with the blocks that hold the first query and the first key.

    Computes only blocks in which the pattern has pairs, in chunks, without an N x M matrix.
    The result is float32, or float64 for float64 inputs, and has no gradient. Call it outside torch.compile.

    Raises ValueError or TypeError, before any work, for inputs that do not fit together.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> _, lse = fd.attend(q, k, v, masks.causal(), return_lse=True)
    >>> mass = fd.block_mass(q, k, lse, masks.causal(), block=64)
    >>> mass.shape
    torch.Size([4, 4, 4])
    >>> torch.testing.assert_close(mass.sum(-1), torch.ones(4, 4))
    """
    require_expression(pattern)
    q, k, _ = expand_batch(*autocast(q, k, k))
    check_tensors(q, k, k, enable_gqa=enable_gqa)
    check_lse(lse, q)
    sides = block_sides(block)
    place = Place(q_offset, k_offset, head_offset, num_heads_global)
    q, call, tensors, factor = checked_call(q, k, pattern, place, scale, bindings)
    refuse_transforms("block_mass", (q, k, lse))
    rows, columns = _BlockAxis(q_offset, q.shape[2], sides[0]), _BlockAxis(k_offset, k.shape[2], sides[1])
    mass = torch.zeros(q.shape[1], rows.blocks, columns.blocks, dtype=sum_dtype(q), device=q.device)
    if 0 in q.shape or 0 in k.shape:
        return mass
    has_keys = lse > -torch.inf
    shifts = rows.split(lse.to(mass.dtype).masked_fill(~has_keys, torch.inf)[..., None], torch.inf)
    queries, keys = rows.split(q), columns.split(k)
    for entries, rule in _rules(call, tensors, q.shape[0]):
        given = _Operands(queries[entries], keys[entries], shifts[entries], rows, columns, factor)
        for branch, times in Counter(rule.branches()).items():
            bound = _extend_to_block_starts(call.bound(branch), rows, columns)
            _add_branch(mass, times, bound, _nonempty_blocks(bound, sides), given)
    number = rows.split(has_keys[..., None].to(mass.dtype)).sum((0, 3))
    return mass / number.clamp(min=1)


@torch.no_grad()
@advises()
def pooled_scores(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "#B G M D"],
    *,
    block: int | tuple[int, int],
    lse: Float[Tensor, "B H N"] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Tensor, "H R C"]:
    """Return the mean score of all pairs of each query block and key block, per head; with `lse`, less the mean lse.

    The scores are computed for all blocks, as scale * (mean of q) · (mean of k), without forming pairs, and averaged
    over batch entries. `fd.refine` takes them to choose among the blocks that a block list leaves out.

    block: tokens of a block, or (of queries, of keys); block 0 begins with token 0, and the last may be shorter.
    lse: of a call with the current pattern; None: subtract nothing. In each batch entry, the mean lse of the query
        block's queries with keys is subtracted, which makes query blocks comparable: if all queries have keys,
        exp(score) times the number of keys in the block is a lower bound of the mass that the block would add. Entries
        in which no query of the block has keys are left out of the average; if none is left, the scores are -inf.
    scale: factor on the scores, a number; None: 1 / sqrt(D).
    enable_gqa: as in `attend`.

    The result is float32, or float64 for float64 inputs, and has no gradient.

    Raises ValueError or TypeError for inputs that do not fit together.

    >>> q, k = torch.randn(2, 1, 4, 256, 64)
    >>> fd.pooled_scores(q, k, block=64).shape
    torch.Size([4, 4, 4])
    """
    q, k, _ = expand_batch(*autocast(q, k, k))
    check_tensors(q, k, k, enable_gqa=enable_gqa)
    sides, factor = block_sides(block), resolve_scale(scale, q.shape[-1])
    if lse is not None:
        check_lse(lse, q)
    rows, columns = (_BlockAxis(0, x.shape[2], side) for x, side in zip((q, k), sides, strict=True))
    with torch.autocast(q.device.type, enabled=False):
        keys = columns.mean(k.to(sum_dtype(q))).repeat_interleave(q.shape[1] // max(1, k.shape[1]), 1)
        scores = factor * rows.mean(q.to(sum_dtype(q))) @ keys.mT
    if lse is None:
        return scores.mean(0)
    has_keys = lse > -torch.inf
    number = rows.split(has_keys[..., None].to(scores.dtype)).sum(3)
    total = rows.split(lse.to(scores.dtype).masked_fill(~has_keys, 0.0)[..., None]).sum(3)
    less = torch.where(number > 0, scores - total / number.clamp(min=1), 0.0)
    entries = (number > 0).sum(0)
    return (less.sum(0) / entries.clamp(min=1)).masked_fill(entries == 0, -torch.inf)


@dataclass(frozen=True)
class _BlockAxis:
    """Axis: `tokens` tokens from position `offset`, in blocks of `side` positions that start at multiples of `side`."""

    offset: int
    tokens: int
    side: int

    @property
    def ahead(self) -> int:
        """Number of positions in the first block that precede the first token."""
        return self.offset % self.side

    @property
    def blocks(self) -> int:
        return -(-(self.ahead + self.tokens) // self.side)

    def split(self, x: Float[Tensor, "B X N D"], fill: float = 0.0) -> Float[Tensor, "B X R S D"]:
        """Return x with its token dim split into (R blocks, S = side), and `fill` at positions without a token."""
        behind = self.blocks * self.side - self.ahead - self.tokens
        padded = pad(x, (0, 0, self.ahead, behind), value=fill) if self.ahead or behind else x
        return padded.unflatten(2, (self.blocks, self.side))

    def mean(self, x: Float[Tensor, "B X N D"]) -> Float[Tensor, "B X R D"]:
        """Return the mean over the tokens of each block."""
        return self.split(x).sum(3) / self.split(torch.ones_like(x[:1, :1, :, :1])).sum(3)

    def positions(self, block: Int64[Tensor, " n"], places: range) -> Int64[Tensor, "n S"]:
        """Return, for each block number in `block`, the positions at the indices `places` within that block.

        Block 0 is the one that holds the first token.
        """
        within = torch.arange(places.start, places.stop, device=block.device)
        return self.offset - self.ahead + block[:, None] * self.side + within

    def holds(self, position: Tensor) -> Tensor:
        """Return a mask, True for positions in [offset, offset + tokens)."""
        return (position >= self.offset) & (position < self.offset + self.tokens)

    def clamp(self, position: Tensor) -> Tensor:
        return position.clamp(self.offset, self.offset + self.tokens - 1)


@dataclass(frozen=True)
class _Operands:
    """Tensors of some batch entries, split into blocks of S queries and T keys, padded with zeros.

    shifts: lse, but inf for padding and for queries without keys.
    rows, columns: query and key blocks.
    factor: scale of the scores.
    """

    q: Float[Tensor, "B H R S D"]
    k: Float[Tensor, "B G C T D"]
    shifts: Float[Tensor, "B H R S 1"]
    rows: _BlockAxis
    columns: _BlockAxis
    factor: float


@outside_torch_modes
def _rules(call: Call, tensors: list[Tensor], batch: int) -> list[tuple[slice, Expression]]:
    return rules_of_entries(call.rules(tensors), batch)


def _extend_to_block_starts(bound: Bound, rows: _BlockAxis, columns: _BlockAxis) -> Bound:
    """Return `bound` with its queries and keys extended backwards to the beginning of their first blocks.

    Pairs at positions without a token are masked later.
    """
    sizes = {"num_queries": rows.ahead + rows.tokens, "num_keys": columns.ahead + columns.tokens}
    return replace(bound, q_offset=rows.offset - rows.ahead, k_offset=columns.offset - columns.ahead, **sizes)


@outside_torch_modes
def _nonempty_blocks(bound: Bound, sides: tuple[int, int]) -> Blocks:
    """Return the blocks, of `sides` (queries, keys) tokens, in which a branch has pairs.

    They are cached unless they depend on the values of run-time tensors.
    """
    (term,) = shared_terms(bound.union, 1, bound, 1)
    if bound.pattern.varies:
        return term_blocks(term, sides)
    (blocks,) = bound_blocks(term, bound, sides)
    return blocks


def _add_branch(mass: Float[Tensor, "H R C"], times: int, bound: Bound, blocks: Blocks, given: _Operands) -> None:
    """Add to `mass`, in place, `times` times the shares of one branch, summed over queries and batch entries.

    bound: the branch, for queries and keys from the starts of blocks.
    blocks: the blocks in which the branch has pairs.
    given: the tensors of some batch entries.
    """
    mod = bound.union.mask_mod(num_heads=bound.num_heads_global, device=mass.device)
    none = torch.zeros((), dtype=torch.int64, device=mass.device)
    for table in range(blocks.num_tables):
        heads = torch.tensor([head for head, own in enumerate(blocks.heads) if own == table], device=mass.device)
        cells = given.q.shape[0] * len(heads) * blocks.q_block * blocks.k_block
        for full in (False, True):
            some = ((blocks.table == table) & (blocks.full == full)).nonzero().squeeze(1)
            for part in some.split(max(1, _PAIRS_AT_ONCE // cells)) if len(some) else ():
                row, column = (x[part].long().to(mass.device) for x in (blocks.row, blocks.column))
                head = heads[0] + bound.head_offset
                rule = None if full else lambda q, k, head=head: mod(none, head, q, k)
                found = _shares(given, heads, row, column, rule)
                mass[heads[:, None], row, column] += times * found


def _shares(
    given: _Operands, heads: Tensor, row: Tensor, column: Tensor, rule: _Allowed | None
) -> Float[Tensor, "h n"]:
    """Return the share that queries of block row[i] give to key block column[i], summed over queries and entries.

    heads: indices of the h heads among this device's; the result has n numbers for each.
    rule: function (query positions, key positions) -> allowed pairs, equal for all `heads`; None allows all pairs.
    """
    groups = given.q.shape[1] // given.k.shape[1]
    wide = given.shifts.dtype
    keys = given.k[:, (heads // groups)[:, None], column].to(wide)
    key = given.columns.positions(column, range(given.columns.side))[:, None, :]
    seen = given.columns.holds(key)
    strip = max(1, _PAIRS_AT_ONCE // (given.q.shape[0] * len(heads) * given.columns.side * len(row)))
    total = torch.zeros(len(heads), len(row), dtype=wide, device=keys.device)
    for begin in range(0, given.rows.side, strip):
        places = range(begin, min(begin + strip, given.rows.side))
        queries, shifts = (x[:, heads[:, None], row, places.start : places.stop] for x in (given.q, given.shifts))
        allowed = seen
        if rule is not None:  # positions without a query take the nearest query's keys, and have shift inf
            query = given.rows.positions(row, places)[:, :, None]
            allowed = seen & rule(given.rows.clamp(query), given.columns.clamp(key))
        with torch.autocast(keys.device.type, enabled=False):
            scores = given.factor * (queries.to(wide) @ keys.mT) - shifts
        total += scores.masked_fill(~allowed, -torch.inf).exp().sum((0, 3, 4))
    return total
