"""attention_received: the sums of dense attention over its queries, for whatever is drawn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
from tests.support.run_time_strategies import packed_cases
from tests.support.strategies import cases, tensors, whole_cases


def weights(q, k, counts, lse=None, scale=None):
    """(B, H, N, M): multiplicity * exp(score - lse) in float64, and the lse of all these keys."""
    q, k = q.detach().double(), k.detach().double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale) + counts.double().log()
    own = scores.logsumexp(-1)
    lse = own if lse is None else lse.double()
    return (scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp(), own


@given(cases(), st.data(), st.sampled_from([None, "reference", "aten"]), st.sampled_from([None, 0.3, 0.0, -0.7]))
def test_sums_of_dense_attention(case, data, engine, scale):
    q, k, _ = data.draw(tensors(case))
    expected, lse = weights(q, k, case.counts(), scale=scale)
    options = {"scale": scale, "enable_gqa": True, "engine": engine}
    received = fd.attention_received(q, k, lse, case.twin.pattern, **options, **case.sizes)
    assert (received.dtype, received.shape) == (torch.float64, (*q.shape[:2], k.shape[2]))
    torch.testing.assert_close(received, expected.sum(2), rtol=1e-9, atol=1e-12)
    rows = (lse > -torch.inf).sum(-1).double()
    torch.testing.assert_close(received.sum(-1), rows, rtol=1e-9, atol=1e-12)
    assert not received.requires_grad


@given(packed_cases(), st.data())
def test_documents_by_batch_entry(case, data):
    q, k, _ = data.draw(tensors(case, batch=case.batch))
    expected, lse = weights(q, k, case.counts)
    received = fd.attention_received(q, k, lse, case.pattern, enable_gqa=True, **case.offsets)
    torch.testing.assert_close(received, expected.sum(2), rtol=1e-9, atol=1e-12)


@given(whole_cases(), st.data(), st.integers(1, 6), st.sampled_from(["aten", "portable", "reference"]))
def test_what_sinks_take_is_missing_in_any_order_of_tokens(case, data, rate, engine):
    q, k, v = data.draw(tensors(case))
    sinks = torch.linspace(-1.0, 2.0, case.num_heads, dtype=q.dtype)
    _, lse = fd.attend(q, k, v, case.twin.pattern, enable_gqa=True, sinks=sinks, return_lse=True)
    order, expected = masks.Layout(case.num_keys, rate), weights(q, k, case.counts(), lse)[0].sum(2)
    ordered = order.apply(q), order.apply(k), order.apply(lse, dim=-1)
    options = {"enable_gqa": True, "layout": order, "engine": engine}
    received = fd.attention_received(*ordered, case.twin.pattern, **options)
    torch.testing.assert_close(received, order.apply(expected, dim=-1), rtol=1e-9, atol=1e-12)
    left = (1 - (sinks[:, None] - lse).exp()).sum(-1)
    torch.testing.assert_close(received.sum(-1), left, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
@pytest.mark.parametrize(("num_tokens", "cut"), [(2, 1), (37, 9)])
def test_parts_of_the_keys_stand_side_by_side(num_tokens, cut, engine):
    """With the lse of all keys, each part is told what it got."""
    torch.manual_seed(num_tokens)
    pattern = masks.longnet((8, 16), (1, 2)) + masks.local_window(left=5, right=2)
    q, k, v = torch.randn(3, 1, 4, num_tokens, 8, dtype=torch.float64)
    _, lse = fd.attend(q, k, v, pattern, return_lse=True)
    whole = fd.attention_received(q, k, lse, pattern)
    first = fd.attention_received(q, k[:, :, :cut], lse, pattern, engine=engine)
    second = fd.attention_received(q, k[:, :, cut:], lse, pattern, k_offset=cut, engine=engine)
    torch.testing.assert_close(torch.cat([first, second], -1), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 8), (8, 1, 3), (10, 2, 1)])
def test_query_heads_that_share_keys_are_told_apart(heads, kv_heads, dim, engine):
    """Also where a group has more heads than there are columns."""
    torch.manual_seed(heads)
    q, k = torch.randn(2, heads, 30, dim).double(), torch.randn(2, kv_heads, 30, dim).double()
    pattern = masks.longnet((8, 32), (1, 4)) & masks.causal()
    counts = masks_counts(pattern, heads, 30)
    expected, lse = weights(q, k, counts)
    received = fd.attention_received(q, k, lse, pattern, enable_gqa=True, engine=engine)
    torch.testing.assert_close(received, expected.sum(2), rtol=1e-9, atol=1e-12)


def masks_counts(pattern, num_heads, num_tokens):
    """(H, N, N) from each branch's mask_mod."""
    h, t = torch.arange(num_heads)[:, None, None], torch.arange(num_tokens)
    found = [branch.mask_mod(num_heads=num_heads, device=torch.device("cpu")) for branch in pattern.branches()]
    return sum(mod(torch.tensor(0), h, t[:, None], t).expand(num_heads, -1, -1).long() for mod in found)


@settings(max_examples=9)
@given(cases(), st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_half_precision_runs_in_float32_on_cpu(case, data, dtype):
    q, k, _ = data.draw(tensors(case, dtype))
    expected, lse = weights(q, k, case.counts())
    received = fd.attention_received(q, k, lse.float(), case.twin.pattern, enable_gqa=True, **case.sizes)
    assert received.dtype == torch.float32
    torch.testing.assert_close(received.double(), expected.sum(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sides", [8, 16, (16, 32)])
@pytest.mark.parametrize("num_tokens", [1, 47])
def test_block_sides_change_nothing(sides, num_tokens):
    torch.manual_seed(num_tokens)
    pattern = masks.neighborhood((6, 8), 1) | masks.first_tokens(2)
    q, k, v = torch.randn(3, 1, 2, num_tokens, 8, dtype=torch.float64)
    _, lse = fd.attend(q, k, v, pattern, return_lse=True)
    received = fd.attention_received(q, k, lse, pattern, block_size=sides)
    torch.testing.assert_close(received, fd.attention_received(q, k, lse, pattern), rtol=1e-9, atol=1e-12)


PATTERN = (masks.longnet((16, 32), (1, 2)) & masks.causal()) + masks.first_tokens(1)


def one_call(dtype=torch.float64):
    torch.manual_seed(5)
    q, k, v = torch.randn(3, 2, 4, 50, 8, dtype=dtype)
    _, lse = fd.attend(q, k, v, PATTERN, return_lse=True)
    return q, k, lse, weights(q, k, masks_counts(PATTERN, 4, 50))[0].sum(2)


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_without_gradients_and_with_tensors_that_want_them(engine):
    q, k, lse, expected = one_call()
    with torch.no_grad():
        torch.testing.assert_close(fd.attention_received(q, k, lse, PATTERN, engine=engine), expected)
    with torch.inference_mode():
        inside = fd.attention_received(q.clone(), k.clone(), lse.clone(), PATTERN, engine=engine)
    torch.testing.assert_close(inside.clone(), expected)
    wanted = [x.clone().requires_grad_() for x in (q, k, lse)]
    received = fd.attention_received(*wanted, PATTERN, engine=engine)
    assert not received.requires_grad
    torch.testing.assert_close(received, expected)


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_an_lse_of_another_width_is_read(engine):
    q, k, lse, expected = one_call()
    narrow = fd.attention_received(q, k, lse.float(), PATTERN, engine=engine)
    torch.testing.assert_close(narrow, expected, rtol=1e-5, atol=1e-5)
    wide = fd.attention_received(q.float(), k.float(), lse, PATTERN, engine=engine)
    assert (narrow.dtype, wide.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-5)


def test_compiled_whole():
    q, k, lse, expected = one_call()
    compiled = torch.compile(lambda *x: fd.attention_received(*x, PATTERN), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, lse), expected)


def test_autocast_is_that_of_the_call():
    q, k, _, _ = one_call(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, lse = fd.attend(q, k, k, PATTERN, return_lse=True)
        received = fd.attention_received(q, k, lse, PATTERN)
    expected, _ = weights(q.bfloat16(), k.bfloat16(), masks_counts(PATTERN, 4, 50), lse)
    assert received.dtype == torch.float32
    torch.testing.assert_close(received.double(), expected.sum(2), rtol=1e-5, atol=1e-5)
