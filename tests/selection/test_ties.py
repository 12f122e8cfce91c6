"""No derivative of a selection passes a tie that torch decides: under a watch, on inputs that are full of ties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated.selection import _select_op, recipes
from flexdilated.selection._scores import pools_of
from tests.selection.cases import Case, cases, with_coarse
from tests.selection.test_recipes import sizes
from tests.selection.test_selected_attention import Gate, gradients
from tests.support import published_selections as published
from tests.support import selection_oracle as oracle
from tests.support.ties import NoTies, tied

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


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
        view = rows[r] if own._whole else rows[r][:1]
        query = q[b, h, [i for i in view if within[b, h, i].any()]].mean(0) * q.shape[-1] ** -0.5
        keys = [key for key in blocks[int(found.blocks[b, h, r, place])] if within[b, h, view, key].any()]
        at = tuple(torch.tensor(index) for index in (b, h, r, place))
        expected = expected.index_put(at, bound_of(query, k[b, h, keys]))
    assert_close(found.scores, expected)
    shown = (x.masked_fill(found.blocks < 0, 0.0) for x in (found.scores, expected))
    for one, other in zip(*(gradients(x, case.q, case.k) for x in shown), strict=True):
        assert_close(one, other)


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
    for one, other in zip(*(gradients(out, *leaves) for out in (found, torch.stack(plain))), strict=True):
        assert_close(one, other)
