"""What describe tells beyond pairs: heads, branches, multiplicity, gaps and blocks, against the dense rule."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks.inspection._gaps import Gap, Gaps, gaps_of
from flexdilated.masks.inspection._pair_counts import branch_shares, count_term, head_shares, multiplicity_of
from flexdilated.masks.orders._layout import Compact
from flexdilated.masks.planning.lowering._term import Term
from tests.masks.inspection.test_describe import gap, histogram
from tests.support import oracle
from tests.support.irregular import bound_rules, dense, padded, run_rules, stretch_rules, sums_of_runs
from tests.support.ladders import GIGAPATH_5
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import Case, cases

MILLION = 1 << 20
GIGAPATH = masks.longnet(*GIGAPATH_5)


def assert_details(bound: masks.Bound, counts: Tensor) -> None:
    """Counts (H, N, M)."""
    shares = head_shares(bound, {})
    assert sorted(head for share in shares for head in share.heads) == list(range(bound.num_heads))
    assert all(share.pairs == int(counts[head].sum()) for share in shares for head in share.heads)
    assert gaps_of(bound) == Gaps(gap((counts == 0).all(2)), gap((counts == 0).all(1)))
    found = multiplicity_of(bound, branch_shares(bound, shares))
    assert (found.exact, found.queries, found.pairs) == (True, bound.num_queries, histogram(counts))


def assert_details_of(bound: masks.Bound) -> None:
    assert_details(bound, sum((dense(bound, branch).long() for branch in bound.pattern.branches()), torch.tensor(0)))


@settings(max_examples=8)
@given(cases(), st.booleans())
def test_details_of_drawn_patterns(case: Case, same_tokens: bool):
    """Queries and keys that begin anywhere, also at one place."""
    if same_tokens:
        case = replace(case, num_keys=case.num_queries, k_offset=case.q_offset)
    try:
        bound = case.bind()
    except ValueError:  # a table or a grid that names other keys
        reject()
    assert_details(bound, case.counts())
    if case.num_heads == case.num_heads_global:
        offsets = {"q_offset": case.q_offset, "k_offset": case.k_offset}
        told = masks.describe(case.twin.pattern, case.num_queries, case.num_keys, num_heads=case.num_heads, **offsets)
        assert told.useful_pairs == int(case.counts().sum())
        assert told.density == float(case.counts().double().mean())
        json.dumps(told.to_data(), allow_nan=False)


@settings(max_examples=8)
@given(packed_cases())
def test_details_with_run_time_tensors(packed: Packed):
    for entry in range(packed.batch):
        assert_details(packed.bind().entry(entry), packed.counts[entry])


@settings(max_examples=8)
@given(sums_of_runs() | bound_rules(stretch_rules) | bound_rules(run_rules, visible=True))
def test_details_of_irregular_patterns(bound: masks.Bound):
    """Listed blocks, documents with padding, visible keys and runs of them."""
    assert_details_of(bound)


@pytest.mark.parametrize(
    "pattern",
    [
        padded(40) | masks.local_window(left=2, right=0),
        masks.local_window(left=2, right=0) | padded(40),
        padded(40) & masks.documents(torch.arange(40) // 3, name="others"),
        masks.dilated(9, 3, 1) & masks.dilated(16, 2) & masks.causal(),
        masks.dilated(7, 3) + masks.dilated(40, 5) + masks.dilated(40, 5) + masks.causal(),
    ],
    ids=repr,
)
def test_details_of_some_patterns(pattern: masks.Pattern | masks.Mixture):
    assert_details_of(pattern.bind(num_heads=1, num_queries=40, num_keys=40))


SIDE = 600  # tokens, more than are looked at pair by pair at once
FAR = masks.causal() & ~masks.local_window(left=200, right=0)  # which only later queries have, at no near distance


@pytest.mark.parametrize(
    "pattern",
    [
        FAR,
        FAR & masks.visible_keys(torch.arange(SIDE) % 7 == 3),
        ~masks.causal() & masks.landmark_tokens(50, rows=False) & ~masks.chunked(100),
        masks.random_blocks(SIDE, block=16, count=1) & FAR,
        masks.dilated(150, 8, offset="interleaved") & FAR,
        masks.custom(lambda b, h, q, k: (q * 7 + k * 13) % 599 == 5),
        masks.documents(torch.arange(SIDE).where(torch.arange(SIDE) % 100 < 60, -1) // 100) & FAR,
    ],
    ids=repr,
)
def test_gaps_where_tokens_do_not_see_themselves(pattern: masks.Pattern):
    for first in ({"q_offset": 40, "k_offset": 0}, {"q_offset": 0, "k_offset": 70}):
        sizes = {"num_queries": SIDE - first["q_offset"], "num_keys": SIDE - first["k_offset"]}
        bound = pattern.bind(num_heads=3, **sizes, **first)
        query, key = torch.arange(sizes["num_queries"]), torch.arange(sizes["num_keys"])
        counts = bound.mask_mod()(torch.tensor(0), torch.arange(3)[:, None, None], query[:, None], key)
        counts = counts.expand(3, len(query), len(key))
        assert gaps_of(bound) == Gaps(gap(~counts.any(2)), gap(~counts.any(1)))


def test_gaps_that_would_take_long_are_not_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flexdilated.masks.inspection._gaps._MOST_PAIRS", 5000)
    told = masks.describe(FAR, 3000)
    assert told.gaps is None
    assert told.to_data()["gaps"] is None
    assert "not known: counting would take too long" in told.to_text(columns=200)
    assert masks.describe(masks.causal(), 100).gaps == Gaps(Gap(0, 0, None, None), Gap(0, 0, None, None))


def test_blocks_of_strips():
    """Branches that nest run as strips: two rows of blocks with all blocks up to the last of them."""
    told = masks.describe(masks.longnet([2048, 4096], [1, 4]) & masks.causal(), 8192, num_heads=4)
    strips, dense = 4 * 4 * 8, 4 * 2  # 4 heads with 4 segments of 8 strips, and with 2 segments' later halves
    assert told.partial_blocks == strips * 3
    assert told.full_blocks == 4 * 4 * sum(2 * 2 * row - 3 for row in range(1, 9)) + dense * (512 // 128) ** 2
    assert told.computed_pairs == 2432 * 128**2
    assert told.useful_pairs == oracle.useful_pairs([2048, 4096], [1, 4], num_heads=4, N=8192, causal=True)


@pytest.mark.parametrize(
    ("side", "queries", "lead"), [(4, 10, 3), (4, 8, 0), (4, 9, 4), (1, 3, 2), (8, 20, 7), (8, 5, 30)]
)
def test_full_blocks_of_a_strip(side: int, queries: int, lead: int):
    """Of queries that are the last of the keys: blocks that are whole and on or below the diagonal throughout."""
    q, k = (
        Compact((0, 1), (start, start + 1), 2, size, 3, 900)
        for start, size in ((2 * lead, queries), (0, queries + lead))
    )
    counted = count_term(Term(masks.causal(), "strip", 1, (0, 1), 0, 2, q, k, 0, 0, block_side=side))
    allowed = torch.arange(queries + lead) <= torch.arange(queries)[:, None] + lead
    whole = [
        bool(block.all()) and block.shape == (side, side)
        for rows in allowed.split(side)
        for block in rows.split(side, dim=1)
    ]
    assert counted.full_blocks == 2 * 3 * sum(whole)
    assert counted.full_blocks + counted.partial_blocks == 2 * 3 * len(whole)
    assert counted.useful_pairs == 2 * 3 * int(allowed.sum())


def test_heads_that_follow_one_rule_share_an_entry():
    told = masks.describe(masks.dilated(1024, 4, offset="interleaved"), 4000, num_heads=6)
    assert [share.heads for share in told.heads] == [(0, 4), (1, 5), (2,), (3,)]
    # The last segment has 928 tokens, of which each offset finds 232.
    assert [share.pairs for share in told.heads] == [3 * 256**2 + 232**2] * 4


def test_a_million_tokens():
    """Pairs by how many branches allow them, and by head, add up to those of the segments."""
    told = masks.describe(GIGAPATH, MILLION, num_heads=4)
    useful = oracle.useful_pairs(*GIGAPATH_5, num_heads=4, N=MILLION, causal=False)
    assert told.useful_pairs == useful
    assert sum(share.pairs * len(share.heads) for share in told.heads) == useful
    assert not told.multiplicity.exact
    assert sum(told.multiplicity.pairs.values()) == pytest.approx(4 * MILLION**2)
    # Each branch's pairs, of queries drawn evenly.
    found = sum(number * pairs for number, pairs in told.multiplicity.pairs.items())
    assert found == pytest.approx(useful, rel=0.1)
    assert told.gaps == Gaps(Gap(0, 0, None, None), Gap(0, 0, None, None))


def test_multiplicity_counts_a_branch_as_often_as_it_occurs():
    both = masks.describe(masks.causal() + masks.causal() + masks.local_window(left=0, right=1), 100, num_heads=2)
    assert both.multiplicity.pairs == {0: 2 * (4950 - 99), 1: 2 * 99, 2: 2 * 4950, 3: 2 * 100}
    alone = masks.describe(masks.causal() + masks.causal(), 100, num_heads=2)
    assert alone.multiplicity.pairs == {0: 2 * 4950, 2: 2 * 5050}


def test_rates_whose_multiple_is_large():
    """Tokens at multiples of 13 and of 97 see their own kind; those of both are seen by both rules: estimated."""
    tokens = 1 << 14
    told = masks.describe(masks.dilated(tokens, 13) + masks.dilated(tokens, 97), tokens)
    sizes = [-(-tokens // rate) for rate in (13, 97, 13 * 97)]
    once = sizes[0] ** 2 + sizes[1] ** 2 - 2 * sizes[2] ** 2
    wanted = {0: tokens**2 - once - sizes[2] ** 2, 1: once, 2: sizes[2] ** 2}
    sample = told.multiplicity
    assert sample == masks.describe(told.pattern, tokens).multiplicity  # the same queries each time
    assert not sample.exact
    assert f"Estimated from a sample of {sample.queries:,} of 16,384 queries." in str(told)
    assert sum(sample.pairs.values()) == pytest.approx(tokens**2)
    assert all(abs(sample.pairs[number] - wanted[number]) <= 4 * sample.standard_errors[number] for number in (0, 1))
    assert told.distinct_pairs == tokens**2 - sample.pairs[0]
    data = told.to_data()
    assert (data["multiplicity"]["exact"], data["multiplicity"]["queries"]) == (False, sample.queries)
    assert not data["distinct_pairs_exact"]


def test_samples_of_multiplicity_are_without_bias(monkeypatch: pytest.MonkeyPatch):
    """Over many samples the mean is what all queries say, and standard errors are about as large as the errors."""
    pattern = masks.dilated(90, 3) + masks.local_window(left=9, right=2) + masks.causal()
    bound = pattern.bind(num_heads=2, num_queries=200, num_keys=200)
    shares = branch_shares(bound, head_shares(bound, {}))
    exact = multiplicity_of(bound, shares)
    monkeypatch.setattr("flexdilated.masks.inspection._pair_counts._MOST_PAIRS", 1 << 16)
    found = []
    for seed in range(60):
        monkeypatch.setattr("flexdilated.masks.inspection._pair_counts._SEED", seed)
        sample = multiplicity_of(bound, shares)
        assert (sample.exact, sample.queries < 200) == (False, True)
        found.append([(sample.pairs.get(n, 0.0), sample.standard_errors.get(n, 0.0)) for n in exact.pairs])
    pairs, errors = torch.tensor(found, dtype=torch.float64).unbind(2)
    wanted = torch.tensor([*exact.pairs.values()], dtype=torch.float64)
    assert bool(((pairs.mean(0) - wanted).abs() <= 4 * pairs.std(0) / len(pairs) ** 0.5).all())
    # One query of each of equal parts varies less than as many of all queries, for which the standard error is.
    assert bool((pairs.std(0) <= 1.2 * errors.mean(0)).all())


def test_the_text_states_the_details():
    told = masks.describe(GIGAPATH & masks.causal(), 600, num_heads=2)
    text = told.to_text(columns=200)
    assert told.multiplicity.exact
    counted = (told.full_blocks, told.partial_blocks, *told.multiplicity.pairs.values(), *(s.pairs for s in told.heads))
    for number in counted:
        assert f"{number:,}" in text
    field = told.receptive_field()
    assert f"at least {field.layers_at_least} layer until the receptive field saturates" in text
    assert "from a sample of 8 of 600 tokens" in text
    few = masks.describe(GIGAPATH & masks.causal(), 100, num_heads=2)
    assert f"after {few.receptive_field().layers_at_least} layer" in str(few)
    assert "sample" not in str(few)
    missing = masks.describe(masks.dilated(4, 2), 16, num_heads=1)
    assert "8 of 16 queries, such as 1" in str(missing)
    assert "no token reaches another" in str(masks.describe(masks.dilated(4, 4), 16, num_heads=1))


def test_queries_and_keys_that_differ_have_no_field():
    told = masks.describe(masks.causal(), 8, 16, num_heads=1, q_offset=8)
    assert "layers" not in str(told)
    assert told.to_data()["receptive_field"] is None
    with pytest.raises(ValueError, match="a receptive field needs queries and keys that are the same tokens"):
        told.receptive_field()
