"""Calls with a table of selected blocks; sizes, mask and offsets are cached unless the mask has run-time tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Int8, Int64
from torch import Tensor

from ..._torch_private import graph_constant
from ...masks import cache
from ...masks.core import Bound, Box, MaskMod, Pattern, Progression, suspended_torch_modes
from ...masks.patterns import HeldRows, SelectedBlocks, blank, names, require_row, require_tables, tables
from ...masks.text import read_text
from .._call import Call
from .._features import Features
from .._ops import own_op
from .._score_mod import function_key
from .._tables import table_split_in_text, table_split_of, tensors_of
from ._flex import as_arguments, compilation_key, compiled_flex, flex_in_graph, from_arguments, require_compiling
from ._selected_flex import CallOffsets, SelectedBlockSizes, attend_selected, unit_of
from ._traced import MAKERS, traced

# T tables, R rows of query blocks, C key blocks, h heads with classes of their own, 1 if all heads have equal ones

_DEPTH = 64  # most levels of nested functions: patterns of patterns
_MOST_CLASSES = 1 << 24  # most (row, block) pairs that are classified in advance; above, kernels evaluate the rule


class SelectedParts(NamedTuple):
    """Split of a pattern with a run-time table of selected blocks, as plain values that are constants of a graph.

    leaf: name under which the call passes the table.
    block: (queries, keys) of a block.
    most: key blocks in a row of the table.
    others: JSON of the pattern of other pairs, which are allowed without the table; "" for none.
    needed, names: sorted names of the run-time tensors of `others`, and of the whole pattern.
    """

    leaf: str
    block: tuple[int, int]
    most: int
    others: str
    needed: tuple[str, ...]
    names: tuple[str, ...]


@graph_constant
def selected_parts(text: str) -> SelectedParts | None:
    """Return a pattern, given as JSON, split into its table of selected blocks and the pairs allowed without the table.

    A mask that further restricts the table's pairs is not part of the result: `prepare_call` reads it from the pattern.
    The result is None if the pattern has no such table, or if the table cannot be separated from the other pairs.
    """
    return _selected_parts(text)


@lru_cache(maxsize=256)
def _selected_parts(text: str) -> SelectedParts | None:
    selection = table_split_in_text(text)
    if selection is None or not isinstance(selection.leaf, SelectedBlocks):
        return None  # rows of a sparse matrix differ in length
    leaf, others = selection.leaf, selection.others
    beside = ("", ()) if others is None else (others.text, names(others))
    return SelectedParts(leaf.name, leaf.block, leaf.most, *beside, names(read_text(text)))


def takes_table(parts: SelectedParts, call: Call) -> bool:
    """True if kernels can compute the call's selected blocks from the table itself.

    Kernels must support the block size (see `unit_of`), tokens must be at consecutive positions in natural order, and
    the first key must begin a block.
    """
    q_block, k_block = parts.block
    in_order = not call.placement and call.rate == 1 and call.k_offset % k_block == 0
    return in_order and unit_of((q_block, k_block), call.q_offset) is not None


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """Sizes, mask and offsets of a call with a table of selected blocks; none of them depends on the table's values.

    sizes: sizes of blocks and heads.
    rest: mask that further restricts the pairs in selected blocks.
    held: holders of the run-time tables that `rest` reads.
    where: offsets of the call.
    classes: result of `_classify_blocks`; None also if queries are gathered or `rest` reads run-time tables.
    skipped: number of rows in the table before the row of the first query.
    """

    sizes: SelectedBlockSizes
    rest: MaskMod
    held: tuple[HeldRows, ...]
    where: CallOffsets
    classes: Int8[Tensor, "h R C"] | None
    skipped: int

    @property
    def nbytes(self) -> int:
        return 1000 + (0 if self.classes is None else self.classes.nbytes)


def prepare_call(
    call: Call, device: torch.device, bindings: Sequence[Tensor], *, blank_rest: bool = False
) -> PreparedCall:
    """Return the `PreparedCall` of a call with a table of selected blocks.

    It is cached if the mask that further restricts the pairs in selected blocks has no run-time tensors.

    bindings: all run-time tensors of the call's pattern, sorted by name.
    blank_rest: True, for a trace, to use placeholders for the values of this mask's run-time tensors.

    Raises TypeError or ValueError if the table does not fit the call.
    """
    selection = table_split_of(call)
    assert selection is not None
    leaf, rest = selection.leaf, selection.rest
    (table,) = tensors_of(call, leaf, bindings)
    first, count = leaf.first_row(table, call.extent), int(table.shape[-3])
    require_tables(count, call.num_heads_global)
    require_row(leaf.block[0], first, int(table.shape[-2]), call.q_offset)
    skipped = call.q_offset // leaf.block[0] - first

    def build() -> PreparedCall:
        rule = rest
        if rest.varies:
            tensors = dict(zip(names(rest), tensors_of(call, rest, bindings), strict=True))
            rule = blank(rest, tensors, call.extent) if blank_rest else rest.resolve(tensors, call.extent)
        unit = unit_of(leaf.block, call.q_offset)
        assert unit is not None
        sizes = SelectedBlockSizes(leaf.block, unit, leaf.most, (count, call.num_heads, call.num_kv_heads))
        head, query, key_first = (torch.tensor(at, device=device) for at in call.offsets)
        where = CallOffsets(head, query, key_first, call.q_offset % leaf.block[0], _table_indices(call, count))
        held = tuple(table.on(device) for table in tables(rule))
        classes = None if held or unit > 0 else _classify_blocks(call, rule, leaf.block, device)
        rest_mod = rule.mask_mod(num_heads=call.num_heads_global, device=device)
        return PreparedCall(sizes, rest_mod, held, where, classes, skipped)

    if rest.varies:
        return build()
    name = ("selected flex", call, device, count, skipped)
    return cache().get(name, build, lambda found: found.nbytes, pattern=call.pattern, device=device)


def _table_indices(call: Call, count: int) -> tuple[int, ...]:
    """Return the index of each local head's table; empty if head i has table i and there are no other tables.

    count: number of tables of selected blocks, each shared by consecutive heads.
    """
    heads = range(call.head_offset, call.head_offset + call.num_heads)
    own = tuple(head * count // call.num_heads_global for head in heads)
    return () if own == tuple(range(count)) else own


def _classify_blocks(call: Call, rule: Pattern, block: tuple[int, int], device: torch.device) -> Tensor | None:
    """Return the class, 1 or 2, of each pair of a query block and a key block: (heads, query blocks, key blocks).

    2 means that both blocks are whole and bounds show that the rule allows all their pairs; all others have 1.
    There is one head if the rule is equal for all heads. The result is None if it would have more than _MOST_CLASSES
    numbers.
    """
    rows, columns = -(-call.num_queries // block[0]), -(-call.num_keys // block[1])
    bound: Bound = call.bound(rule)
    heads = [head + call.head_offset for head in range(call.num_heads)]
    alike = len({rule.for_head(head, call.num_heads_global) for head in heads}) == 1
    heads = heads[:1] if alike else heads
    if rows * columns * len(heads) > _MOST_CLASSES:
        return None
    head, row, column = (
        x.flatten()
        for x in torch.meshgrid(torch.tensor(heads), torch.arange(rows), torch.arange(columns), indexing="ij")
    )
    q, k = row * block[0], column * block[1]
    sides = Progression(q + call.q_offset, 1, torch.full_like(q, block[0])), k + call.k_offset
    box = Box(head, sides[0], Progression(sides[1], 1, torch.full_like(k, block[1])))
    whole = (q + block[0] <= call.num_queries) & (k + block[1] <= call.num_keys)
    found = 1 + (whole & (bound.count(box).low == box.area)).to(torch.int8)
    return found.view(len(heads), rows, columns).to(device)


def selected_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bindings: list[Tensor],
    parts: SelectedParts,
    call: Call,
    features: Features,
) -> tuple[Tensor, Tensor]:
    """Return (out in float32 or wider, natural lse) over the pairs in selected blocks that `PreparedCall.rest` allows.

    Eagerly, a separately compiled function computes them; under torch.compile(fullgraph=True), the caller's graph does.

    bindings: all run-time tensors of the call's pattern, sorted by name.
    parts: the split of the pattern.
    """
    table = bindings[parts.names.index(parts.leaf)].to(q.device)
    if torch.compiler.is_compiling():
        found: PreparedCall = traced("selected", q, k, bindings, call)
        if found.held:
            for held, rows in zip(found.held, _held_rows(q, k, bindings, *call.arguments), strict=True):
                held.rows = rows
        rows = _rows_of(table, found)
        return attend_selected(
            found.sizes, found.rest, found.where, rows, found.classes, q, k, v, features, flex_in_graph
        )
    found = prepare_call(call, q.device, bindings)
    compiled = compiled_flex(_structure(found), q.device, _call_selected)  # type: ignore[arg-type]
    run, rows = compiled(compilation_key(q, k, v, features, [found.sizes.sides])), _rows_of(table, found)
    return run(found.sizes, found.rest, found.where, rows, found.classes, q, k, v, *as_arguments(features))


def _rows_of(table: Int64[Tensor, "*b T R W"], found: PreparedCall) -> Int64[Tensor, "b t R W"]:
    """Return the rows of the call's queries and heads in a table, with key block 0 at the call's first key.

    table: key blocks that each query block selects.

    The result has t tables: the T of `table` if `PreparedCall.where.tables` is empty, else one for each head.
    """
    rows = (table if table.dim() == 4 else table[None])[:, :, found.skipped :].long()
    own = found.where.tables
    rows = rows[:, list(own)] if own else rows
    return rows - found.where.key // found.sizes.k_block


def _structure(found: PreparedCall) -> Hashable:
    return function_key(found.rest, _DEPTH), found.sizes.numbers, found.classes is None, found.where.row


def _call_selected(sizes, rest, where, rows, classes, q, k, v, *features):
    require_compiling()
    return attend_selected(sizes, rest, where, rows, classes, q, k, v, from_arguments(*features), flex_in_graph)


MAKERS["selected"] = lambda key, q, bindings: prepare_call(key, q.device, bindings, blank_rest=True)


@own_op("flexdilated::selected_rows")  # so that a compiled graph computes them from the values of each call
def _held_rows(
    q: Tensor, k: Tensor, bindings: list[Tensor], constants: str, q_offset: int, k_offset: int
) -> list[Tensor]:
    """Return copies of the rows of each run-time table that `PreparedCall.rest` reads, in the order of `held`.

    bindings: all run-time tensors of the call's pattern, sorted by name.
    constants, q_offset, k_offset: `Call.arguments`.
    """
    key = Call.of(q, k, constants, q_offset, k_offset)
    return [held.rows.clone() for held in prepare_call(key, q.device, bindings).held]


@_held_rows.register_fake
def _(q, k, bindings, *arguments):
    found = Call.of(q, k, *arguments)
    with suspended_torch_modes():
        held = prepare_call(found, q.device, bindings, blank_rest=True).held
        shapes = [(tuple(each.rows.shape), each.rows.dtype) for each in held]
    return [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
