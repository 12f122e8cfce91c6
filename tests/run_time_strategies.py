"""What is drawn with run-time tensors: patterns that use them, beside the dense counts of every batch entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks._run_time import Extent
from tests import oracle
from tests.strategies import Twin, expressions, in_range, sets


@dataclass(frozen=True)
class Packed:
    """A pattern with its tensors and sizes, and counts (B, H, N, M): how often each entry allows a pair."""

    pattern: masks.Pattern | masks.Mixture
    counts: Tensor
    batch: int
    num_heads: int
    num_queries: int
    num_keys: int
    q_offset: int
    k_offset: int

    @property
    def offsets(self) -> dict[str, int]:
        return {"q_offset": self.q_offset, "k_offset": self.k_offset}

    @property
    def sizes(self) -> dict[str, int]:
        named = {"num_heads": self.num_heads, "num_queries": self.num_queries, "num_keys": self.num_keys}
        return named | self.offsets | {"batch": self.batch}

    def bind(self) -> masks.Bound:
        return self.pattern.bind(**self.sizes)

    def __repr__(self) -> str:
        given = {leaf.name: leaf.given.tensor.tolist() for leaf in self.pattern.leaves() if hasattr(leaf, "given")}
        return f"{self.pattern.text} over {self.sizes} with {given}"


@dataclass(frozen=True)
class _Tensor:
    """A run-time pattern, and its dense rule for each batch entry."""

    pattern: masks.Pattern
    rules: list[oracle.Rule]
    ids: Tensor | None = None  # (B, L), where it tells documents apart


@st.composite
def _documents(draw: st.DrawFn, batch: int, extent: Extent) -> _Tensor:
    positions = extent.tokens
    rows = draw(st.sampled_from([1, batch]))
    steps = st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), min_size=positions, max_size=positions)
    ids = torch.tensor([draw(steps) for _ in range(rows)]).cumsum(1)
    if draw(st.booleans()):
        ids[:, positions - draw(st.integers(0, positions)) :] = -1
    given = ids[0] if rows == 1 and draw(st.booleans()) else ids
    ids = ids.expand(batch, -1)
    longest = draw(st.sampled_from([None, _longest(ids), positions]))
    return _Tensor(masks.documents(given, longest=longest), [oracle.documents(row) for row in ids], ids)


def _longest(ids: Tensor) -> int:
    """Tokens of the longest document of any row, at least 1."""
    sizes = [row[row >= 0].unique(return_counts=True)[1] for row in ids]
    return max([1, *(int(size) for size in torch.cat(sizes))])


@st.composite
def _lengths(draw: st.DrawFn, batch: int, extent: Extent) -> _Tensor:
    positions = extent.tokens
    lengths = [draw(st.integers(0, positions)) for _ in range(batch)]
    padding = draw(st.sampled_from(["right", "left"]))
    ids = torch.full((batch, positions), -1)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = 0
    ids = ids.flip(1) if padding == "left" else ids
    pattern = masks.lengths(torch.tensor(lengths), padding=padding)
    return _Tensor(pattern, [oracle.documents(row) for row in ids], ids)


@st.composite
def _visible_keys(draw: st.DrawFn, batch: int, extent: Extent) -> _Tensor:
    rows = draw(st.sampled_from([1, batch]))
    seen = [draw(st.lists(st.booleans(), min_size=extent.keys, max_size=extent.keys)) for _ in range(rows)]
    visible = torch.tensor(seen)
    rules = [oracle.visible_keys(row) for row in visible.expand(batch, -1)]
    return _Tensor(masks.visible_keys(visible), rules)


@st.composite
def packed_cases(draw: st.DrawFn, max_heads: int = 3, largest: int = 40) -> Packed:
    """A pattern that uses one run-time tensor or two: cut by it, restarted by it, united with it, without it."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, max_heads))
    num_keys = draw(st.integers(1, largest))
    same = draw(st.booleans())
    num_queries = num_keys if same else draw(st.integers(1, largest))
    q_offset, k_offset = (0, 0) if same else (draw(st.integers(0, 9)), draw(st.sampled_from([0, 3])))
    extent = Extent(q_offset + num_queries, k_offset + num_keys)
    pattern, rules = draw(_composed(batch, heads, extent))
    queries, keys = torch.arange(q_offset, q_offset + num_queries), torch.arange(k_offset, k_offset + num_keys)
    counts = torch.stack([oracle.counts(rule, range(heads), heads, queries, keys) for rule in rules])
    packed = Packed(pattern, counts, batch, heads, num_queries, num_keys, q_offset, k_offset)
    assume(in_range(packed))
    return packed


@st.composite
def _composed(draw: st.DrawFn, batch: int, heads: int, extent: Extent):
    kind = draw(st.sampled_from(["and", "and", "per_document", "per_document", "or", "without", "both"]))
    sources = [_documents, _lengths] if kind == "per_document" else [_documents, _lengths, _visible_keys]
    first = draw(draw(st.sampled_from(sources))(batch, extent))
    twin: Twin = draw(expressions(heads) if kind in ("and", "per_document") else sets(heads))
    combine: dict[str, Callable[[], tuple]] = {
        "and": lambda: (twin.pattern & first.pattern, [oracle.both(twin.rule, rule) for rule in first.rules]),
        "or": lambda: (twin.pattern | first.pattern, [oracle.either(twin.rule, rule) for rule in first.rules]),
        "without": lambda: (
            twin.pattern & ~first.pattern,
            [oracle.both(twin.rule, oracle.neither(rule)) for rule in first.rules],
        ),
        "per_document": lambda: (
            twin.pattern.per_document(first.pattern),
            [oracle.per_document(twin.rule, row) for row in (first.ids if first.ids is not None else [])],
        ),
    }
    if kind != "both":
        return combine[kind]()
    second = draw(_visible_keys(batch, extent))
    if first.ids is None:
        second = draw(_lengths(batch, extent))
    rules = [oracle.both(twin.rule, a, b) for a, b in zip(first.rules, second.rules, strict=True)]
    return twin.pattern & first.pattern & second.pattern, rules
