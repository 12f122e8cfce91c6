"""attend: options do what they say, and autocast what it does to torch's attention."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.support.agreement import TIGHT

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

PATTERN = masks.longnet([8, 16], [1, 2])


def tensors(B=1, H=4, G=4, N=12, M=12, D=8, **options) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, tokens, D, **options) for heads, tokens in ((H, N), (G, M), (G, M)))
    return q, k, v


def test_more_heads_than_models_have_are_likely_to_be_tokens():
    """It warns: some pack a batch into the heads."""
    q, k, v = (x.transpose(1, 2) for x in tensors(N=300, M=300))
    with pytest.warns(UserWarning, match=r"q has 300 heads of 4 tokens, .* as x\.transpose\(1, 2\)"):
        fd.attend(q, k, v, PATTERN)
    q, k, v = tensors(H=300, G=300, N=300, M=300, D=1)
    fd.attend(q, k, v, PATTERN)  # as many tokens


def test_few_causal_queries_say_where_they_are():
    """q_offset=0 is the answer None has elsewhere; what is not causal, and more queries, need none."""
    q, k, v = tensors(N=3, dtype=torch.float64)
    with pytest.raises(ValueError, match="write q_offset=9 if the queries are the last tokens, or q_offset=0"):
        fd.attend(q, k, v, PATTERN & masks.causal())
    first = fd.attend(q, k, v, PATTERN & masks.causal(), q_offset=0)
    assert_close(first, fd.attend(q, k[:, :, :3], v[:, :, :3], PATTERN & masks.causal()), **TIGHT)
    for pattern in (PATTERN, masks.prefix_lm(2), masks.local_window(left=2, right=1)):
        assert_close(fd.attend(q, k, v, pattern), fd.attend(q, k, v, pattern, q_offset=0), rtol=0, atol=0)
    fd.attend(k, q, q, masks.causal())


def test_the_output_alone_or_with_its_lse():
    given = tensors()
    out = fd.attend(*given, PATTERN)
    pair = fd.attend(*given, PATTERN, return_lse=True)
    assert isinstance(pair, tuple)
    assert torch.equal(out, pair[0])
    assert (out.shape, pair[1].shape) == ((1, 4, 12, 8), (1, 4, 12))


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_sdpa_does(engine, dtype):
    q, k, v = tensors()
    with torch.autocast("cpu", dtype):
        found = fd.attend(q, k.half(), v.to(dtype), PATTERN, engine=engine)
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert found.dtype == dense.dtype == dtype
    assert torch.equal(found, fd.attend(q.to(dtype), k.half().to(dtype), v.to(dtype), PATTERN, engine=engine))


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_autocast_leaves_what_sdpa_leaves(engine):
    """Float64 stays float64, and integers stay an error."""
    q, k, v = (x.double() for x in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        found = fd.attend(q, k, v, PATTERN, engine=engine)
        assert torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == found.dtype == torch.float64
        with pytest.raises(TypeError, match=r"q must be float32, .*; got torch\.int64"):
            fd.attend(q.long(), k, v, PATTERN, engine=engine)
    assert torch.equal(found, fd.attend(q, k, v, PATTERN, engine=engine))


def test_autocast_sends_gradients_back_in_the_input_dtype():
    given = tensors(requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = fd.attend(*given, PATTERN)
    found = torch.autograd.grad(out.float().square().sum(), given)
    expected = torch.autograd.grad(fd.attend(*given, PATTERN).square().sum(), given)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


def test_a_full_int_is_a_scale():
    given = tensors()
    assert torch.equal(fd.attend(*given, PATTERN, scale=1), fd.attend(*given, PATTERN, scale=1.0))
    mean = fd.attend(*given, masks.longnet([12], [1]), scale=0)
    assert_close(mean, given[2].mean(2, keepdim=True).expand_as(mean))


@pytest.mark.parametrize("D", [1, 3, 24, 48, 65])
def test_any_head_dim(D):
    given = tensors(D=D, dtype=torch.float64)
    assert_close(fd.attend(*given, PATTERN), fd.attend(*given, PATTERN, engine="reference"), **TIGHT)
