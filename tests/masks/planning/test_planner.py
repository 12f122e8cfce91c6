"""The planner: every way that it weighs computes the pattern exactly; its choice computes little in vain."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks.orders._layout import Compact, Layout, Permutation
from flexdilated.masks.planning._candidates import Allowed
from flexdilated.masks.planning._planner import plan, recommended_layout
from flexdilated.masks.planning.lowering._term import Term
from tests.support import oracle, twins
from tests.support.ladders import LADDERS
from tests.support.strategies import Case, cases


def tokens_of(side: Permutation | Compact, heads: int) -> Tensor:
    """(heads, folds, slots): the token in each slot."""
    return side.tokens() if isinstance(side, Compact) else side.positions().expand(heads, 1, -1)


def weight_of(term: Term, shape: tuple[int, ...]) -> Tensor:
    """(H, N, M): how often the term counts each pair of the bound's tokens."""
    total = torch.zeros(shape, dtype=torch.int64)
    heads, (q, k) = len(term.heads), (tokens_of(side, len(term.heads)) for side in (term.q, term.k))
    slots = torch.arange(q.shape[-1])[:, None], torch.arange(k.shape[-1])[None, :]
    mod = term.mask_mod(torch.device("cpu"))
    weights = weights_of(term)
    for index, head in enumerate(term.heads):
        allowed = mod(torch.tensor(0), torch.tensor(index), *slots).expand(len(slots[0]), slots[1].shape[1])
        if term.shape == "masked":
            allowed = torch.ones_like(allowed)  # its weights are the rule
        elif term.shape != "blocks":
            lead = len(slots[1][0]) - len(slots[0]) if term.shape == "strip" else 0
            plain = torch.ones_like(allowed) if term.shape == "dense" else slots[1] <= slots[0] + lead
            assert torch.equal(allowed, plain)
        times = term.multiplicity * weights[index] * allowed
        for fold in range(q.shape[1]):
            table = total[head]
            table[q[index, fold][:, None], k[index, fold][None, :]] += times
    assert heads == len(set(term.heads))
    return total


def weights_of(term: Term) -> Tensor:
    """(heads, queries or 1, key slots): how often each pair counts, 0 where it is hidden."""
    bias = term.bias(torch.float64)
    times = torch.ones(1, 1, 1, dtype=torch.int64) if bias is None else bias.exp().round().long()
    return times.expand(len(term.heads), -1, -1)


def weight_of_all(terms: Iterable[Term], shape: tuple[int, ...]) -> Tensor:
    return sum((weight_of(term, shape) for term in terms), torch.zeros(shape, dtype=torch.int64))


@st.composite
def spaced(draw: st.DrawFn) -> Case:
    """Rules of distances that are multiples of a spacing, over at least as many tokens, from any positions on."""
    rate = draw(st.integers(2, 7))
    left, right, window = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.integers(0, 9))
    spaced = [twins.strided(rate), twins.dilated_window(left=left, right=right, rate=rate)]
    others = [twins.every(), twins.causal(), twins.local_window(left=window, right=0)]
    twin = draw(st.sampled_from(spaced)) & draw(st.sampled_from(others))
    N, M = draw(st.integers(rate, 30)), draw(st.integers(rate, 30))
    return Case(twin, 2, N, M, draw(st.integers(0, 12)), draw(st.integers(0, 12)), 0, 2)


CAUSAL = [twins.causal(), *(each & twins.causal() for each in (twins.dilated(16, 3, 0), twins.longnet([12], [2])))]


@st.composite
def later_queries(draw: st.DrawFn) -> Case:
    """Causal rules of queries after some or all keys, which need no block lists there."""
    sizes = [draw(st.integers(*ends)) for ends in ((1, 40), (1, 60), (0, 60), (0, 30))]
    return Case(draw(st.sampled_from(CAUSAL)), 2, *sizes, 0, 2)


# Both factors choose by head.
BY_HEAD = twins.longnet([8], [2]) & twins.per_head(
    [twins.every(), twins.blockwise(twins.causal(), 4) & twins.chunked(8)] * 2
)


@settings(max_examples=40)
@given(st.one_of(cases(), spaced(), later_queries()))
@example(Case.whole(BY_HEAD, 4, 32))
def test_every_option_is_the_dense_rule(case):
    """The terms of each way to compute a branch add up to the branch, whether or not the planner takes it."""
    planned, counts = plan(case.bind()), case.counts()
    for choice in range(max(len(options) for options in planned.options)):
        terms = [term for options in planned.options for term in options[choice % len(options)].terms]
        assert torch.equal(weight_of_all(terms, counts.shape), counts)
    assert torch.equal(weight_of_all(planned.terms, counts.shape), counts)


@pytest.mark.parametrize(("keys", "shapes"), [(17_408, ["dense", "causal"]), (16_384, ["dense"])])
def test_long_causal_terms_are_split(keys, shapes):
    """A chunk of 1,024 queries after 16,384 keys: no block lists are left."""
    best = plan(masks.causal().bind(num_heads=4, num_queries=1024, num_keys=keys, q_offset=16_384))
    assert [term.shape for term in best.terms] == shapes


@settings(max_examples=12)
@given(cases(), st.booleans())
def test_plans_say_whether_terms_share_rows(case, may_split):
    """An engine without an lse runs one branch, unsplit: its terms must write each row once."""
    planned, counts = plan(case.bind(), allowed=Allowed(shared_rows=may_split)), case.counts()
    assert torch.equal(weight_of_all(planned.terms, counts.shape), counts)
    written = torch.zeros(counts.shape[:2], dtype=torch.int64)
    for term in planned.terms:
        for head, tokens in zip(term.heads, tokens_of(term.q, len(term.heads)).flatten(1), strict=True):
            written[head, tokens] += 1
    assert planned.shares_rows or (written <= 1).all()
    assert may_split or not planned.shares_rows or len(planned.options) > 1


@pytest.mark.parametrize("name", LADDERS)
@pytest.mark.parametrize(("causal", "N"), [(False, 20011), (True, 16384)])
def test_computes_little_in_vain(name, causal, N):
    """Pairs in listed blocks of side 128, over pairs that branches allow."""
    segments, rates = LADDERS[name]
    pattern = masks.longnet(segments, rates)
    pattern = pattern & masks.causal() if causal else pattern
    computed = plan(pattern.bind(num_heads=16, num_queries=N, num_keys=N)).cost.computed_pairs
    useful = oracle.useful_pairs(segments, rates, num_heads=16, N=N, causal=causal)
    assert computed / useful <= 1.15


def test_recommends_a_layout_only_where_rates_ask_for_one():
    assert recommended_layout(masks.causal(), 4096, num_heads=2) is None
    assert recommended_layout(masks.longnet([8], [2]), 1, num_heads=2) is None
    assert recommended_layout(masks.longnet([64, 96], [2, 3]), 500, num_heads=2) in (None, Layout(500, 6))
