"""Block lists in their compact storage: the same lists come back, and little is kept."""

import pytest
import torch
from hypothesis import given

from flexdilated import masks
from flexdilated.masks.blocks import PackedBlocks
from flexdilated.masks.blocks._blocks import Blocks, build_blocks
from flexdilated.masks.blocks._rule import Rule
from flexdilated.masks.orders._layout import Layout
from flexdilated.masks.planning.lowering._layouts import shared_terms
from tests.support.strategies import Case, cases


def assert_same(found: Blocks, expected: Blocks) -> None:
    assert (found.shape, found.heads) == (expected.shape, expected.heads)
    for name in ("table", "row", "column", "full", "pairs"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


def lists_of(pattern: masks.Pattern | masks.Mixture, num_tokens: int, num_heads: int = 1, rate: int = 1) -> Blocks:
    bound = pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens)
    (term,) = shared_terms(bound.union, 1, bound, rate)
    return term.blocks(128, 128)


@given(cases())
def test_what_is_packed_comes_back(case: Case):
    bound = case.bind()
    (term,) = shared_terms(bound.union, 1, bound, 1)
    for sides, settle in (((16, 16), True), ((8, 3), False), ((8, 3), True), ((64, 128), False)):
        blocks = term.blocks(*sides, settle=settle)
        assert_same(PackedBlocks.pack(blocks).unpack(), blocks)


def test_no_block_at_all():
    nothing = lists_of(masks.causal() & ~masks.causal(), 300)
    assert len(nothing.row) == 0
    assert_same(PackedBlocks.pack(nothing).unpack(), nothing)


def test_more_blocks_than_an_int32_counts():
    """Places in large tables, of many heads, lie far apart."""
    far = torch.tensor([0, 7, 4095], dtype=torch.int32)
    blocks = Blocks(
        1 << 30, 1 << 30, 128, 128, tuple(range(4096)), far, torch.tensor([0, 8388607, 8388607], dtype=torch.int32),
        torch.tensor([8388607, 0, 8388607], dtype=torch.int32), far > 0, far,
    )  # fmt: skip
    assert_same(PackedBlocks.pack(blocks).unpack(), blocks)


LONGNET = masks.longnet([2048, 8192], [1, 4]) & masks.causal()


@pytest.mark.parametrize(
    ("pattern", "rate", "factor"),
    [(masks.causal() & masks.local_window(left=1023, right=0), 1, 60), (LONGNET, 1, 40), (LONGNET, 4, 20)],
    ids=["window", "longnet", "longnet, residue-major"],
)
def test_lists_that_repeat_shrink(pattern, rate: int, factor: int):
    blocks = lists_of(pattern, 1 << 16, num_heads=4, rate=rate)
    assert PackedBlocks.pack(blocks).nbytes * factor < blocks.nbytes


def test_packed_lists_take_room_for_their_heads_too() -> None:
    bound = masks.causal().bind(num_heads=8, num_queries=64, num_keys=64)
    rule = Rule(bound.pattern, 8, (0,), Layout(64).pieces(0), Layout(64).pieces(0))
    packed = PackedBlocks.pack(build_blocks(rule, q_block=8, k_block=8).with_heads((0,) * 8))
    assert packed.nbytes == len(packed.data[0]) + 64
