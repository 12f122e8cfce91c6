"""BlockSelector held to its definition in loops: coarse choices, modules that score, gradients, at ties too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.selection import Pools, _select_op, recipes
from flexdilated.selection._scores import pools_of
from tests.selection.cases import Case, assert_selects, cases, with_coarse
from tests.selection.test_recipes import sizes
from tests.selection.test_selected_attention import Gate, gradients
from tests.support import published_selections as published
from tests.support import selection_oracle as oracle
from tests.support.ties import NoTies, tied

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


def test_both_choices_are_within_what_a_call_names() -> None:
    """A run-time tensor of the call's own rule, beside one of each selector: coarse and fine get theirs."""
    real = [torch.rand(16, generator=torch.Generator().manual_seed(seed)) > 0.3 for seed in range(3)]
    names = ("coarse", "fine", "call")

    def chosen(rules: list[masks.Pattern], bindings: dict[str, Tensor] | None) -> fd.selection.Selection:
        coarse, fine, call = rules
        first = fd.BlockSelector(block=4, query_block=1, scorer="mean", choose=fd.TopK(2), within=coarse)
        selector = fd.BlockSelector(block=2, query_block=1, scorer="mean", choose=fd.TopK(2), within=fine, coarse=first)
        q, k = (tied(1, 2, 16, 4, seed=seed) for seed in (1, 2))
        return selector(q, k, within=call, bindings=bindings)

    held = [masks.visible_keys(keys, name=name) for name, keys in zip(names, real, strict=True)]
    named = [masks.visible_keys(name) for name in names]
    found = chosen(named, dict(zip(names, real, strict=True)))
    assert found.blocks.equal(chosen(held, None).blocks)
    assert not found.blocks.equal(chosen([*held[:2], masks.every()], None).blocks)


class Projected(nn.Module):
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
    gate = Projected(8, per_group=per_group)
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


class Given(nn.Module):
    """Scores that do not depend on the call."""

    def __init__(self, scores: list[list[float]]) -> None:
        super().__init__()
        self.scores = torch.tensor(scores, dtype=torch.float64)[None, :, None]

    def forward(self, queries, pools: Pools):
        return self.scores


SCORES = st.sampled_from([inf, inf, -inf, float("nan"), 0.0, -1.0, 1e4, 1e30, -1e30])


@given(st.data(), st.integers(1, 7), st.integers(1, 2), st.sampled_from(["head", "all"]), st.integers(1, 8))
def test_a_module_may_return_any_scores(data, blocks: int, heads: int, share: str, most: int) -> None:
    """NaN counts as -inf; large scores share as small ones do, and those of inf have all."""
    scores = data.draw(st.lists(st.lists(SCORES, min_size=blocks, max_size=blocks), min_size=heads, max_size=heads))
    choose = data.draw(st.sampled_from([fd.TopK(most), fd.TopP(0.4, most=most), fd.Threshold(0.15, most=most)]))
    selector = fd.BlockSelector(block=2, choose=choose, scorer=Given(scores), share=share)
    q, k = torch.ones(1, heads, 1, 4, dtype=torch.float64), torch.ones(1, heads, 2 * blocks, 4, dtype=torch.float64)
    pairs, rule = torch.empty(0), (choose.kind, choose.amount)
    asked = oracle.Asked(pairs, pairs, 2, 1, "module", rule, most, heads, False, 2 * blocks - 1, 1.0)
    each = [{j: -inf if score != score else score for j, score in enumerate(head)} for head in scores]
    tables = [oracle.joined(each, asked)] if share == "all" else each
    found = selector(q, k, q_offset=2 * blocks - 1).blocks[0, :, 0]
    for row, table in zip(found.tolist(), tables, strict=True):
        chosen, _ = oracle.pick({j: -inf if score != score else score for j, score in table.items()}, asked)
        assert [j for j in row if j >= 0] == [j for j, _ in chosen]


def test_a_module_is_not_asked_for_blocks_that_are_seen_in_part() -> None:
    """Its pools would hold what the row does not see: without `always`, a query's own block is no candidate."""
    q, k = torch.randn(2, 1, 2, 22, 8, dtype=torch.float64)
    found = fd.BlockSelector(block=4, choose=fd.TopK(9), scorer=Projected(8))(q, k)
    for i in range(22):
        whole = set(range((i + 1) // 4)) | ({5} if i == 21 else set())
        assert set(found.blocks[0, 1, i].tolist()) - {-1} == whole


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


@pytest.fixture(autouse=True, scope="module")
def watched_op() -> Iterator[None]:
    """The op of a choice differentiates its scores under the watch, too."""
    recording = _select_op.autograd_on

    @contextmanager
    def watched() -> Iterator[None]:
        with recording(), NoTies():
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_select_op, "autograd_on", watched)
        yield


def of_ties(case: Case, seed: int) -> Case:
    """With queries and keys that are full of ties."""
    return replace(case, q=tied(*case.q.shape, seed=seed), k=tied(*case.k.shape, seed=seed + 1))


def trained(case: Case) -> Case:
    for selector in (case.selector, case.selector.coarse):
        if selector is not None:
            selector._sees_ahead = False  # which is all that forbids gradients
    return case


def watched(call: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    with NoTies():
        return call(*inputs, **options)


def bound_of(query: Tensor, keys: Tensor) -> Tensor:
    """sum_d max(q_d least_d, q_d greatest_d) of (D,) and (n, D), with the gradients that are promised.

    Equal ends share theirs equally; a query of 0 has the mean of the gradients to its sides.
    """

    def end(found: Tensor) -> Tensor:
        at = keys.detach() == found
        return (keys * at).sum(0) / at.sum(0)

    least, greatest = end(keys.detach().amin(0)), end(keys.detach().amax(0))
    side = query.detach().sign()
    return (query * ((1 + side) / 2 * greatest + (1 - side) / 2 * least)).sum()


@settings(max_examples=20)
@given(cases(scorers=("minmax",)), st.integers(0, 99))
def test_the_gradient_of_a_bound_at_ties(case: Case, seed: int) -> None:
    """Repeated keys and queries of 0, in whole blocks and in blocks that a row sees in part."""
    case = trained(replace(of_ties(case, seed), options=case.options | {"share": "head"}))
    found, own, within = watched(case.run), case.selector, case.table(case.selector.within)
    q, k = case.q, case.k.repeat_interleave(case.q.shape[1] // case.k.shape[1], 1)
    rows, blocks = oracle.rows_of(q.shape[2], case.q_offset, own.query_block), oracle.blocks_of(k.shape[2], own.block)
    expected = found.scores.detach() + 0 * (q.sum() + k.sum())
    for b, h, r, place in (found.blocks >= 0).nonzero().tolist():
        view = rows[r] if own._scores_all_queries else rows[r][:1]
        query = q[b, h, [i for i in view if within[b, h, i].any()]].mean(0) * q.shape[-1] ** -0.5
        keys = [key for key in blocks[int(found.blocks[b, h, r, place])] if within[b, h, view, key].any()]
        at = tuple(torch.tensor(index) for index in (b, h, r, place))
        expected = expected.index_put(at, bound_of(query, k[b, h, keys]))
    assert_close(found.scores, expected)
    shown = (x.masked_fill(found.blocks < 0, 0.0) for x in (found.scores, expected))
    assert_close(*(gradients(x, case.q, case.k) for x in shown))


@settings(max_examples=20)
@given(cases(), st.booleans(), st.booleans(), st.integers(0, 99))
def test_attention_to_what_is_chosen(case: Case, by_coarse: bool, bias: bool, seed: int) -> None:
    """Every scorer, choice and share, with sinks, and with the scores as a bias."""
    if by_coarse and case.options["scorer"] != "antidiagonal":
        case = with_coarse(case, ratio=2, rows=2, most=3)
    case = trained(of_ties(case, seed))
    attention, sinks = fd.SelectedAttention(case.selector, "bias" if bias else "none"), tied(1, case.q.shape[1], seed=5)
    options = {"enable_gqa": True, "q_offset": case.q_offset, "bindings": case.bindings, "return_selection": True}
    out, found = watched(attention, case.q, case.k, case.k, sinks=sinks[0], **options)
    chosen = found.scores.masked_fill(found.blocks < 0, 0.0).sum() if bias else 0.0
    for grad in torch.autograd.grad(out.sin().sum() + chosen, (case.q, case.k, sinks)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("gradient", ["bias", "distill"])
@settings(max_examples=10)
@given(case=cases(scorers=("mean",), tensors=False), seed=st.integers(0, 99))
def test_a_gate(gradient: str, case: Case, seed: int) -> None:
    """A module's pools, and the loss that teaches it."""
    gate = Gate(case.q.shape[-1])
    changed = {"scorer": gate, "query_summary": "first", "future_in_choice": False, "share": "head"}
    case = of_ties(replace(case, options=case.options | changed), seed)
    attention, options = fd.SelectedAttention(case.selector, gradient), {"enable_gqa": True, "q_offset": case.q_offset}
    inputs = (case.q, case.k, case.k) if gradient == "bias" else (case.q, case.k)
    found = watched(attention if gradient == "bias" else attention.distill_loss, *inputs, **options)
    for grad in gradients(found, gate.weight, case.q, case.k):
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_ends_of_a_block_share_a_gradient(dtype: torch.dtype) -> None:
    """And the pool is the end itself, where the sum of equal ends is no number of this dtype."""
    k = torch.tensor([3e4, -1.0, 3e4, 3e4], dtype=dtype).view(1, 1, 4, 1).requires_grad_()
    _, least, greatest = watched(pools_of, k, 4)
    assert torch.cat([least, greatest]).flatten().equal(k[0, 0, [1, 0], 0].float())
    (grad,) = torch.autograd.grad((3 * greatest - least).sum(), k)
    assert grad.flatten().tolist() == [1, -1, 1, 1]


@settings(max_examples=10)
@given(sizes(), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_coarse_to_fine(size, block: int, top: int, causal: bool, seed: int) -> None:
    """Parts with equal lse. Means of 1, 2 or 4 keys are exact, so the plain statement meets the ties of float32."""
    H, G, N, offset = size
    shapes, options = ((2, H, N, 4), *[(2, G, offset + N, 4)] * 2), {"block": block, "top": top, "causal": causal}
    leaves = [tied(*shape, seed=seed + place) for place, shape in enumerate(shapes)]
    found = watched(recipes.CoarseToFineAttention(**options), *leaves, enable_gqa=True, q_offset=offset)
    plain = [published.coarse_to_fine(*(x[b] for x in leaves), **options, offset=offset) for b in range(2)]
    assert_close(*(gradients(out, *leaves) for out in (found, torch.stack(plain))))
