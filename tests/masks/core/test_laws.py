"""Laws that relate two calls of exact attention, whatever computes it.

Laws of one kind of case are held on the same draws: what is planned for one serves the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
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


def inactive_tokens_are_never_read(call: Call) -> None:
    """Keys and values that no pair allows do not matter."""
    unseen = (call.case.counts().sum((0, 1)) == 0).nonzero().squeeze(1)
    assert_same(call.both, call.attend(call.q, disturbed(call.k, unseen), disturbed(call.v, unseen)))


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


def block_sides_do_not_matter(call: Call) -> None:
    assert_same(call.attend(*call.tensors, block_size=(2, 5)), call.both)


@settings(max_examples=10)
@given(st.data())
def test_any_call(data):
    call = Call(data.draw(cases()), data)
    inactive_tokens_are_never_read(call)
    rows_without_keys_are_zero(call)
    a_sum_with_itself_adds_log_m(call)
    block_sides_do_not_matter(call)


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
@given(st.data())
def test_complements_make_a_whole(data):
    """p + ~p allows every pair once: dense attention."""
    case = data.draw(whole_cases(sets))
    q, k, v = data.draw(tensors(case))
    pattern = case.twin.pattern
    out = fd.attend(q, k, v, pattern + ~pattern, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_close(out, expected, **TIGHT)
