"""What describe counts where little repeats, such as listed blocks and visible keys, against the rule pair by pair."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings

from flexdilated import masks
from flexdilated.masks.core._bound import Bound
from flexdilated.masks.inspection._pair_counts import gaps_of, multiplicity_of, sampled_multiplicity
from flexdilated.masks.inspection._receptive_field import ReceptiveField, follow_tokens, receptive_field_of
from flexdilated.masks.inspection._relations import Relations
from flexdilated.masks.inspection._squares import TooManySquaresError
from tests.irregular import bound_rules, dense, listed, padded, run_rules, stretch_rules, sums_of_runs
from tests.reached import assert_same

MILLION = 1 << 20


def assert_field(bound: Bound) -> None:
    assert_same(receptive_field_of(Relations(bound)), dense(bound))


BLOCKED = {
    "drawn": lambda N: masks.random_blocks(max(1, N - 3), block=4, count=1, seed=N),
    "drawn for later tokens too": lambda N: masks.random_blocks(N + 6, block=4, count=1, seed=N),
    "drawn, causal": lambda N: masks.random_blocks(N, block=3, count=1, seed=N) & masks.causal(),
    "listed": lambda N: listed(N, 3),
    "listed, causal": lambda N: listed(N, 3) & masks.causal(),
    "listed, later": lambda N: listed(N, 3) & ~masks.causal(),
    "listed, both": lambda N: masks.per_head([listed(N, 3) & masks.causal(), listed(N, 4) & ~masks.causal()]),
    "beside global tokens": lambda N: listed(N, 7) & masks.causal() | masks.global_tokens(3),
    "beside padded documents": lambda N: listed(N, 8) & masks.causal() | padded(N),
    "in documents": lambda N: listed(N, 8) & masks.causal().per_document(torch.arange(N) // 9),
    "anew in documents": lambda N: masks.random_blocks(9, block=2, count=1).per_document(torch.arange(N) // 9),
    "chain": lambda N: masks.block_list([[max(0, row - 1)] for row in range(N)], block=1),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_of_each_length(name: str):
    for num_tokens in (*range(1, 14), 26, 65):
        first = num_tokens % 2 * 3
        sizes = {"num_queries": num_tokens, "num_keys": num_tokens, "q_offset": first, "k_offset": first}
        assert_field(BLOCKED[name](first + num_tokens).bind(num_heads=2, **sizes))


@settings(max_examples=30)
@given(bound_rules(stretch_rules))
def test_rules_by_blocks(bound: Bound):
    assert_field(bound)


@settings(max_examples=30)
@given(bound_rules(run_rules, visible=True))
def test_windows_over_visible_keys(bound: Bound):
    assert_field(bound)


@settings(max_examples=30)
@given(sums_of_runs())
def test_overlap_and_gaps(bound: Bound):
    assert_overlap_and_gaps(bound)


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
def test_overlap_and_gaps_of_some_patterns(pattern: masks.Pattern | masks.Mixture):
    assert_overlap_and_gaps(pattern.bind(num_heads=1, num_queries=40, num_keys=40))


@pytest.mark.parametrize("num_tokens", [1, 5, 30, 31])
def test_a_window_over_active_tokens(num_tokens: int):
    rule = masks.dilated(9, 3, 1) & masks.local_window(left=4, right=3)
    assert_field(rule.bind(num_heads=1, num_queries=num_tokens, num_keys=num_tokens))


def assert_overlap_and_gaps(bound: Bound) -> None:
    """Counted; and of the sample, which holds all queries of so few, without an error."""
    overlap, gaps, sample = multiplicity_of(Relations(bound)), gaps_of(Relations(bound)), sampled_multiplicity(bound)
    counts = sum((dense(bound, branch).long() for branch in bound.pattern.branches()), torch.tensor(0))
    numbers, pairs = counts.unique(return_counts=True)
    assert overlap == {0: 0} | dict(zip(numbers.tolist(), pairs.tolist(), strict=True))
    assert sample.queries == bound.num_queries
    assert sample.pairs == pytest.approx(overlap)
    assert set(sample.standard_errors.values()) == {0.0}
    for told, lacking in ((gaps.queries, (counts == 0).all(2)), (gaps.keys, (counts == 0).all(1))):
        assert (told.in_every_head, told.in_some_head) == (int(lacking.all(0).sum()), int(lacking.any(0).sum()))


def test_rates_whose_multiple_is_large():
    """Tokens at multiples of 13 and of 997 see their own kind; those of both are seen by both rules: estimated."""
    tokens = 1 << 16
    told = masks.describe(masks.dilated(tokens, 13) + masks.dilated(tokens, 97), tokens)
    sizes = [-(-tokens // rate) for rate in (13, 97, 13 * 97)]
    once = sizes[0] ** 2 + sizes[1] ** 2 - 2 * sizes[2] ** 2
    wanted = {0: tokens**2 - once - sizes[2] ** 2, 1: once, 2: sizes[2] ** 2}
    with patch.object(Relations, "of", side_effect=TooManySquaresError):
        sample = told.sampled_multiplicity
        assert told.multiplicity is None
        assert told.distinct_pairs is None
        assert "Estimated from a sample of 64 of 65,536 queries." in str(told)
    assert sample is not None
    assert sample.queries == 64
    assert sum(sample.pairs.values()) == pytest.approx(tokens**2)
    assert all(abs(sample.pairs[number] - wanted[number]) <= 4 * sample.standard_errors[number] for number in (0, 1))
    assert told.to_data()["sampled_multiplicity"]["queries"] == 64


def told(pattern: masks.Pattern | masks.Mixture, num_tokens: int = MILLION, num_heads: int = 1) -> ReceptiveField:
    bound = pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens)
    return receptive_field_of(Relations(bound).with_allowance())


def test_random_blocks_at_a_million_tokens():
    """A sample, exact for its tokens: those of a block reach what their block does among as many tokens as blocks."""
    side, blocks = 1024, MILLION // 1024
    bounds = (
        masks.random_blocks(size, block=block, count=3).bind(num_heads=1, num_queries=size, num_keys=size)
        for size, block in ((MILLION, side), (blocks, 1))
    )
    many, few = map(follow_tokens, bounds)
    assert [token // side for token in many.tokens] == list(few.tokens)
    for of_tokens, of_blocks in zip(many.reached, few.reached, strict=True):
        # A token whose block does not see itself reaches one token of it.
        reached = zip(of_tokens, of_blocks, strict=False)
        assert all(own in (other * side, (other - 1) * side + 1) for own, other in reached)


def test_a_chain_of_listed_blocks():
    """Each block sees the one before it: as many layers as there are blocks, one block more a layer."""
    side = 1024
    found = told(masks.block_list([[max(0, row - 1)] for row in range(MILLION // side)], block=side))
    blocks = MILLION // side
    assert found.layers == blocks - 1
    assert found.growth[0] == (1, (blocks - 1) * side**2 + side**2 + (blocks - 1) * side)
    assert found.slowest == ((blocks - 1) * side, 0)
    assert found.first_never_earlier == (side + 1, side)


@pytest.mark.parametrize("hidden", [0, 7])
def test_a_window_over_visible_keys_at_a_million_tokens(hidden: int):
    """Of every 8 tokens the last ones are hidden: a hop of 1023 reaches the next multiple of 8."""
    seen = torch.arange(MILLION) % 8 < 8 - hidden
    found = told(masks.visible_keys(seen) & masks.local_window(left=1023, right=0))
    hop = 1016 if hidden else 1023  # between visible tokens
    layers = -(-(MILLION - 1) // hop) if not hidden else 1 + -(-(MILLION - 8 - 1016) // hop)
    assert found.layers == layers
    assert found.never_later == found.earlier_pairs
    assert found.first_never_earlier == ((2, 1) if hidden else None)
