"""Patterns with run-time tensors that hypothesis draws: packed documents, padding, visible keys."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..masks import Mixture, Pattern
from . import _vocabulary
from ._any_of import any_of
from ._drawn_packings import document_ids
from ._drawn_sizes import AttentionSizes
from ._grammar import Grammar

# The simplest comes first: hypothesis shrinks towards it.
_COMPOSITIONS = ("and", "per_document", "or", "without", "both", "and", "per_document", "per_document")


def run_time_patterns(
    sizes: AttentionSizes, *, max_number: int = 24, closures: bool = False
) -> st.SearchStrategy[Pattern | Mixture]:
    """Patterns of `patterns`, cut by the tensors of a batch, united with them, without them, begun anew by documents.

    One tensor or two, with its values in place, as `masks.documents(ids)`, `masks.lengths(lengths)` and
    `masks.visible_keys(visible)` take it; for these sizes: there is an id for each position up to the last query's and
    key's. They shrink towards `masks.causal() & masks.documents(ids)` of one document.
    """
    most = max(sizes.q_offset + sizes.num_queries, sizes.k_offset + sizes.num_keys)
    return run_time_compositions(Grammar(sizes.num_heads_global, max_number, most, closures), sizes, _vocabulary)


@st.composite
def run_time_compositions(draw: st.DrawFn, grammar: Grammar, sizes: AttentionSizes, words: Any) -> Any:
    """As `run_time_patterns`, in the words of a grammar, and these of run-time tensors."""
    positions = max(sizes.q_offset + sizes.num_queries, sizes.k_offset + sizes.num_keys)
    keys = sizes.k_offset + sizes.num_keys
    spans = [_documents(words, sizes.batch, positions), _lengths(words, sizes.batch, positions)]
    seen = _visible_keys(words, sizes.batch, keys)
    kind = draw(st.sampled_from(_COMPOSITIONS))
    pattern = draw(grammar.patterns() if kind in ("and", "per_document") else grammar.sets())
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
    """Ids of any numbers that grow; a table for each batch entry, or one for all; padding at the end, and between."""
    rows = draw(st.sampled_from([1, batch]))
    ids = draw(document_ids(positions, batch=rows, max_documents=draw(st.sampled_from([5, 40]))))
    hidden = draw(st.sampled_from([-1, -1, -1, 0, 1]))
    ids = torch.where((ids < 0) | (ids == hidden), -1, draw(st.integers(1, 3)) * ids + draw(st.integers(0, 1)))
    longest = draw(st.sampled_from([None, _longest(ids), positions]))
    return words.documents(ids[0] if rows == 1 and draw(st.booleans()) else ids, longest=longest)


def _longest(ids: Tensor) -> int:
    """Tokens of the longest document of any row, at least 1."""
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
