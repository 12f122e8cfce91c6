"""Parts of a softmax: tokens at stated positions, as a device with parts of a sequence has them, and merges by lse."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flexdilated import attend, masks
from flexdilated.engines._gather import merge_
from flexdilated.engines._merge import merge, with_sinks
from flexdilated.engines._placed_call import PlacedCall, placed_engine
from flexdilated.engines.flex._flex_op import static_program
from flexdilated.masks.orders._placement import Placement
from tests.engines.test_flex import around_dense
from tests.support.agreement import TIGHT, assert_agrees
from tests.support.padded import everything_padded
from tests.support.placed import Part, parts
from tests.support.strategies import block_sides


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


@given(
    part=st.booleans().flatmap(lambda complete: parts(complete=complete)),
    engine=st.sampled_from(["aten", "portable", "flex"]),
    padded=st.booleans(),
    side=block_sides,
)
def test_parts_are_the_oracle(part: Part, engine: str, padded: bool, side: int):
    """Rows and keys by index, some of them held, others left out; flex around a dense kernel."""
    (q, k, _), call = part.tensors(), part.call(engine)
    if engine == "flex":
        key = replace(call, sides=(side, side)).call(q, k)
        with everything_padded() if padded else nullcontext():
            run = around_dense(static_program(key, torch.device("cpu")), 0.5)
    else:
        run = lambda q, k, v: call.forward(q, k, v, [])  # noqa: E731
    assert_agrees(run, part.tensors(), part.counts, scale=0.5)
    assert Placement.read(part.placement.text) == part.placement


def test_engines_that_run_no_parts():
    with pytest.raises(ValueError, match="whole sequences"):
        placed_engine("reference", torch.device("cpu"))
    with pytest.raises(ValueError, match="on CPU only"):
        placed_engine("aten", torch.device("cuda"))


def in_place(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = out.clone(), lse.clone()
    merge_(out, lse, part, part_lse)
    return out, lse


def traced(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    return merge([(out, lse), (part, part_lse)])


both_merges = pytest.mark.parametrize("join", [traced, in_place], ids=["traced", "in place"])


@both_merges
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("lse", "part_lse", "joined", "share"),
    [
        (0.0, 0.0, 0.6931471805599453, 0.5),
        (1000.0, -1000.0, 1000.0, 0.0),
        (-1000.0, 1000.0, 1000.0, 1.0),
        (3e4, 3e4, 3e4 + 0.6931471805599453, 0.5),
        (-torch.inf, 5.0, 5.0, 1.0),
        (5.0, -torch.inf, 5.0, 0.0),
        (-torch.inf, -3e4, -3e4, 1.0),
        (-torch.inf, -torch.inf, -torch.inf, 0.0),
    ],
)
def test_extremes(join, dtype, lse, part_lse, joined, share):
    """Neither overflow nor NaN, whichever side weighs all or nothing."""
    out, part = (torch.tensor([[0.0, x]], dtype=dtype) for x in (2.0 if lse > -torch.inf else 0.0, 4.0))
    found, found_lse = join(out, torch.tensor([lse], dtype=dtype), part, torch.tensor([part_lse], dtype=dtype))
    assert_close(found, torch.lerp(out, part, share))
    assert_close(found_lse, torch.tensor([joined], dtype=dtype))


def test_a_score_keeps_no_wider_copy_of_the_output():
    """In half precision: of the output's size, the backward of sinks holds the output alone."""
    out = torch.randn(1, 2, 512, 64, dtype=torch.bfloat16, requires_grad=True)
    lse, sinks = torch.randn(1, 2, 512, requires_grad=True), torch.randn(2, requires_grad=True)
    held: dict[int, int] = {}

    def hold(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x):
        found, _ = with_sinks(out, lse, sinks)
    assert found.dtype == torch.bfloat16
    assert sum(held.values()) < 1.3 * out.nbytes


@pytest.mark.parametrize("logit", [torch.inf, 3e38])
def test_a_sink_that_takes_all(logit):
    out, lse = with_sinks(torch.ones(1, 1, 2, 3), torch.tensor([[[0.0, -torch.inf]]]), torch.tensor([logit]))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, logit))


def test_sums_over_terms_are_kept_wide():
    """Many small parts beside a large one: bfloat16 would lose them."""
    parts = [torch.full((1, 1, 4, 2), value, dtype=torch.bfloat16) for value in (256.0, *[1.0] * 64)]
    out, _ = merge([(part, torch.zeros(1, 1, 4)) for part in parts])
    assert torch.equal(out, torch.full_like(out, 320 / 65))
