"""Attention dropout: which pairs are dropped, and that graphs and checkpoints drop them too."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import flexdilated as fd
from flexdilated import masks
from tests.support.drawn_calls import SEED, drawn_dropout


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
