"""The calls of block lists: every pair once, as views where problems lie evenly, whatever the limits are."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines.aten import _tile_blocks, _tile_calls
from flexdilated.engines.aten._tile_calls import BlockRanges, Even, KernelCall, KernelCalls, Stretches, plan_calls
from flexdilated.masks import Layout
from flexdilated.masks.planning.lowering._layouts import shared_terms
from tests.support import oracle
from tests.support.agreement import assert_agrees, gradients
from tests.support.strategies import block_sides, cases, tensors

LEAST_PAIRS = [1, 40, 500, 1 << 20]  # the last keeps small problems together; a band is found with the first
TOGETHER = [1, 100, 1 << 20]  # heads one by one, some, all at once


@contextmanager
def limits(*, least: int = 1, together: int = 1 << 20, gathered: int = 8 << 20, joined: int = 1024) -> Iterator[None]:
    """Other limits, and no calls or programs made with the usual ones, on either side."""
    masks.cache().clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tile_calls, "_LEAST_PAIRS", least)
        patch.setattr(_tile_calls, "_MAX_JOINED_SLOTS", joined)
        patch.setattr(_tile_blocks, "_PAIRS_AT_ONCE", together)
        patch.setattr(_tile_blocks, "GATHERED_BYTES", gathered)
        yield
    masks.cache().clear()


limited = st.builds(
    dict,
    least=st.sampled_from(LEAST_PAIRS),
    together=st.sampled_from(TOGETHER),
    gathered=st.sampled_from([1, 2000, 8 << 20]),
    joined=st.sampled_from([1, 12, 1024]),
)


@given(st.data(), st.tuples(block_sides, block_sides), limited)
def test_attend_is_the_oracle_within_any_limits(data, sides, limit):
    case = data.draw(cases())
    drawn = data.draw(tensors(case))

    def attend(q, k, v):
        options = {"enable_gqa": True, "engine": "aten", "block_size": sides, "return_lse": True}
        return fd.attend(q, k, v, case.twin.pattern, scale=0.5, **options, **case.sizes)

    with limits(**limit):
        assert_agrees(attend, drawn, case.counts(), scale=0.5)


def calls_of(pattern: masks.Pattern, num_tokens: int, side: int, *, heads: int = 1, rate: int = 1) -> KernelCalls:
    bound = pattern.bind(num_heads=heads, num_queries=num_tokens, num_keys=num_tokens)
    (term,) = shared_terms(bound.pattern, 1, bound, rate)
    return plan_calls(term, term.blocks(side, side))


def slots(some: Stretches, num_slots: int) -> torch.Tensor:
    """(n, L) slots of stretches."""
    padded = -(-num_slots // some.side) * some.side if isinstance(some, BlockRanges) else num_slots
    return some.of(torch.arange(padded)[None]).squeeze(0)


def counted(calls: KernelCalls) -> torch.Tensor:
    """(tables, N, M): how often each pair is computed and not hidden."""
    num_queries, num_keys = calls.shape[:2]
    counts = torch.zeros(len(calls.heads), num_queries, num_keys, dtype=torch.int64)
    for call in calls.calls:
        mask = calls.mask_of(call, torch.float32)
        q, k = slots(call.queries, num_queries), slots(call.keys, num_keys)
        shown = torch.ones(len(q), q.shape[1], k.shape[1]) if mask is None else (mask == 0).expand(len(q), -1, -1)
        index = (
            torch.full_like(shown, call.table).long(),
            q[:, :, None].expand(shown.shape),
            k[:, None].expand_as(shown),
        )
        counts.index_put_(index, shown.long(), accumulate=True)
    return counts


RULES = {
    "window": (masks.local_window(left=11, right=3), oracle.local_window(11, 3)),
    "causal window": (masks.local_window(left=20, right=0), oracle.local_window(20, 0)),
    "dilated window": (masks.dilated_window(left=3, right=3, rate=5), oracle.dilated_window(3, 3, 5)),
    "causal": (masks.causal(), oracle.causal()),
    "strided": (masks.strided(7), oracle.strided(7)),
    "global": (masks.global_tokens(9), oracle.global_tokens(9, True, True)),
    "first and window": (
        masks.first_tokens(5) | masks.local_window(left=6, right=6),
        oracle.either(oracle.global_tokens(5, False, True), oracle.local_window(6, 6)),
    ),
    "a head each": (masks.dilated(16, 4, 1), oracle.dilated(16, 4, 1)),
}


@pytest.mark.parametrize(("least", "rate"), [(1, 1), (1, 5), (40, 1), (500, 5), (1 << 20, 1)])
@pytest.mark.parametrize("name", RULES)
def test_every_pair_is_computed_once(name, least, rate):
    pattern, rule = RULES[name]
    for num_tokens, side in ((61, 4), (64, 8), (33, 16), (5, 8), (1, 2)):
        order = Layout(num_tokens, rate).positions()
        expected = oracle.counts(rule, range(1), 1, order, order)
        with limits(least=least):
            assert torch.equal(counted(calls_of(pattern, num_tokens, side, rate=rate)), expected)


def test_a_band_is_a_view_with_one_mask():
    """All rows but the first few and a last short one: no key is copied, one mask serves all."""
    with limits(least=2 * 8 * 32):
        calls = calls_of(masks.local_window(left=23, right=0), 163, 8)
    longest = max(calls.calls, key=lambda call: len(call.row))
    assert (longest.queries, longest.keys) == (Even(24, 8, 17, 8), Even(0, 8, 17, 32))
    assert longest.masks is not None
    assert len(longest.masks) == 1
    assert all(isinstance(call.keys, Even) for call in calls.calls)
    assert calls.complete
    assert calls.key_slots == 163


def test_rows_that_share_keys_are_a_view():
    """Global keys: tall problems over the same keys, which none of them copies."""
    with limits():
        calls = calls_of(masks.first_tokens(64), 64 * 33, 64)
    most, last = calls.calls if len(calls.calls[0].row) > 1 else calls.calls[::-1]
    assert (most.queries, most.keys, most.masks) == (Even(0, 1024, 2, 1024), Even(0, 0, 2, 64), None)
    assert (last.queries, last.keys, last.masks) == (Even(2048, 64, 1, 64), Even(0, 64, 1, 64), None)


def test_scattered_blocks_are_gathered():
    """Of rows whose masks agree, and of the others with a mask each."""
    places = [[0, 3, 5], [1, 4, 7], [2, 3, 6], [0, 1, 2, 3], [1, 2, 5], [0, 2, 6], [1, 3, 4], [0, 6, 7]]
    pattern = masks.block_list(places, block=8) & masks.local_window(left=30, right=35)
    with limits(least=3 * 8 * 24):
        calls = calls_of(pattern, 64, 8)
    listed = [call for call in calls.calls if isinstance(call.keys, BlockRanges)]
    assert any(call.masks is not None and len(call.masks) == len(call.row) > 1 for call in listed)


def test_a_run_begins_where_the_one_before_it_ends():
    """Bands of other slopes, by rows or by columns, and a stray row between: runs, and the rest together."""
    row = torch.tensor([0, 1, 2, 3, 9, 10, 12, 14, 16, 17, 18, 19])
    first = torch.tensor([0, 1, 2, 3, 0, 5, 6, 7, 8, 9, 10, 11])
    runs = list(_tile_calls._even_runs(row, torch.stack([first, first + 1], 1).int(), 3))
    assert [run.tolist() for run in runs] == [[0, 1, 2, 3], [6, 7, 8], [9, 10, 11], [4, 5]]


def test_lists_of_masks_are_told_apart():
    """Whatever the order of their ids: all lists of five out of four, and the same ones again."""
    ids = torch.cartesian_prod(*[torch.arange(4)] * 5).repeat(2, 1)
    codes = _tile_calls._codes(ids.flatten(), torch.full((len(ids),), 5))
    assert torch.equal(codes[: 4**5], codes[4**5 :])
    assert len(codes.unique()) == 4**5


def test_broken_lists_are_in_no_run():
    columns = torch.tensor([[0, 2], [1, 3], [2, 4]]).int()
    (others,) = _tile_calls._even_runs(torch.arange(3), columns, 1)
    assert others.tolist() == [0, 1, 2]


def test_parts_are_the_whole():
    with limits():
        calls = calls_of(masks.local_window(left=11, right=3) | masks.strided(9), 70, 4)
    for call in calls.calls:
        parts = list(call.parts(3))
        assert sum(len(part.row) for part in parts) == len(call.row)
        assert torch.equal(torch.cat([slots(part.keys, 70) for part in parts]), slots(call.keys, 70))
        assert torch.equal(torch.cat([slots(part.queries, 70) for part in parts]), slots(call.queries, 70))
        assert all(_masks(part) == _masks(call)[: len(part.row)] or len(_masks(call)) > 1 for part in parts)


def _masks(call: KernelCall) -> list[list[int]]:
    return [] if call.masks is None else call.masks.tolist()


LAYOUTS = {
    "heads outermost": lambda x: x.contiguous(),
    "tokens outermost": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "head dim outermost": lambda x: x.movedim(3, 0).contiguous().movedim(0, 3),
    "a slice": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "groups"), [(torch.float32, 2), (torch.bfloat16, 1), (torch.float16, 2)])
def test_views_of_any_layout_and_type(layout, dtype, groups):
    """Bands are read in place: from tensors of any strides, and from gradients that repeat one number."""
    torch.manual_seed(0)
    pattern, rule = masks.local_window(left=21, right=2), oracle.local_window(21, 2)
    q, k, v = (torch.randn(2, heads, 75, 8, dtype=torch.float64) for heads in (4, 4 // groups, 4 // groups))
    lower = tuple(LAYOUTS[layout](x.to(dtype)).requires_grad_() for x in (q, k, v))
    exact = tuple(x.detach().double().requires_grad_() for x in lower)
    counts = oracle.counts(rule, range(4), 4, torch.arange(75), torch.arange(75))
    with limits():
        options = {"enable_gqa": True, "engine": "aten", "block_size": 8}
        found = torch.autograd.grad(fd.attend(*lower, pattern, **options).sum(), lower)
        truth = torch.autograd.grad(oracle.attention(*exact, counts, None)[0].sum(), exact)
    tolerance = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}[dtype]
    for grad, true_grad in zip(found, truth, strict=True):
        assert_close(grad.double(), true_grad, rtol=tolerance, atol=tolerance)


def test_folds_and_heads_of_their_own():
    """Segments of some heads each, with a window inside: folds run together or one by one."""
    pattern = masks.longnet([32], [2]) & masks.local_window(left=9, right=9)
    rule = oracle.both(oracle.longnet([32], [2]), oracle.local_window(9, 9))
    counts = oracle.counts(rule, range(5), 5, torch.arange(96), torch.arange(96))
    torch.manual_seed(0)
    drawn = tuple(torch.randn(2, 5, 96, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(q, k, v):
        return fd.attend(q, k, v, pattern, engine="aten", block_size=4, return_lse=True)

    for together in TOGETHER:
        with limits(together=together):
            assert_agrees(attend, drawn, counts)
            assert all(grad.abs().sum() > 0 for grad in gradients(attend, drawn))
