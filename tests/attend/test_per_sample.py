"""Patterns that differ between batch entries: a choice of pattern, and the position of the first query."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo import testing
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.testing import strategies as fst

B, H, N, M = 3, 4, 5, 90
STARTS = torch.tensor([85, 0, 41])


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((B, H, N, 8), (B, 2, M, 8), (B, 2, M, 16))
    q, k, v = (torch.randn(size, generator=draw, dtype=dtype).requires_grad_() for size in sizes)
    return q, k, v


def sample_by_sample(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """Results of a separate call attend(index, q, k, v) for each batch entry, concatenated."""
    return torch.cat([attend(b, q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(len(q))])


@given(
    fst.patterns(num_heads=H, max_positions=M), st.lists(st.integers(0, M - N), min_size=B, max_size=B), st.booleans()
)
def test_queries_from_another_position_in_each_sample(pattern, starts, hides):
    q, k, v = tensors()
    visible = torch.rand(B, M, generator=torch.Generator().manual_seed(1)) < 0.7
    whole = pattern & masks.visible_keys(visible) if hides else pattern

    def alone(b: int, *x: Tensor) -> Tensor:
        rule = pattern & masks.visible_keys(visible[b]) if hides else pattern
        return fd.attend(*x, rule, q_offset=starts[b], enable_gqa=True)

    out = fd.attend(q, k, v, whole, q_offset=torch.tensor(starts), enable_gqa=True)
    expected = sample_by_sample(q, k, v, alone)
    assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)), strict=True):
        assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ["portable", "reference"])
def test_score_mod_gets_positions(engine):
    q, k, v = tensors()
    table = torch.randn(H, 61, dtype=torch.float64, requires_grad=True)
    how = {"engine": engine, "enable_gqa": True, "score_mod": fd.biases.relative(table)}
    rule = masks.causal()
    out = fd.attend(q, k, v, rule, q_offset=STARTS, **how)
    expected = sample_by_sample(q, k, v, lambda b, *x: fd.attend(*x, rule, q_offset=int(STARTS[b]), **how))
    assert_close(out, expected, rtol=1e-10, atol=1e-10)
    mine, theirs = (torch.autograd.grad(x.square().sum(), table)[0] for x in (out, expected))
    assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ["portable", "reference"])
def test_one_position_serves_all_samples(engine):
    q, k, v = tensors()
    weight = torch.arange(B, dtype=torch.float64)
    how = {"engine": engine, "enable_gqa": True, "score_mod": lambda s, b, h, i, j: s + weight[b] * (i - j)}
    out = fd.attend(q, k, v, masks.causal(), q_offset=STARTS[:1], **how)
    assert_close(out, fd.attend(q, k, v, masks.causal(), q_offset=int(STARTS[0]), **how), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "how",
    [{}, {"engine": "portable"}, {"score_mod": lambda s, b, h, i, j: s - (i - j).abs()}],
    ids=["aten", "portable", "score_mod"],
)
def test_positions_may_change_in_place(how):
    """As in a loop of decoding: earlier gradients, and later calls from the earlier positions, are not affected."""
    _, q, v = tensors()
    k = q
    expected = fd.attend(q, k, v, masks.causal(), q_offset=STARTS, **how)
    of_expected = torch.autograd.grad(expected.square().sum(), (q, v))
    masks.cache().clear()
    starts = STARTS.clone()
    with torch.no_grad():
        fd.attend(q, k, v, masks.causal(), q_offset=starts, **how)
    starts -= starts.clamp(max=3)
    out = fd.attend(q, k, v, masks.causal(), q_offset=STARTS.clone(), **how)
    assert_close(out, expected, rtol=1e-10, atol=1e-10)
    starts.copy_(STARTS)
    out = fd.attend(q, k, v, masks.causal(), q_offset=starts, **how)
    starts -= starts.clamp(max=3)
    for mine, theirs in zip(torch.autograd.grad(out.square().sum(), (q, v)), of_expected, strict=True):
        assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@given(st.lists(st.integers(0, 2), min_size=B, max_size=B), st.sampled_from([None, "portable", "reference"]))
def test_one_of_several_patterns_for_each_sample(which, engine):
    q, k, v = tensors()
    rules = [masks.local_window(left=3, right=3), masks.dilated(16, 2) & masks.causal(), masks.first_tokens(2)]
    how = {"engine": engine, "enable_gqa": True, "q_offset": 40}
    out = fd.attend(q, k, v, masks.per_sample(rules, torch.tensor(which)), **how)
    expected = sample_by_sample(q, k, v, lambda b, *x: fd.attend(*x, rules[which[b]], **how))
    assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_each_sample_its_own_pattern_by_default():
    q, k, v = tensors()
    rules = [masks.causal(), masks.every(), masks.local_window(left=1, right=1)]
    out = fd.attend(q, k, v, masks.per_sample(rules), enable_gqa=True, q_offset=40)
    expected = sample_by_sample(q, k, v, lambda b, *x: fd.attend(*x, rules[b], enable_gqa=True, q_offset=40))
    assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_samples_of_one_pattern_share_a_plan():
    _, k, v = (x.detach() for x in tensors())
    near = masks.local_window(left=3, right=3)
    fd.attend(k, k, v, masks.per_sample([near, masks.causal()], torch.tensor([0, 0, 0])))
    before = masks.cache().stats()
    fd.attend(k, k, v, near)
    after = masks.cache().stats()
    assert after.misses == before.misses
    assert after.hits > before.hits


def test_samples_that_begin_at_0_share_the_plan_of_the_pattern():
    _, k, v = (x.detach() for x in tensors())
    near = masks.local_window(left=3, right=3)
    fd.attend(k, k, v, near)
    before = masks.cache().stats().misses
    fd.attend(k, k, v, near, q_offset=torch.zeros(B, dtype=torch.int64))
    assert masks.cache().stats().misses - before <= 1  # the values of the positions


def test_texts_name_the_tensors():
    rule = masks.per_sample([masks.causal(), masks.every()], "which").queries_from
    with pytest.raises(ValueError, match=r"queries_from needs .* other than visible_keys, .* masks.same_document"):
        rule("starts")
    for pattern in (
        masks.per_sample([masks.causal(), masks.every()], "which") & masks.causal(),
        (masks.longnet([8, 16], [1, 2]) & masks.causal()).queries_from("starts") & masks.visible_keys("seen"),
    ):
        assert masks.parse(repr(pattern)) == pattern
        assert masks.from_json(masks.to_json(pattern)) == pattern


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda q, k, v: fd.attend(q, k, v, masks.causal(), q_offset=STARTS[:2]),
            ValueError,
            "each of 3 batch entries",
        ),
        (
            lambda q, k, v: fd.attend(q, k, v, masks.causal(), q_offset=STARTS - 9),
            ValueError,
            "at least 0 and below 2147483648; got -9",
        ),
        (
            lambda q, k, v: fd.attend(q, k, v, masks.causal(), q_offset=STARTS + 2**31, engine="portable"),
            ValueError,
            "below 2147483648; got 2147483733",
        ),
        (
            lambda q, k, v: fd.attend(q, k, v, masks.per_sample([masks.causal()], STARTS[None])),
            ValueError,
            r"got \(1, 3\)$",
        ),
        (lambda q, k, v: fd.attend(q, k, v, masks.causal(), q_offset=STARTS / 2), TypeError, "must hold integers"),
        (lambda q, k, v: fd.attend(q, k, v, masks.causal(), q_offset=STARTS[None]), TypeError, r"shape \(\)"),
        (
            lambda q, k, v: fd.attend(q, k, v, masks.per_sample([masks.causal()], STARTS)),
            ValueError,
            "pattern numbers of per_sample must be at least 0 and below 1; got 85",
        ),
        (lambda q, k, v: masks.per_sample([masks.causal() + masks.every()]), TypeError, "none of them a mixture"),
        (lambda q, k, v: masks.per_sample(masks.causal()), TypeError, "needs a sequence of patterns"),
        (
            lambda q, k, v: masks.causal().queries_from(masks.lengths(STARTS)),
            TypeError,
            r"positions of the first queries must be integers .*; got lengths\('lengths'\)",
        ),
        (
            lambda q, k, v: masks.from_json(
                '{"kind":"per_sample","parts":[{"kind":"causal"}],"which":{"kind":"causal"}}'
            ),
            ValueError,
            r"pattern numbers of per_sample must be integers .*; got causal\(\)",
        ),
        (lambda q, k, v: masks.per_sample([]), ValueError, "at least one pattern"),
    ],
)
def test_wrong_calls(call, error, says):
    q, k, v = tensors()
    with pytest.raises(error, match=says):
        call(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


@pytest.mark.slow
def test_new_positions_do_not_recompile():
    q, k, v = (x.detach() for x in tensors())
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    compilations = testing.CompileCounterWithBackend("aot_eager")

    def attend(starts: Tensor) -> Tensor:
        return fd.attend(q, k, v, masks.causal(), q_offset=starts)

    compiled = torch.compile(attend, fullgraph=True, backend=compilations)
    for starts in (STARTS, STARTS + 1, STARTS.flip(0)):
        assert_close(compiled(starts), fd.attend(q, k, v, masks.causal(), q_offset=starts), rtol=1e-10, atol=1e-10)
    assert compilations.frame_count == 1


@pytest.mark.slow
def test_one_position_compiles_with_score_mod():
    _, q, v = (x.detach().float() for x in tensors())

    def attend(starts: Tensor | int, engine: str) -> Tensor:
        how = {"engine": engine, "score_mod": lambda s, b, h, i, j: s - 0.1 * (i - j)}
        return fd.attend(q, q, v, masks.causal(), q_offset=starts, **how)

    with torch.no_grad():
        out = torch.compile(attend, fullgraph=True)(STARTS[:1], "flex")
        assert_close(out, attend(int(STARTS[0]), "reference"), rtol=1e-4, atol=1e-5)
