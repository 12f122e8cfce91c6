"""Merging softmax parts by lse: equal to one softmax over both, at any magnitude, in place and traced."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flexdilated.engines._gather import merge_
from flexdilated.engines._merge import merge, with_sinks
from tests.support import oracle
from tests.support.agreement import TIGHT

# B batch, H heads, N queries, M keys, D head dim


def in_place(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = out.clone(), lse.clone()
    merge_(out, lse, part, part_lse)
    return out, lse


def traced(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    return merge([(out, lse), (part, part_lse)])


both_merges = pytest.mark.parametrize("join", [traced, in_place], ids=["traced", "in place"])


@both_merges
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3), st.integers(0, 1 << 16))
def test_two_parts_are_one_softmax(join, N, M, most, seed):
    """Keys of either part, of both (they count twice) and of none; rows without keys on either side."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, tokens, 4, dtype=torch.float64) for tokens in (N, M, M))
    first, second = (torch.randint(0, 2, (2, N, M)) * torch.randint(0, most + 1, (2, N, 1)) for _ in range(2))
    out, lse = join(*oracle.attention(q, k, v, first), *oracle.attention(q, k, v, second))
    expected_out, expected_lse = oracle.attention(q, k, v, first + second)
    assert_close(out, expected_out, **TIGHT)
    assert_close(lse, expected_lse, **TIGHT)


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


@both_merges
def test_the_order_of_parts_does_not_matter(join):
    torch.manual_seed(0)
    parts = [(torch.randn(5, 3, dtype=torch.float64), 9 * torch.randn(5, dtype=torch.float64)) for _ in range(3)]
    forwards = join(*join(*parts[0], *parts[1]), *parts[2])
    backwards = join(*join(*parts[2], *parts[1]), *parts[0])
    for one, other in zip(forwards, backwards, strict=True):
        assert_close(one, other, **TIGHT)


def test_gradients_of_the_traced_merge():
    """Against finite differences; rows without keys on either side pass nothing on, and no NaN."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3), (4,), (4, 3), (4,))]
    absent = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])

    def joined(out, lse, part, part_lse):
        hidden = absent[0][:, None], absent[1][:, None]
        found, found_lse = traced(
            out.masked_fill(hidden[0], 0.0),
            lse.masked_fill(absent[0], -torch.inf),
            part.masked_fill(hidden[1], 0.0),
            part_lse.masked_fill(absent[1], -torch.inf),
        )
        return found, found_lse[1:]

    assert torch.autograd.gradcheck(joined, inputs)


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
