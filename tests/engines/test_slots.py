"""Slots and tokens, each read where the other holds it: against plain indexing, in values and gradients; and merges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.engines._merge import merge, with_sinks
from flexdilated.engines.flex._flex_op import allowed_on
from flexdilated.engines.flex._program import make_flex_program
from flexdilated.engines.flex._slots import SideGather, SlotIndex, _by_index, sides_of
from flexdilated.masks import Layout
from flexdilated.masks.planning import plan
from tests.support.ladders import LONGNET_5
from tests.support.padded import padded_cases, padded_plan

CPU = torch.device("cpu")

# B batch, X heads of a tensor, H heads of a term, N tokens, S slots, D head dim


def assert_reads(
    side: SideGather, tokens: Tensor, heads: list[int], groups: int, num_heads: int, num_tokens: int
) -> None:
    """That a side reads these tokens (H, S) of these query heads, -1 for nothing, and puts rows back there."""
    x = torch.randn(2, num_tokens, num_heads // groups, 3, dtype=torch.float64).transpose(1, 2).requires_grad_()
    slots = side.slots.take(x, side.rows, side.start, tokens.shape[1])
    source = torch.tensor(heads)[:, None] // groups
    expected = torch.where((tokens >= 0)[..., None], x[:, source, tokens.clamp(min=0)], 0.0)
    if slots.shape[1] < len(heads):  # heads of a group read alike
        slots = slots.repeat_interleave(groups, 1)
    assert torch.equal(slots, expected)
    sent = torch.randn_like(slots)
    torch.testing.assert_close(*(torch.autograd.grad(each, x, sent)[0] for each in (slots, expected)))
    if groups > 1:
        return  # keys are not put back
    for values, empty in ((torch.randn_like(slots), 0.0), (torch.randn_like(slots[..., 0]), -torch.inf)):
        values = values.detach().requires_grad_()
        put = side.slots.put(values, side.rows, side.start, num_tokens, empty)
        truth = values.new_full((2, num_heads, num_tokens, *values.shape[3:]), empty)
        h, s = (tokens >= 0).nonzero(as_tuple=True)
        truth = truth.index_put((torch.arange(2)[:, None], torch.tensor(heads)[h], tokens[h, s]), values[:, h, s])
        assert torch.equal(put, truth)
        sent = torch.randn_like(put)
        torch.testing.assert_close(*(torch.autograd.grad(each, values, sent)[0] for each in (put, truth)))


@given(padded_cases(), st.sampled_from([1, 4, 8]), st.data())
def test_segments(case, side, data):
    """By arithmetic, on either side, for all heads and some, grouped too."""
    planned = padded_plan(case)
    groups = data.draw(st.sampled_from([n for n in (1, 2, 4) if case.num_heads % n == 0]))
    for term in planned.terms:
        term = term.in_blocks_of(side, side)
        sides = sides_of(term, planned, groups, None, CPU)
        for found, order, shared, length in zip(
            sides, (term.q, term.k), (1, groups), (case.num_queries, case.num_keys), strict=True
        ):
            assert_reads(found, order.tokens()[:, 0], list(term.heads), shared, case.num_heads, length)


@given(st.data(), st.integers(1, 4), st.integers(1, 12), st.sampled_from([1, 2]), st.booleans())
def test_an_index(data, kv_heads, num_tokens, groups, alike):
    """Any slots of any heads, each token at most once a head."""
    num_heads = kv_heads * groups
    heads = sorted(data.draw(st.sets(st.integers(0, num_heads - 1), min_size=1)))
    slots = st.permutations([*range(num_tokens), -1, -1])
    length = data.draw(st.integers(1, num_tokens))
    rows = [data.draw(slots)[:length] for _ in range(1 if alike else len(heads))]
    index = torch.tensor(rows)
    given_heads = None if heads == list(range(num_heads)) else tuple(heads)
    side = _by_index(index, given_heads, num_heads, groups, num_tokens, CPU)
    assert_reads(side, index.expand(len(heads), -1), heads, groups, num_heads, num_tokens)


def test_what_is_in_order_is_not_moved():
    x = torch.randn(1, 4, 6, 3)
    assert _by_index(torch.arange(6)[None], None, 4, 1, 6, CPU).slots.take(x, SlotIndex(), 0, 6) is x
    grouped = _by_index(torch.arange(6).expand(4, -1), None, 4, 2, 6, CPU)
    assert grouped.slots.take(x[:, :2], grouped.rows, 0, 6).shape == (1, 2, 6, 3)


@given(st.integers(1, 4), st.booleans(), st.sampled_from(["out", "lse", "both"]), st.integers(0, 2**16))
def test_one_merge_is_merging_one_by_one(num_parts, sinks, through, seed):
    """Values and gradients, through either result: rows in many parts, in one, in none."""
    torch.manual_seed(seed)
    outs = [torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(num_parts)]
    lses = [torch.randn(1, 2, 5, dtype=torch.float64) * 5 for _ in range(num_parts)]
    for out, lse in zip(outs, lses, strict=True):
        empty = torch.rand_like(lse) < 0.4
        lse.masked_fill_(empty, -torch.inf)
        out.masked_fill_(empty[..., None], 0.0)
    logits = torch.tensor([0.3, -torch.inf], dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*outs, *lses, *([logits] if sinks else []))]
    parts = list(zip(outs, lses, strict=True))
    found = merge(parts, [logits[:, None]] if sinks else [])
    truth = parts[0]
    for part in parts[1:]:
        truth = merge([truth, part])
    truth = with_sinks(*truth, logits) if sinks else truth
    for each, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(each, expected)
    empty = truth[1] == -torch.inf
    sent = [
        torch.randn_like(truth[0]).masked_fill(empty[..., None], 0.0),
        torch.randn_like(truth[1]).masked_fill(empty, 0.0),
    ]
    chosen = {"out": [0], "lse": [1], "both": [0, 1]}[through]

    def gradients(results: tuple[Tensor, Tensor]) -> list[Tensor]:
        outputs = [results[i] for i in chosen], leaves, [sent[i] for i in chosen]
        grads = torch.autograd.grad(*outputs, allow_unused=True)
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)]

    for grad, expected in zip(gradients(found), gradients(truth), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-11)


def test_sums_over_terms_are_kept_wide():
    """Many small parts beside a large one: bfloat16 would lose them."""
    parts = [torch.full((1, 1, 4, 2), value, dtype=torch.bfloat16) for value in (256.0, *[1.0] * 64)]
    out, _ = merge([(part, torch.zeros(1, 1, 4)) for part in parts])
    assert torch.equal(out, torch.full_like(out, 320 / 65))


@pytest.mark.parametrize("pattern", [masks.longnet(*LONGNET_5), masks.longnet(*LONGNET_5) & masks.causal()])
def test_a_million_tokens_hold_little(pattern):
    """All that a call keeps on an accelerator, tables included, is small beside q: 2 GiB in bfloat16."""
    N, H = 1 << 20, 8
    bound = pattern.bind(num_heads=H, num_queries=N, num_keys=N)
    chosen = plan(bound, device="cuda", allowed=allowed_on(torch.device("cuda")))
    options = {"num_kv_heads": H, "block_size": (128, 128), "device": torch.device("meta")}
    program = make_flex_program(chosen, Layout(N), **options)
    assert program.nbytes < (2 << 30) / 256
    assert sum(step.nbytes for step in program.steps) < 1 << 12
