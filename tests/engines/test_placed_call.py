"""Tokens at stated positions: what a device computes that holds parts of a sequence is the oracle's."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flexdilated import attend, masks
from flexdilated.engines import Features, WholeRows, run
from flexdilated.engines._placed_call import PlacedCall, placed_engine
from flexdilated.engines.flex._flex_op import static_program
from flexdilated.masks.orders._placement import Placement
from flexdilated.masks.planning._planner import plan_at
from tests.engines.test_flex import around_dense
from tests.support import oracle
from tests.support.agreement import TIGHT, assert_agrees
from tests.support.compilers import without_inductor
from tests.support.padded import everything_padded
from tests.support.placed import Part, parts
from tests.support.strategies import block_sides

# B batch, H query heads, G key/value heads, D head dim


ENGINES = st.sampled_from(["aten", "portable"])


@settings(max_examples=16)
@given(part=parts(complete=True), engine=ENGINES)
def test_the_needed_keys_are_held(part: Part, engine: str):
    """Own keys or none of them, then others in any order, with room to spare where a head has fewer."""
    call = part.call(engine)
    assert_agrees(lambda q, k, v: call.forward(q, k, v, []), part.tensors(), part.counts, scale=0.5)
    assert Placement.read(part.placement.text) == part.placement


@settings(max_examples=16)
@given(part=parts(complete=False), engine=ENGINES)
def test_runs_of_keys_are_held(part: Part, engine: str):
    """Keys that are not there are left out, also where the rule allows them.

    What an engine without a backward of its own sends into a part, by public means, makes the same gradients.
    """
    call = part.call(engine)
    assert_agrees(lambda q, k, v: call.forward(q, k, v, []), part.tensors(), part.counts, scale=0.5)
    q, k, v = part.tensors()
    out, lse = call.forward(q, k, v, [])
    assert lse is not None
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0)
    whole = WholeRows(out.detach(), lse.detach(), grad_out, grad_lse)
    sent = whole.gradients_of(out.detach(), lse.detach())
    by_parts = torch.autograd.grad((out, lse), (q, k, v), sent)
    for found, truth in zip(by_parts, call.backward(q.detach(), k.detach(), v.detach(), [], whole), strict=True):
        assert_close(found, truth, **TIGHT)


@settings(max_examples=16)
@given(part=parts(complete=True), cut=st.integers(0, 48), engine=ENGINES)
def test_gradients_of_parts_add_up(part: Part, cut: int, engine: str):
    """Each part of the keys, fed the rows' whole outcome, gives its share of dq, and its own dk and dv."""
    q, k, v = part.tensors()
    N = part.placement.num_tokens
    whole_keys = torch.randn(2, 2, 2, N, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    heads, pattern = part.num_heads, part.twin.pattern
    k, v = (x[:, :1].expand(-1, part.num_kv_heads, -1, -1).clone().requires_grad_() for x in whole_keys)
    rows = part.queries
    counts = oracle.counts(part.twin.rule, range(heads), heads, rows, torch.arange(N))
    out, lse = oracle.attention(q, k, v, counts, 0.5)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0)
    sent = (out * grad_out).sum() + (lse.masked_fill(lse == -torch.inf, 0) * grad_lse).sum()
    truth = torch.autograd.grad(sent, (q, k, v))
    whole = WholeRows(out.detach(), lse.detach(), grad_out, grad_lse)
    total = torch.zeros_like(q)
    for keys in (range(min(cut, N)), range(min(cut, N), N)):
        if not keys:
            continue
        placement = Placement(part.placement.queries, ((keys,),), complete=False, num_tokens=N)
        call = PlacedCall(pattern.text, placement, 0.5, 0, heads, engine)
        some = [x[:, :, keys.start : keys.stop].detach() for x in (k, v)]
        dq, *grads = call.backward(q.detach(), *some, [], whole)
        total += dq
        for found, true in zip(grads, truth[1:], strict=True):
            assert_close(found, true[:, :, keys.start : keys.stop], **TIGHT)
    assert_close(total, truth[0], **TIGHT)


@pytest.mark.parametrize("engine", ["aten", "portable"])
def test_gradients_of_a_part_of_the_keys_come_as_they_are_summed(engine: str) -> None:
    """In float32 for tokens in bfloat16: those of the other parts are to be added."""
    q, k, v, grad = torch.randn(4, 1, 2, 4, 8).bfloat16()
    call = PlacedCall(masks.causal().text, Placement((range(4),), ((range(4),),), complete=True), 0.5, 0, 2, engine)
    out, lse = call.forward(q, k, v, [])
    assert lse is not None
    assert {x.dtype for x in call.backward(q, k, v, [], WholeRows(out, lse, grad, None))} == {torch.float32}


def test_partly_overlapping_terms_start_from_nothing():
    """A later term that reaches rows no earlier one has written must not add to what memory happened to hold."""
    pattern = masks.longnet((16, 32, 64), (1, 2, 4)) & masks.causal()
    placement = Placement((range(12, 21), range(38, 44)), ((range(10, 14),),), complete=False, num_tokens=50)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 15, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 4, 8, generator=generator, dtype=torch.float64)
    call = PlacedCall(pattern.text, placement, 0.3, 0, 4, "aten")
    torch.full((1 << 16,), torch.nan)  # freed at once: what the next allocations may find
    found, _ = call.forward(q, k, v, [])
    options = {"scale": 0.3, "enable_gqa": True, "k_offset": 10}
    whole = [attend(rows, k, v, pattern, q_offset=at, **options) for rows, at in ((q[:, :, :9], 12), (q[:, :, 9:], 38))]
    assert_close(found, torch.cat(whole, dim=2), **TIGHT)


@given(part=st.booleans().flatmap(lambda complete: parts(complete=complete)), padded=st.booleans(), side=block_sides)
def test_flex_around_a_dense_kernel(part: Part, padded: bool, side: int):
    """Rows and keys by index, some of them held, others left out; dilated segments over their active tokens."""
    q, k, _ = part.tensors()
    key = replace(part.call("flex"), sides=(side, side)).call(q, k)
    with everything_padded() if padded else nullcontext():
        program = static_program(key, torch.device("cpu"))
    assert_agrees(around_dense(program, 0.5), part.tensors(), part.counts, scale=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("complete", [False, True])
def test_flex_runs_parts(complete: bool):
    """FlexAttention, traced, over picked keys, for a set pattern, where it has a forward: on CPU without lse."""
    pattern = masks.causal() & masks.local_window(left=200, right=0)
    queries = (range(150, 200), range(300, 400))
    needed = (*queries, range(0, 150), range(200, 300))
    placement = Placement(queries, (needed,) * 2 if complete else ((range(100, 300),),), complete, num_tokens=400)
    q = torch.randn(1, 4, 150, 16)
    k, v = torch.randn(2, 1, 2, placement.num_keys, 16)
    call, features = (
        PlacedCall(pattern.text, placement, 0.25, 0, 4, "flex").call(q, k),
        Features(0.25, return_lse=False),
    )
    with without_inductor():
        found, truth = (run(engine, q, k, v, [], call, features)[0] for engine in ("flex", "aten"))
    assert_close(found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "complete", "told"),
    [
        ((range(0, 8, 2),), ((range(8),),), True, "queries must be in runs of step 1"),
        ((range(2),), ((range(3), range(4, 9, 2)),), False, "keys must be in runs of step 1"),
        ((range(8),), ((range(0, 8, 2),),), False, "keys must be in runs of step 1, equal for all heads"),
        ((range(8),), ((range(8),), (range(8),)), False, "keys must be in runs of step 1, equal for all heads"),
        ((range(8),), ((range(0),),), True, "keys must be ascending ranges of positions, none of them empty"),
        ((range(0),), ((range(8),),), True, "queries must be ascending ranges of positions, none of them empty"),
    ],
)
def test_bad_placements(queries, keys, complete, told):
    with pytest.raises(ValueError, match=told):
        Placement(queries, keys, complete=complete)


def test_keys_at_one_position_twice():
    placement = Placement((range(4),), ((range(4), range(2, 6)),), complete=True)
    with pytest.raises(ValueError, match="tokens must be at different positions"):
        placement.key_slots(0)


def test_engines_that_run_no_parts():
    with pytest.raises(ValueError, match="whole sequences"):
        placed_engine("reference", torch.device("cpu"))
    with pytest.raises(ValueError, match="on CPU only"):
        placed_engine("aten", torch.device("cuda"))


def test_run_time_tensors_reach_to_the_last_token_here() -> None:
    assert Placement((range(3),), ((range(5),),), complete=False).end == 5
    assert Placement((range(8, 11),), ((range(5),),), complete=False, num_tokens=20).end == 20


def test_a_position_past_all_that_are_held_has_some_slot() -> None:
    slots = Placement((range(2),), ((range(3, 9, 2),),), complete=True).key_slots(0)
    assert slots.of(torch.tensor([3, 5, 7])).tolist() == [0, 1, 2]
    assert 0 <= int(slots.of(torch.tensor([100]))) <= 2


def test_terms_that_meet_in_one_run_of_queries_are_merged_in_all() -> None:
    """The first queries are computed in one term, those far on in several over the same rows."""
    rule = masks.strided(8) | masks.local_window(left=64, right=0)
    heads = {"num_heads": 1, "head_offset": 0, "num_heads_global": 1}
    for queries in ((range(8), range(1024, 2048)), (range(1024), range(2040, 2048))):
        placement = Placement(queries, ((range(2048),),), complete=False)
        assert plan_at(rule, placement, **heads).shares_rows
