"""Custom patterns: any mask_mod, exactly; known by code and captured values; refused where it is no rule."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.blocks import _blocks
from flexdilated.masks.blocks._blocks import Blocks, build_blocks, estimate_blocks
from flexdilated.masks.planning.lowering._layouts import shared_terms
from flexdilated.testing._drawn_patterns import classify_window, same_kind, window_by_head
from tests.support.agreement import assert_agrees
from tests.support.compilers import without_inductor
from tests.support.custom_rules import TABLE, by_global, diagonal, window
from tests.support.strategies import cases, functions, sets, tensors
from tests.support.twins import Twin


def mixed_with_custom(num_heads: int) -> st.SearchStrategy[Twin]:
    """A custom function with something else, in all ways to combine the two."""
    joins = st.sampled_from([operator.and_, operator.or_, lambda a, b: a & ~b, operator.add])
    joined = st.builds(lambda join, a, b: join(a, b), joins, sets(num_heads, 1), functions())
    return st.one_of(functions(), joined)


# What it computes


@settings(max_examples=12)
@given(st.data())
def test_attention_is_the_oracle(data):
    case = data.draw(cases(mixed_with_custom))
    assert_agrees(
        lambda q, k, v: fd.attend(q, k, v, case.twin.pattern, **case.sizes, enable_gqa=True, return_lse=True),
        data.draw(tensors(case)),
        case.counts(),
    )


@pytest.mark.parametrize("classified", [False, True])
def test_block_lists_are_those_of_create_block_mask(classified):
    widths = torch.tensor([70, 300])
    classify = classify_window(widths) if classified else None
    pattern = masks.custom(window_by_head(widths), classify=classify)
    slow = create_block_mask(window_by_head(widths), 1, 2, 1000, 900, device="cpu")
    fast = masks.block_mask(pattern, 1000, 900, num_heads=2)
    assert torch.equal(fast.to_dense(), slow.to_dense())
    assert torch.equal(fast.full_kv_num_blocks, slow.full_kv_num_blocks)


def test_heads_that_differ_have_tables_of_their_own():
    """The rule reads the head, though not on the heads that the checks look at."""
    late = masks.custom(lambda b, h, q, k: (h < 6) | (q == k))
    assert late.for_head(7, 8) != late.for_head(6, 8) != late
    dense = masks.block_mask(late, 256, num_heads=8, block_size=64).to_dense()[0]
    assert dense[5].sum() == 16
    assert torch.equal(dense[7], torch.eye(4, dtype=dense.dtype))
    alike = masks.custom(diagonal)
    assert alike.for_head(3, 8) is alike
    alike = masks.custom(lambda b, h, q, k: (torch.zeros_like(h) + q == k) & (h.dtype == torch.int64))
    assert alike.for_head(3, 8) is alike


def test_a_head_that_is_written_into_a_tensor():
    def shifted(b, h, q, k):
        shift = torch.zeros_like(h)
        shift += h
        return q - k == shift

    pattern = masks.custom(shifted)
    dense = masks.block_mask(pattern, 12, num_heads=3, block_size=1).to_dense()[0]
    assert torch.equal(dense.bool(), torch.stack([torch.eye(12).roll(-h, 1).tril(-h).bool() for h in range(3)]))


@pytest.mark.parametrize("function", [lambda b, h, q, k: q % 3 == 0, lambda b, h, q, k: k < 2], ids=["query", "key"])
def test_functions_of_one_side_hold_for_all_of_the_other(function):
    pattern = masks.custom(function)
    mask = pattern.mask_mod(num_heads=1, device=torch.device("cpu"))
    t = torch.arange(7)
    assert mask(torch.tensor(0), torch.tensor(0), t[:, None], t).shape == (7, 7)
    out = fd.attend(*torch.randn(3, 1, 1, 7, 4), pattern)
    assert out.shape == (1, 1, 7, 4)


def test_short_tables_hold_as_far_as_they_reach():
    """Even one of two entries, and for rules of one side."""
    short = torch.tensor([1, 0])
    pattern = masks.custom(lambda b, h, q, k: short[q] > 0)
    q, k, v = torch.randn(3, 1, 1, 2, 4)
    assert torch.equal(fd.attend(q, k, v, pattern)[..., 1, :], torch.zeros(1, 1, 4))
    t = torch.arange(2)
    mod = pattern.mask_mod(num_heads=1, device=torch.device("cpu"))
    assert mod(t[0], t[0], t[:, None], t).tolist() == [[True, True], [False, False]]


def test_classify_prunes():
    """With classify the builder looks at few blocks; without, at all."""
    calls = []
    inner = classify_window(torch.tensor([64]))

    def asked(pattern: masks.Pattern) -> int:
        calls.clear()
        sizes = {"num_heads": 1, "num_queries": 8192, "num_keys": 8192}
        (term,) = shared_terms(pattern, 1, pattern.bind(**sizes), 1)
        rule = term.table_rule()
        evaluated = type(rule).allowed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(rule), "allowed", lambda self, t, q, k: calls.append(len(q)) or evaluated(self, t, q, k))
            build_blocks(rule, q_block=64, k_block=64)
        return sum(calls)

    assert inner is not None
    assert asked(masks.custom(window_by_head(torch.tensor([64])))) == 128**2
    assert asked(masks.custom(window_by_head(torch.tensor([64])), classify=inner)) < 3 * 128
    assert asked(masks.custom(window_by_head(torch.tensor([64]))) & masks.local_window(left=64, right=0)) < 3 * 128


@settings(max_examples=12)
@given(st.data(), st.sampled_from([1, 7, 40]))
def test_few_rows_at_a_time_are_all_rows(data, at_once):
    """Where doubts are many, ranges of rows are built one after the other: the lists are the same."""
    case, rate = data.draw(cases(lambda H: st.one_of(functions(), sets(H)))), data.draw(st.integers(1, 3))
    (term,) = shared_terms(case.twin.pattern, 1, case.bind(), rate)
    whole = build_blocks(term.table_rule(), q_block=3, k_block=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_blocks, "_DOUBTS_AT_ONCE", at_once)
        parts = build_blocks(term.table_rule(), q_block=3, k_block=4)
    for field in ("table", "row", "column", "full", "pairs"):
        assert torch.equal(getattr(parts, field), getattr(whole, field)), field


def test_doubts_are_settled_a_few_at_a_time():
    """No list of all blocks is ever made: what is held at once stays small while tokens grow."""
    most = []
    settle = _blocks.count_pairs
    pattern = masks.custom(diagonal)
    for N in (1024, 4096):
        held: list[int] = []

        def noting(rule, places, shape, held=held):
            held.append(len(places.table))
            return settle(rule, places, shape)

        (term,) = shared_terms(pattern, 1, pattern.bind(num_heads=1, num_queries=N, num_keys=N), 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_blocks, "_DOUBTS_AT_ONCE", 1024)
            patch.setattr(_blocks, "count_pairs", noting)
            blocks: Blocks = build_blocks(term.table_rule(), q_block=32, k_block=32)
        assert len(blocks.row) == N // 32
        assert sum(held) == (N // 32) ** 2
        most.append(max(held))
    assert max(most) <= 1024


def test_estimates_of_opaque_rules_take_a_bounded_sample(monkeypatch):
    """A million tokens have 2 ** 26 blocks; the planner looks at a sample of them, and evaluates none."""
    pattern, N = masks.custom(diagonal), 1 << 20
    (term,) = shared_terms(pattern, 1, pattern.bind(num_heads=1, num_queries=N, num_keys=N), 1)
    rule, looked = term.table_rule(), []
    count = type(pattern).count
    monkeypatch.setattr(
        type(pattern), "count", lambda self, box, **heads: looked.append(len(box.area)) or count(self, box, **heads)
    )
    monkeypatch.setattr(type(rule), "allowed", lambda *_: pytest.fail("evaluated"))
    assert estimate_blocks(rule, q_block=128, k_block=128).blocks == (N // 128) ** 2
    assert sum(looked) < 1 << 18


def capturing() -> list[masks.Pattern]:
    """Functions that capture ints, tensors by position and by head, globals and inner functions."""
    inner = window(9)
    composite = lambda b, h, q, k: (TABLE[q % 6] == TABLE[k % 6]) & inner(b, h, q, k)  # noqa: E731
    functions = [window(3), window(8), by_global, window_by_head(torch.tensor([5, 60, 7, 30, 9])), composite]
    return [masks.custom(function) for function in functions]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["flex", "aten"])
def test_each_runs_with_what_it_captured(engine):
    """By itself, for changing ints; and the last in one graph with its caller."""
    q, k, v = torch.randn(3, 1, 2, 150, 16)
    patterns = capturing()
    with without_inductor(), torch.no_grad():
        for pattern in patterns[: 3 if engine == "flex" else None]:
            found = fd.attend(q, k, v, pattern & masks.causal(), engine=engine)
            exact = fd.attend(q, k, v, pattern & masks.causal(), engine="reference")
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
        last = patterns[-1]
        compiled = torch.compile(lambda q, k, v: fd.attend(q, k, v, last, engine=engine), fullgraph=True)
        exact = fd.attend(q, k, v, last, engine="reference")
        torch.testing.assert_close(compiled(q, k, v), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_captures_compile_to_one_kernel():
    """The C++ of FlexAttention, one function a head: heads 1 and 2 of 3 on one key/value head, 70 queries over 190.

    Its scores are changed as well, by a table that is captured, for each head and distance.
    """
    slopes = torch.tensor([9.0, 0.5, 0.1])

    def score_mod(score, b, h, q_idx, k_idx):
        return torch.tanh(score) - slopes[h] * (q_idx - k_idx).abs() + torch.sin(0.3 * k_idx)

    q, (k, v) = torch.randn(1, 2, 70, 16), torch.randn(2, 1, 1, 190, 16)
    *_, by_head, composite = capturing()
    pattern = masks.per_head([masks.every(), by_head, composite])
    options = {"q_offset": 130, "k_offset": 10, "head_offset": 1, "num_heads_global": 3, "enable_gqa": True}
    options["score_mod"] = score_mod
    found, exact = (fd.attend(q, k, v, pattern, engine=engine, **options) for engine in ("flex", "reference"))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_what_it_captured_follows_the_device():
    pattern = masks.custom(same_kind(TABLE)) | masks.custom(lambda b, h, q, k: TABLE[q % 6] > 1)
    pattern |= masks.custom(lambda b, h, q, k: (q - k).to(h.device) > torch.full((), 3, device=q.device))
    meta = torch.empty(3, dtype=torch.int64, device="meta")
    mod = pattern.mask_mod(num_heads=1, device=torch.device("meta"))
    assert mod(meta[0], meta[0], meta[:, None], meta).device.type == "meta"


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_head_that_becomes_a_new_tensor_is_followed() -> None:
    """It hands its value on in second place, after a tensor of which only the kind counts."""
    assert masks.custom(lambda b, h, q, k: q.new_tensor(h) + 0 * q >= k).rule.uses_head
    assert not masks.custom(lambda b, h, q, k: h.new_tensor(3) + 0 * q >= k).rule.uses_head
