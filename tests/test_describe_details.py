"""What describe tells beyond pairs: heads, branches, multiplicity, gaps and blocks, against the dense rule."""

import json

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from flexdilated import masks
from flexdilated.masks._layout import Compact
from flexdilated.masks._term import Term
from flexdilated.masks.inspection._describe_terms import count_term
from flexdilated.masks.inspection._gaps import Gap, Gaps, gaps_of
from flexdilated.masks.inspection._multiplicity import multiplicity_of
from flexdilated.masks.inspection._relations import Relations
from flexdilated.masks.inspection._shares import head_shares
from tests.run_time_strategies import Packed, packed_cases
from tests.strategies import Case, cases

MILLION = 1 << 20
GIGAPATH = masks.longnet([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])


def histogram(counts: Tensor) -> dict[int, int]:
    numbers, pairs = counts.unique(return_counts=True)
    return {0: 0} | dict(zip(numbers.tolist(), pairs.tolist(), strict=True))


def gap(empty: Tensor) -> Gap:
    """Of (H, tokens), True where a token has no pair."""
    sides = [empty.all(0), empty.any(0)]
    firsts = [int(side.nonzero()[0]) if bool(side.any()) else None for side in sides]
    return Gap(*(int(side.sum()) for side in sides), *firsts)


def assert_details(bound: masks.Bound, counts: Tensor) -> None:
    """Counts (H, N, M)."""
    relations = Relations(bound)
    assert multiplicity_of(relations) == histogram(counts)
    assert gaps_of(relations) == Gaps(gap((counts == 0).all(2)), gap((counts == 0).all(1)))
    shares = head_shares(relations)
    assert sorted(head for share in shares for head in share.heads) == list(range(bound.num_heads))
    assert all(share.pairs == int(counts[head].sum()) for share in shares for head in share.heads)


@given(cases())
def test_details_of_drawn_patterns(case: Case):
    assert_details(case.bind(), case.counts())


@given(packed_cases())
def test_details_with_run_time_tensors(packed: Packed):
    for entry in range(packed.batch):
        assert_details(packed.bind().entry(entry), packed.counts[entry])


@given(cases(max_heads=3, largest=30))
def test_branches(case: Case):
    """The share of a branch is what the branch alone allows, as often as it counts."""
    assume(case.num_heads == case.num_heads_global)
    sizes = {"num_heads": case.num_heads, "q_offset": case.q_offset, "k_offset": case.k_offset}
    told = masks.describe(case.twin.pattern, case.num_queries, case.num_keys, **sizes)
    for share in told.branch_shares:
        alone = masks.describe(share.pattern, case.num_queries, case.num_keys, **sizes)
        assert share.pairs == share.multiplicity * alone.useful_pairs
    assert sum(share.pairs for share in told.branch_shares) == told.useful_pairs
    assert told.multiplicity == histogram(case.counts())
    assert told.distinct_pairs == int((case.counts() > 0).sum())
    json.dumps(told.to_data(), allow_nan=False)


@pytest.mark.parametrize("pattern", [masks.local_window(left=300, right=40), masks.global_tokens(200)], ids=repr)
def test_blocks_are_those_of_the_block_mask(pattern):
    told = masks.describe(pattern, 3000, num_heads=2)
    (chosen,) = (branch.options[0] for branch in told.branches)
    assert chosen.layout == "natural"
    mask = masks.block_mask(pattern, 3000, num_heads=2, block_size=chosen.terms[0].block_side)
    heads = 2 // mask.kv_num_blocks.shape[1]
    assert mask.full_kv_num_blocks is not None
    assert told.full_blocks == heads * int(mask.full_kv_num_blocks.sum())
    assert told.partial_blocks == heads * int(mask.kv_num_blocks.sum())


@pytest.mark.parametrize(
    ("pattern", "full", "partial"),
    [
        # Blocks of 128: a last one that is shorter is not whole.
        (masks.causal(), 1, 5),
        (masks.every(), 4, 5),
        (masks.causal() & ~masks.causal(), 0, 0),
    ],
    ids=repr,
)
def test_blocks_of_other_shapes(pattern, full: int, partial: int):
    told = masks.describe(pattern, 300, num_heads=3)
    assert (told.full_blocks, told.partial_blocks) == (3 * full, 3 * partial)
    assert told.computed_pairs == (told.full_blocks + told.partial_blocks) * 128**2


def test_blocks_of_strips():
    """Branches that nest run as strips: rows of queries with all keys up to the last of them."""
    told = masks.describe(masks.longnet([2048, 4096], [1, 4]) & masks.causal(), 8192, num_heads=4)
    sides = {term.block_side for term in told.branches[0].options[0].terms}
    assert told.branches[0].options[0].layout == "nested"
    assert sides == {128}
    assert (told.full_blocks + told.partial_blocks) * 128**2 == told.computed_pairs
    # Of the 16 x 16 blocks of each segment of 2048 the diagonal is partial: in strips of two rows one block more.
    strips = [term for term in told.branches[0].options[0].terms if term.shape == "strip"]
    assert told.partial_blocks == sum(2 + 1 for term in strips for _ in range(len(term.heads) * term.folds))


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


def test_heads_that_follow_one_rule_are_told_once():
    told = masks.describe(masks.dilated(1024, 4, offset="interleaved"), 4000, num_heads=6)
    assert [share.heads for share in told.heads] == [(0, 4), (1, 5), (2,), (3,)]
    # The last segment has 928 tokens, of which each offset finds 232.
    assert [share.pairs for share in told.heads] == [3 * 256**2 + 232**2] * 4


def test_a_million_tokens_by_two_ways():
    """Pairs that how many branches allow, told from what repeats, add up to the pairs of the plan's blocks."""
    told = masks.describe(GIGAPATH, MILLION, num_heads=16)
    assert told.multiplicity is not None
    assert sum(told.multiplicity.values()) == told.all_pairs
    assert sum(number * pairs for number, pairs in told.multiplicity.items()) == told.useful_pairs
    assert sum(share.pairs * len(share.heads) for share in told.heads) == told.useful_pairs
    # All five branches allow the pairs of a segment of 1024 whose tokens are active in all of them.
    assert told.multiplicity[5] < MILLION * 64
    assert told.gaps == Gaps(Gap(0, 0, None, None), Gap(0, 0, None, None))


def test_multiplicity_counts_a_branch_as_often_as_it_occurs():
    both = masks.describe(masks.causal() + masks.causal() + masks.local_window(left=0, right=1), 100, num_heads=2)
    assert both.multiplicity == {0: 2 * (4950 - 99), 1: 2 * 99, 2: 2 * 4950, 3: 2 * 100}
    alone = masks.describe(masks.causal() + masks.causal(), 100, num_heads=2)
    assert alone.multiplicity == {0: 2 * 4950, 2: 2 * 5050}


def test_the_text_tells_the_details():
    told = masks.describe(GIGAPATH & masks.causal(), 8192, num_heads=4)
    text = str(told)
    assert told.multiplicity is not None
    for number in (told.full_blocks, told.partial_blocks, *told.multiplicity.values(), *(s.pairs for s in told.heads)):
        assert f"{number:,}" in text
    field = told.receptive_field()
    assert f"after {field.layers:,} layers" in text
    missing = masks.describe(masks.dilated(4, 2), 16, num_heads=1)
    assert "8 of 16 queries, such as 1" in str(missing)
    assert "no token hears of another" in str(masks.describe(masks.dilated(4, 4), 16, num_heads=1))


def test_queries_and_keys_that_differ_have_no_field():
    told = masks.describe(masks.causal(), 8, 16, num_heads=1, q_offset=8)
    assert "layers" not in str(told)
    assert told.to_data()["receptive_field"] is None
    with pytest.raises(ValueError, match="a receptive field needs queries and keys that are the same tokens"):
        told.receptive_field()
