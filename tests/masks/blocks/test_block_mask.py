"""BlockMasks: equal to create_block_mask's once both are read as dense masks, in every table they hold."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexdilated import masks
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
    by_row = (
        table(mask.kv_num_blocks, mask.kv_indices, C),
        table(mask.full_kv_num_blocks, mask.full_kv_indices, C),
    )
    by_column = (
        table(mask.q_num_blocks, mask.q_indices, R),
        table(mask.full_q_num_blocks, mask.full_q_indices, R),
    )
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
