"""What is drawn with run-time tensors: patterns that use them, beside the dense counts of every batch entry."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.testing import strategies as fst
from flexdilated.testing._drawn_inputs import in_range
from flexdilated.testing._drawn_patterns import run_time_compositions
from tests.support import oracle
from tests.support.strategies import grammar
from tests.support.twins import BatchTwin, Twin


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


def run_time_words(num_positions: int, num_queries: int) -> SimpleNamespace:
    """Constructors of run-time patterns as twins, for positions below num_positions, queries below num_queries."""

    def spans(pattern: masks.Pattern, ids: Tensor) -> BatchTwin:
        return BatchTwin(pattern, tuple(map(oracle.documents, ids)), ids)

    def documents(ids: Tensor, *, longest: int | None) -> BatchTwin:
        return spans(masks.documents(ids, longest=longest), torch.atleast_2d(ids))

    def lengths(real: Tensor, *, padding: str) -> BatchTwin:
        ids = torch.full((len(real), num_positions), -1)
        for row, length in zip(ids, real.tolist(), strict=True):
            row[:length] = 0
        return spans(masks.lengths(real, padding=padding), ids.flip(1) if padding == "left" else ids)

    def visible_keys(visible: Tensor) -> BatchTwin:
        return BatchTwin(masks.visible_keys(visible), tuple(map(oracle.visible_keys, visible)))

    def same_document(q_ids: Tensor, k_ids: Tensor) -> BatchTwin:
        lead = max(q_ids.dim(), k_ids.dim())
        sides = [torch.atleast_2d(ids) for ids in (q_ids, k_ids)]
        sides = [ids.expand(max(map(len, sides)), -1) for ids in sides] if lead == 2 else sides
        return BatchTwin(masks.same_document(q_ids, k_ids), tuple(map(oracle.same_document, *sides)))

    def per_sample(twins: Sequence[Twin], which: Tensor) -> BatchTwin:
        pattern = masks.per_sample([twin.pattern for twin in twins], which)
        return BatchTwin(pattern, tuple(twins[index].rule for index in which))

    def mask(allowed: Tensor) -> BatchTwin:
        return BatchTwin(
            masks.mask(allowed), tuple(map(oracle.mask, allowed if allowed.dim() == 4 else [allowed[None]]))
        )

    def sparse(matrix: Tensor) -> BatchTwin:
        allowed = matrix.to_dense().bool()
        allowed = allowed.view(1, 1, *allowed.shape) if allowed.dim() == 2 else allowed
        return BatchTwin(
            masks.sparse(matrix), tuple(map(oracle.sparse, allowed if allowed.dim() == 4 else allowed[:, None]))
        )

    def selected_blocks(blocks: Tensor, *, block: tuple[int, int], most: int) -> BatchTwin:
        tables = blocks if blocks.dim() == 4 else blocks[None]
        rules = tuple(oracle.selected_blocks(rows, block, -(-num_queries // block[0])) for rows in tables)
        return BatchTwin(masks.selected_blocks(blocks, block=block, most=most), rules)

    return SimpleNamespace(
        documents=documents,
        same_document=same_document,
        lengths=lengths,
        visible_keys=visible_keys,
        mask=mask,
        sparse=sparse,
        per_sample=per_sample,
        selected_blocks=selected_blocks,
    )


@st.composite
def packed_cases(
    draw: st.DrawFn,
    max_heads: int = 3,
    largest: int = 40,
    *,
    whole: bool = False,
    closures: bool = True,
    **kinds: Sequence[str],
) -> Packed:
    """A pattern that uses one run-time tensor or two: cut by it, restarted by it, united with it, without it.

    whole: of self-attention alone. closures: also of functions that no other process can read.
    """
    sizes = draw(fst.attention_sizes(max_heads=max_heads, max_batch=3, max_tokens=largest))
    if not whole and not draw(st.booleans()):
        other, k_offset = draw(st.integers(1, largest)), draw(st.sampled_from([0, 3]))
        sizes = replace(sizes, num_queries=other, q_offset=draw(st.integers(0, 9)), k_offset=k_offset)
    stop = sizes.q_offset + sizes.num_queries
    words = run_time_words(max(stop, sizes.k_offset + sizes.num_keys), stop)
    twin = draw(run_time_compositions(grammar(sizes.num_heads, closures=closures), sizes, words, **kinds))
    queries = torch.arange(sizes.q_offset, sizes.q_offset + sizes.num_queries)
    keys = torch.arange(sizes.k_offset, sizes.k_offset + sizes.num_keys)
    heads = range(sizes.num_heads), sizes.num_heads
    counts = torch.stack([oracle.counts(rule, *heads, queries, keys) for rule in twin.rules])
    counts = counts.expand(sizes.batch, -1, -1, -1)
    shape = (sizes.batch, sizes.num_heads, sizes.num_queries, sizes.num_keys)
    packed = Packed(twin.pattern, counts, *shape, sizes.q_offset, sizes.k_offset)
    assume(in_range(packed.bind))
    return packed
