"""Tables of selected blocks, computed as they are; and padding="zeros", the zero keys of torchscale."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines.aten import _aten_op, _query_rows
from flexdilated.masks.patterns import lists_keys
from flexdilated.masks.planning.lowering import TableProblems, _key_lists, _table
from flexdilated.testing import assert_attention_close, check_attention_module, check_pattern
from flexdilated.testing._drawn_patterns import _selected_blocks
from flexdilated.testing.strategies import attention_sizes
from tests.support import oracle, published
from tests.support.agreement import TIGHT, assert_agrees
from tests.support.run_time_strategies import Packed, run_time_words
from tests.support.strategies import tensors

CAUSAL = masks.causal()
NUMBERS = torch.arange(128)  # of all positions that are drawn


def causal_class(h: Tensor, q_first: Tensor, q_last: Tensor, k_first: Tensor, k_last: Tensor) -> Tensor:
    q_first, q_last, k_first, k_last = (NUMBERS[x] for x in (q_first, q_last, k_first, k_last))
    return torch.where(k_last <= q_first, 2, torch.where(k_first > q_last, 0, 1))


READ = masks.custom(lambda b, h, q, k: NUMBERS[q] >= NUMBERS[k], classify=causal_class)
# What stands beside a table named "chosen", and the same for the oracle.
BESIDE = {
    "alone": (lambda chosen: chosen, lambda chosen: chosen),
    "causal": (lambda chosen: chosen & CAUSAL, lambda chosen: oracle.both(chosen, oracle.causal())),
    "a rule that reads": (lambda chosen: chosen & READ, lambda chosen: oracle.both(chosen, oracle.causal())),
    "own block": (
        lambda chosen: (chosen | masks.chunked(4)) & CAUSAL,
        lambda chosen: oracle.both(oracle.either(chosen, oracle.dilated(4, 1, 0)), oracle.causal()),
    ),
    "sinks and a window": (
        lambda chosen: chosen & CAUSAL | masks.first_tokens(3) | masks.local_window(left=2, right=1),
        lambda chosen: oracle.either(
            oracle.both(chosen, oracle.causal()),
            oracle.both(oracle.fixed(1 << 20, 1 << 20), lambda h, H, q, k: (k < 3).long().expand(len(q), -1)),
            oracle.local_window(2, 1),
        ),
    ),
    "a mixture": (
        lambda chosen: (chosen & CAUSAL) + masks.chunked(8) + CAUSAL,
        lambda chosen: oracle.total(oracle.both(chosen, oracle.causal()), oracle.dilated(8, 1, 0), oracle.causal()),
    ),
    "heads of their own": (
        lambda chosen: chosen & masks.dilated(9, 3, "interleaved"),
        lambda chosen: oracle.both(chosen, oracle.dilated(9, 3, "interleaved")),
    ),
}


@st.composite
def packed(draw: st.DrawFn, beside: str, largest: int = 60, batch: int = 3, *, whole: bool = False) -> Packed:
    sizes = draw(attention_sizes(max_heads=4, max_batch=batch, max_tokens=largest))
    if not whole and draw(st.booleans()):
        sizes = replace(sizes, num_queries=draw(st.integers(1, largest)), q_offset=draw(st.integers(0, 40)))
        sizes = replace(sizes, k_offset=draw(st.sampled_from([0, 0, 2, 12])))
    stop = sizes.q_offset + sizes.num_queries
    twin = draw(_selected_blocks(run_time_words(max(stop, sizes.k_offset + sizes.num_keys), stop), sizes))
    of_pattern, of_rule = BESIDE[beside]
    q, k = (
        torch.arange(at, at + number)
        for at, number in ((sizes.q_offset, sizes.num_queries), (sizes.k_offset, sizes.num_keys))
    )
    heads = range(sizes.num_heads), sizes.num_heads
    counts = torch.stack([oracle.counts(of_rule(rule), *heads, q, k) for rule in twin.rules])
    counts = counts.expand(sizes.batch, -1, -1, -1)
    shape = sizes.batch, sizes.num_heads, sizes.num_queries, sizes.num_keys
    return Packed(of_pattern(twin.pattern), counts, *shape, sizes.q_offset, sizes.k_offset)


WAYS = {"one by one": {}, "in groups": {"_FEW_QUERIES": 0}, "from where keys lie": {"_KEYS_PER_LISTED_KEY": 0}}


@settings(max_examples=30)
@given(data=st.data(), way=st.sampled_from([*WAYS]), beside=st.sampled_from([*BESIDE]))
def test_a_table_is_the_oracle(beside: str, way: str, data: st.DataObject):
    """Output, lse and gradients, few queries in groups as well; and the pairs that a description counts."""
    case = data.draw(packed(beside))
    drawn = data.draw(tensors(case, batch=case.batch))
    sinks = (torch.linspace(-1, 1, case.num_heads, dtype=torch.float64).requires_grad_(),)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return fd.attend(q, k, v, case.pattern, sinks=sinks, enable_gqa=True, return_lse=True, **case.offsets)

    copied = data.draw(st.sampled_from([24, 1 << 30]))  # keys are gathered, or all pairs computed under a mask
    limits = mock.patch.multiple(_table, _PARTS_BYTES=1 << 12, **WAYS[way])
    with limits, mock.patch.object(_key_lists, "_GATHERED_KEY_COST", copied):
        assert_agrees(attend, drawn + (sinks if data.draw(st.booleans()) else ()), case.counts)
    if case.batch == 1:
        sizes = {"num_heads": case.num_heads, **case.offsets}
        found = masks.describe(case.pattern, case.num_queries, case.num_keys, **sizes)
        pairs = {head: share.pairs for share in found.heads for head in share.heads}
        assert found.useful_pairs == case.counts.sum()
        assert [pairs[head] for head in range(case.num_heads)] == case.counts[0].sum((1, 2)).tolist()


@contextmanager
def counted_work() -> Iterator[list[int]]:
    """Pairs of each kernel call over a table that runs inside."""
    found, run = [], _query_rows.flash_forward

    def counting(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        found.append(q[..., 0].numel() * k.shape[2])
        return run(q, k, v, **how)

    with mock.patch.object(_query_rows, "flash_forward", counting):
        yield found


@pytest.mark.parametrize("first", ["causal", "whole", "none"])
def test_the_largest_batches_are_of_one_kind(first: str) -> None:
    """With a mask or without, as in the first portion that has problems; of every portion that has this kind."""
    at, none = torch.arange(32), torch.full((32,), 1 << 30)
    own, past = torch.where(at % 4 < 3, at // 4, none), torch.where(at < 4, none, 0)
    tables = {"causal": (own, past), "whole": (past, own), "none": (none, past)}[first]
    bound = masks.causal().bind(num_heads=2, num_queries=32, num_keys=32)
    problems = TableProblems.of(bound, 2, torch.stack(tables)[..., None], (1, 4), 0)
    largest = problems.of_largest_batch(8, 4)
    kinds = [[each.seen is None for each in largest.batches(*portion, 8, 4)] for portion in problems.portions(8)]
    assert kinds == {"causal": [[False], []], "whole": [[True], []], "none": [[], [True]]}[first]


@settings(max_examples=24)
@given(
    data=st.data(),
    way=st.sampled_from([*WAYS]),
    beside=st.sampled_from([*BESIDE]),
    gathered=st.sampled_from([1, 1 << 12, 1 << 23]),
)
def test_a_plan_counts_what_its_call_computes(beside: str, way: str, gathered: int, data: st.DataObject):
    """Pairs and kernel calls over the table, and the allowed pairs of the whole pattern."""
    case = data.draw(packed(beside, batch=1, whole=True))
    assume(not any(map(lists_keys, case.pattern.leaves())))  # of these, tests/attend/test_single_keys.py
    kv_heads = data.draw(st.sampled_from([n for n in range(1, case.num_heads + 1) if case.num_heads % n == 0]))
    width = data.draw(st.sampled_from([8, 16]))
    q = torch.randn(1, case.num_heads, case.num_queries, width)
    k, v = torch.randn(2, 1, kv_heads, case.num_keys, width)
    sizes = {"num_heads": case.num_heads, "num_kv_heads": kv_heads, "head_dim": width}
    limits = {"_PARTS_BYTES": 1 << 12, "GATHERED_BYTES": gathered, **WAYS[way]}
    masks.cache().clear()
    with mock.patch.multiple(_table, **limits), counted_work() as calls:
        fd.attend(q, k, v, case.pattern, enable_gqa=True)
        report = fd.plan(case.pattern, case.num_queries, **sizes)
    (own,) = (each for each in report.options if each.layout.startswith("table"))
    assert (own.computed_pairs, own.launches) == (sum(calls), len(calls))
    assert report.useful_pairs == case.counts.sum()
    chosen = [each.computed_pairs for each in report.options if each.chosen]
    assert report.computed_pairs >= max(report.useful_pairs and sum(calls), chosen[0])
    masks.cache().clear()


def test_consecutive_heads_share_the_counts_of_a_table():
    chosen = torch.tensor([[[0, -1], [0, -1]], [[0, -1], [0, 1]]])
    found = masks.describe(masks.selected_blocks(chosen, block=16, most=2), 32, num_heads=4)
    assert [(each.heads, each.pairs) for each in found.heads] == [((0, 1), 512), ((2, 3), 768)]
    assert (found.full_blocks, found.partial_blocks) == (10, 0)


@pytest.mark.parametrize("block", [(16, 16), (4, 8), (1, 8)])
def test_another_choice_is_neither_planned_nor_kept(block):
    """Nothing is looked up, built or hashed for its values, and nothing stays in the cache."""
    q, k, v = torch.randn(3, 1, 4, 128, 16)
    pattern = (masks.selected_blocks("chosen", block=block, most=3) | masks.chunked(16)) & CAUSAL
    rows, columns = 128 // block[0], 128 // block[1]

    def choice(seed: int) -> Tensor:
        return torch.randint(-1, columns, (2, rows, 3), generator=torch.Generator().manual_seed(seed))

    fd.attend(q, k, v, pattern, bindings={"chosen": choice(0)})
    before = masks.cache().stats()
    with mock.patch.object(_aten_op, "plan_aten", side_effect=AssertionError("planned")):
        for seed in range(1, 5):
            fd.attend(q, k, v, pattern, bindings={"chosen": choice(seed)})
    after = masks.cache().stats()
    assert (after.misses, after.entries) == (before.misses, before.entries)


def test_a_forwards_choice_is_its_backwards():
    """A table that is written to in between does not reach the gradients."""
    q, k, v = (torch.randn(1, 1, 64, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    chosen = torch.tensor([[[0], [1], [0], [3]]])
    pattern = masks.selected_blocks("chosen", block=16, most=1)
    out = fd.attend(q, k, v, pattern, bindings={"chosen": chosen})
    expected = torch.autograd.grad(fd.attend(q, k, v, pattern, bindings={"chosen": chosen}).sum(), (q, k, v))
    chosen.fill_(2)
    for found, true in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(found, true)


def test_bad_tables_are_refused_where_they_are_planned():
    """In the words for tables that are computed as they are, which tests/project/errors.md has."""
    q, pattern = torch.randn(2, 2, 16, 4), ~masks.selected_blocks("chosen", block=4, most=2)
    for table, says in (
        (torch.zeros(1, 3, 2), "got 3 rows, the first for position 4, and queries from 0 on"),
        (torch.full((1, 4, 2), 4), "below the 4 blocks of 4 keys .*; got 4 in row 0 of table 0"),
    ):
        with pytest.raises(ValueError, match=says):
            fd.attend(q, q, q, pattern, bindings={"chosen": table.long()})


LADDER = ((8, 20, 50), (1, 3, 4))
PADDED = masks.longnet(*LADDER, offsets="contiguous", padding="zeros")


def drawn(H: int, N: int, *, dtype=torch.float64, seed: int = 0, requires_grad: bool = False):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, H, N, 4, generator=generator, dtype=dtype, requires_grad=requires_grad) for _ in "qkv")


@st.composite
def ladders(draw: st.DrawFn, longest: int = 60) -> tuple[list[int], list[int]]:
    branches = draw(st.lists(st.tuples(st.integers(1, longest), st.integers(1, 7)), min_size=1, max_size=4))
    segments, rates = zip(*branches, strict=True)
    return [*segments], [*rates]


@given(ladders(), st.integers(1, 6), st.integers(1, 120), st.sampled_from(["contiguous", "interleaved"]))
def test_rows_are_the_published_ones(ladder, H, N, offsets) -> None:
    """Output, lse and gradients through both; each segment's rows stand where its tokens do."""
    q, k, v = drawn(H, N, requires_grad=True)
    pattern = masks.longnet(*ladder, offsets=offsets, padding="zeros")
    found = fd.attend(q, k, v, pattern, return_lse=True)
    truth = published.dilated_attention(q, k, v, *ladder, offsets=offsets, shifted=False)
    seen = truth[1].isfinite()
    grads = [torch.autograd.grad(out.sin().sum() + lse[seen].sum(), (q, k, v)) for out, lse in (found, truth)]
    assert_close((*found, *grads[0]), (*truth, *grads[1]), **TIGHT)


def test_causal_order_hides_them() -> None:
    """Also written the other way round, and all at once; what is left has no padding."""
    exact = masks.longnet(*LADDER, offsets="contiguous") & masks.causal()
    assert PADDED & masks.causal() == masks.causal() & PADDED == exact
    assert not masks.parse(f"{PADDED!r} & strided(2) & causal()").pads
    q, k, v = drawn(3, 57)
    rows = [x[:, :, :23] for x in (q, k, v)]
    assert_close(fd.attend(q, k, v, PADDED & masks.causal())[:, :, :23], fd.attend(*rows, exact), **TIGHT)


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_options_of_a_call(engine) -> None:
    """Layouts, sinks, grouped heads, some of the heads, and some of the queries."""
    q, k, v = drawn(6, 57)
    out, lse = fd.attend(q, k, v, PADDED, engine=engine, return_lse=True)
    truth = published.dilated_attention(q, k, v, *LADDER, shifted=False)
    assert_close((out, lse), truth, **TIGHT)

    layout = masks.layout(PADDED, 57)
    assert layout.rate > 1
    permuted = fd.attend(*(layout.apply(x) for x in (q, k, v)), PADDED, layout=layout, engine=engine)
    assert_close(layout.invert(permuted), out, **TIGHT)

    some = fd.attend(q[:, 2:5], k[:, 2:5], v[:, 2:5], PADDED, head_offset=2, num_heads_global=6, engine=engine)
    assert_close(some, out[:, 2:5], **TIGHT)
    assert_close(fd.attend(q[:, :, 30:41], k, v, PADDED, q_offset=30, engine=engine), out[:, :, 30:41], **TIGHT)

    groups = fd.attend(q, k[:, :2], v[:, :2], PADDED, enable_gqa=True, engine=engine)
    keys, values = (x[:, :2].repeat_interleave(3, dim=1) for x in (k, v))
    assert_close(groups, published.dilated_attention(q, keys, values, *LADDER, shifted=False)[0], **TIGHT)

    scale = torch.linspace(-1, 2, 6, dtype=torch.float64)  # of each head; that of zero keys is still 0
    scaled = fd.attend(q, k, v, PADDED, scale=scale, engine=engine)
    by_hand = q * scale[:, None, None] * q.shape[-1] ** 0.5
    assert_close(scaled, published.dilated_attention(by_hand, k, v, *LADDER, shifted=False)[0], **TIGHT)

    sinks = torch.randn(6, dtype=torch.float64)
    with_sinks, sunk = fd.attend(q, k, v, PADDED, sinks=sinks, engine=engine, return_lse=True)
    assert_close(sunk, torch.logaddexp(lse, sinks[:, None].expand_as(lse)), **TIGHT)
    assert_close(with_sinks, out * (lse - sunk).exp()[..., None], **TIGHT)


def test_a_sum_keeps_them() -> None:
    q, k, v = drawn(3, 31)
    out, lse = fd.attend(q, k, v, PADDED + masks.causal(), return_lse=True)
    parts = [fd.attend(q, k, v, part, return_lse=True) for part in (PADDED, masks.causal())]
    assert_close(lse, torch.logaddexp(parts[0][1], parts[1][1]), **TIGHT)
    assert_close(out, sum(each * (own - lse).exp()[..., None] for each, own in parts), **TIGHT)


def test_half_precision_and_meta() -> None:
    q, k, v = drawn(3, 57, dtype=torch.bfloat16, requires_grad=True)
    out, lse = fd.attend(q, k, v, PADDED, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert_attention_close(out, q, k, v, PADDED, lse=lse, gradients=True)
    assert fd.attend(*(x.to("meta") for x in (q, k, v)), PADDED).shape == q.shape
    assert fd.attend(*(x[:, :, :0] for x in (q, k, v)), PADDED).shape == (2, 3, 0, 4)


def test_the_definition_has_them_too() -> None:
    """The checks for users know the zero keys, and miss them where they are forgotten."""
    q, k, v = drawn(3, 57, dtype=torch.float32)
    check_pattern(PADDED, num_heads=3, max_tokens=60, examples=6)
    compiled = ("compile", "recompilation")  # as in test_it_compiles
    check_attention_module(lambda: fd.BlockSparseAttention(PADDED), PADDED, max_tokens=40, examples=2, skip=compiled)
    assert_attention_close(fd.attend(q, k, v, PADDED), q, k, v, PADDED)
    for computed, claimed in ((PADDED.unpadded, PADDED), (PADDED, PADDED.unpadded)):
        with pytest.raises(AssertionError, match="out is wrong"):
            assert_attention_close(fd.attend(q, k, v, computed), q, k, v, claimed)


def test_rows_that_zero_keys_fill() -> None:
    """Scores far below 0: what is left of a row is as exact as any."""
    q, k, v = drawn(1, 9, dtype=torch.float32)
    k, q = -20 * q, q.requires_grad_()
    k, v, pattern = k.requires_grad_(), v.requires_grad_(), masks.longnet((8,), (1,), padding="zeros")
    out, lse = fd.attend(q, k, v, pattern, return_lse=True)
    assert 0 < out[:, :, 8].abs().max() < 1e-3
    assert_attention_close(out, q, k, v, pattern, lse=lse, gradients=True)


def test_received_attention_leaves_out_what_zero_keys_take() -> None:
    q, k, v = drawn(3, 57)
    lse = fd.attend(q, k, v, PADDED, return_lse=True)[1]
    exact = fd.attend(q, k, v, PADDED.unpadded, return_lse=True)[1]
    for engine in ("aten", "reference"):
        received = fd.attention_received(q, k, lse, PADDED, engine=engine)
        assert_close(received.sum(-1), (exact - lse).exp().sum(-1), **TIGHT)


def test_texts() -> None:
    one = masks.longnet((8,), (3,), padding="zeros")
    both = PADDED + masks.longnet((8,), (3,), offsets="contiguous")
    for pattern in (PADDED, one, both, PADDED + one):
        assert masks.parse(repr(pattern)) == masks.from_json(masks.to_json(pattern)) == pattern
    assert repr(one) == "longnet((8,), (3,), padding='zeros')"
    assert one != masks.longnet((8,), (3,))
    assert "has 7 zero keys" in str(masks.explain(PADDED, query=56, key=56, num_heads=3, num_tokens=57))
    unknown = str(masks.explain(PADDED, query=48, key=48, num_heads=3))
    assert "an unknown number of zero keys besides: give num_tokens to count them" in unknown
    described = masks.describe(PADDED, 57, num_heads=3)
    assert "zero keys" in str(described)
    counts = PADDED.zero_keys(torch.arange(3)[:, None], torch.arange(57), num_heads=3, num_tokens=57)
    assert described.zero_keys == counts.sum()
    assert "zero keys" not in str(masks.describe(PADDED.unpadded, 57, num_heads=3))
