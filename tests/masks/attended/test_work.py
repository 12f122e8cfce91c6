"""Work of ranks: every pair of every rank's queries is counted, once a branch, at any size and without forming it."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.distributed.counts._tokens import work_of_ranks
from flexdilated.masks.blocks import _pair_search
from flexdilated.masks.blocks._pair_search import exact_pairs, pairs_of_queries
from flexdilated.masks.core._box import Box, Progression
from flexdilated.testing.strategies import shardings
from tests.support.strategies import sets, whole_cases
from tests.support.twins import Twin

# W ranks, N tokens


@pytest.fixture(params=["as it is", "in small steps"], scope="module")
def steps(request):
    """The sizes at which the count changes its ways, and the same at the sizes of the drawn cases."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in small steps":
            patch.setattr(_pair_search, "_CELL_SIDE", 2)
            patch.setattr(_pair_search, "_FRONTIER", 5)
        yield request.param


@settings(max_examples=10)
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


REPEATING = {
    "confined": masks.dilated(6, 4, 1) & masks.causal(),
    "window": masks.local_window(left=7, right=2),
    "window, causal": masks.local_window(left=9, right=0) & masks.causal(),
    "ahead alone": masks.local_window(left=0, right=11),
    "dilated window": masks.dilated_window(left=3, right=1, rate=3),
    "of two kinds": (masks.dilated(8, 2) | masks.local_window(left=3, right=3)) & masks.causal(),
    "blocks of windows": masks.blockwise(masks.local_window(left=1, right=1), 3),
    "never": masks.dilated(8, 2) & ~masks.dilated(4, 2),
    # Of 10 tokens the last row alone sees so far, and no whole period of rows shows it.
    "further at the end": masks.dilated_window(left=1, right=0, rate=5) & masks.fixed(4, summary=1),
    "far to one side": masks.strided(5) & masks.causal(),
}


@pytest.mark.parametrize("pattern", REPEATING.values(), ids=REPEATING)
def test_runs_of_queries_anywhere(pattern, steps) -> None:
    """All runs at once, the empty ones too; of more tokens, and in small steps, some of them."""
    mod = pattern.mask_mod(num_heads=1, device=torch.device("cpu"))
    for num_tokens, every in ((1, 1), (10, 4), (19, 17)) if steps == "in small steps" else ((10, 1), (40, 5)):
        zero, position = torch.zeros((), dtype=torch.int64), torch.arange(num_tokens)
        seen = [0, *accumulate(mod(zero, zero, position[:, None], position).sum(1).tolist())]
        start, stop = torch.cartesian_prod(torch.arange(num_tokens + 1), torch.arange(num_tokens + 1)).unbind(1)
        start, stop = (ends[start <= stop][::every] for ends in (start, stop))
        expected = torch.tensor(seen)[stop] - torch.tensor(seen)[start]
        assert torch.equal(pairs_of_queries(pattern, start, stop, num_tokens), expected)


def test_runs_without_queries(steps) -> None:
    at = torch.tensor([3, 0])
    assert pairs_of_queries(masks.causal(), at, at, 7).tolist() == [0, 0]
    assert pairs_of_queries(masks.chunked(2), at[:0], at[:0], 7).tolist() == []
    empty = Progression(at * 0, 1, at * 0)
    assert exact_pairs(masks.neighborhood((120,), 1), Box(at * 0, empty, empty)).tolist() == [0, 0]


@settings(max_examples=12)
@given(data=st.data())
def test_boxes_anywhere(steps, data: st.DataObject) -> None:
    """Queries and keys apart, at any positions."""
    twin: Twin = data.draw(sets(1))
    numbers = st.lists(st.integers(0, 14 if steps == "in small steps" else 40), min_size=3, max_size=3)
    q, k, rows, columns = (torch.tensor(data.draw(numbers)) for _ in range(4))
    try:
        twin.pattern.check_tokens(range(80), range(80))
    except ValueError:
        return  # a block list names keys beyond these, or a grid is smaller
    boxes = Box(torch.zeros_like(q), Progression(q, 1, rows), Progression(k, 1, columns))
    expected = [
        int(twin.rule(0, 1, torch.arange(a, a + m), torch.arange(b, b + n)).sum()) if m and n else 0
        for a, b, m, n in zip(q.tolist(), k.tolist(), rows.tolist(), columns.tolist(), strict=True)
    ]
    assert exact_pairs(twin.pattern.for_head(0, 1), boxes).tolist() == expected


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
