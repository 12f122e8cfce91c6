"""Selected blocks on the flex engine: the graph computes block tables from the call's table of selected blocks.

The table has a row for each query block: the key blocks that its queries see. If blocks are whole kernel tiles and the
first query begins a block, they are the blocks of a BlockMask. Else queries are gathered, a query block or a single
query at a time. They are copied once for each key block that their query block selects. Copies are sorted by key block,
the copies of each key block begin at a tile, and the results are merged by lse. All sizes follow from the shapes of
tensors, so no value is copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor
from torch.nn.functional import pad

from ...masks.core import TILE, MaskMod
from .._features import Features
from .._merge import shares_of, sum_dtype
from ._kernel_call import Kernel, call_kernel

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim
# R rows of queries, W entries of a row, C key blocks, S tiles of gathered rows, P places for rows in all tiles
# h heads with classes of their own, 1 if all heads have equal ones


def unit_of(block: tuple[int, int], q_offset: int) -> int | None:
    """Return the number of consecutive queries that are gathered as one unit, with the same selected key blocks.

    block: (queries, keys) of a selected block.
    q_offset: position of the first query.

    The result is None if the kernels do not support these blocks: block[1] is neither a multiple nor a divisor of TILE.
    It is 0, and no queries are gathered, if block[0] and block[1] are multiples of TILE and the first query begins a
    block. Else it is block[0] if this divides TILE and the first query begins a block, and 1 if not.
    """
    q_block, k_block = block
    if k_block % TILE and TILE % k_block:
        return None
    if q_offset % q_block == 0:
        if q_block % TILE == 0 and k_block % TILE == 0:
            return 0
        if TILE % q_block == 0:
            return q_block
    return 1


def sides_of_table(block: tuple[int, int], unit: int) -> tuple[int, int]:
    """Return (queries, keys) of the kernel's blocks, for selected blocks of these sizes.

    If queries are gathered, a kernel block has TILE queries and at least TILE keys; else it is a selected block.

    unit: queries that are gathered as one unit, 0 if none are.
    """
    return (TILE, max(block[1], TILE)) if unit else block


def copies_of(block: tuple[int, int], q_offset: int, most: int, sizes: tuple[int, int]) -> int:
    """Return the number of gathered copies per query, tile padding included, rounded up; 1 if none are gathered.

    block: (queries, keys) of a selected block.
    q_offset: position of the first query.
    most: key blocks in a row of the table.
    sizes: (queries, keys) of the call.
    """
    unit = unit_of(block, q_offset)
    if not unit:
        return 1
    queries, keys = sizes
    places = -(-queries // unit) * most + -(-keys // block[1]) * (TILE // unit)
    return -(-places * unit // queries)


class SelectedBlockSizes(torch.nn.Module):  # the numbers of modules are constants of compiled graphs
    """Sizes of attention over a table of selected blocks, without lengths.

    block: (queries, keys) of a selected block.
    unit: queries that are gathered as one unit, 0 if none are.
    most: key blocks in a row of the table.
    heads: numbers of (tables, query heads, key/value heads), the attributes `tables`, `heads` and `kv_heads`.
    """

    def __init__(self, block: tuple[int, int], unit: int, most: int, heads: tuple[int, int, int]) -> None:
        super().__init__()
        self.q_block, self.k_block = block
        self.unit, self.most = unit, most
        self.tables, self.heads, self.kv_heads = heads

    @property
    def sides(self) -> tuple[int, int]:
        """Return (queries, keys) of the kernel's blocks."""
        return sides_of_table((self.q_block, self.k_block), self.unit)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All values as a hashable key: instances with equal keys are equal."""
        return (self.q_block, self.k_block, self.unit, self.most, self.tables, self.heads, self.kv_heads)


class CallOffsets(NamedTuple):
    """Offsets of a call, and the tables of its heads.

    head, query, key: tensors with the global index of the first head and the positions of the first query and key.
    row: index of the first query in its query block, an int.
    tables: index of each head's table of selected blocks; empty if head i has table i and there are no other tables.
        `attend_selected` does not read it, as its caller chooses `rows` by it.
    """

    head: Int64[Tensor, ""]
    query: Int64[Tensor, ""]
    key: Int64[Tensor, ""]
    row: int
    tables: tuple[int, ...] = ()


def attend_selected(
    sizes: SelectedBlockSizes,
    rest: MaskMod,
    where: CallOffsets,
    rows: Int64[Tensor, "b T R W"],
    classes: Int32[Tensor, "h R C"] | None,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    features: Features,
    kernel: Kernel,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
    """Return (out in float32 or wider, natural lse) over the pairs in selected blocks that `rest` also allows.

    sizes: sizes of blocks and heads.
    rest: mask by global head and positions.
    where: offsets of the call.
    rows: key blocks that each query block selects; key block 0 begins with the call's first key, query block 0 has its
        first query. Blocks outside the keys are ignored, and a block that is named twice counts once.
    classes: for each (query block, key block), 2 only if both are whole and `rest` allows every pair, else 1; None if
        not known. It is read only if no queries are gathered.
    features: with return_lse; sinks and dropout are ignored. Its score_mod takes the global head and positions.
    kernel: function called like flex_attention.
    """
    blocks, tokens, unit = -(-k.shape[2] // sizes.k_block), q.shape[2], sizes.unit
    rows = rows.repeat_interleave(q.shape[1] // rows.shape[1], 1).expand(q.shape[0], -1, -1, -1)
    rows = rows.sort(-1).values
    again = pad(rows[..., 1:] == rows[..., :-1], (1, 0))
    named = (rows >= 0) & (rows < blocks) & ~again
    rows = torch.where(named, rows, 0)
    if not unit:
        tables = _block_mask_tables(rows, named, classes, blocks)
        out, lse = _run_kernel(sizes, tables, rest, where, q, k, v, features, kernel)
        return out.to(sum_dtype(q)), lse
    if unit != sizes.q_block:
        row = (where.row + torch.arange(tokens, device=q.device)) // sizes.q_block
        rows, named = rows[:, :, row], named[:, :, row]
    at = _tile_places(rows.flatten(2), named.flatten(2), blocks, TILE // unit)
    own_row = torch.where(at.entry >= 0, at.entry // sizes.most, -1)
    short = rows.shape[2] * unit - tokens
    own = (pad(q, (0, 0, 0, short)) if short else q).unflatten(2, (-1, unit)).flatten(3)
    own = gather_vectors(own, own_row, at.place.unflatten(2, (-1, sizes.most))).unflatten(3, (unit, -1)).flatten(2, 3)
    own_block = at.block.repeat_interleave(TILE // unit, 2)

    def position(b, h, place):
        return (own_row[b, h, place // unit] * unit + place % unit + where.query).clamp(min=0)

    def inside(b, h, place, key):
        return (own_row[b, h, place // unit] >= 0) & (key // sizes.k_block == own_block[b, h, place // unit])

    tables = _tables_of_tiles(sizes, at)
    out, lse = _run_kernel(sizes, tables, rest, where, own, k, v, features, kernel, position, inside)
    parts = out.unflatten(2, (-1, unit)).flatten(3)
    parts = gather_vectors(parts, at.place, at.entry[..., None]).unflatten(2, (-1, sizes.most)).unflatten(4, (unit, -1))
    lses = gather_vectors(lse.unflatten(2, (-1, unit)), at.place, at.entry[..., None]).unflatten(2, (-1, sizes.most))
    shares, whole = shares_of(torch.where(named[..., None], lses, -torch.inf), 3)
    joined = (parts.to(sum_dtype(q)) * shares[..., None]).sum(3)
    return joined.flatten(2, 3)[:, :, :tokens], whole.flatten(2, 3)[:, :, :tokens]


def _block_mask_tables(
    rows: Int64[Tensor, "B H R W"],
    named: Bool[Tensor, "B H R W"],
    classes: Int32[Tensor, "h R C"] | None,
    columns: int,
) -> dict[str, Tensor]:
    """Return the block tables of a BlockMask whose query blocks list the key blocks `rows` where `named` is True.

    classes: as in `attend_selected`; blocks of class 2 are listed as full. None: no block is listed as full.
    columns: number of key blocks.
    """
    full = torch.zeros_like(named)
    if classes is not None:
        head = torch.arange(rows.shape[1], device=rows.device)[:, None, None] % classes.shape[0]
        row = torch.arange(rows.shape[2], device=rows.device)[:, None]
        full = named & (classes[head, row, rows] == 2)
    tables: dict[str, Tensor] = {}
    for prefix, listed in (("", named & ~full), ("full_", full)):
        tables[f"{prefix}kv_num_blocks"] = listed.sum(-1, dtype=torch.int32)
        # A stable sort puts the listed blocks first and keeps their order.
        order = (~listed).to(torch.int8).argsort(dim=-1, stable=True)
        tables[f"{prefix}kv_indices"] = rows.gather(-1, order).int()
        # Blocks that are not listed are written to an extra column, which is cut off.
        dense = torch.zeros(*rows.shape[:3], columns + 1, dtype=torch.int8, device=rows.device)
        dense = dense.scatter(3, torch.where(listed, rows, columns), 1)[..., :columns].mT
        tables[f"{prefix}q_num_blocks"] = dense.sum(-1, dtype=torch.int32)
        tables[f"{prefix}q_indices"] = (1 - dense).argsort(dim=-1, stable=True).int()
    return tables


class TilePlaces(NamedTuple):
    """Places of gathered queries in the kernel's tiles; a tile has TILE // unit places.

    A place holds a copy of one unit of queries, made for one entry in the unit's row, which names a key block.
    Copies are sorted by key block, and the copies for each key block begin at a tile. Entry w in the row of unit r has
    index r * W + w, also if it names no block.

    place: index of the place of each entry's copy, -1 for an entry without a block.
    entry: index of the entry whose copy is in each place, -1 for none.
    block: key block of each tile, C (the number of key blocks) for unused tiles.
    begin, number: first tile and number of tiles of each key block.
    """

    place: Int32[Tensor, "B H RW"]
    entry: Int32[Tensor, "B H P"]
    block: Int64[Tensor, "B H S"]
    begin: Int64[Tensor, "B H C"]
    number: Int64[Tensor, "B H C"]


def _tile_places(block: Int64[Tensor, "B H RW"], named: Bool[Tensor, "B H RW"], blocks: int, height: int) -> TilePlaces:
    lead, entries, device = block.shape[:2], block.shape[2], block.device
    block = torch.where(named, block, blocks)
    ordered, order = block.sort(dim=-1, stable=True)
    numbers = torch.arange(blocks + 1, device=device).expand(*lead, -1).contiguous()
    before = torch.searchsorted(ordered, numbers)  # entries of smaller blocks
    number = (before.diff(dim=-1) + height - 1) // height
    end = number.cumsum(-1)
    begin, tiles = end - number, -(-entries // height) + blocks
    rank = torch.arange(entries, device=device) - before.gather(2, ordered)
    # Empty entries share one extra place after the last tile.
    first = pad(begin * height, (0, 1), value=0).gather(2, ordered)
    there = torch.where(ordered < blocks, first + rank, tiles * height)
    # int32, as inductor passes int64 scatters to a fallback kernel.
    place = torch.full(there.shape, -1, dtype=torch.int32, device=device)
    place = place.scatter(2, order, torch.where(ordered < blocks, there, -1).int())
    entry = torch.full((*lead, tiles * height + 1), -1, dtype=torch.int32, device=device)
    entry = entry.scatter(2, there, order.int())[..., : tiles * height]
    wanted = torch.arange(tiles, device=device).expand(*lead, tiles).contiguous()
    return TilePlaces(place, entry, torch.searchsorted(end, wanted, right=True), begin, number)


def _tables_of_tiles(sizes: SelectedBlockSizes, at: TilePlaces) -> dict[str, Tensor]:
    """Return block tables of a BlockMask in which each tile of gathered queries lists the one block that it attends to.

    A key block of the kernel may consist of several selected key blocks. Unused tiles list no block.
    """
    joined, blocks, tiles = sizes.sides[1] // sizes.k_block, at.number.shape[2], at.block.shape[2]
    number = pad(at.number, (0, -blocks % joined)).unflatten(2, (-1, joined)).sum(-1)
    begin = number.cumsum(-1) - number
    there = at.block < blocks
    of_column = begin[..., None] + torch.arange(tiles, device=begin.device)
    by_row = torch.where(there, at.block // joined, 0)[..., None].int()
    by_column = of_column.clamp(max=tiles - 1).int()
    return {
        "kv_num_blocks": there.int(),
        "kv_indices": by_row,
        "full_kv_num_blocks": torch.zeros_like(there, dtype=torch.int32),
        "full_kv_indices": by_row,
        "q_num_blocks": number.int(),
        "q_indices": by_column,
        "full_q_num_blocks": torch.zeros_like(number, dtype=torch.int32),
        "full_q_indices": by_column,
    }


def _run_kernel(
    sizes: SelectedBlockSizes,
    tables: dict[str, Tensor],
    rest: MaskMod,
    where: CallOffsets,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    kernel: Kernel,
    position: Callable[[Any, Any, Any], Any] | None = None,
    inside: MaskMod | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, natural lse) of the kernel with these block tables and the mask `rest`.

    Rows without keys have output 0 and lse -inf.

    position: function (b, h, place) -> position of the gathered query in this place; None if queries are not gathered.
    inside: mask (b, h, place, key), True if the query in this place is gathered for the key's block; None if queries
        are not gathered.
    """

    def query_at(b, h, query):
        return query + where.query if position is None else position(b, h, query)

    def mask_mod(b, h, query, key):
        allowed = rest(b, h + where.head, query_at(b, h, query), key + where.key)
        return allowed if inside is None else inside(b, h, query, key) & allowed

    def scored(score, b, h, query, key):
        assert features.score_mod is not None
        return features.score_mod(score, b, h + where.head, query_at(b, h, query), key + where.key)

    tables = {name: each.contiguous() for name, each in tables.items()}
    own = features._replace(score_mod=None if features.score_mod is None else scored)
    out, lse = call_kernel(kernel, q, k, v, tables, mask_mod, sides=sizes.sides, features=own)
    assert lse is not None
    return torch.where((lse == -torch.inf)[..., None], 0.0, out), lse


class _VectorGather(torch.autograd.Function):
    """Autograd function (x, index, inverse) -> vectors of x (dim 2) by index, 0 for a negative index.

    The gradient is a gather too, by `inverse`: for each vector of x, along the last dim, the indices of its copies in
    the result; negative for no copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _take_or_zero(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (inverse,) = grads, ctx.saved_tensors
        total = _take_or_zero(grad, inverse.flatten(2)).unflatten(2, inverse.shape[2:])
        return total.sum(3, dtype=sum_dtype(grad)).to(grad.dtype), None, None


def _take_or_zero(x: Tensor, index: Tensor) -> Tensor:
    batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
    head = torch.arange(x.shape[1], device=x.device)[:, None]
    found = x[batch, head, index.clamp(min=0)]
    return torch.where((index >= 0).unsqueeze(-1), found, 0.0)


def gather_vectors(x, index, inverse):
    return _VectorGather.apply(x, index, inverse)
