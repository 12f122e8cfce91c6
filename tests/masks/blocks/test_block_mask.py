"""BlockMasks, equal to create_block_mask's in every table they hold; and what block lists cost."""

from dataclasses import field
from math import log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexdilated import masks
from flexdilated.masks.blocks import PackedBlocks
from flexdilated.masks.blocks._blocks import Blocks, build_blocks, estimate_blocks
from flexdilated.masks.blocks._rule import Rule
from flexdilated.masks.core._expression import pattern_kind
from flexdilated.masks.core._pattern import Pattern
from flexdilated.masks.orders._layout import Layout
from flexdilated.masks.patterns._block_list import BlockTable
from flexdilated.masks.planning.lowering._layouts import shared_terms
from flexdilated.masks.planning.lowering._term import Term
from tests.support.ladders import LADDERS, scaled
from tests.support.strategies import block_sides, cases, whole_cases

EMPTY, PARTIAL, FULL = 0, 1, 2


def table(counts: Tensor | None, indices: Tensor | None, columns: int) -> Tensor:
    """(heads, rows, columns): whether a block is in the lists. Entries past a row's count do not matter."""
    assert counts is not None
    assert indices is not None
    heads, rows = counts.shape[1:]
    listed = torch.zeros(heads, rows, columns, dtype=torch.bool)
    for head in range(heads):
        for row in range(rows):
            entries = indices[0, head, row, : counts[0, head, row]].long()
            assert len(entries.unique()) == len(entries)
            listed[head, row, entries] = True
    return listed


def verdicts(mask: BlockMask, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """(H, R, C) twice: EMPTY, PARTIAL or FULL, from the key side's lists and from the query side's."""
    H, R, C = shape
    by_row = (table(mask.kv_num_blocks, mask.kv_indices, C), table(mask.full_kv_num_blocks, mask.full_kv_indices, C))
    by_column = (table(mask.q_num_blocks, mask.q_indices, R), table(mask.full_q_num_blocks, mask.full_q_indices, R))
    found = []
    for partial, full in (by_row, tuple(x.mT for x in by_column)):
        assert not (partial & full).any()
        found.append((PARTIAL * partial + FULL * full).expand(H, R, C))
    return found[0], found[1]


def assert_equals_torch(mask: BlockMask, counts: Tensor, sides: tuple[int, int]) -> None:
    """The same block lists, from both sides, and the same mask inside; counts are over slots."""
    H, N, M = counts.shape
    dense = counts > 0
    theirs = create_block_mask(lambda b, h, q, k: dense[h, q, k], None, H, N, M, device="cpu", BLOCK_SIZE=sides)
    shape = (H, -(-N // sides[0]), -(-M // sides[1]))
    expected = verdicts(theirs, shape)
    assert torch.equal(expected[0], expected[1])
    for found in verdicts(mask, shape):
        assert torch.equal(found, expected[0])
    assert torch.equal(mask.to_dense().expand(theirs.to_dense().shape), theirs.to_dense()), "torch reads them otherwise"
    assert mask.seq_lengths == (N, M)
    assert sides == mask.BLOCK_SIZE
    h, q, k = torch.arange(H)[:, None, None], torch.arange(N)[:, None], torch.arange(M)[None, :]
    assert torch.equal(mask.mask_mod(torch.tensor(0), h, q, k).expand(dense.shape), dense)


@settings(max_examples=14)
@given(cases(), block_sides, block_sides)
def test_natural_order(case, q_block, k_block):
    sizes = {"num_heads": case.num_heads, "block_size": (q_block, k_block), **case.sizes}
    here, there = (
        masks.block_mask(case.twin.pattern, case.num_queries, case.num_keys, device=device, **sizes)
        for device in ("cpu", "meta")
    )
    assert_equals_torch(here, case.counts(), (q_block, k_block))
    assert_are_for_accelerators(there, here)


def assert_are_for_accelerators(there: BlockMask, here: BlockMask) -> None:
    """Tables end at the longest list: kernels read partial and full ones by one shape, entries and heads as one dim."""
    for side in ("kv", "q"):
        counts = [getattr(here, f"{kind}{side}_num_blocks") for kind in ("", "full_")]
        partial, full = (getattr(there, f"{kind}{side}_indices") for kind in ("", "full_"))
        assert partial.shape == full.shape == (*counts[0].shape, max(1, *(int(count.max()) for count in counts)))
        assert partial.is_contiguous()
        assert full.is_contiguous()
        assert partial.dtype == full.dtype == torch.int32
        for kind, count in zip(("", "full_"), counts, strict=True):
            found = getattr(there, f"{kind}{side}_num_blocks")
            assert (found.shape, found.stride(), found.dtype) == (count.shape, count.contiguous().stride(), torch.int32)
    assert there.seq_lengths == here.seq_lengths


@settings(max_examples=12)
@given(whole_cases(), st.integers(1, 7), block_sides, block_sides)
def test_residue_order(case, rate, q_block, k_block):
    layout = masks.Layout(case.num_keys, rate)
    sizes = {"num_heads": case.num_heads, "block_size": (q_block, k_block)}
    mask = masks.block_mask(case.twin.pattern, case.num_keys, layout=layout, **sizes)
    slots = layout.positions()
    assert_equals_torch(mask, case.counts()[:, slots][:, :, slots], (q_block, k_block))


def test_tables_stay_small():
    """Full-width views over compact storage: a long sequence costs bytes for listed blocks, not for all."""
    N = 1 << 15
    mask = masks.block_mask(masks.longnet([1024, 4096], [1, 4]), N, num_heads=4, layout=masks.Layout(N, 4))
    tables = [mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices]
    held = sum(table.untyped_storage().nbytes() for table in tables)
    full_width = sum(table.numel() * table.element_size() for table in tables)
    assert all(table.shape[-1] == N // 128 for table in tables)
    assert held < full_width / 8
    # Entries past a row's count are read by no one but must be block numbers all the same.
    assert all(((table >= 0) & (table < N // 128)).all() for table in tables)


def test_masks_are_kept_by_their_sizes():
    pattern = masks.longnet([8], [2])

    def made(**change) -> BlockMask:
        return masks.block_mask(pattern, **{"num_queries": 40, "num_heads": 4} | change)

    assert made() is made()
    assert made(num_keys=40) is made()
    sizes = {"num_queries": 41, "num_keys": 41, "num_heads": 3, "q_offset": 1, "head_offset": 1, "block_size": 64}
    changes = [{name: size} for name, size in sizes.items()]
    changes += [{}, {"block_size": (128, 64)}, {"layout": masks.Layout(40, 2)}]
    assert len({id(made(**change)) for change in changes}) == len(changes)


def term_of(pattern: Pattern, num_tokens: int, num_heads: int = 1, rate: int = 1) -> Term:
    bound = pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens)
    (term,) = shared_terms(bound.union, 1, bound, rate)
    return term


# Looks while lists are built


@pattern_kind("watched")
class Watched(Pattern):
    inner: Pattern
    asked: list[int] = field(default_factory=list)

    def parameters(self):
        return {}

    def mask_mod(self, *, num_heads, device):
        return self.inner.mask_mod(num_heads=num_heads, device=device)

    def count(self, box, *, num_heads):
        self.asked.append(len(box.area))
        return self.inner.count(box, num_heads=num_heads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("segment", "rate"), [(2048, 1), (8192, 4), (32768, 16)])
def test_price_grows_with_the_blocks(segment, rate, causal):
    """The builder asks about some boxes for each listed block, not about every block there is."""
    N = 1 << 17
    inner = masks.dilated(segment, rate, rate // 2)
    watched = Watched(inner & masks.causal() if causal else inner)
    pieces = Layout(N, rate).pieces(0)
    blocks = build_blocks(Rule(watched, 1, (0,), pieces, pieces), q_block=128, k_block=128)
    assert len(blocks.row) < (N // 128) ** 2 / 30
    assert sum(watched.asked) < 2 * log2(N) * len(blocks.row)


def test_scattered_blocks_are_found_where_they_are_listed(monkeypatch):
    """One look at each listed pair of blocks, and one at each block of the whole."""
    tokens = 1 << 15
    pattern, drawn = masks.random_blocks(tokens), 3 * 3 * tokens // 64

    def looked_at(pattern: Pattern) -> int:
        boxes, count = [], BlockTable.count
        with monkeypatch.context() as patch:
            patch.setattr(BlockTable, "count", lambda self, t, box: boxes.append(len(t)) or count(self, t, box))
            term_of(pattern, tokens, num_heads=3).blocks(128, 128)
        return sum(boxes)

    assert looked_at(pattern) == drawn
    assert looked_at(masks.per_head([pattern & masks.causal()] * 3)) == drawn
    united = (pattern | masks.local_window(left=64, right=64) | masks.global_tokens(64)) & masks.causal()
    assert looked_at(united) < 4 * drawn


LONGNET = masks.longnet([2048, 8192], [1, 4]) & masks.causal()


@pytest.mark.parametrize(
    ("pattern", "rate", "factor"),
    [(masks.causal() & masks.local_window(left=1023, right=0), 1, 60), (LONGNET, 1, 40), (LONGNET, 4, 20)],
)
def test_lists_that_repeat_shrink(pattern, rate: int, factor: int):
    blocks: Blocks = term_of(pattern, 1 << 16, num_heads=4, rate=rate).blocks(128, 128)
    assert PackedBlocks.pack(blocks).nbytes * factor < blocks.nbytes


# Estimates


def ladder(name: str) -> masks.Mixture:
    return masks.longnet(*scaled(LADDERS[name], 2)) & masks.causal()


@pytest.mark.parametrize(
    ("pattern", "num_tokens", "num_heads", "rate", "error"),
    [
        # A first row that sees everyone does not stand for the others.
        (masks.global_tokens(64) | masks.local_window(left=512, right=512), 1 << 15, 1, 1, 0.1),
        (masks.first_tokens(4) | masks.local_window(left=1023, right=0), 1 << 15, 1, 1, 0.1),
        ((masks.strided(128) | masks.fixed(256, summary=100)) & masks.causal(), 1 << 15, 1, 1, 0.1),
        (ladder("longnet-5"), 8192, 4, 16, 0.15),
        (ladder("paper-5"), 8192, 4, 1, 0.15),
        (ladder("gigapath-5"), 8192, 4, 16, 0.15),
        # Five tables, of which no one is sampled twice.
        (masks.per_head([masks.local_window(left=100 * n * n, right=0) & ~masks.first_tokens(1) for n in range(1, 6)]),
         8192, 5, 1, 0.1),
    ],
)  # fmt: skip
def test_estimates_are_near(pattern, num_tokens, num_heads, rate, error):
    """What the planner weighs: the mean number of blocks that a head lists, from a sample."""
    for branch in pattern.branches():
        term = term_of(branch, num_tokens, num_heads=num_heads, rate=rate)
        listed = len(term.blocks(128, 128).row) / (max(term.tables()) + 1)
        assert estimate_blocks(term.table_rule(), q_block=128, k_block=128).blocks == pytest.approx(listed, rel=error)


def test_estimates_of_opaque_rules_take_a_bounded_sample(monkeypatch):
    """A million tokens have 2 ** 26 blocks; the planner looks at a sample of them, and evaluates none."""
    pattern, N = masks.custom(lambda b, h, q, k: q == k), 1 << 20
    rule, looked, count = term_of(pattern, N).table_rule(), [], type(pattern).count
    monkeypatch.setattr(
        type(pattern), "count", lambda self, box, **heads: looked.append(len(box.area)) or count(self, box, **heads)
    )
    monkeypatch.setattr(Rule, "allowed", lambda *_: pytest.fail("evaluated"))
    assert estimate_blocks(rule, q_block=128, k_block=128).blocks == (N // 128) ** 2
    assert sum(looked) < 1 << 18
