"""Laws that any exact attention obeys, whatever computes it: each relates two calls, none needs an oracle.

Laws of one kind of case are held on the same draws: what is planned for one serves the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.support import twins
from tests.support.agreement import TIGHT
from tests.support.strategies import Case, cases, causal_twins, sets, tensors, whole_cases


@dataclass
class Call:
    """A drawn case with its tensors, and what attention over it gives."""

    case: Case
    data: Any

    def __post_init__(self) -> None:
        self.q, self.k, self.v = self.tensors = self.data.draw(tensors(self.case))
        self.out, self.lse = self.both = self.attend(*self.tensors)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Any = None, **options) -> tuple[Tensor, Tensor]:
        pattern = self.case.twin.pattern if pattern is None else pattern
        return fd.attend(q, k, v, pattern, enable_gqa=True, return_lse=True, **self.case.sizes | options)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, **TIGHT)


def disturbed(x: Tensor, tokens: Tensor) -> Tensor:
    """x with other values at some tokens."""
    changed = x.detach().clone()
    changed[:, :, tokens] += 3.0
    return changed


# A causal pattern


def the_future_does_not_matter(call: Call) -> None:
    """Rows up to t are the same whatever follows, and send no gradient there."""
    t = call.data.draw(st.integers(0, call.case.num_keys - 1))
    other = call.attend(*(disturbed(x, torch.arange(t + 1, call.case.num_keys)) for x in call.tensors))
    out, lse = (x[:, :, : t + 1] for x in call.both)
    assert_same((out, lse), tuple(x[:, :, : t + 1] for x in other))
    for grad in torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), call.tensors):
        assert grad[:, :, t + 1 :].abs().sum() == 0


def a_prefix_is_a_shorter_sequence(call: Call) -> None:
    n = call.data.draw(st.integers(1, call.case.num_keys))
    assert_same(call.attend(*(x[:, :, :n] for x in call.tensors)), tuple(x[:, :, :n] for x in call.both))


@settings(max_examples=10)
@given(st.data())
def test_causal_attention(data):
    call = Call(data.draw(whole_cases(causal_twins)), data)
    the_future_does_not_matter(call)
    a_prefix_is_a_shorter_sequence(call)


# Any call


def inactive_tokens_are_never_read(call: Call) -> None:
    """Keys and values that no pair allows do not matter."""
    unseen = (call.case.counts().sum((0, 1)) == 0).nonzero().squeeze(1)
    assert_same(call.both, call.attend(call.q, disturbed(call.k, unseen), disturbed(call.v, unseen)))


def batch_entries_are_strangers(call: Call) -> None:
    q, k, v = (torch.cat([x, x.flip(2), x * 0.5]) for x in call.tensors)
    together = call.attend(q, k, v)
    for entry in range(len(q)):
        alone = call.attend(*(x[entry : entry + 1] for x in (q, k, v)))
        assert_same(tuple(x[entry : entry + 1] for x in together), alone)


def heads_are_strangers(call: Call) -> None:
    """Softmax runs over keys, never over heads: what happens in one head is not seen in another."""
    groups = call.case.num_heads // call.k.shape[1]
    chosen = call.data.draw(st.integers(0, call.k.shape[1] - 1))
    changed = [x.detach().clone() for x in call.tensors]
    for x, heads in zip(changed, (slice(chosen * groups, (chosen + 1) * groups), chosen, chosen), strict=True):
        x[:, heads] += 3.0
    kept = torch.arange(call.case.num_heads) // groups != chosen
    assert_same(tuple(x[:, kept] for x in call.both), tuple(x[:, kept] for x in call.attend(*changed)))


def rows_without_keys_are_zero(call: Call) -> None:
    """Output 0, lse -inf, and no gradient from or to them; weights of all other rows add up to 1."""
    out, lse = call.both
    empty = (call.case.counts().sum(-1) == 0).expand(lse.shape)
    assert torch.equal(lse == -torch.inf, empty)
    assert (out[empty] == 0).all()
    (dq,) = torch.autograd.grad(out.sum() + lse[~empty].sum(), call.q, retain_graph=True)
    assert (dq[empty] == 0).all()
    for grad in torch.autograd.grad(out[empty].sum(), call.tensors, retain_graph=True):
        assert (grad == 0).all()
    ones, _ = call.attend(call.q, call.k, torch.ones_like(call.v))
    assert_close(ones[~empty], torch.ones_like(ones[~empty]))


def a_sum_with_itself_adds_log_m(call: Call) -> None:
    """Every pair counts m times as often: the output stays, the lse grows by log m."""
    pattern, m = call.case.twin.pattern, call.data.draw(st.integers(2, 4))
    repeated = call.attend(*call.tensors, masks.Mixture(pattern.branches() * m))
    assert_same(repeated, (call.out, call.lse + log(m)))


def shared_heads_are_repeated_heads(call: Call) -> None:
    """Grouped key/value heads give what copies of them give; their gradient is the sum over the copies."""
    copies = [x.repeat_interleave(call.case.num_heads // call.k.shape[1], dim=1) for x in (call.k, call.v)]
    repeated = call.attend(call.q, *copies)
    assert_same(call.both, repeated)
    outs = call.out, repeated[0]
    assert_same(*(torch.autograd.grad(out.square().sum(), call.tensors, retain_graph=True) for out in outs))


def scale_belongs_to_the_scores(call: Call) -> None:
    factor = call.data.draw(st.sampled_from([-1.5, 0.25, 2.0]))
    scaled = call.attend(*call.tensors, scale=0.5 * factor)
    assert_same(call.attend(call.q * factor, call.k, call.v, scale=0.5), scaled)
    assert_same(call.both, call.attend(*call.tensors, scale=call.q.shape[-1] ** -0.5))


def block_sides_do_not_matter(call: Call) -> None:
    assert_same(call.attend(*call.tensors, block_size=(2, 5)), call.both)


@settings(max_examples=10)
@given(st.data())
def test_any_call(data):
    call = Call(data.draw(cases()), data)
    inactive_tokens_are_never_read(call)
    batch_entries_are_strangers(call)
    heads_are_strangers(call)
    rows_without_keys_are_zero(call)
    a_sum_with_itself_adds_log_m(call)
    shared_heads_are_repeated_heads(call)
    scale_belongs_to_the_scores(call)
    block_sides_do_not_matter(call)


# Self-attention over the whole sequence


def a_layout_changes_the_order_only(call: Call) -> None:
    layout = masks.Layout(call.case.num_keys, call.data.draw(st.integers(1, 9)))
    out, lse = call.attend(*(layout.apply(x) for x in call.tensors), layout=layout)
    assert_same((layout.invert(out), layout.invert(lse, dim=-1)), call.both)


def some_heads_are_a_slice_of_all(call: Call) -> None:
    """Heads on several devices: each computes its own, told where they stand among all."""
    num_heads = call.case.num_heads
    q, k, v = (x[:, :1].expand(-1, num_heads, -1, -1) + 0 for x in call.tensors)
    cut, whole = call.data.draw(st.integers(0, num_heads)), call.attend(q, k, v)
    for first, last in ((0, cut), (cut, num_heads)):
        if first < last:
            part = call.attend(*(x[:, first:last] for x in (q, k, v)), head_offset=first)
            assert_same(part, tuple(x[:, first:last] for x in whole))


def queries_in_chunks_are_one_pass(call: Call) -> None:
    """Equal chunks at different positions: only q_offset tells them apart."""
    chunk = call.data.draw(st.integers(1, 20))
    firsts = range(0, call.case.num_queries, chunk)
    parts = [call.attend(call.q[:, :, at : at + chunk], call.k, call.v, q_offset=at) for at in firsts]
    assert_same(tuple(torch.cat(part, dim=2) for part in zip(*parts, strict=True)), call.both)


@settings(max_examples=10)
@given(st.data())
def test_whole_sequences(data):
    call = Call(data.draw(whole_cases()), data)
    a_layout_changes_the_order_only(call)
    some_heads_are_a_slice_of_all(call)
    queries_in_chunks_are_one_pass(call)


@settings(max_examples=10)
@given(st.data(), st.integers(1, 12), st.integers(1, 4))
def test_segments_are_isolated(data, segment, number):
    """Where all segments divide one length, tokens of other stretches of that length do not matter."""
    divisors = [w for w in range(1, segment + 1) if segment % w == 0]
    widths = data.draw(st.lists(st.sampled_from(divisors), min_size=1, max_size=3))
    rates = [data.draw(st.integers(1, 5)) for _ in widths]
    N = data.draw(st.integers(1, number * segment))
    call = Call(Case.whole(twins.longnet(widths, rates), data.draw(st.integers(1, 4)), N), data)
    stretch = torch.arange(N) // segment
    chosen = data.draw(st.integers(0, int(stretch.max())))
    other = call.attend(*(disturbed(x, (stretch == chosen).nonzero().squeeze(1)) for x in call.tensors))
    kept = stretch != chosen
    assert_same(tuple(x[:, :, kept] for x in call.both), tuple(x[:, :, kept] for x in other))


@settings(max_examples=10)
@given(st.data())
def test_complements_make_a_whole(data):
    """p + ~p allows every pair once: dense attention."""
    case = data.draw(whole_cases(sets))
    q, k, v = data.draw(tensors(case))
    pattern = case.twin.pattern
    out = fd.attend(q, k, v, pattern + ~pattern, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_close(out, expected, **TIGHT)


@pytest.mark.parametrize("N", [1, 128, 129])
def test_one_segment_over_all_is_dense_attention(N):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, N, 8, dtype=torch.float64) for _ in range(3))
    dense = torch.nn.functional.scaled_dot_product_attention
    assert_close(fd.attend(q, k, v, masks.longnet([512], [1])), dense(q, k, v), **TIGHT)
    causal = fd.attend(q, k, v, masks.longnet([512], [1]) & masks.causal())
    assert_close(causal, dense(q, k, v, is_causal=True), **TIGHT)
    assert_close(fd.attend(q, k, v, masks.causal()), causal, **TIGHT)
