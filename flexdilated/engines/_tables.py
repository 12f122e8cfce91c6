"""Calls with a table of keys or blocks: their split into the table and other pairs, and the table's problems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from torch import Tensor

from .._torch_private import graph_constant
from ..masks.core import Bound, Every, Expression, outside_torch_modes
from ..masks.patterns import SelectedBlocks, TableSplit, lists_keys, names, table_split
from ..masks.planning import KeyLists, TableProblems
from ..masks.text import read_text
from ._call import Call

Entry = TypeVar("Entry")


def table_split_of(call: Call) -> TableSplit | None:
    """Return the call's pattern, split into a table of keys or blocks, a mask on its pairs, and other pairs.

    The table lists the keys of each query, or the key blocks that each query block selects. The result is None unless
    the pattern has exactly one such table, this can be separated from the other pairs, and tokens are at consecutive
    positions in natural order. It is None, too, if the first key does not begin a block, unless the table is read as
    lists of single keys.
    """
    found = table_split_in_text(call.pattern) if not call.placement and call.rate == 1 else None
    if found is None or lists_keys(found.leaf):
        return found
    return None if call.k_offset % found.leaf.block[1] else found


@lru_cache(maxsize=256)
def table_split_in_text(text: str) -> TableSplit | None:
    """Return a pattern, given as JSON, split into a table of keys or blocks, a mask on its pairs, and other pairs.

    The result is None unless the pattern has exactly one such table and this can be separated from the other pairs.
    """
    has_table = any(f'"kind":"{kind}"' in text for kind in ("selected_blocks", "sparse"))
    return table_split(read_text(text)) if has_table else None


class ListedParts(NamedTuple):
    """Split of a pattern into the pairs of a table of single keys and other pairs, as constants of a graph.

    own, others: the two patterns in JSON; others is "" if there are no other pairs.
    own_bindings, other_bindings: indices of their run-time tensors among those of the whole pattern, sorted by name.
    place: index, in the whole pattern, of the branch with the table.
    places: for each branch of `others`, the index of the branch of the whole pattern that it is a part of.
    width: most keys of a query; 0 if the values of the table decide it.
    """

    own: str
    own_bindings: tuple[int, ...]
    others: str
    other_bindings: tuple[int, ...]
    place: int
    places: tuple[int, ...]
    width: int

    @property
    def keeps_places(self) -> bool:
        """True if each branch has the same index in `own` or `others` as in the whole pattern.

        Dropout depends on that index.
        """
        return self.place == 0 and self.places == tuple(range(len(self.places)))


@graph_constant
def listed_parts(text: str) -> ListedParts | None:
    """Return a pattern, given as JSON, split by its table of single keys.

    The result is None if that of `table_split_in_text` is, or if the table is not read as lists of single keys.
    """
    return _listed_parts(text)


@lru_cache(maxsize=256)
def _listed_parts(text: str) -> ListedParts | None:
    split = table_split_in_text(text)
    if split is None or not lists_keys(split.leaf):
        return None
    every, leaf = names(read_text(text)), split.leaf
    width = leaf.most * leaf.block[1] if isinstance(leaf, SelectedBlocks) else 0
    if split.others is None:
        return ListedParts(text, tuple(range(len(every))), "", (), split.place, (), width)
    own = leaf if split.rest == Every() else leaf & split.rest
    of_own, of_others = ([every.index(name) for name in names(part)] for part in (own, split.others))
    return ListedParts(own.text, tuple(of_own), split.others.text, tuple(of_others), split.place, split.places, width)


def without_table(call: Call, selection: TableSplit, bindings: Sequence[Tensor]) -> tuple[Call, list[Tensor]]:
    """Return (call, run-time tensors) for `selection.others`, the part of the pattern without the table.

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


def require_batch(entries: int, batch: int) -> None:
    """Raise ValueError unless a table has one batch entry or as many as the call."""
    if entries not in (1, batch):
        raise ValueError(
            f"a table of keys or blocks must have one batch entry, or one for each of {batch}; got {entries}"
        )


@outside_torch_modes
def table_problems(call: Call, selection: TableSplit, bindings: Sequence[Tensor], batch: int) -> list[TableProblems]:
    """Return a list with the problems of a call's table of selected blocks for each batch entry.

    It has one item for the whole batch if the table and the rule have a single entry.

    selection: split of the call's pattern into the table, the rule that further restricts its pairs, and other pairs.
    bindings: run-time tensors of the pattern, sorted by name.
    batch: number of batch entries.

    Raises ValueError unless the numbers of entries in the table and in the rule are 1 or `batch`, and TypeError or
    ValueError for a table whose dtype, shape or values do not fit the call.
    """
    leaf = selection.leaf
    (table,) = tensors_of(call, leaf, bindings)
    rows, first = leaf.rows(table, call.extent)
    entries = _rules_and_tables(call, selection, bindings, batch, rows)
    return [TableProblems.of(bound, call.num_kv_heads, own, leaf.block, first) for bound, own in entries]


@outside_torch_modes
def key_lists(call: Call, selection: TableSplit, bindings: Sequence[Tensor], batch: int) -> KeyLists:
    """Return, for each query, the keys that the call's table of single keys lists and the rule of its pairs allows.

    Arguments and errors are those of `table_problems`.
    """
    (table,) = tensors_of(call, selection.leaf, bindings)
    rows = selection.leaf.key_rows(table, call.extent)
    return KeyLists.of(list(_rules_and_tables(call, selection, bindings, batch, rows)))


def _rules_and_tables(
    call: Call, selection: TableSplit, bindings: Sequence[Tensor], batch: int, entries: Sequence[Entry]
) -> Iterator[tuple[Bound, Entry]]:
    """Yield (the rule that further restricts the table's pairs, with the call's sizes; the table) of each batch entry.

    Yields once, for all batch entries, if the rule and the table have a single entry.

    entries: the table of each batch entry, or a single one for all.

    Raises ValueError unless the numbers of entries in the table and in the rule are 1 or `batch`.
    """
    rest = selection.rest
    rule = rest.resolve(dict(zip(names(rest), tensors_of(call, rest, bindings), strict=True)), call.extent)
    rule.require_entries(batch)
    require_batch(len(entries), batch)
    for each in range(max(len(entries), rule.num_entries())):
        yield call.bound(rule.entry(each)), entries[each % len(entries)]
