"""What one term of a plan lists: useful and computed pairs, full and partial blocks, bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..blocks._blocks import LISTED_BYTES, UNKNOWN, count_pairs
from ..planning._cost import computed_pairs
from ..planning.lowering._term import Term


class TermCount(NamedTuple):
    """Over all heads and folds; useful pairs as often as they count."""

    useful_pairs: int
    computed_pairs: int
    full_blocks: int
    partial_blocks: int
    table_bytes: int


def sum_counts(counts: Iterable[TermCount]) -> TermCount:
    """All of them together."""
    columns = zip(TermCount(0, 0, 0, 0, 0), *counts, strict=True)
    return TermCount(*(sum(column) for column in columns))


def count_term(term: Term) -> TermCount:
    """A term's lists are built once more for it, as attention builds them."""
    if term.shape != "blocks":
        return _count_plain(term)
    side = term.block_side
    blocks = term.blocks(side, side)
    unknown = (blocks.pairs == UNKNOWN).nonzero().squeeze(1)
    pairs = blocks.pairs.long()
    pairs[unknown] = count_pairs(term.table_rule(), blocks.places(unknown), blocks.shape)
    users = torch.bincount(torch.tensor(blocks.heads))[blocks.table.long()]
    useful, listed = int((pairs * users).sum()), int(users.sum()) * term.folds
    full = int(users[blocks.full].sum()) * term.folds
    return TermCount(term.multiplicity * useful * term.folds, listed * side**2, full, listed - full, blocks.nbytes)


def _count_plain(term: Term) -> TermCount:
    """The same for what is no list of blocks: nothing has to be listed to be counted."""
    computed = computed_pairs(term)
    listed, problems = computed // term.block_side**2, len(term.heads) * term.folds
    full = _full_blocks(term) * problems
    held = listed // problems * (max(term.tables()) + 1) * LISTED_BYTES
    return TermCount(term.counted_pairs(), computed, full, listed - full, held)


def _full_blocks(term: Term) -> int:
    """Whole blocks without a hidden pair, of one head and fold."""
    side = term.block_side
    rows, columns = term.q.num_slots // side, term.k.num_slots // side
    if term.shape == "dense":
        return rows * columns
    lead = term.k.num_slots - term.q.num_slots if term.shape == "strip" else 0
    # The keys up to a row's first query are seen by all of its queries.
    return sum(min((row * side + lead + 1) // side, columns) for row in range(rows))
