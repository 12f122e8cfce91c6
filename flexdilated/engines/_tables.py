"""Calls with a table of selected blocks: their split into the table and other pairs, and the table's problems."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from ..masks.core import Expression, outside_torch_modes
from ..masks.patterns import TableSplit, names, table_split
from ..masks.planning import TableProblems
from ..masks.text import read_text
from ._call import Call


def table_split_of(call: Call) -> TableSplit | None:
    """Split the call's pattern into a table of selected blocks, a mask on their pairs, and a pattern of other pairs.

    The table lists the key blocks that each query block selects. Returns None if the pattern has no such table or it
    cannot be separated, if tokens are not at consecutive positions in natural order, or if the first key does not begin
    a block.
    """
    found = table_split_in_text(call.pattern) if not call.placement and call.rate == 1 else None
    return None if found is None or call.k_offset % found.leaf.block[1] else found


@lru_cache(maxsize=256)
def table_split_in_text(text: str) -> TableSplit | None:
    """Split a pattern, given as JSON, into a table of selected blocks, a mask on their pairs, and other pairs.

    The table lists the key blocks that each query block selects. Returns None if the pattern has no such table or
    it cannot be separated from the rest.
    """
    return table_split(read_text(text)) if '"kind":"selected_blocks"' in text else None


def without_table(call: Call, selection: TableSplit, bindings: Sequence[Tensor]) -> tuple[Call, list[Tensor]]:
    """Return (call, run-time tensors) for `selection.others`, the branch of the pattern without selected blocks.

    selection: split of the call's pattern, in which `others` is not None.
    bindings: run-time tensors of the whole pattern, sorted by name.
    """
    assert selection.others is not None
    return call._replace(pattern=selection.others.text), tensors_of(call, selection.others, bindings)


def tensors_of(call: Call, part: Expression, bindings: Sequence[Tensor]) -> list[Tensor]:
    """Return the run-time tensors of `part`, sorted by name.

    part: part of the call's pattern.
    bindings: all run-time tensors of the pattern, sorted by name.
    """
    tensors = dict(zip(names(read_text(call.pattern)), bindings, strict=True))
    return [tensors[name] for name in names(part)]


@outside_torch_modes
def table_problems(call: Call, selection: TableSplit, bindings: Sequence[Tensor], batch: int) -> list[TableProblems]:
    """Return the problems of a call's table of selected blocks, for each batch entry.

    There is only one item, for all entries, if the tensor of the table and the rule have a single entry.

    selection: the call's pattern, split into the table and the rule that further restricts its pairs.
    bindings: run-time tensors of the pattern, sorted by name.
    batch: number of batch entries.

    Raises ValueError unless the numbers of entries in the table and in the rule are 1 or `batch`.
    """
    leaf, rest = selection.leaf, selection.rest
    (table,) = tensors_of(call, leaf, bindings)
    rows, first = leaf.rows(table, call.extent)
    rule = rest.resolve(dict(zip(names(rest), tensors_of(call, rest, bindings), strict=True)), call.extent)
    rule.require_entries(batch)
    if len(rows) not in (1, batch):
        raise ValueError(
            f"selected blocks must have one table, or one for each of {batch} batch entries; got {len(rows)}"
        )
    return [
        TableProblems.of(call.bound(rule.entry(each)), call.num_kv_heads, rows[each % len(rows)], leaf.block, first)
        for each in range(max(len(rows), rule.num_entries()))
    ]
