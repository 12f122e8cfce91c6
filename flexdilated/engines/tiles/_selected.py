"""A call's table of selected blocks, made ready to run: no plan is made of its values, and none is kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...masks.core import plans
from ...masks.patterns import Selection, names
from .._call_key import CallKey
from .._selection import tensors_of
from ._query_rows import QueryRows
from ._selected_listed import Listed


@plans
def selected_rows(key: CallKey, selection: Selection, bindings: Sequence[Tensor], batch: int) -> list[QueryRows]:
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
    listed = (Listed.of(key, rule.entry(each), rows[each % len(rows)], leaf.block, first) for each in entries)
    return [QueryRows(each) for each in listed]
