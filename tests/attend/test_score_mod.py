"""score_mod: what may be one, which engines take it, and how often it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines._score_mod import plain_values
from tests.engines.test_flex import qkv
from tests.support.compilers import without_inductor

# B batch, H query heads, N queries, M keys, D head dim


@pytest.fixture
def traced_only():
    with without_inductor():
        yield


def alibi(slopes: Tensor):
    def score_mod(score, b, h, q_idx, k_idx):
        return score - slopes[h] * (q_idx - k_idx).abs()

    return score_mod


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05])


def test_what_flex_cannot_do_is_left_to_portable():
    """On CPU; no call needs to name it."""
    q, k, v = qkv(32)
    causal, mixture = masks.causal(), masks.longnet([8, 16], [1, 2])
    learning = SLOPES.clone().requires_grad_()
    wanting = q.clone().requires_grad_()
    for pattern in (causal, mixture):
        out = fd.attend(wanting, k, v, pattern, score_mod=alibi(learning))
        exact = fd.attend(wanting, k, v, pattern, score_mod=alibi(learning), engine="reference")
        grads, exact_grads = (torch.autograd.grad(x.square().sum(), (wanting, learning)) for x in (out, exact))
        assert_close((out, *grads), (exact, *exact_grads))


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_what_could_learn_serves_without_gradients():
    q, k, v = qkv(32)
    learning = SLOPES.clone().requires_grad_()
    with torch.no_grad():
        found = fd.attend(q, k, v, masks.causal(), engine="flex", score_mod=alibi(learning))
    assert_close(found, fd.attend(q, k, v, masks.causal(), engine="reference", score_mod=alibi(SLOPES)))


def capturing(value: object) -> Callable[[Tensor], object]:
    return lambda score: value


VALUES = [[1, 2], [(1,), (2,)], [{"a": 1}, {"a": 2}, {"b": 1}], [{1}, {1, 2}], [{"a": [1]}, {"a": [2]}]]


@pytest.mark.parametrize("values", VALUES)
def test_what_functions_captured_tells_them_apart(values):
    """Those that are told apart are compiled each for itself; torch gives up after eight of the others."""
    assert len({plain_values(capturing(value)) for value in values}) == len(values)
    assert len({plain_values(capturing(deepcopy(value))) for value in (values[0], values[0])}) == 1
