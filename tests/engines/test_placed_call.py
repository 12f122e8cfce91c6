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
from flexdilated.engines import WholeRows
from flexdilated.engines._placed_call import PlacedCall, placed_engine
from flexdilated.engines.flex._flex_op import static_program
from flexdilated.masks.orders._placement import Placement
from tests.engines.test_flex import around_dense
from tests.support.agreement import TIGHT, assert_agrees
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


def test_engines_that_run_no_parts():
    with pytest.raises(ValueError, match="whole sequences"):
        placed_engine("reference", torch.device("cpu"))
    with pytest.raises(ValueError, match="on CPU only"):
        placed_engine("aten", torch.device("cuda"))
