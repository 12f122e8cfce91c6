"""A call's table of selected blocks, made ready to run: by rows of blocks, or query by query."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from ...masks import Layout
from ...masks.blocks import UNKNOWN, Blocks
from ...masks.core import Pattern, plans
from ...masks.patterns import Selection, names
from ...masks.planning import Term
from .._call_key import CallKey
from .._gather import Whole
from .._selection import tensors_of
from ._query_rows import QueryRows
from ._selected_listed import Listed
from ._tile_calls import plan_calls
from ._tiles import Program, Step

# B batch entries, T tables, R rows of query blocks, W entries of a row

_ROWS_IN_BLOCKS = 16  # queries of a block from which it is a problem of its own

Selected = Program | QueryRows


def selected_programs(key: CallKey, selection: Selection, bindings: Sequence[Tensor], batch: int) -> list[Selected]:
    """What computes the pairs of the table and the rest, for each batch entry, or for all where they are alike."""
    leaf, rest = selection.leaf, selection.rest
    (table,) = tensors_of(key, leaf, bindings)
    rows, first = leaf.rows(table, key.extent)
    rule = rest.resolve(dict(zip(names(rest), tensors_of(key, rest, bindings), strict=True)), key.extent)
    rule.require_entries(batch)
    if len(rows) not in (1, batch):
        raise ValueError(
            f"selected blocks must have one table, or one for each of {batch} batch entries; got {len(rows)}"
        )
    entries = range(max(len(rows), rule.num_entries()))
    return [_selected(key, rule.entry(entry), rows[entry % len(rows)], leaf.block, first) for entry in entries]


@plans
def _selected(
    key: CallKey, rule: Pattern, rows: Int64[Tensor, "T R W"], block: tuple[int, int], first: int
) -> Selected:
    listed = Listed.of(key, rule, rows, block, first)
    if block[0] < _ROWS_IN_BLOCKS or key.q_offset % block[0]:
        return QueryRows(listed)
    return _program(listed)


def _program(listed: Listed) -> Program:
    """One step of block lists in the order of the tokens."""
    key, (q_block, k_block) = listed.key, listed.block
    layouts = Layout(key.num_queries, 1), Layout(key.num_keys, 1)
    all_heads = tuple(range(key.num_heads))
    heads = tuple(head * listed.num_tables // key.num_heads for head in all_heads)
    term = Term.of(key.bound(listed.rule), listed.rule, "blocks", 1, *layouts, heads=all_heads)
    table, row, column, full = listed.sorted()
    unknown = torch.full_like(row, UNKNOWN).int()
    sizes = (key.num_queries, key.num_keys, q_block, k_block)
    blocks = Blocks(*sizes, heads, table.int(), row.int(), column.int(), full, unknown)
    calls = plan_calls(term.slot_rule(tuple(heads.index(each) for each in range(listed.num_tables))), blocks)
    groups = key.num_heads // key.num_kv_heads
    sides = (
        Whole(layouts[0], layouts[0], all_heads),
        Whole(layouts[1], layouts[1], tuple(h // groups for h in all_heads)),
    )
    return Program(layouts[0], layouts[0], (Step(term, *sides, calls, calls.hidden, True),), True)
