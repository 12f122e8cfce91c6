"""Branches that nest are computed together, each pair once and weighted; others as lists over their active tokens."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate, product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.masks.orders import Placement
from flexdilated.masks.planning import Allowed, IntervalTerm, PaddedTerm, plan_at
from flexdilated.masks.planning._candidates import ANYTHING
from flexdilated.masks.planning._planner import Plan, plan
from flexdilated.masks.planning.lowering import _nested, interval_terms
from tests.engines.test_aten import Layout, assert_plan_agrees
from tests.masks.planning.test_planner import weight_of_all
from tests.support import twins
from tests.support.padded import padded_cases, padded_plan
from tests.support.placed import parts
from tests.support.strategies import Case, block_sides, tensors

pytestmark = pytest.mark.usefixtures("without_masks")


@st.composite
def nested(draw: st.DrawFn) -> Case:
    """Segments and rates that divide the next ones, a branch twice, the past only, any heads of all, any N."""
    size = draw(st.integers(2, 4))
    rates = list(accumulate(draw(st.lists(st.integers(1, 3), min_size=size, max_size=size)), lambda a, b: a * b))
    ratios = draw(st.lists(st.integers(1, 4), min_size=size - 1, max_size=size - 1))
    first = rates[-1] * draw(st.integers(1, 3))
    segments = list(accumulate([first, *ratios], lambda a, b: a * b))
    order = draw(st.permutations(range(size)))
    branches = [(segments[i], rates[i]) for i in order] + [(segments[0], rates[0])] * draw(st.booleans())
    widths, steps = zip(*branches, strict=True)
    twin = twins.longnet(widths, steps)
    twin = twin & twins.causal() if draw(st.booleans()) else twin
    N, heads = draw(st.integers(1, 64)), draw(st.integers(1, 5))
    first_head = draw(st.integers(0, 3))
    return Case(twin, heads, N, N, 0, 0, first_head, first_head + heads + draw(st.integers(0, 2)))


@pytest.fixture(autouse=True, scope="module")
def short_strips():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_nested, "_STRIP_ROWS", 4)
        masks.cache().clear()
        yield
    masks.cache().clear()


def together(case: Case) -> Plan | None:
    """The plan that computes all branches together, whether or not it is the cheapest."""
    planned = plan(case.bind())
    return replace(planned, terms=planned.together[0].terms) if planned.together else None


@settings(max_examples=12)
@given(nested())
def test_terms_are_the_dense_rule(case):
    chosen, counts = together(case), case.counts()
    assert (chosen is None) == (len(set(case.bind().pattern.branches())) == 1)
    if chosen is not None:
        assert torch.equal(weight_of_all(chosen.terms, counts.shape), counts)
        once = [replace(term, multiplicity=1, weights=None) for term in chosen.terms]
        assert torch.equal(weight_of_all(once, counts.shape), (counts > 0).long())


@st.composite
def partly_nested(draw: st.DrawFn) -> Case:
    """Nested branches beside others, and offsets under which only some nest."""
    case = draw(nested())
    offsets, left = draw(st.sampled_from(["interleaved", "contiguous"])), draw(st.integers(0, 9))
    other, window = twins.longnet([16, 18], [4, 3], offsets=offsets), twins.local_window(left=left, right=0)
    return replace(case, twin=case.twin + other + window)


@settings(max_examples=10)
@given(st.data())
def test_attention_is_the_oracle(data):
    case = data.draw(st.one_of(nested(), partly_nested()))
    chosen = together(case)
    if chosen is not None:
        assert_plan_agrees(chosen, Layout(case.num_queries), data.draw(tensors(case, one_width=True)), case.counts(), 8)


WINDOW = masks.local_window(left=3, right=3)


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        (masks.longnet([8, 12], [1, 2]), {}),  # 8 does not divide 12
        (masks.longnet([6, 24], [1, 4]), {}),  # a segment of 6 starts within a period of 4
        (masks.longnet([12, 24], [2, 3]), {}),  # 2 does not divide 3
        (masks.longnet([8, 40], [1, 2]), {}),  # five times as long: too many terms
        (masks.longnet([8, 16], [2, 4], offsets="contiguous"), {}),  # head 2 is active at 0, then at 1
        (masks.longnet([8, 16], [1, 2]) & WINDOW, {}),
        (masks.longnet([8], [1]) + WINDOW, {}),
        (masks.longnet([8], [1]), {}),
        (masks.longnet([8, 16], [1, 2]), {"q_offset": 8}),
        (masks.longnet([8, 16], [1, 2]), {"num_keys": 32}),
    ],
)
def test_what_does_not_nest_or_an_engine_cannot_run_is_not_offered(pattern, sizes):
    bound = pattern.bind(**{"num_heads": 8, "num_queries": 48, "num_keys": 48, **sizes})
    assert not plan(bound).together
    bound = masks.longnet([8, 16], [1, 2]).bind(num_heads=2, num_queries=48, num_keys=48)
    assert plan(bound, allowed=ANYTHING).together
    assert not plan(bound, allowed=Allowed(key_weights=False)).together
    assert not plan(bound, allowed=Allowed(shared_rows=False)).together


def test_shared_pairs_are_computed_once():
    """Segments and rates that double: 2,944 distinct pairs of 3,840 a query, found in the plan and in the table."""
    pattern, N = masks.longnet([2048, 4096, 8192, 16384], [1, 2, 4, 8]), 16384
    told = masks.describe(pattern, N, num_heads=2)
    assert told.useful_pairs == 2 * N * 3840
    assert told.computed_pairs == 2 * N * 2944
    assert "nested" in str(told)
    assert "branch by branch" in str(told.to_data())


def test_reduced_precision():
    """Weights are exact where q, k and v are not: the error is that of one rounding of the output."""
    pattern, N, dtype = masks.longnet([512, 1024], [1, 2]), 1280, torch.bfloat16
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, N, 16, dtype=dtype) for _ in range(3))
    assert plan(pattern.bind(num_heads=2, num_queries=N, num_keys=N)).chosen[0].layout == "nested"
    found = fd.attend(q, k, v, pattern)
    truth = fd.attend(q, k, v, pattern, engine="reference")
    assert_close(found, truth, rtol=0.0, atol=4 * torch.finfo(dtype).eps)


@given(padded_cases(), block_sides, block_sides)
def test_listed_blocks_hold_the_pairs(case, q_side, k_side):
    planned, times = padded_plan(case), torch.zeros(case.num_heads, case.num_queries, case.num_keys, dtype=torch.int64)
    for term in planned.terms:
        assert isinstance(term, PaddedTerm)
        times.index_put_(listed_pairs(term, q_side, k_side), torch.tensor(term.multiplicity), accumulate=True)
    assert torch.equal(times, case.counts())


@given(parts(complete=False), block_sides, block_sides)
def test_intervals_over_all_runs(part, q_side, k_side):
    """The same of terms over what a device holds, whatever runs of positions that is."""
    bound, sides = part.bind(), (part.placement.queries, part.placement.keys[0])
    terms = [interval_terms(each, times, bound, part.placement) for each, times in Counter(part.branches()).items()]
    assume(all(each is not None for each in terms))
    N = part.placement.num_tokens
    times = torch.zeros(part.num_heads, N, N, dtype=torch.int64)
    for term in (term for each in terms for term in each or ()):
        assert isinstance(term, IntervalTerm)
        times.index_put_(listed_pairs(term, q_side, k_side), torch.tensor(term.multiplicity), accumulate=True)
    q, k = (torch.cat([torch.arange(0), *(torch.arange(r.start, r.stop) for r in side)]) for side in sides)
    assert torch.equal(times[:, q][:, :, k], part.counts)
    assert int(times.sum()) == int(part.counts.sum())


def test_a_term_a_branch_however_the_tokens_are_held():
    """Zigzag shards on eight ranks, each turn of a ring: what is compiled is the same for all of them."""
    pattern, split = masks.longnet([512, 1024, 2048], [1, 2, 4]) & masks.causal(), Sharding(8192, 8, order="zigzag")
    options = {"num_heads": 4, "head_offset": 0, "num_heads_global": 4, "device": "cuda"}
    allowed = Allowed(windows=False, residues=False, lists_only=True)
    for mine, others in product(range(8), range(8)):
        held = Placement(split.ranges(mine), (split.ranges(others),), complete=False, num_tokens=8192)
        terms = plan_at(pattern, held, **options, allowed=allowed).terms
        assert len(terms) <= 3
        assert all(isinstance(term, IntervalTerm) for term in terms)
        assert [term.listed_blocks.blocks for term in terms] == [
            4 * len(term.in_blocks_of(128, 128).blocks(128, 128).row) for term in terms
        ]


def listed_pairs(term: PaddedTerm | IntervalTerm, q_side: int, k_side: int) -> tuple[Tensor, Tensor, Tensor]:
    """(head, query, key) of each pair: in a block that is listed; full blocks need no rule; the others have it."""
    term = term.in_blocks_of(q_side, k_side)
    blocks = term.blocks(q_side, k_side)
    N, M = blocks.num_q_slots, blocks.num_k_slots
    q_tokens, k_tokens = (slots_of(side, length) for side, length in ((term.q, N), (term.k, M)))
    q, k = torch.arange(N), torch.arange(M)
    heads = torch.arange(len(term.heads))[:, None, None]
    rule = term.mask_mod(torch.device("cpu"))(torch.tensor(0), heads, q[:, None], k)
    listed, full = torch.zeros(2, -(-N // q_side), -(-M // k_side), dtype=torch.bool)
    listed[blocks.row.long(), blocks.column.long()] = True
    full[blocks.row.long(), blocks.column.long()] = blocks.full
    listed, full = (each[q // q_side][:, k // k_side] for each in (listed, full))
    pairs = full | (listed & rule)
    held = (q_tokens >= 0)[:, :, None] & (k_tokens >= 0)[:, None]
    assert not (pairs & (q_tokens >= 0)[:, :, None] & (k_tokens < 0)[:, None]).any()
    assert torch.equal(pairs & held, rule & held)
    h, i, j = (pairs & held).nonzero(as_tuple=True)
    assert torch.equal(term.pairs_of_heads(), torch.bincount(h, minlength=len(term.heads)))
    by_block = (pairs & held).any(0).unflatten(0, (-1, q_side)).unflatten(2, (-1, k_side)).any(3).any(1)
    assert int(by_block.sum()) == len(blocks.row), "a listed block holds no pair"
    sides = zip(term.hidden(), (q_tokens, k_tokens), ((pairs & held).any(2), (pairs & held).any(1)), strict=True)
    for marked, tokens, seen in sides:
        lonely = (tokens >= 0) & ~seen
        assert torch.equal(lonely, torch.zeros_like(lonely) if marked is None else marked[0])
    return torch.tensor(term.heads)[h], q_tokens[h, i], k_tokens[h, j]


def slots_of(side, length: int) -> torch.Tensor:
    tokens = side.tokens()[:, 0]
    return torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]), value=-1)
