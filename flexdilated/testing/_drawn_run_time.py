"""Strategies for patterns with run-time tensors: documents, lengths, visible keys, selected blocks."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..masks import Mixture, Pattern
from . import _vocabulary
from ._drawn_inputs import AttentionSizes, any_of, document_ids
from ._drawn_patterns import Grammar

# The simplest choice comes first: hypothesis shrinks towards it.
_RUN_TIME_COMPOSITIONS = (
    *("and", "per_document", "or", "without", "both", "and", "per_document", "per_document"),
    *("selected", "selected beside", "selected in documents"),
)


def run_time_patterns(
    sizes: AttentionSizes, *, max_number: int = 24, closures: bool = False
) -> st.SearchStrategy[Pattern | Mixture]:
    """Patterns of `patterns` combined by &, |, & ~ or `per_document` with one or two run-time patterns of a batch.

    The run-time patterns are `masks.documents(ids)`, `masks.lengths(lengths)`, `masks.visible_keys(visible)` and
    `masks.selected_blocks(blocks, ...)`, with tensors of values that fit `sizes`: ids cover all positions up to the
    last query and key. They shrink towards `masks.causal() & masks.documents(ids)` of one document.
    """
    most = max(sizes.q_offset + sizes.num_queries, sizes.k_offset + sizes.num_keys)
    return run_time_compositions(Grammar(sizes.num_heads_global, max_number, most, closures), sizes, _vocabulary)


@st.composite
def run_time_compositions(draw: st.DrawFn, grammar: Grammar, sizes: AttentionSizes, words: Any) -> Any:
    """Like `run_time_patterns`, with patterns of `grammar` and run-time constructors of `words`."""
    positions = max(sizes.q_offset + sizes.num_queries, sizes.k_offset + sizes.num_keys)
    keys = sizes.k_offset + sizes.num_keys
    spans = [_documents(words, sizes.batch, positions), _lengths(words, sizes.batch, positions)]
    seen = _visible_keys(words, sizes.batch, keys)
    kind = draw(st.sampled_from(_RUN_TIME_COMPOSITIONS))
    pattern = draw(grammar.patterns() if kind in ("and", "per_document") else grammar.sets())
    if kind.startswith("selected"):
        chosen = draw(_selected_blocks(words, sizes))
        if kind == "selected":
            return draw(st.sampled_from([chosen, pattern & chosen, pattern | chosen, pattern & ~chosen]))
        beside = pattern | chosen
        return draw(grammar.sets()) & beside if kind == "selected beside" else beside & draw(spans[0])
    if kind == "both":
        one, other = draw(st.sampled_from([(spans[0], seen), (spans[1], seen), (spans[0], spans[1])]))
        return pattern & draw(one) & draw(other)
    if kind == "per_document":
        return pattern.per_document(draw(any_of(*spans)))
    given = draw(any_of(spans[0], seen, seen, spans[1], spans[1]))
    if kind == "and":
        return pattern & given
    return pattern | given if kind == "or" else pattern & ~given


@st.composite
def _documents(draw: st.DrawFn, words: Any, batch: int, positions: int) -> Any:
    """Ascending ids, by batch entry or for all entries, with padding at the end and between documents."""
    rows = draw(st.sampled_from([1, batch]))
    ids = draw(document_ids(positions, batch=rows, max_documents=draw(st.sampled_from([5, 40]))))
    hidden = draw(st.sampled_from([-1, -1, -1, 0, 1]))
    ids = torch.where((ids < 0) | (ids == hidden), -1, draw(st.integers(1, 3)) * ids + draw(st.integers(0, 1)))
    longest = draw(st.sampled_from([None, _longest(ids), positions]))
    return words.documents(ids[0] if rows == 1 and draw(st.booleans()) else ids, longest=longest)


def _longest(ids: Tensor) -> int:
    """Length of the longest document in any row, at least 1."""
    return max([1, *(int((row == number).sum()) for row in ids for number in row[row >= 0].unique())])


@st.composite
def _lengths(draw: st.DrawFn, words: Any, batch: int, positions: int) -> Any:
    numbers = st.lists(st.integers(0, positions), min_size=batch, max_size=batch)
    return words.lengths(torch.tensor(draw(numbers)), padding=draw(st.sampled_from(["right", "left"])))


@st.composite
def _visible_keys(draw: st.DrawFn, words: Any, batch: int, keys: int) -> Any:
    rows = draw(st.sampled_from([1, batch]))
    seen = st.lists(st.booleans(), min_size=keys, max_size=keys)
    return words.visible_keys(torch.tensor([draw(seen) for _ in range(rows)]))


@st.composite
def _selected_blocks(draw: st.DrawFn, words: Any, sizes: AttentionSizes) -> Any:
    """Tables with any block sides, for all heads or groups of heads; row 0 is block 0 or the first query's block."""
    block = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    stop, heads = sizes.q_offset + sizes.num_queries, sizes.num_heads_global
    first = draw(st.sampled_from([0, sizes.q_offset // block[0]]))
    columns = -(-(sizes.k_offset + sizes.num_keys) // block[1])
    most = draw(st.integers(1, min(columns, 5) + 1))
    tables = draw(st.sampled_from([number for number in range(1, heads + 1) if heads % number == 0]))
    shape = draw(st.sampled_from([1, sizes.batch])), tables, -(-stop // block[0]) - first, most
    entries = st.lists(st.integers(-1, columns - 1), min_size=shape[2] * most, max_size=shape[2] * most)
    rows = torch.tensor([draw(entries) for _ in range(shape[0] * tables)]).view(shape)
    return words.selected_blocks(rows[0] if shape[0] == 1 and draw(st.booleans()) else rows, block=block, most=most)
