"""Scales, sinks, keys of batch 1, dropout and biases: what the law of test_oracle does not draw of them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers.models.t5.modeling_t5 import T5Attention

import flexdilated as fd
from flexdilated import masks
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.drawn_calls import SEED, drawn_dropout

# Some heads of longnet([8, 16], [2, 4]) have rows without keys.
PATTERN = masks.longnet([8, 16], [2, 4]) & masks.causal()
RULE = oracle.both(oracle.longnet([8, 16], [2, 4]), oracle.causal())
SCALE = torch.tensor([0.2, 1.0, -0.5, 0.0], dtype=torch.float64)


def qkv(dtype: torch.dtype = torch.float64, N: int = 37) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, heads, N, 8).to(dtype).requires_grad_() for heads in (4, 2, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_scaled_queries_once(dtype: torch.dtype):
    q, k, v = qkv(dtype)
    scale = SCALE.to(dtype)
    scaled = (q.double() * scale.double()[:, None, None]).to(dtype)
    wanted = fd.attend(scaled, k, v, PATTERN, scale=1.0, enable_gqa=True)
    assert fd.attend(q, k, v, PATTERN, scale=scale, enable_gqa=True).equal(wanted)


def test_a_cache_takes_no_scale_that_learns():
    learned = fd.KVCache(PATTERN, num_heads=4, scale=SCALE.clone().requires_grad_())
    with pytest.raises(ValueError, match="a cache computes no gradients"):
        learned.attend(*(x.detach() for x in qkv()))


def test_attention_received_and_mass_of_scaled_scores():
    q, k, v = qkv()
    _, lse = fd.attend(q, k, v, PATTERN, scale=SCALE, enable_gqa=True, return_lse=True)
    for of in (fd.attention_received, fd.block_mass):
        options: dict[str, Any] = {"enable_gqa": True} | ({"block": 8} if of is fd.block_mass else {})
        found = of(q, k, lse, PATTERN, scale=SCALE, **options)
        assert_close(found, of(q * SCALE[:, None, None], k, lse, PATTERN, scale=1.0, **options), **TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sinks_of_any_float_dtype(dtype, sink_dtype):
    """The output has q's dtype and the lse is wide, whatever the sinks are; each gradient has its tensor's dtype."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=sink_dtype, requires_grad=True)
    inputs = *qkv(dtype), sinks
    counts = oracle.counts(RULE, range(4), 4, torch.arange(37), torch.arange(37))
    truth, truth_lse = oracle.attention(*inputs[:3], counts, None, sinks)
    true_grads = torch.autograd.grad(truth.sum() + truth_lse[truth_lse.isfinite()].sum(), inputs)
    for engine in ("aten", "reference"):
        out, lse = fd.attend(*inputs[:3], PATTERN, sinks=sinks, enable_gqa=True, engine=engine, return_lse=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        near = 2e-2 if dtype == torch.bfloat16 else 5e-3 if dtype == torch.float16 else 1e-5
        assert (out.double() - truth).norm() <= near * truth.norm()
        assert (lse.double() - truth_lse).norm() <= near * truth_lse.norm()
        grads = torch.autograd.grad(out.double().sum() + lse.double().sum(), inputs)
        near = max(near, 1e-2 if sink_dtype == torch.bfloat16 else 0)
        for grad, true_grad, x in zip(grads, true_grads, inputs, strict=True):
            assert grad.dtype == x.dtype
            assert (grad.double() - true_grad).norm() <= near * true_grad.norm()


def test_only_the_sinks_may_want_a_gradient():
    q, k, v = (x.detach() for x in qkv())
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    grads = []
    for engine in ("aten", "reference"):
        out = fd.attend(q, k, v, PATTERN, sinks=sinks, enable_gqa=True, engine=engine)
        grads += torch.autograd.grad(out.square().sum(), sinks)
    assert_close(grads[0], grads[1], **TIGHT)
    assert grads[0].abs().min() > 0


def test_autocast_leaves_sinks_as_they_are():
    q, k, v = (x.detach().float() for x in qkv())
    options = {"sinks": torch.tensor([1.0001, 0.0, 0.0, 0.0]), "enable_gqa": True, "return_lse": True}
    with torch.autocast("cpu", torch.bfloat16):
        found = fd.attend(q, k, v, PATTERN, **options)
    for one, other in zip(found, fd.attend(*(x.bfloat16() for x in (q, k, v)), PATTERN, **options), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("batch", [3, 0])
def test_keys_of_batch_1_are_expanded(batch):
    """With zero keys, without entries, in what follows attend's lse, and by keys that a module hides by entry."""
    pattern = masks.longnet([8, 16], [1, 3], padding="zeros")
    q, k, v = (torch.randn(size, 2, 20, 8, dtype=torch.float64, requires_grad=True) for size in (batch, 1, 1))
    wide_k, wide_v = (x.expand(batch, -1, -1, -1) for x in (k, v))
    found, wanted = (fd.attend(q, *each, pattern, return_lse=True) for each in ((k, v), (wide_k, wide_v)))
    assert_close(found, wanted, rtol=0, atol=1e-12)
    grads = (torch.autograd.grad(each[0].square().sum(), (q, k, v)) for each in (found, wanted))
    assert_close(*grads, rtol=0, atol=1e-12)
    if batch:
        for call in (fd.attention_received, lambda *each: fd.block_mass(*each, block=4)):
            assert torch.equal(call(q, k, found[1], pattern), call(q, wide_k, found[1], pattern))
        assert torch.equal(fd.pooled_scores(q, k, block=4), fd.pooled_scores(q, wide_k, block=4))
    layer, hidden = fd.BlockSparseAttention(masks.causal()), torch.rand(batch, 20) < 0.4
    wide = layer(q, wide_k, wide_v, key_padding_mask=hidden)
    assert torch.equal(layer(q, k, v, key_padding_mask=hidden), wide)


def test_where_keys_of_batch_1_are_not_served_the_error_expands_them():
    q, k = torch.randn(3, 2, 12, 8), torch.randn(1, 2, 12, 8)
    selector = fd.BlockSelector(block=4, choose=fd.TopK(1))
    for call in (lambda k: selector(q, k), lambda k: fd.KVCache(masks.causal(), num_heads=2).attend(q, k, k)):
        with pytest.raises(ValueError, match=r"write k.expand\(3, -1, -1, -1\), and the same of v$"):
            call(k)
        call(k.expand(3, -1, -1, -1))


def test_a_graph_and_a_checkpoint_draw_the_pairs_of_eager_code():
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    pattern = masks.longnet([8, 16], [1, 2]) & masks.causal()

    def attend(q, k, v):
        return fd.attend(q, k, v, pattern, dropout_p=0.3)

    def again(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=False)

    found = []
    for function in (attend, again, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(SEED)
        out = function(q, k, v)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for other in found[1:]:
        assert_close(other, found[0])


def test_each_call_and_each_branch_draws_its_own():
    """Three branches allow each pair: the numbers of branches that keep it are binomial."""
    x, p = torch.zeros(2, 3, 200, 8), 0.25
    v = torch.eye(200)[None, None].expand(2, 3, -1, -1)
    pattern = masks.every() + masks.every() + masks.local_window(left=300, right=300)
    first, second = (fd.attend(x, x, v, pattern, dropout_p=p) for _ in range(2))
    counts = (first * 200 * 3 * (1 - p)).round()  # branches that keep each pair
    seen = torch.stack([(counts == count).double().mean() for count in range(4)])
    expected = torch.distributions.Binomial(3, torch.tensor(1 - p)).log_prob(torch.arange(4.0)).exp().double()
    assert_close(seen, expected, rtol=0, atol=5e-3)
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.01


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_kept_pairs_are_independent(p):
    """Rates of rows and of keys, and correlations of rows, of keys, heads, entries and branches: noise alone."""
    dropout, n = drawn_dropout(p), 1024
    tokens, zero, one = torch.arange(n), torch.tensor(0), torch.tensor(1)
    places = {"": (0, zero, zero), "branch": (1, zero, zero), "entry": (0, one, zero), "head": (0, zero, one)}
    spread = (p * (1 - p)) ** 0.5
    tables = {
        name: (dropout.kept(place, b, h, tokens[:, None], tokens).double() - (1 - p)) / spread
        for name, (place, b, h) in places.items()
    }
    table = tables.pop("")
    assert abs(table.mean()) * n < 5
    for one_way in (table, table.T):
        assert 0.9 < (one_way.mean(1) * n**0.5).std() < 1.1
        correlation = (one_way @ one_way.T / n**0.5).fill_diagonal_(0.0)
        assert 0.95 < correlation.std() < 1.05
        assert correlation.abs().max() < 8
    for name, other in tables.items():
        assert abs((table * other).mean()) * n < 5, name


LONGNET = masks.longnet([16, 32], [1, 2]) & masks.causal()
BIDIRECTIONAL = masks.local_window(left=20, right=11)


def assert_trains(score_mod, table, dense, pattern=LONGNET, tokens=40):
    """Compare output and gradients (of q, k, v and the table) with a bias that is added densely, on both engines.

    dense: (scores, (N, M) distances of keys from queries) -> new scores.
    """
    q, k, v = torch.randn(3, 2, len(SLOPES), tokens, 8, dtype=torch.float64, requires_grad=True)
    distance = torch.arange(tokens) - torch.arange(tokens)[:, None]
    bound = pattern.bind(num_heads=len(SLOPES), num_queries=tokens, num_keys=tokens)
    counts = fd.engines.multiplicity(bound, torch.device("cpu"))
    scores = dense(q @ k.mT / 8**0.5, distance)
    weights = counts * (scores - scores.amax(-1, keepdim=True)).exp()
    leaves = (q, k, v, *(() if table is None else (table,)))
    want = weights @ v / weights.sum(-1, keepdim=True)
    cotangent = torch.randn_like(want)
    wanted = torch.autograd.grad(want, leaves, cotangent)
    for engine in (None, "reference"):
        out = fd.attend(q, k, v, pattern, score_mod=score_mod, engine=engine)
        assert_close((out, *torch.autograd.grad(out, leaves, cotangent)), (want, *wanted), **TIGHT)


SLOPES = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)


@pytest.mark.parametrize("pattern", [LONGNET, BIDIRECTIONAL])
def test_alibi(pattern):
    slopes = SLOPES.clone().requires_grad_()
    dense = lambda scores, distance: scores - slopes[:, None, None] * distance.abs()  # noqa: E731
    assert_trains(fd.biases.alibi(slopes), slopes, dense, pattern)


def test_slopes_are_the_papers():
    assert_close(fd.biases.slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    assert_close(fd.biases.slopes(1), torch.tensor([2.0**-8]))
    twelve = [2.0**-i for i in range(1, 9)] + [2.0 ** -(i + 0.5) for i in range(4)]  # by the paper's own code
    assert_close(fd.biases.slopes(12), torch.tensor(twelve))


@pytest.mark.parametrize("rows", [1, 3])
def test_relative(rows):
    table = torch.randn(rows, 11, dtype=torch.float64, requires_grad=True)
    dense = lambda scores, distance: scores + table[:, distance.clamp(-5, 5) + 5]  # noqa: E731
    assert_trains(fd.biases.relative(table), table, dense, BIDIRECTIONAL)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5(bidirectional):
    weight = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)

    def dense(scores, distance):
        bucket = T5Attention._relative_position_bucket(distance, bidirectional, 8, 20)
        return scores + weight[bucket].permute(2, 0, 1)

    bias = fd.biases.t5(weight, bidirectional=bidirectional, max_distance=20)
    assert_trains(bias, weight, dense, BIDIRECTIONAL)


@given(st.booleans(), st.sampled_from([4, 8, 32, 34]), st.integers(20, 300))
def test_buckets_are_t5s(bidirectional, num_buckets, max_distance):
    distance = torch.arange(-500, 500)
    found = fd.biases._bucket(distance, num_buckets, bidirectional, max_distance)
    assert torch.equal(found, T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance))


def test_functions_compose():
    slopes = SLOPES.clone().requires_grad_()
    both = fd.biases.compose(fd.biases.alibi(slopes), fd.biases.softcap(2.0))
    dense = lambda scores, distance: 2 * ((scores - slopes[:, None, None] * distance.abs()) / 2).tanh()  # noqa: E731
    assert_trains(both, slopes, dense)
    assert_trains(fd.biases.softcap(2.0), None, lambda scores, _: 2 * (scores / 2).tanh())


@given(st.data(), st.sampled_from([4, 2]))
def test_a_mask_that_holds_a_bias_names_the_score_mod_that_adds_it(data, dims):
    """The advice is run, and equals SDPA with the bias; visible keys are a bias of keys."""
    sizes = (2, 3, 5, 7)
    of_keys = dims == 2 and data.draw(st.booleans())
    full = (sizes[0], sizes[3]) if of_keys else sizes[-dims:]
    shape = [data.draw(st.sampled_from([1, size])) for size in full[:-1]] + [full[-1]]
    bias = torch.randn(shape, dtype=torch.float64)
    q, k, v = (torch.randn(2, 3, tokens, 8, dtype=torch.float64) for tokens in (5, 7, 7))
    wrong = masks.visible_keys(bias) if of_keys else masks.mask(bias)
    with pytest.raises(ValueError, match="a bias is no mask but a score_mod") as caught:
        fd.attend(q, k, v, wrong)
    said = str(caught.value).partition("attend(..., score_mod=")[2].removesuffix(")")
    found = fd.attend(q, k, v, masks.every(), score_mod=eval(said, {"bias": bias}))
    dense = bias[:, None, None] if of_keys else bias
    assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense))
