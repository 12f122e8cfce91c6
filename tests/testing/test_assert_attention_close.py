"""assert_attention_close: right results pass in any dtype; an error shows the first wrong row and its branches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import assert_attention_close
from flexdilated.testing import strategies as fst
from tests.support import oracle

LADDER = masks.longnet([4, 8, 16], [1, 2, 3]) & masks.causal()
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def inputs(num_tokens=24, heads=(2, 2), head_dim=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, number, num_tokens, head_dim) for number in (heads[0], heads[1], heads[1])]
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    )


def found(*call, **options) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_attention_close(*call, **options)
    return str(caught.value)


@settings(max_examples=max(2, settings.default.max_examples // 2))
@given(st.data())
def test_attend_is_close(data) -> None:
    """Any pattern, sizes and values, in every dtype, with the gradients."""
    heads = data.draw(st.integers(1, 4))
    pattern = data.draw(fst.patterns(num_heads=heads))
    sizes = data.draw(fst.attention_sizes(pattern, num_heads=heads))
    dtype = data.draw(st.sampled_from(DTYPES))
    q, k, v = data.draw(fst.attention_inputs(sizes, dtype=dtype, requires_grad=True))
    if dtype == torch.float16:  # whose largest number is 65,504
        q, k, v = (x.detach().clamp(-30, 30).requires_grad_() for x in (q, k, v))
    out, lse = fd.attend(q, k, v, pattern, enable_gqa=True, return_lse=True)
    assert_attention_close(out, q, k, v, pattern, lse=lse, gradients=True)


def test_all_options_of_attend() -> None:
    """Offsets, heads that live elsewhere, sinks, a score_mod, run-time tensors, a scale."""
    q, k, v = inputs(12, dtype=torch.float32)
    ids = torch.tensor([0] * 5 + [1] * 7)
    pattern = masks.parse("(local_window(left=4, right=2) & documents('ids')) + first_tokens(2)")
    options = {"scale": 0.3, "sinks": torch.randn(2), "score_mod": lambda s, b, h, i, j: s * 0.5 + (j - i) * 0.1}
    options |= {"bindings": {"ids": ids}, "head_offset": 1, "num_heads_global": 5}
    out, lse = fd.attend(q, k, v, pattern, return_lse=True, engine="reference", **options)
    assert_attention_close(out, q, k, v, pattern, lse=lse, gradients=True, **options)
    for name, other in {"scale": 0.31, "sinks": torch.zeros(2), "score_mod": None}.items():
        assert "out is wrong" in found(out, q, k, v, pattern, lse=lse, **{**options, name: other})
    shifted = fd.attend(q[:, :, :5], k, v, masks.causal(), q_offset=7)
    assert_attention_close(shifted, q[:, :, :5], k, v, masks.causal(), q_offset=7)
    assert "out is wrong" in found(shifted, q[:, :, :5], k, v, masks.causal(), q_offset=6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_budget_is_tight(dtype) -> None:
    """An error of a few times what torch's own attention makes in the dtype does not pass; nor does half a percent."""
    q, k, v = inputs(40, dtype=dtype)
    pattern = masks.local_window(left=6, right=0)
    truth, lse = oracle.attention(
        q, k, v, oracle.counts(oracle.local_window(6, 0), range(2), 2, *[torch.arange(40)] * 2)
    )
    assert_attention_close(truth.to(dtype), q, k, v, pattern, lse=lse)
    eps = torch.finfo(dtype).eps
    for factor in (1 + 40 * eps, 1 - 40 * eps):
        text = found(truth.detach() * factor, q, k, v, pattern)
        assert "out is wrong" in text
    assert "lse is wrong" in found(truth.to(dtype), q, k, v, pattern, lse=lse + 40 * eps * lse.abs().amax() + 40 * eps)


def test_the_report() -> None:
    """The first wrong row with its keys by branch; the budget is that of q's dtype."""
    q, k, v = inputs()
    out = fd.attend(q, k, v, masks.longnet([4, 8], [1, 2]) & masks.causal())
    lines = found(out, q, k, v, LADDER).splitlines()
    assert lines[0].startswith("out is wrong in 30 of 96 rows; the first is batch 0, head 0, query 3, element 0")
    assert [line.split()[0] for line in lines[1:]] == ["found", "expected", "off", "branch", "branch", "branch"]
    assert lines[4] == "  branch 0  0 to 3: dilated(4, 1, offset='interleaved') & causal()"
    assert lines[6] == "  branch 2  0, 3: dilated(16, 3, offset='interleaved') & causal()"
    window = masks.local_window(left=3, right=0)
    text = found(fd.attend(q, k, v, window).float(), q, k, v, window)
    assert "(in float32, where q is float64)" in text
    assert "where rounding to float64 may account for" in text
    assert text.splitlines()[-1] == "  keys      0: local_window(left=3, right=0)"


def test_rows_without_keys_are_exact() -> None:
    q, k, v = inputs(8)
    pattern = masks.dilated(8, 2)
    out, lse = fd.attend(q, k, v, pattern, return_lse=True)
    assert_attention_close(out, q, k, v, pattern, lse=lse)
    broken = out.detach().clone()
    broken[1, 1, 3] = 1e-30
    assert "batch 1, head 1, query 3" in found(broken, q, k, v, pattern)
    assert "lse is wrong in 16 of 32 rows" in found(out, q, k, v, pattern, lse=lse.detach().clamp(min=-1e9))
    broken[1, 1, 3] = torch.nan
    assert "found     nan" in found(broken, q, k, v, pattern)


def test_gradients_are_checked() -> None:
    q, k, v = inputs(9)
    out, lse = fd.attend(q, k, v, LADDER, return_lse=True)
    assert "dq is wrong" in found(out, q, k, v, LADDER, lse=lse.detach(), gradients=True)
    assert "has no gradient" in found(out.detach(), q, k, v, LADDER, gradients=True)
    half = 0.5 * (out + out.detach())
    assert "dq is wrong" in found(half, q, k, v, LADDER, gradients=True)
    text = found(fd.attend(q, k, v.detach(), LADDER) + 0 * v.sum(), q, k, v, LADDER, gradients=True)
    assert text.splitlines()[0].startswith("dv is wrong in")
    assert "key/value head 0, key 0" in text
    assert "seen by   " in text
