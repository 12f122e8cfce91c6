"""Attention dropout: the pairs that every engine drops, and softmax, dropout, values in that order, with gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Dropout, multiplicity
from flexdilated.engines.flex._flex_op import static_program, with_dropout
from tests.attend.test_score_mod import modified
from tests.engines.test_flex import CPU, around_dense, call_key
from tests.support.agreement import TIGHT, assert_agrees
from tests.support.strategies import Case, block_sides, cases, inputs, tensors, whole_cases

# B batch, H query heads, N queries, M keys

probabilities = st.sampled_from([0.1, 0.5, 0.9])
SEED = 7


def drawn_dropout(p: float) -> Dropout:
    """The dropout of the next call after `torch.manual_seed(SEED)`."""
    torch.manual_seed(SEED)
    return Dropout.drawn(p, CPU)


def shares(case: Case, batch: int, dropout: Dropout) -> Tensor:
    """(B, H, N, M): of the branches that allow a pair, the share that keeps it, over 1 - p; by a loop over branches."""
    heads, (q, k) = torch.arange(*_ends(case.heads)), (torch.arange(*_ends(each)) for each in _tokens(case))
    bound, total = replace(case.bind(), batch=batch), torch.zeros((), dtype=torch.float64)
    for place, branch in enumerate(case.twin.pattern.branches()):
        allowed = multiplicity(replace(bound, pattern=branch), CPU)
        b = torch.arange(batch)[:, None, None, None]
        total = total + allowed * dropout.kept(place, b, heads[:, None, None], q[:, None], k)
    return total / case.counts().clamp(min=1) / (1 - dropout.p)


def _ends(numbers: range) -> tuple[int, int]:
    return numbers.start, numbers.stop


def _tokens(case: Case) -> tuple[range, range]:
    return (
        range(case.q_offset, case.q_offset + case.num_queries),
        range(case.k_offset, case.k_offset + case.num_keys),
    )


def features(case: Case, drawn: tuple[Tensor, ...], p: float) -> dict:
    kept = shares(case, len(drawn[0]), drawn_dropout(p))
    return {"dropped": lambda weights: weights * kept}


@pytest.mark.parametrize("engine", ["reference", "portable", None])
@given(st.data(), probabilities, block_sides)
def test_every_engine_is_the_oracle_and_drops_the_same_pairs(engine, data, p, side):
    case = data.draw(cases())
    drawn = data.draw(inputs(case))
    options = {"enable_gqa": True, "engine": engine, "return_lse": True, "block_size": side, **case.sizes}

    def attend(q, k, v, sinks=None):
        torch.manual_seed(SEED)
        return fd.attend(q, k, v, case.twin.pattern, dropout_p=p, sinks=sinks, **options)

    assert_agrees(attend, drawn, case.counts(), **features(case, drawn, p))


@pytest.mark.parametrize("engine", ["reference", "portable"])
@given(st.data(), probabilities)
def test_beside_a_score_mod(engine, data, p):
    case = data.draw(cases())
    drawn = data.draw(inputs(case))
    rule = data.draw(modified(len(drawn[0]), case.num_heads_global))

    def attend(q, k, v, sinks=None):
        torch.manual_seed(SEED)
        how = {"score_mod": rule.score_mod(), "engine": engine, "enable_gqa": True, "return_lse": True}
        return fd.attend(q, k, v, case.twin.pattern, dropout_p=p, sinks=sinks, **how, **case.sizes)

    assert_agrees(attend, drawn, case.counts(), modify=rule.of(case), **features(case, drawn, p))


@pytest.mark.slow
@settings(max_examples=6)
@given(st.data(), st.sampled_from([0.0, 0.5]))
def test_any_pattern_in_a_graph(data, p):
    case = data.draw(cases())
    drawn = data.draw(inputs(case))
    torch.compiler.reset()  # every example compiles another function

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def attend(q, k, v, sinks=None):
        options = {"engine": "portable", "enable_gqa": True, "return_lse": True, **case.sizes}
        return fd.attend(q, k, v, case.twin.pattern, dropout_p=p, sinks=sinks, **options)

    def seeded(*given: Tensor):
        torch.manual_seed(SEED)
        return attend(*given)

    how = features(case, drawn, p) if p else {}
    assert_agrees(seeded, drawn, case.counts(), **how)


@given(st.data(), probabilities, block_sides, st.booleans())
def test_flex_attends_to_the_kept_pairs(data, p, side, with_score_mod):
    """FlexAttention over the kept pairs, and its lse over all of them."""
    case = data.draw(cases())
    drawn = data.draw(tensors(case))
    rule = data.draw(modified(len(drawn[0]), case.num_heads_global)) if with_score_mod else None
    program = static_program(call_key(case, drawn[1].shape[1], side), CPU)
    more = {} if rule is None else {"score_mod": rule.score_mod()}

    def attend(q, k, v):
        kept, kept_lse = around_dense(program, 0.5, dropout=drawn_dropout(p), **more)(q, k, v)
        _, lse = around_dense(program, 0.5, **more)(q, k, v)
        return with_dropout(kept, kept_lse, lse, p), lse

    how = features(case, drawn, p) | ({} if rule is None else {"modify": rule.of(case)})
    assert_agrees(attend, drawn, case.counts(), scale=0.5, **how)


@settings(max_examples=12)
@given(st.data(), st.integers(2, 7), probabilities)
def test_a_layout_drops_the_pairs_of_its_tokens(data, rate, p):
    case = data.draw(whole_cases())
    drawn = data.draw(tensors(case))
    layout = masks.Layout(case.num_queries, min(rate, case.num_queries))
    natural, ordered = (
        fd.attend(*inputs, case.twin.pattern, dropout_p=p, enable_gqa=True, engine="portable", layout=each)
        for each, inputs in ((None, drawn), (layout, [layout.apply(x) for x in drawn]))
        for _ in [torch.manual_seed(SEED)]
    )
    assert_close(layout.invert(ordered), natural, **TIGHT)


def test_documents_by_run_time_tensors():
    x = torch.randn(2, 2, 30, 8, dtype=torch.float64)
    ids = torch.arange(30).div(torch.tensor([[7], [10]]), rounding_mode="floor")
    pattern = masks.documents("documents") & masks.causal()
    found = []
    for engine in ("portable", "reference"):
        torch.manual_seed(SEED)
        found.append(fd.attend(x, x, x, pattern, dropout_p=0.4, bindings={"documents": ids}, engine=engine))
    assert_close(*found, **TIGHT)


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


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("aten", "aten runs kernels without attention dropout; engine='portable' serves it"),
        ("flash", "flash runs kernels without attention dropout; engine='flex' serves it"),
    ],
)
def test_an_engine_without_dropout_is_refused(engine, words):
    x = torch.randn(1, 1, 8, 16)
    with pytest.raises(ValueError, match=words):
        fd.attend(x, x, x, masks.causal(), engine=engine, dropout_p=0.1)
