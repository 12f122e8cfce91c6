"""BlockSelector held to its definition in loops: coarse choices, modules that score, gradients of scores."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.selection import Pools
from tests.selection.cases import Case, assert_selects, cases, with_coarse
from tests.support import selection_oracle as oracle

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim, R rows, C blocks of keys


@given(cases(scorers=("mean", "minmax", "mass")), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
def test_the_fine_choice_is_within_the_coarse_one(case: Case, ratio: int, rows: int, most: int) -> None:
    case = with_coarse(case, ratio=ratio, rows=rows, most=most)
    coarse = case.selector.coarse
    assert coarse is not None
    heads, first = case.q.shape[1], case.q_offset // case.selector.query_block
    answer = oracle.select(case.q, case.k, case.asked(coarse)).blocks
    asked = case.asked()
    own = oracle.rows_of(case.q.shape[2], case.q_offset, asked.query_block)
    allowed = {}
    for b, entry in enumerate(answer):
        for h in range(heads):
            for r in range(len(own)):
                at = (first + r) * asked.query_block // coarse.query_block - case.q_offset // coarse.query_block
                chosen = entry[h * len(entry) // heads][at]
                allowed[b, h, r] = {j * ratio + step for j in chosen for step in range(ratio)}
    assert_selects(case.run(), oracle.select(case.q, case.k, replace(asked, candidates=allowed)), asked.most)


class Gate(nn.Module):
    """A gate as SeerAttention's: a projection of the query by one of all three pools."""

    def __init__(self, dim: int, *, per_group: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.keys, self.per_group = nn.Linear(3 * dim, dim, dtype=torch.float64), per_group

    def forward(self, queries, pools: Pools):
        keys = self.keys(torch.cat([pools.mean, pools.least, pools.greatest], -1))
        groups = queries.unflatten(1, (keys.shape[1], -1))
        if self.per_group:
            return groups.mean(2) @ keys.mT
        return (groups @ keys.unsqueeze(2).mT).flatten(1, 2)


@pytest.mark.parametrize("share", ["head", "group", "all"])
@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("query_block", [1, 4])
def test_a_module_scores_whole_blocks(share: str, per_group: bool, query_block: int) -> None:
    """The same as a selection by hand of its scores; the module learns from the scores of the chosen."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 22, 8, dtype=torch.float64), torch.randn(2, 2, 22, 8, dtype=torch.float64)
    gate = Gate(8, per_group=per_group)
    options = {"block": 4, "choose": fd.TopK(2), "query_block": query_block, "query_summary": "first"}
    selector = fd.BlockSelector(**options, scorer=gate, always=masks.chunked(4), share=share)
    found = selector(q, k)
    blocks = [k[:, :, at : at + 4] for at in range(0, 22, 4)]
    pools = Pools(
        *(
            torch.stack([f(x) for x in blocks], 2)
            for f in (lambda x: x.mean(2), lambda x: x.amin(2), lambda x: x.amax(2))
        )
    )
    scores = gate(q[:, :, ::query_block], pools)
    if share == "head":
        scores = scores.repeat_interleave(2, 1) if per_group else scores
    else:  # each head's own scores once: the module's, summed where heads share a table
        scores = scores.unflatten(1, (2 if share == "group" else 1, -1)).sum(2)
    for r in range(found.blocks.shape[2]):
        past = r * query_block // 4
        best = scores[:, :, r, :past].sort(dim=-1, descending=True)
        number = min(2, past)
        assert found.blocks[:, :, r, :number].equal(best.indices[..., :number])
        assert found.blocks[:, :, r, number:].eq(-1).all()
        assert_close(found.scores[:, :, r, :number], best.values[..., :number])
    chosen = found.blocks >= 0
    (grad,) = torch.autograd.grad(found.scores[chosen].sin().sum(), gate.keys.weight, retain_graph=True)
    expected = scores.gather(-1, found.blocks.clamp(min=0))[chosen].sin().sum()
    assert_close(grad, torch.autograd.grad(expected, gate.keys.weight)[0])


def test_a_module_is_not_asked_for_blocks_that_are_seen_in_part() -> None:
    """Its pools would hold what the row does not see: without `always`, a query's own block is no candidate."""
    q, k = torch.randn(2, 1, 2, 22, 8, dtype=torch.float64)
    found = fd.BlockSelector(block=4, choose=fd.TopK(9), scorer=Gate(8))(q, k)
    for i in range(22):
        whole = set(range((i + 1) // 4)) | ({5} if i == 21 else set())
        assert set(found.blocks[0, 1, i].tolist()) - {-1} == whole


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hidden_tokens_do_not_come_to_a_module(value: float) -> None:
    """Padding, whatever it holds: the gradients of the module are the same numbers."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 22, 8, dtype=torch.float64)
    within, grads = masks.every() & masks.lengths(torch.tensor([16])), []
    for bad in (value, 0.0):
        gate = Gate(8)
        selector = fd.BlockSelector(block=4, query_block=4, choose=fd.TopK(2), scorer=gate, within=within)
        spoilt = (x.index_fill(2, torch.arange(16, 22), bad).requires_grad_() for x in (q, k))
        scores = selector(*spoilt).scores
        grads.append(torch.autograd.grad(scores[scores > -inf].sin().sum(), gate.keys.weight)[0])
    assert torch.equal(*grads)
    assert not grads[0].isnan().any()


def test_shapes_alone() -> None:
    """On the meta device, which has no values."""
    q, k = torch.randn(2, 4, 9, 8, device="meta"), torch.randn(2, 2, 9, 8, device="meta")
    for scorer in ("mean", "mass", Gate(8).to("meta", torch.float32)):
        found = fd.BlockSelector(block=2, choose=fd.TopK(3), scorer=scorer)(q, k)
        assert found.blocks.shape == found.scores.shape == (2, 4, 9, 3)


@given(cases())
def test_gradients_of_scores_are_those_of_finite_differences(case: Case) -> None:
    """Of a weighted sum of the chosen scores, for the choice of the forward, along a random direction."""
    case.selector._sees_ahead = False  # which is all that forbids gradients
    q, k = (x.clone().requires_grad_() for x in (case.q, case.k))
    found = case.run(q, k)
    weights = torch.randn(found.scores.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    shown = found.scores > -inf

    def loss(q, k) -> torch.Tensor:
        return (case.run(q, k).scores.masked_fill(~shown, 0.0) * weights).sum()

    grads = torch.autograd.grad((found.scores.masked_fill(~shown, 0.0) * weights).sum(), (q, k))
    step = 1e-6
    generator = torch.Generator().manual_seed(4)
    directions = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in (q, k)]
    with torch.no_grad():
        ends = [[x + sign * step * d for x, d in zip((q, k), directions, strict=True)] for sign in (1, -1)]
        if not all(case.run(*end).blocks.equal(found.blocks) for end in ends):
            return  # another choice lies within a millionth
        expected = (loss(*ends[0]) - loss(*ends[1])) / (2 * step)
    slope = sum((grad * d).sum() for grad, d in zip(grads, directions, strict=True))
    assert_close(slope, expected, rtol=1e-5, atol=1e-6)
