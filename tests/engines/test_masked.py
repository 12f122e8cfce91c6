"""Few tokens in one kernel call under a mask: chosen only where it is the cheapest, and one mask for many lengths."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines.aten import _aten_op, _tile_blocks
from flexdilated.engines.aten._program import make_program
from flexdilated.engines.kernels import _kernel
from flexdilated.masks import Bound, Layout
from flexdilated.masks.planning import Allowed, CountedPairs, _candidates
from flexdilated.masks.planning._planner import Plan, plan
from flexdilated.masks.planning.lowering._layouts import masked_term
from tests.engines.test_aten import RunPlan, assert_plan_agrees
from tests.support.oracle import useful_pairs
from tests.support.strategies import cases, tensors

# Some heads of longnet([8, 16], [2, 4]) have rows without keys.
MIXTURE = masks.longnet([8, 16], [2, 4]) & masks.causal()


def under_mask(bound: Bound, *_: object, **__: object) -> Plan:
    """The plan of one masked term, whatever other ways would cost."""
    return Plan(bound, Layout(bound.num_queries), (masked_term(bound.pattern, 1, bound),), ())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    q, k, v = (torch.randn(2, heads, 50, 16).to(dtype) for heads in (4, 2, 2))
    exact = fd.attend(q, k, v, MIXTURE, enable_gqa=True, engine="reference")
    program = make_program(under_mask(bound_of(MIXTURE, 50, heads=4)), Layout(50), num_kv_heads=2)
    found = RunPlan.apply(program, q * 16**-0.5 / 0.5, k, v)[0]
    torch.testing.assert_close(found.to(dtype), exact, rtol=0, atol=2 * torch.finfo(dtype).eps)


def bound_of(pattern: masks.Pattern | masks.Mixture, tokens: int, heads: int = 8) -> Bound:
    return pattern.bind(num_heads=heads, num_queries=tokens, num_keys=tokens)


SHORT = {
    "window": masks.local_window(left=31, right=0),
    "LongNet": masks.longnet([16, 32], [1, 2]),
    "causal LongNet": masks.longnet([16, 32], [1, 2]) & masks.causal(),
    "documents": masks.causal() & masks.documents(torch.arange(64) // 13),
    "a union": masks.local_window(left=3, right=3) | masks.global_tokens(2),
}


@pytest.mark.parametrize("name", SHORT)
def test_short_sequences_take_one_kernel_call(name, monkeypatch):
    calls: Counter[str] = Counter()
    for module in (_kernel, _tile_blocks):
        for kernel in ("flash_forward", "flash_backward"):
            monkeypatch.setattr(module, kernel, _counted(calls, kernel, getattr(module, kernel)))
    q, k, v = torch.randn(3, 1, 8, 64, 16, requires_grad=True)
    fd.attend(q, k, v, SHORT[name]).sum().backward()
    assert calls == {"flash_forward": 1, "flash_backward": 1}


def _counted(calls, name, kernel):
    def run(*args, **options):
        calls[name] += 1
        return kernel(*args, **options)

    return run


def test_where_no_mask_is_taken(monkeypatch):
    """Long sequences, patterns that one kernel call computes without a mask, and calls that ask for blocks."""
    window = SHORT["window"]
    by_head = masks.per_head([window] * 7 + [masks.local_window(left=3, right=0)])
    for rule, num_masks in ((window, 1), (by_head, 8)):  # one mask serves all heads that share a rule
        most = int((_candidates._MOST_MASKED_PAIRS / num_masks) ** 0.5)
        assert "masked" in layouts(rule, most)
        assert "masked" not in layouts(rule, most + 1)
    assert "masked" not in layouts(masks.causal(), 64)
    assert "masked" not in layouts(masks.chunked(16), 64)
    planned = _aten_op.plan_aten(bound_of(window, 64), Layout(64), "cpu", allowed=Allowed(masks=False))
    assert {term.shape for term in planned.terms} == {"blocks"}


def layouts(pattern: masks.Pattern, tokens: int) -> set[str]:
    return {option.layout for options in plan(bound_of(pattern, tokens)).options for option in options}


def test_plan_and_describe_say_so():
    described = masks.describe(SHORT["causal LongNet"], 64, num_heads=8)
    assert described.computed_pairs == 8 * 64 * 64
    assert described.useful_pairs == useful_pairs([16, 32], [1, 2], num_heads=8, N=64, causal=True)
    (term,) = fd.plan(SHORT["causal LongNet"], 64, num_heads=8).terms
    assert (term.layout, term.shape) == ("masked", "masked")


@pytest.mark.parametrize("pattern", [MIXTURE & masks.causal(), SHORT["window"]], ids=str)
def test_later_keys_may_have_infinite_scores(pattern):
    """As with xPos, whose queries shrink and keys grow: what a rule hides is never asked for by a causal one."""
    generator = torch.Generator().manual_seed(0)
    grown = 10 ** torch.linspace(-30, 30, 60)[:, None]
    q, k, v = torch.randn(3, 1, 4, 60, 16, generator=generator).unbind()
    leaves = [(q.abs() / grown).requires_grad_(), (k.abs() * grown).requires_grad_(), v.requires_grad_()]
    assert (leaves[0].detach() @ leaves[1].detach().mT).isinf().any()
    program = make_program(under_mask(bound_of(pattern, 60, heads=4)), Layout(60), num_kv_heads=4)
    out = RunPlan.apply(program, *leaves)[0]
    exact = fd.attend(*leaves, pattern, scale=0.5, engine="reference")
    torch.testing.assert_close(out, exact)
    grads = (torch.autograd.grad(each.square().sum(), leaves[2])[0] for each in (out, exact))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_the_table_has_the_dtype_of_sums():
    """Of one pattern both are kept."""
    term = masked_term(MIXTURE, 1, bound_of(MIXTURE, 40))
    for dtype in (torch.float32, torch.float64):
        largest = term.bias(dtype).max()
        assert torch.equal(largest, torch.tensor(2, dtype=dtype).log())
        assert largest.dtype == dtype


@given(cases(), st.data(), st.integers(1, 30), st.booleans())
def test_calls_of_other_lengths_share_the_mask(case, data, more, longer_first):
    """A call after, or before, one with more queries and as many more keys is the oracle, with gradients."""
    drawn, bound = data.draw(tensors(case, one_width=True)), case.bind()
    longer = replace(bound, num_queries=bound.num_queries + more, num_keys=bound.num_keys + more)
    masks.cache().clear()
    if longer_first:
        masked_term(longer.pattern, 1, longer).bias(torch.float64)
    assert_plan_agrees(under_mask(bound), Layout(case.num_queries), drawn, case.counts(), 8)
    whole = masked_term(longer.pattern, 1, longer).weights.counts()
    assert torch.equal(whole[:, : bound.num_queries, : bound.num_keys], CountedPairs(bound)._count_pairs())
    assert torch.equal(whole, CountedPairs(longer)._count_pairs())
    masks.cache().clear()


def test_masks_of_other_offsets_are_others():
    pattern, sizes = masks.local_window(left=5, right=0) | masks.first_tokens(3), {"num_queries": 20, "num_heads": 1}
    places = [{"num_keys": 20}, {"num_keys": 40, "q_offset": 20}, {"num_keys": 20, "q_offset": 9, "k_offset": 9}]
    for place in [*places, {"num_keys": 40}, *places]:
        bound = pattern.bind(**sizes, **place)
        assert torch.equal(CountedPairs(bound).counts(), CountedPairs(bound)._count_pairs())


def test_windows_of_900_lengths_hold_one_mask():
    """The longest, which serves all shorter ones; the rest are plans of each length."""
    pattern = masks.local_window(left=15, right=0)
    masks.cache().clear()
    for tokens in range(17, 917, 10):
        q, k, v = torch.randn(3, 1, 1, tokens, 8)
        found, exact = (fd.attend(q, k, v, pattern, engine=engine) for engine in ("aten", "reference"))
        torch.testing.assert_close(found, exact)
    stats = masks.cache().stats()
    assert stats.evictions == 0
    assert stats.bytes < 8 << 20
    masks.cache().clear()
