"""Laws that relate two calls of exact attention, whatever computes it; all of one kind of case on the same draws."""

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
from tests.support.strategies import Case, cases, causal_twins, tensors, whole_cases


@dataclass
class Call:
    case: Case
    data: Any

    def __post_init__(self) -> None:
        self.q, self.k, self.v = self.tensors = self.data.draw(tensors(self.case))
        self.out, self.lse = self.both = self.attend(*self.tensors)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Any = None, **options) -> tuple[Tensor, Tensor]:
        pattern = self.case.twin.pattern if pattern is None else pattern
        return fd.attend(q, k, v, pattern, enable_gqa=True, return_lse=True, **self.case.sizes | options)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert_close(found, expected, **TIGHT)


def disturbed(x: Tensor, tokens: Tensor) -> Tensor:
    changed = x.detach().clone()
    changed[:, :, tokens] += 3.0
    return changed


@settings(max_examples=10)
@given(st.data())
def test_the_future_does_not_matter(data):
    """Rows up to t are the same whatever follows, also where nothing does, and send no gradient there."""
    call = Call(data.draw(whole_cases(causal_twins)), data)
    t = data.draw(st.integers(0, call.case.num_keys - 1))
    out, lse = rows = tuple(x[:, :, : t + 1] for x in call.both)
    other = call.attend(*(disturbed(x, torch.arange(t + 1, call.case.num_keys)) for x in call.tensors))
    assert_same(tuple(x[:, :, : t + 1] for x in other), rows)
    assert_same(call.attend(*(x[:, :, : t + 1] for x in call.tensors)), rows)
    for grad in torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), call.tensors):
        assert grad[:, :, t + 1 :].abs().sum() == 0


@settings(max_examples=10)
@given(st.data())
def test_any_call(data):
    """Keys of no pair, rows of no key, sums of a pattern with itself (pairs count m times), and sides of blocks."""
    call = Call(data.draw(cases()), data)
    counts = call.case.counts()
    unseen = (counts.sum((0, 1)) == 0).nonzero().squeeze(1)
    assert_same(call.attend(call.q, disturbed(call.k, unseen), disturbed(call.v, unseen)), call.both)
    empty = (counts.sum(-1) == 0).expand(call.lse.shape)
    assert torch.equal(call.lse == -torch.inf, empty)
    assert (call.out[empty] == 0).all()
    for grad in torch.autograd.grad(call.out[empty].sum(), call.tensors, retain_graph=True):
        assert (grad == 0).all()
    ones, _ = call.attend(call.q, call.k, torch.ones_like(call.v))
    assert_close(ones[~empty], torch.ones_like(ones[~empty]))
    m = data.draw(st.integers(2, 4))
    repeated = call.attend(*call.tensors, masks.Mixture(call.case.twin.pattern.branches() * m))
    assert_same(repeated, (call.out, call.lse + log(m)))
    assert_same(call.attend(*call.tensors, block_size=(2, 5)), call.both)


@settings(max_examples=10)
@given(st.data())
def test_whole_sequences(data):
    """A layout changes the order only; some heads are a slice of all, and queries in chunks are one pass."""
    call = Call(data.draw(whole_cases()), data)
    layout = masks.Layout(call.case.num_keys, data.draw(st.integers(1, 9)))
    out, lse = call.attend(*(layout.apply(x) for x in call.tensors), layout=layout)
    assert_same((layout.invert(out), layout.invert(lse, dim=-1)), call.both)
    num_heads = call.case.num_heads
    q, k, v = (x[:, :1].expand(-1, num_heads, -1, -1) + 0 for x in call.tensors)
    cut, whole = data.draw(st.integers(0, num_heads)), call.attend(q, k, v)
    for first, last in ((0, cut), (cut, num_heads)):
        if first < last:
            part = call.attend(*(x[:, first:last] for x in (q, k, v)), head_offset=first)
            assert_same(part, tuple(x[:, first:last] for x in whole))
    chunk = data.draw(st.integers(1, 20))
    firsts = range(0, call.case.num_queries, chunk)
    parts = [call.attend(call.q[:, :, at : at + chunk], call.k, call.v, q_offset=at) for at in firsts]
    assert_same(tuple(torch.cat(part, dim=2) for part in zip(*parts, strict=True)), call.both)
