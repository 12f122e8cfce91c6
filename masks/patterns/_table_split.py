"""Patterns with a table of keys or key blocks: the split into the table's pairs and other pairs; numbered pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from ..core import And, Every, Expression, Mixture, Or, Pattern
from ._selected_blocks import SelectedBlocks, SelectedTable
from ._sparse import Sparse, SparseTable, packed

_TABLES = (SelectedBlocks, SelectedTable, Sparse, SparseTable)
_FEW_QUERIES, _FEW_KEYS = 15, 8  # largest sides of a block whose table is read as lists of single keys


def lists_keys(leaf: Pattern) -> bool:
    """Return True if a table is read as a list of single keys for each query.

    This holds for sparse matrices, and for tables whose blocks have at most 15 queries and 8 keys.
    """
    if isinstance(leaf, SelectedBlocks | SelectedTable):
        return leaf.block[0] <= _FEW_QUERIES and leaf.block[1] <= _FEW_KEYS
    return isinstance(leaf, Sparse | SparseTable)


@dataclass(frozen=True)
class TableSplit:
    """Split of a pattern into the sum (leaf & rest) + others, with one table of keys or blocks as `leaf`.

    leaf: a `SelectedBlocks` or `Sparse`, or one of their tables.
    others: pattern or mixture; None if there is nothing to add.
    place: index of the branch of the pattern that contains `leaf`.
    places: for each branch of `others`, the index of the branch of the pattern that it is a part of.
    """

    leaf: Any
    rest: Pattern
    others: Expression | None
    place: int = 0
    places: tuple[int, ...] = ()


def table_split(pattern: Expression) -> TableSplit | None:
    """Return the split of a pattern with exactly one table, alone or combined by `|`, `&` and `+`; None for others."""
    branches = pattern.branches()
    chosen = [index for index, branch in enumerate(branches) if _num_tables(branch)]
    if len(chosen) != 1:
        return None
    (place,) = chosen
    own = _split_branch(branches[place])
    if own is None:
        return None
    beside = [(index, branch) for index, branch in enumerate(branches) if index != place]
    if own.others is not None:
        assert isinstance(own.others, Pattern)
        beside.insert(place, (place, own.others))
    places, others = tuple(index for index, _ in beside), [branch for _, branch in beside]
    return TableSplit(own.leaf, own.rest, Mixture.of(*others) if others else None, place, places)


def _num_tables(pattern: Pattern) -> int:
    return sum(isinstance(leaf, _TABLES) for leaf in pattern.leaves())


def _split_branch(pattern: Pattern) -> TableSplit | None:
    # Fields `place` and `places` keep their defaults: only `table_split` knows the branches.
    if isinstance(pattern, _TABLES):
        return TableSplit(pattern, Every(), None)
    if not isinstance(pattern, And | Or):
        return None
    own = [part for part in pattern.direct_parts() if _num_tables(part)]
    if len(own) != 1 or (inner := _split_branch(own[0])) is None:
        return None
    beside = type(pattern).of(*(part for part in pattern.direct_parts() if part is not own[0]))
    rest, others = inner.rest, inner.others
    assert others is None or isinstance(others, Pattern)
    if isinstance(pattern, Or):
        return TableSplit(inner.leaf, _intersection(rest, ~beside), beside if others is None else Or.of(others, beside))
    return TableSplit(inner.leaf, _intersection(rest, beside), None if others is None else And.of(others, beside))


def _intersection(first: Pattern, second: Pattern) -> Pattern:
    return second if first == Every() else And.of(first, second)


def numbered_pairs(pattern: Any) -> tuple[SparseTable, Int64[Tensor, " BS"], tuple[int, ...]]:
    """Number the pairs of `sparse(matrix)` or `selected_keys(table)`; return (pairs, index, shape).

    pairs: the pattern's pairs, one packed matrix for each batch entry, or one for all.
    index: one integer for each number of `pairs.rows`, flattened. Where that number is a key, it is the index of the
        pair's value in the flattened tensor of values; elsewhere 0, which is not read.
    shape: shape of the tensor of values. For `sparse` it is (E,), in the order of the matrix's E values. For
        `selected_keys` it is that of the table without the dim of tables: each value is at the place of its key.

    Raises TypeError for any other pattern, and for one whose tensor is passed by name; ValueError for several matrices
    or tables of one batch entry, and for a pair that occurs twice.
    """
    if isinstance(pattern, Sparse) and pattern.given is not None:
        rows, places = pattern.given.tensor, None if pattern.places is None else pattern.places.tensor
        shape = (pattern.num_values,)
    elif isinstance(pattern, SelectedBlocks) and pattern.given is not None and pattern.block == (1, 1):
        table = pattern.given.tensor.detach().cpu()
        listed = (table >= 0).nonzero()
        index = torch.cat([listed[:, :-1].T, table[table >= 0][None]])
        size = (*table.shape[:-1], max(1, int(table.max()) + 1))
        matrix = torch.sparse_coo_tensor(index, torch.ones(index.shape[1]), size, check_invariants=True)
        rows, places, _ = packed(pattern.name, matrix if table.dim() == 4 else matrix.unsqueeze(0))
        places = None if places is None else (table >= 0).flatten().nonzero().squeeze(1)[places]
        shape = (*table.shape[:-3], *table.shape[-2:])
    else:
        by_name = isinstance(pattern, Sparse | SelectedBlocks) and pattern.given is None
        how = " with the tensor itself, not its name" if by_name else ""
        raise TypeError(f"pattern must be masks.sparse(matrix) or masks.selected_keys(table){how}; got {pattern!r:.80}")
    if rows.shape[1] > 1:
        raise ValueError(f"pattern must have one table of pairs for all heads; got {rows.shape[1]}")
    if places is None:
        raise ValueError("pattern must name each pair once: a pair that is named twice has no single value")
    made = SparseTable.of(rows)
    numbers = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.int64)
    numbers[made.is_key()] = places
    return made, numbers.flatten(), shape
