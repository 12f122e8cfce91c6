"""Work of ranks: every pair of every rank's queries is counted, once a branch, at any size and without forming it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.distributed.counts._tokens import work_of_ranks
from flexdilated.masks.blocks import _pair_search
from flexdilated.testing.strategies import shardings
from tests.support.strategies import whole_cases

# W ranks, N tokens


@pytest.fixture(params=["as it is", "in small steps"], scope="module")
def steps(request):
    """The sizes at which the count changes its ways, and the same at the sizes of the drawn cases."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in small steps":
            patch.setattr(_pair_search, "_CELL_SIDE", 2)
            patch.setattr(_pair_search, "_FRONTIER", 5)
        yield request.param


@given(data=st.data())
def test_every_pair_is_counted_where_its_query_is(steps, data: st.DataObject) -> None:
    case = data.draw(whole_cases())
    sharding = data.draw(shardings(case.num_queries, max_ranks=6))
    first = data.draw(st.integers(0, case.num_heads - 1))
    here = data.draw(st.integers(1, case.num_heads - first))
    rows = case.counts()[first : first + here].sum((0, 2))
    expected = [int(rows[sharding.positions(rank)].sum()) for rank in range(sharding.num_ranks)]
    heads = {"num_heads": here, "head_offset": first, "num_heads_global": case.num_heads}
    assert work_of_ranks(case.twin.pattern, sharding, **heads).tolist() == expected


@pytest.mark.parametrize(
    ("pattern", "order"),
    [(masks.longnet((2048, 8192, 65536), (1, 4, 32)), "contiguous"), (masks.local_window(left=999, right=0), "zigzag")],
)
def test_all_ranks_do_what_one_does(pattern, order) -> None:
    """At a size at which the planner's own count, term by term, is another."""
    tokens = 140_000
    for rule in (pattern, pattern & masks.causal()):
        described = masks.describe(rule, tokens, num_heads=4)
        assert int(work_of_ranks(rule, Sharding(tokens, 7, order), num_heads=4).sum()) == described.useful_pairs


def test_zigzag_balances_what_is_causal() -> None:
    for pattern in (masks.causal(), masks.longnet((4096, 65536), (1, 16)) & masks.causal()):
        orders = ("contiguous", "zigzag")
        work = [work_of_ranks(pattern, Sharding(1 << 16, 8, order), num_heads=2).double() for order in orders]
        contiguous, zigzag = (float(each.max() / each.mean()) for each in work)
        assert zigzag < 1.001 < contiguous


def test_batch_entries_add_up() -> None:
    ids = torch.tensor([[0] * 24, [0] * 6 + [1] * 18])
    work = work_of_ranks(masks.documents(ids) & masks.causal(), Sharding(24, 2), num_heads=3)
    whole = [sum(range(1, 13)), sum(range(13, 25))]
    cut = [sum(range(1, 7)) + sum(range(1, 7)), sum(range(7, 19))]
    assert work.tolist() == [3 * (a + b) for a, b in zip(whole, cut, strict=True)]


def test_what_does_not_bind_is_refused() -> None:
    with pytest.raises(ValueError, match="within the 64 tokens of a 8x8 grid"):
        work_of_ranks(masks.neighborhood((8, 8), 1), Sharding(65, 2), num_heads=1)
    with pytest.raises(ValueError, match="documents"):
        work_of_ranks(masks.documents("documents"), Sharding(64, 2), num_heads=1)
