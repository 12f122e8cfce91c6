"""Score functions of `fd.biases` against their definitions, dense, and against the models that they come from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers.models.t5.modeling_t5 import T5Attention

import flexdilated as fd
from flexdilated import masks
from tests.support.agreement import TIGHT

# H heads, N tokens

PATTERN = masks.longnet([16, 32], [1, 2]) & masks.causal()
BIDIRECTIONAL = masks.local_window(left=20, right=11)


def assert_trains(score_mod, table, dense, pattern=PATTERN, tokens=40):
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


@pytest.mark.parametrize("pattern", [PATTERN, BIDIRECTIONAL])
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
