"""Merging softmax parts by lse: at any magnitude, in place and traced, in float32."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flexdilated.engines._gather import merge_
from flexdilated.engines._merge import merge, with_sinks

# B batch, H heads, N queries, M keys, D head dim


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
