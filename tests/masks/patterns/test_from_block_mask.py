"""Patterns of BlockMasks: the pairs that compiled FlexAttention computes, whatever lists, lengths and rule it has."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention, noop_mask

import flexdilated as fd
from flexdilated import masks
from tests.support.custom_rules import window

pytestmark = pytest.mark.usefixtures("without_masks")

IDS = torch.tensor([0, 0, 1, 1, 1, 2, 0, 3] * 6).view(3, 16).repeat_interleave(3, 1)


def causal(b, h, q, k):
    return q >= k


def of_entry(b, h, q, k):
    return (q * 3 + k * 5 + h + b) % 4 > 1


def of_head(b, h, q, k):
    return (q + k * 3 + h) % 3 > 0


def same_document(b, h, q, k):
    return IDS[b, q] == IDS[b, k]


def without_entry(b, h, q, k):
    """Takes only dtype and device of b, as and_masks does."""
    return b.new_ones((), dtype=torch.bool) & (q < k + 5)


def tables(block_mask: BlockMask) -> list[Any]:
    """Numbers and indices, of partial blocks and of full ones."""
    return [
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ]


def pairs(block_mask: BlockMask, batch: int, heads: int) -> Tensor:
    """Allowed pairs (batch, heads, queries, keys), by a loop over the lists as the kernel has it."""
    queries, keys = block_mask.seq_lengths
    q_side, k_side = block_mask.BLOCK_SIZE
    grid = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None], torch.arange(queries)[:, None]
    ruled = block_mask.mask_mod(*grid, torch.arange(keys)).expand(batch, heads, queries, keys)
    allowed = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for (numbers, indices), rule in zip(tables(block_mask), (ruled, torch.ones_like(ruled)), strict=True):
        for b, h, row in torch.cartesian_prod(*map(torch.arange, (batch, heads, -(-queries // q_side)))).tolist():
            if numbers is None:
                continue
            entry = b % len(numbers), h % numbers.shape[1], row
            for column in indices[entry][: numbers[entry]].tolist():
                block = slice(row * q_side, (row + 1) * q_side), slice(column * k_side, (column + 1) * k_side)
                allowed[b, h][block] |= rule[b, h][block]
    return allowed


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v  # rows without keys give 0


def lists(classes: Tensor, kind: int, generator: torch.Generator, *, width: int) -> tuple[Tensor, Tensor]:
    """Number and indices of the blocks with this class, in any order; the entries past a row's number are arbitrary."""
    chosen = classes == kind
    order = (torch.rand(classes.shape, generator=generator) + ~chosen).argsort(-1)
    spare = torch.randint(-9, 9, (*classes.shape[:-1], width), generator=generator)
    indices = torch.cat([order.masked_fill(~chosen.gather(-1, order), 99), spare], -1)[..., :width]
    return chosen.sum(-1), indices


def drawn_lists(
    seed: int, rule: Callable, shape: tuple[int, int], lengths: tuple[int, int], sides: tuple[int, int], **options
) -> BlockMask:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (-(-length // side) for length, side in zip(lengths, sides, strict=True))
    full, spare, trimmed = (
        options.get(name, default) for name, default in (("full", True), ("spare", 0), ("trimmed", 0))
    )
    classes = torch.randint(0, 3 if full else 2, (*shape, rows + spare, columns), generator=generator)
    if seed % 3 == 0:
        classes[:, :, :1] = 0  # rows without blocks
    if seed % 3 == 1:
        classes = classes[:1, :1].expand_as(classes)  # equal lists
    width = max(1, int((classes == 1).sum(-1).max()), int((classes == 2).sum(-1).max())) if trimmed else columns + spare
    tables = [each.int() for kind in (1, 2)[: 1 + full] for each in lists(classes, kind, generator, width=width)]
    return BlockMask.from_kv_blocks(
        *tables, BLOCK_SIZE=sides, mask_mod=rule, seq_lengths=lengths, compute_q_blocks=False
    )


@st.composite
def block_masks(draw) -> BlockMask:
    lengths, sides = (draw(st.tuples(*[st.integers(1, most)] * 2)) for most in (40, 24))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rules = [causal, of_head, noop_mask, without_entry, window(7), *[of_entry, same_document] * (shape[0] > 1)]
    rule = draw(st.sampled_from(rules))
    if draw(st.booleans()):
        separate = draw(st.booleans())
        return create_block_mask(rule, *shape, *lengths, device="cpu", BLOCK_SIZE=sides, separate_full_blocks=separate)
    full, spare, trimmed = draw(st.booleans()), draw(st.integers(0, 2)), draw(st.booleans())
    seed = draw(st.integers(0, 1000))
    return drawn_lists(seed, rule, shape, lengths, sides, full=full, spare=spare, trimmed=trimmed)


@settings(max_examples=16)
@given(block_masks(), st.data())
def test_a_pattern_allows_the_pairs_of_the_lists(block_mask: BlockMask, data) -> None:
    queries, keys = block_mask.seq_lengths
    batch, heads = (size if size > 1 else data.draw(st.integers(1, 3)) for size in block_mask.kv_indices.shape[:2])
    if len(block_mask.kv_indices) == 1 and block_mask.mask_mod in (of_entry, same_document):
        batch = 1
    pattern, allowed = masks.custom(block_mask), pairs(block_mask, batch, heads)
    bound = pattern.bind(num_heads=heads, num_queries=queries, num_keys=keys, batch=batch)
    grid = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None], torch.arange(queries)[:, None]
    assert torch.equal(bound.mask_mod()(*grid, torch.arange(keys)).expand_as(allowed), allowed)
    q, k, v = x = [torch.randn(batch, heads, size, 4, dtype=torch.float64) for size in (queries, keys, keys)]
    for each in x:
        each.requires_grad_()
    want = attention(q, k, v, allowed)
    for engine in (None, "portable", "reference"):
        torch.testing.assert_close(fd.attend(q, k, v, pattern, engine=engine), want)
    at = data.draw(st.integers(0, queries - 1))
    torch.testing.assert_close(fd.attend(q[:, :, at:], k, v, pattern, q_offset=at), want[:, :, at:])
    if allowed.any(-1).all():
        outs = fd.attend(q, k, v, pattern), want
        found, expected = (torch.autograd.grad(out.square().sum(), x, retain_graph=True) for out in outs)
        torch.testing.assert_close(found, expected)


def assert_attends(pattern: masks.Pattern | masks.Mixture, allowed: Tensor) -> None:
    batch, heads, queries, keys = allowed.shape
    q, k, v = (torch.randn(batch, heads, size, 8, dtype=torch.float64) for size in (queries, keys, keys))
    torch.testing.assert_close(fd.attend(q, k, v, pattern), attention(q, k, v, allowed))


@pytest.mark.thorough
def test_the_pairs_are_those_of_compiled_flex_attention() -> None:
    """As `pairs`, with which the other tests compare, says."""
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    for seed in range(3):
        block_mask = drawn_lists(seed, of_entry, (2, 2), (44, 52), (16, 12))
        q, k, v = (torch.randn(2, 2, length, 16) for length in (44, 52, 52))
        found = fd.attend(q, k, v, masks.custom(block_mask))
        torch.testing.assert_close(found, attention(q, k, v, pairs(block_mask, 2, 2)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found, compiled(q, k, v, block_mask=block_mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [causal, window(5), of_head, same_document, noop_mask, without_entry])
def test_the_lists_of_the_rule_leave_the_rule_alone(rule: Callable) -> None:
    shape = 3 if rule is same_document else 1, 2
    for separate in (True, False):
        made = create_block_mask(rule, *shape, 30, 40, device="cpu", BLOCK_SIZE=(8, 16), separate_full_blocks=separate)
        pattern = masks.custom(made)
        assert "block_list" not in pattern.text
        assert pattern == masks.custom(made)
        if rule is not same_document:
            assert pattern.factors()[0] == (masks.every() if rule is noop_mask else masks.custom(rule))
            assert masks.describe(pattern, 30, 40, num_heads=2).useful_pairs == int(pairs(made, 1, 2).sum())


def test_two_of_them_combine() -> None:
    first, second = (drawn_lists(seed, of_entry, (3, 1), (40, 40), (8, 8)) for seed in (2, 5))
    assert_attends(masks.custom(first) & ~masks.custom(second), pairs(first, 3, 2) & ~pairs(second, 3, 2))


def test_lists_are_copied() -> None:
    made = drawn_lists(2, of_entry, (2, 1), (40, 40), (8, 8))
    pattern, allowed = masks.custom(made), pairs(made, 2, 1)
    for table in chain(*tables(made)):
        table.zero_()
    made.seq_lengths, made.mask_mod = (8, 8), causal
    assert_attends(pattern, allowed)


def test_adjusted_and_sliced_ones() -> None:
    """`_adjust` crops to the upper left; a slice has a new rule, and lengths that its maker sets."""
    whole = create_block_mask(causal, 2, 2, 64, 64, device="cpu", BLOCK_SIZE=16)
    adjusted, part = whole._adjust(40, 40), whole[:1, :, 1:3]
    assert_attends(masks.custom(adjusted), pairs(adjusted, 1, 2))
    with pytest.raises(ValueError, match="Cannot use mask_mod from a sliced BlockMask"):
        masks.custom(whole[:1])
    part.mask_mod, part.seq_lengths = lambda b, h, q, k: q + 16 >= k, (32, 64)
    assert_attends(masks.custom(part), pairs(part, 1, 2))


def test_other_lengths_heads_and_entries() -> None:
    """Fewer positions take the upper left part; more of anything is refused."""
    made = create_block_mask(causal, None, None, 40, 30, device="cpu", BLOCK_SIZE=8)
    assert_attends(masks.custom(made), pairs(made, 1, 2)[..., :25, :25])
    for queries, keys, offset in ((41, 30, 0), (40, 31, 0), (1, 30, 40)):
        q, k = torch.randn(1, 1, queries, 8), torch.randn(1, 1, keys, 8)
        with pytest.raises(ValueError, match=f"40 queries and 30 keys.*got {queries + offset} queries and {keys} keys"):
            fd.attend(q, k, k, masks.custom(made), q_offset=offset)
    pattern = masks.custom(create_block_mask(of_entry, 2, 4, 40, 40, device="cpu", BLOCK_SIZE=8))
    with pytest.raises(ValueError, match="lists for 4 heads needs calls of as many; got 2"):
        fd.attend(*torch.randn(3, 2, 2, 40, 8), pattern)
    with pytest.raises(ValueError, match="one row, or one for each of 3 batch entries; got 2"):
        fd.attend(*torch.randn(3, 3, 4, 40, 8), pattern)


def made_of(numbers, indices, **options) -> BlockMask:
    made = BlockMask.from_kv_blocks(torch.tensor([[[1, 1]]]), torch.tensor([[[[0, 1], [0, 1]]]]), BLOCK_SIZE=8)
    made.kv_num_blocks, made.kv_indices = torch.tensor(numbers), torch.tensor(indices)
    for name, value in options.items():
        setattr(made, name, value)
    return made


ONE = torch.tensor([[[1, 1]]]), torch.tensor([[[[0, 1], [0, 1]]]])
TWO = [table.expand(2, *table.shape[1:]) for table in ONE]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (made_of([[[1, 2]]], [[[[0, 1], [1, 1]]]]), "^kv_indices .* once .* block 1 twice in row 1, batch entry 0, "),
        (made_of([[[1, 1]]], [[[[0, 1], [2, 1]]]]), "^kv_indices .* below 2, .*; got 2"),
        (made_of([[[1, 3]]], [[[[0, 1], [0, 1]]]]), "^kv_num_blocks .* below 3, .*; got 3"),
        (made_of([[[1, 1]]], [[[[0, 1], [0, 1]]]], seq_lengths=(17, 16)), "3 rows; got 2"),
        (made_of([[[1, 1, 1]]], [[[[0, 1], [0, 1]]]]), r"got \(1, 1, 3\) and \(1, 1, 2, 2\)"),
        (
            made_of([[[1, 1]]], [[[[0], [1]]]], full_kv_num_blocks=TWO[0], full_kv_indices=TWO[1]),
            r"got \(1, 1\) and \(2, 1\)",
        ),
        (made_of([[[1, 1]]], [[[[0], [1]]]], kv_indices=ONE[1].to("meta")), "got tensors on the meta device"),
        (
            create_block_mask(of_entry, None, None, 16, 16, device="cpu"),
            "'of_entry' must not depend on the batch entry b, as all entries share the lists .*B=batch",
        ),
    ],
)  # fmt: skip
def test_lists_that_are_none_are_refused(made: BlockMask, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        masks.custom(made)
