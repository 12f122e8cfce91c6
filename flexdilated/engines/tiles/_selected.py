"""A call's table of selected blocks, made ready to run: by rows of blocks, or query by query."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Int64
from torch import Tensor

from ...masks import Layout
from ...masks.blocks import UNKNOWN, Blocks
from ...masks.core import Pattern, plans
from ...masks.patterns import Selection, names, selection_of
from ...masks.planning import Term
from ...masks.text import read_text
from .._call_key import CallKey
from .._gather import Whole
from ._query_rows import QueryRows
from ._selected_listed import Listed
from ._tile_calls import plan_calls
from ._tiles import Program, Step

# B batch entries, T tables, R rows of query blocks, W entries of a row

_ROWS_IN_BLOCKS = 16  # queries of a block from which it is a problem of its own

Selected = Program | QueryRows


@lru_cache(maxsize=256)
def selection_in(text: str) -> Selection | None:
    """How a pattern with selected blocks is parted, if it can be."""
    return selection_of(read_text(text)) if '"kind":"selected_blocks"' in text else None


def takes_table(key: CallKey, selection: Selection) -> bool:
    """Whether a call is computed from its table as it is: tokens in order, keys from where a block begins."""
    return key.rate == 1 and not key.placement and key.k_offset % selection.leaf.block[1] == 0


def selected_programs(key: CallKey, selection: Selection, bindings: Sequence[Tensor], batch: int) -> list[Selected]:
    """What computes the pairs of the table and the rest, for each batch entry, or for all where they are alike."""
    tensors = dict(zip(names(read_text(key.pattern)), bindings, strict=True))
    leaf = selection.leaf
    rows, first = leaf.rows(tensors[leaf.name], key.extent)
    rule = selection.rest.resolve({name: tensors[name] for name in names(selection.rest)}, key.extent)
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
