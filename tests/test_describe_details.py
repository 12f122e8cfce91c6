"""What describe tells beyond pairs: heads, branches, multiplicity, gaps and blocks, against the dense rule."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks.inspection import _pair_counts
from flexdilated.masks.inspection._describe import count_term
from flexdilated.masks.inspection._pair_counts import Gap, Gaps, gaps_of, head_shares, multiplicity_of
from flexdilated.masks.inspection._relations import Relations
from flexdilated.masks.inspection._squares import TooManySquaresError
from flexdilated.masks.orders._layout import Compact
from flexdilated.masks.planning.lowering._term import Term
from tests import oracle
from tests.ladders import GIGAPATH_5
from tests.run_time_strategies import Packed, packed_cases
from tests.strategies import Case, cases
from tests.test_describe import gap, histogram

MILLION = 1 << 20
GIGAPATH = masks.longnet(*GIGAPATH_5)


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


@given(cases(), st.booleans())
def test_shares_of_heads_where_little_repeats(case: Case, same_tokens: bool):
    """By bounds on boxes, of queries and keys that begin anywhere, also at one place."""
    if same_tokens:
        case = replace(case, num_keys=case.num_queries, k_offset=case.q_offset)
    try:
        bound = case.bind()
    except ValueError:  # a table or a grid that names other keys
        reject()
    with patch.object(_pair_counts, "_shares_by_squares", side_effect=TooManySquaresError):
        shares = head_shares(Relations(bound))
    found = {head: share.pairs for share in shares for head in share.heads}
    assert found == dict(enumerate(case.counts().sum((1, 2)).tolist()))


@given(packed_cases())
def test_details_with_run_time_tensors(packed: Packed):
    for entry in range(packed.batch):
        assert_details(packed.bind().entry(entry), packed.counts[entry])


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
    told = masks.describe(GIGAPATH, MILLION, num_heads=16)
    useful = oracle.useful_pairs(*GIGAPATH_5, num_heads=16, N=MILLION, causal=False)
    assert told.useful_pairs == useful
    assert told.multiplicity is not None
    assert sum(told.multiplicity.values()) == 16 * MILLION**2
    assert sum(number * pairs for number, pairs in told.multiplicity.items()) == useful
    assert sum(share.pairs * len(share.heads) for share in told.heads) == useful
    # All five branches allow the pairs of a segment of 1024 whose tokens are active in all of them.
    assert told.multiplicity[5] < MILLION * 64
    assert told.gaps == Gaps(Gap(0, 0, None, None), Gap(0, 0, None, None))


def test_multiplicity_counts_a_branch_as_often_as_it_occurs():
    both = masks.describe(masks.causal() + masks.causal() + masks.local_window(left=0, right=1), 100, num_heads=2)
    assert both.multiplicity == {0: 2 * (4950 - 99), 1: 2 * 99, 2: 2 * 4950, 3: 2 * 100}
    alone = masks.describe(masks.causal() + masks.causal(), 100, num_heads=2)
    assert alone.multiplicity == {0: 2 * 4950, 2: 2 * 5050}


def test_the_text_states_the_details():
    told = masks.describe(GIGAPATH & masks.causal(), 8192, num_heads=4)
    text = str(told)
    assert told.multiplicity is not None
    for number in (told.full_blocks, told.partial_blocks, *told.multiplicity.values(), *(s.pairs for s in told.heads)):
        assert f"{number:,}" in text
    field = told.receptive_field()
    assert f"after {field.layers:,} layers" in text
    missing = masks.describe(masks.dilated(4, 2), 16, num_heads=1)
    assert "8 of 16 queries, such as 1" in str(missing)
    assert "no token reaches another" in str(masks.describe(masks.dilated(4, 4), 16, num_heads=1))


def test_queries_and_keys_that_differ_have_no_field():
    told = masks.describe(masks.causal(), 8, 16, num_heads=1, q_offset=8)
    assert "layers" not in str(told)
    assert told.to_data()["receptive_field"] is None
    with pytest.raises(ValueError, match="a receptive field needs queries and keys that are the same tokens"):
        told.receptive_field()
