"""Laws that any exact attention obeys, whatever computes it: each relates two calls, none needs an oracle."""

from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.support import twins
from tests.support.agreement import TIGHT
from tests.support.strategies import Case, cases, causal_twins, longnets, mixtures, sets, tensors, whole_cases


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    return fd.attend(q, k, v, case.twin.pattern, enable_gqa=True, return_lse=True, **case.sizes | options)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, **TIGHT)


def disturbed(x: Tensor, tokens: Tensor) -> Tensor:
    """x with other values at some tokens."""
    changed = x.detach().clone()
    changed[:, :, tokens] += 3.0
    return changed


@given(st.data())
def test_the_future_does_not_matter(data):
    """A causal pattern: rows up to t are the same whatever follows, and send no gradient there."""
    case = data.draw(whole_cases(causal_twins))
    q, k, v = data.draw(tensors(case))
    t = data.draw(st.integers(0, case.num_keys - 1))
    future = torch.arange(t + 1, case.num_keys)
    out, lse = attend(case, q, k, v)
    other = attend(case, *(disturbed(x, future) for x in (q, k, v)))
    assert_same((out[:, :, : t + 1], lse[:, :, : t + 1]), tuple(x[:, :, : t + 1] for x in other))
    present = lse[:, :, : t + 1].isfinite()
    for grad in torch.autograd.grad(out[:, :, : t + 1].sum() + lse[:, :, : t + 1][present].sum(), (q, k, v)):
        assert grad[:, :, t + 1 :].abs().sum() == 0


@given(st.data())
def test_a_prefix_is_a_shorter_sequence(data):
    """A causal pattern over fewer tokens gives the first rows of the whole."""
    case = data.draw(whole_cases(causal_twins))
    q, k, v = data.draw(tensors(case))
    n = data.draw(st.integers(1, case.num_keys))
    out, lse = attend(case, q, k, v)
    assert_same(attend(case, q[:, :, :n], k[:, :, :n], v[:, :, :n]), (out[:, :, :n], lse[:, :, :n]))


@given(st.data(), st.integers(1, 12), st.integers(1, 4))
def test_segments_are_isolated(data, segment, number):
    """Where all segments divide one length, tokens of other stretches of that length do not matter."""
    H = data.draw(st.integers(1, 4))
    divisors = [w for w in range(1, segment + 1) if segment % w == 0]
    widths = data.draw(st.lists(st.sampled_from(divisors), min_size=1, max_size=3))
    rates = [data.draw(st.integers(1, 5)) for _ in widths]
    N = data.draw(st.integers(1, number * segment))
    case = Case.whole(twins.longnet(widths, rates), H, N)
    q, k, v = data.draw(tensors(case))
    stretch = torch.arange(N) // segment
    chosen = data.draw(st.integers(0, int(stretch.max())))
    other = attend(case, *(disturbed(x, (stretch == chosen).nonzero().squeeze(1)) for x in (q, k, v)))
    kept = stretch != chosen
    assert_same(tuple(x[:, :, kept] for x in attend(case, q, k, v)), tuple(x[:, :, kept] for x in other))


@given(st.data())
def test_inactive_tokens_are_never_read(data):
    """Keys and values that no pair allows do not matter."""
    case = data.draw(cases())
    q, k, v = data.draw(tensors(case))
    unseen = (case.counts().sum((0, 1)) == 0).nonzero().squeeze(1)
    assert_same(attend(case, q, k, v), attend(case, q, disturbed(k, unseen), disturbed(v, unseen)))


@given(st.data(), st.integers(1, 9))
def test_a_layout_changes_the_order_only(data, rate):
    case = data.draw(whole_cases())
    q, k, v = data.draw(tensors(case))
    layout = masks.Layout(case.num_keys, rate)
    out, lse = attend(case, *(layout.apply(x) for x in (q, k, v)), layout=layout)
    assert_same((layout.invert(out), layout.invert(lse, dim=-1)), attend(case, q, k, v))


@given(st.data())
def test_batch_entries_are_strangers(data):
    case = data.draw(cases())
    q, k, v = (torch.cat([x, x.flip(2), x * 0.5]) for x in data.draw(tensors(case)))
    together = attend(case, q, k, v)
    for entry in range(len(q)):
        alone = attend(case, *(x[entry : entry + 1] for x in (q, k, v)))
        assert_same(tuple(x[entry : entry + 1] for x in together), alone)


@given(st.data())
def test_heads_are_strangers(data):
    """Softmax runs over keys, never over heads: what happens in one head is not seen in another."""
    case = data.draw(cases())
    q, k, v = data.draw(tensors(case))
    groups = case.num_heads // k.shape[1]
    chosen = data.draw(st.integers(0, k.shape[1] - 1))
    changed = [x.detach().clone() for x in (q, k, v)]
    for x, heads in zip(changed, (slice(chosen * groups, (chosen + 1) * groups), chosen, chosen), strict=True):
        x[:, heads] += 3.0
    kept = torch.arange(case.num_heads) // groups != chosen
    assert_same(tuple(x[:, kept] for x in attend(case, q, k, v)), tuple(x[:, kept] for x in attend(case, *changed)))


@given(st.data())
def test_rows_without_keys_are_zero(data):
    """Output 0, lse -inf, and no gradient from or to them; weights of all other rows add up to 1."""
    case = data.draw(cases())
    q, k, v = data.draw(tensors(case))
    out, lse = attend(case, q, k, v)
    empty = (case.counts().sum(-1) == 0).expand(lse.shape)
    assert torch.equal(lse == -torch.inf, empty)
    assert (out[empty] == 0).all()
    (dq,) = torch.autograd.grad(out.sum() + lse[~empty].sum(), q, retain_graph=True)
    assert (dq[empty] == 0).all()
    for grad in torch.autograd.grad(out[empty].sum(), (q, k, v)):
        assert (grad == 0).all()
    ones, _ = attend(case, q, k, torch.ones_like(v))
    assert_close(ones[~empty], torch.ones_like(ones[~empty]))


@given(st.data())
def test_some_heads_are_a_slice_of_all(data):
    """Heads on several devices: each computes its own, told where they stand among all."""
    case = data.draw(whole_cases())
    q, k, v = (x[:, :1].expand(-1, case.num_heads, -1, -1) + 0 for x in data.draw(tensors(case)))
    cut = data.draw(st.integers(0, case.num_heads))
    whole = attend(case, q, k, v)
    for first, last in ((0, cut), (cut, case.num_heads)):
        if first < last:
            part = attend(case, *(x[:, first:last] for x in (q, k, v)), head_offset=first)
            assert_same(part, tuple(x[:, first:last] for x in whole))


@given(st.data(), st.integers(1, 20))
def test_queries_in_chunks_are_one_pass(data, chunk):
    """Equal chunks at different positions: only q_offset tells them apart."""
    case = data.draw(whole_cases())
    q, k, v = data.draw(tensors(case))
    parts = [
        attend(case, q[:, :, first : first + chunk], k, v, q_offset=first)
        for first in range(0, case.num_queries, chunk)
    ]
    joined = tuple(torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    assert_same(joined, attend(case, q, k, v))


@given(st.data(), st.integers(1, 3))
def test_a_sum_with_itself_adds_log_2(data, times):
    """Every pair counts m times as often: the output stays, the lse grows by log m."""
    case = data.draw(cases(lambda H: st.one_of(sets(H), mixtures(H), longnets())))
    q, k, v = data.draw(tensors(case))
    out, lse = attend(case, q, k, v)
    pattern = case.twin.pattern
    for _ in range(times):
        pattern = pattern + case.twin.pattern
    repeated = fd.attend(q, k, v, pattern, enable_gqa=True, return_lse=True, **case.sizes)
    assert_same(repeated, (out, lse + log(times + 1)))


@given(st.data())
def test_shared_heads_are_repeated_heads(data):
    """Grouped key/value heads give what copies of them give; their gradient is the sum over the copies."""
    case = data.draw(cases())
    q, k, v = data.draw(tensors(case))
    copies = [x.repeat_interleave(case.num_heads // k.shape[1], dim=1) for x in (k, v)]
    shared, repeated = attend(case, q, k, v), attend(case, q, *copies)
    assert_same(shared, repeated)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out, _ in (shared, repeated)]
    assert_same(*grads)


@given(st.data(), st.sampled_from([-1.5, 0.25, 2.0]))
def test_scale_belongs_to_the_scores(data, factor):
    case = data.draw(cases())
    q, k, v = data.draw(tensors(case))
    assert_same(attend(case, q * factor, k, v, scale=0.5), attend(case, q, k, v, scale=0.5 * factor))
    assert_same(attend(case, q, k, v), attend(case, q, k, v, scale=q.shape[-1] ** -0.5))


@given(st.data())
def test_block_sides_do_not_matter(data):
    case = data.draw(cases())
    q, k, v = data.draw(tensors(case))
    assert_same(attend(case, q, k, v, block_size=(2, 5)), attend(case, q, k, v))


@given(st.data())
def test_complements_make_a_whole(data):
    """p + ~p allows every pair once: dense attention."""
    case = data.draw(whole_cases(sets))
    q, k, v = data.draw(tensors(case))
    pattern = case.twin.pattern
    out = fd.attend(q, k, v, pattern + ~pattern, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_close(out, expected, **TIGHT)


@pytest.mark.parametrize("N", [1, 127, 128, 129, 300])
def test_one_segment_over_all_is_dense_attention(N):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, N, 8, dtype=torch.float64) for _ in range(3))
    dense = torch.nn.functional.scaled_dot_product_attention
    assert_close(fd.attend(q, k, v, masks.longnet([512], [1])), dense(q, k, v), **TIGHT)
    causal = fd.attend(q, k, v, masks.longnet([512], [1]) & masks.causal())
    assert_close(causal, dense(q, k, v, is_causal=True), **TIGHT)
    assert_close(fd.attend(q, k, v, masks.causal()), causal, **TIGHT)
