"""padding="zeros": the zero keys of torchscale's encoder, against its semantics written out densely."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import assert_attention_close, check_attention_module, check_pattern
from tests.support import published
from tests.support.agreement import TIGHT

LADDER = ((8, 20, 50), (1, 3, 4))
PADDED = masks.longnet(*LADDER, offsets="contiguous", padding="zeros")


def drawn(H: int, N: int, *, dtype=torch.float64, seed: int = 0, requires_grad: bool = False):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, H, N, 4, generator=generator, dtype=dtype, requires_grad=requires_grad) for _ in "qkv")


@st.composite
def ladders(draw: st.DrawFn, longest: int = 60) -> tuple[list[int], list[int]]:
    branches = draw(st.lists(st.tuples(st.integers(1, longest), st.integers(1, 7)), min_size=1, max_size=4))
    segments, rates = zip(*branches, strict=True)
    return [*segments], [*rates]


@given(ladders(), st.integers(1, 6), st.integers(1, 120), st.sampled_from(["contiguous", "interleaved"]))
def test_rows_are_the_published_ones(ladder, H, N, offsets) -> None:
    """Output, lse and gradients through both; each segment's rows stand where its tokens do."""
    q, k, v = drawn(H, N, requires_grad=True)
    pattern = masks.longnet(*ladder, offsets=offsets, padding="zeros")
    found = fd.attend(q, k, v, pattern, return_lse=True)
    truth = published.dilated_attention(q, k, v, *ladder, offsets=offsets, shifted=False)
    seen = truth[1].isfinite()
    grads = [torch.autograd.grad(out.sin().sum() + lse[seen].sum(), (q, k, v)) for out, lse in (found, truth)]
    for one, other in zip((*found, *grads[0]), (*truth, *grads[1]), strict=True):
        assert_close(one, other, **TIGHT)


def test_causal_order_hides_them() -> None:
    """Also written the other way round, and all at once; what is left has no padding."""
    exact = masks.longnet(*LADDER, offsets="contiguous") & masks.causal()
    assert PADDED & masks.causal() == masks.causal() & PADDED == exact
    assert not masks.parse(f"{PADDED!r} & strided(2) & causal()").pads
    q, k, v = drawn(3, 57)
    rows = [x[:, :, :23] for x in (q, k, v)]
    assert_close(fd.attend(q, k, v, PADDED & masks.causal())[:, :, :23], fd.attend(*rows, exact), **TIGHT)


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_options_of_a_call(engine) -> None:
    """Layouts, sinks, grouped heads, some of the heads, and some of the queries."""
    q, k, v = drawn(6, 57)
    out, lse = fd.attend(q, k, v, PADDED, engine=engine, return_lse=True)
    truth = published.dilated_attention(q, k, v, *LADDER, shifted=False)
    assert_close((out, lse), truth, **TIGHT)

    layout = masks.layout(PADDED, 57)
    assert layout.rate > 1
    permuted = fd.attend(*(layout.apply(x) for x in (q, k, v)), PADDED, layout=layout, engine=engine)
    assert_close(layout.invert(permuted), out, **TIGHT)

    some = fd.attend(q[:, 2:5], k[:, 2:5], v[:, 2:5], PADDED, head_offset=2, num_heads_global=6, engine=engine)
    assert_close(some, out[:, 2:5], **TIGHT)
    assert_close(fd.attend(q[:, :, 30:41], k, v, PADDED, q_offset=30, engine=engine), out[:, :, 30:41], **TIGHT)

    groups = fd.attend(q, k[:, :2], v[:, :2], PADDED, enable_gqa=True, engine=engine)
    keys, values = (x[:, :2].repeat_interleave(3, dim=1) for x in (k, v))
    assert_close(groups, published.dilated_attention(q, keys, values, *LADDER, shifted=False)[0], **TIGHT)

    scale = torch.linspace(-1, 2, 6, dtype=torch.float64)  # of each head; that of zero keys is still 0
    scaled = fd.attend(q, k, v, PADDED, scale=scale, engine=engine)
    by_hand = q * scale[:, None, None] * q.shape[-1] ** 0.5
    assert_close(scaled, published.dilated_attention(by_hand, k, v, *LADDER, shifted=False)[0], **TIGHT)

    sinks = torch.randn(6, dtype=torch.float64)
    with_sinks, sunk = fd.attend(q, k, v, PADDED, sinks=sinks, engine=engine, return_lse=True)
    assert_close(sunk, torch.logaddexp(lse, sinks[:, None].expand_as(lse)), **TIGHT)
    assert_close(with_sinks, out * (lse - sunk).exp()[..., None], **TIGHT)


def test_a_sum_keeps_them() -> None:
    q, k, v = drawn(3, 31)
    out, lse = fd.attend(q, k, v, PADDED + masks.causal(), return_lse=True)
    parts = [fd.attend(q, k, v, part, return_lse=True) for part in (PADDED, masks.causal())]
    assert_close(lse, torch.logaddexp(parts[0][1], parts[1][1]), **TIGHT)
    assert_close(out, sum(each * (own - lse).exp()[..., None] for each, own in parts), **TIGHT)


def test_half_precision_and_meta() -> None:
    q, k, v = drawn(3, 57, dtype=torch.bfloat16, requires_grad=True)
    out, lse = fd.attend(q, k, v, PADDED, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert_attention_close(out, q, k, v, PADDED, lse=lse, gradients=True)
    assert fd.attend(*(x.to("meta") for x in (q, k, v)), PADDED).shape == q.shape
    assert fd.attend(*(x[:, :, :0] for x in (q, k, v)), PADDED).shape == (2, 3, 0, 4)


def test_the_definition_has_them_too() -> None:
    """The checks for users know the zero keys, and miss them where they are forgotten."""
    q, k, v = drawn(3, 57, dtype=torch.float32)
    check_pattern(PADDED, num_heads=3, max_tokens=60, examples=6)
    compiled = ("compile", "recompilation")  # as in test_it_compiles
    check_attention_module(lambda: fd.BlockSparseAttention(PADDED), PADDED, max_tokens=40, examples=2, skip=compiled)
    assert_attention_close(fd.attend(q, k, v, PADDED), q, k, v, PADDED)
    for computed, claimed in ((PADDED.unpadded, PADDED), (PADDED, PADDED.unpadded)):
        with pytest.raises(AssertionError, match="out is wrong"):
            assert_attention_close(fd.attend(q, k, v, computed), q, k, v, claimed)


def test_rows_that_zero_keys_fill() -> None:
    """Scores far below 0: what is left of a row is as exact as any."""
    q, k, v = drawn(1, 9, dtype=torch.float32)
    k, q = -20 * q, q.requires_grad_()
    k, v, pattern = k.requires_grad_(), v.requires_grad_(), masks.longnet((8,), (1,), padding="zeros")
    out, lse = fd.attend(q, k, v, pattern, return_lse=True)
    assert 0 < out[:, :, 8].abs().max() < 1e-3
    assert_attention_close(out, q, k, v, pattern, lse=lse, gradients=True)


def test_received_attention_leaves_out_what_zero_keys_take() -> None:
    q, k, v = drawn(3, 57)
    lse = fd.attend(q, k, v, PADDED, return_lse=True)[1]
    exact = fd.attend(q, k, v, PADDED.unpadded, return_lse=True)[1]
    for engine in ("aten", "reference"):
        received = fd.attention_received(q, k, lse, PADDED, engine=engine)
        assert_close(received.sum(-1), (exact - lse).exp().sum(-1), **TIGHT)


def test_texts() -> None:
    one = masks.longnet((8,), (3,), padding="zeros")
    both = PADDED + masks.longnet((8,), (3,), offsets="contiguous")
    for pattern in (PADDED, one, both, PADDED + one):
        assert masks.parse(repr(pattern)) == masks.from_json(masks.to_json(pattern)) == pattern
    assert repr(one) == "longnet((8,), (3,), padding='zeros')"
    assert one != masks.longnet((8,), (3,))
    assert "has 7 zero keys" in str(masks.explain(PADDED, query=56, key=56, num_heads=3, num_tokens=57))
    unknown = str(masks.explain(PADDED, query=48, key=48, num_heads=3))
    assert "an unknown number of zero keys besides: give num_tokens to count them" in unknown
    described = masks.describe(PADDED, 57, num_heads=3)
    assert "zero keys" in str(described)
    counts = PADDED.zero_keys(torch.arange(3)[:, None], torch.arange(57), num_heads=3, num_tokens=57)
    assert described.zero_keys == counts.sum()
    assert "zero keys" not in str(masks.describe(PADDED.unpadded, 57, num_heads=3))
