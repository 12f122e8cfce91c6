"""What is attended to: keys of given queries, rows of single ones and the work of ranks, by the dense rule."""

import operator
from itertools import pairwise
from time import process_time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.distributed.counts._tokens import work_of_ranks
from flexdilated.masks.attended import _search
from flexdilated.masks.attended._search import attended_keys
from flexdilated.masks.blocks import _pair_search
from flexdilated.masks.core import _ranges
from flexdilated.masks.core._bound import Extent
from flexdilated.masks.core._ranges import Ranges
from flexdilated.testing.strategies import shardings
from tests.support import oracle, strategies
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import Case, cases, whole_cases, whole_grids

# W ranks, N tokens


@st.composite
def shares(draw: st.DrawFn, tokens: int) -> Ranges:
    """Some of the positions below `tokens`: up to three runs, as a rank holds them, or progressions."""
    edges = sorted(draw(st.lists(st.integers(0, tokens), min_size=2, max_size=6)))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in edges]
    parts = (range(*edge) for edge in zip(edges[::2], edges[1::2], steps, strict=False))
    return tuple(part for part in parts if part)


def members(ranges: Ranges) -> list[int]:
    return [position for each in ranges for position in each]


def seen_in(table: Tensor, queries: Ranges, keys: Ranges) -> list[int]:
    """The keys with a pair, from a table (..., N, M) of pairs over positions from 0 on."""
    q, k = members(queries), sorted(members(keys))
    pairs = table[..., q, :][..., k].flatten(0, -2).any(0)
    return torch.tensor(k, dtype=torch.int64)[pairs].tolist()


def assert_found(found: Ranges, expected: list[int]) -> None:
    """Each position once, in ranges by their first positions, with neighbours in one run."""
    assert all(found)
    assert [each.start for each in found] == sorted(each.start for each in found)
    assert sorted(members(found)) == expected
    runs = [each for each in found if each.step == 1 or len(each) == 1]
    assert all(a.stop < b.start for a, b in pairwise(runs))


def all_pairs(case: Case) -> Tensor:
    """(H, N, M) over all positions below the last query and the last key, and over all global heads."""
    queries = torch.arange(case.q_offset + case.num_queries)
    keys = torch.arange(case.k_offset + case.num_keys)
    return oracle.counts(case.twin.rule, range(case.num_heads_global), case.num_heads_global, queries, keys)


@settings(max_examples=50)
@given(cases() | whole_grids(), st.booleans(), st.data())
def test_needs_are_those_of_the_dense_rule(case: Case, in_small_steps, data):
    """As they are, and where every search goes to its end and all limits on what is done at a time are met."""
    queries = data.draw(shares(case.q_offset + case.num_queries))
    keys = data.draw(shares(case.k_offset + case.num_keys))
    heads = sorted(data.draw(st.sets(st.integers(0, case.num_heads_global - 1))))
    with pytest.MonkeyPatch.context() as patch:
        if in_small_steps:
            for name, limit in {"_FEW_PAIRS": 0, "_FRONTIER": 4, "_BOXES_AT_ONCE": 2, "_NUM_PARTS": 2}.items():
                patch.setattr(_search, name, limit)
            patch.setattr(_search, "_SIDE", data.draw(st.sampled_from([2, 16])))
            patch.setattr(_search, "_MOST_CLASSES", data.draw(st.sampled_from([0, 512])))
            patch.setattr(_ranges, "_FEW_POSITIONS", data.draw(st.sampled_from([0, 1 << 16])))
            patch.setattr(_ranges, "_MOST_COMPARISONS", data.draw(st.sampled_from([0, 1 << 16])))
        found = attended_keys(
            case.twin.pattern, queries=queries, keys=keys, heads=heads, num_heads_global=case.num_heads_global
        )
    assert_found(found, seen_in(all_pairs(case)[heads], queries, keys))


@settings(max_examples=10)
@given(packed_cases(), st.data())
def test_needs_of_run_time_patterns_are_those_of_any_batch_entry(packed: Packed, data):
    extent = Extent(packed.q_offset + packed.num_queries, packed.k_offset + packed.num_keys)
    pattern = packed.pattern.resolve(packed.pattern.given_tensors(), extent)
    table = torch.zeros(packed.batch, packed.num_heads, extent.queries, extent.keys, dtype=torch.int64)
    table[..., packed.q_offset :, packed.k_offset :] = packed.counts
    queries, keys = (
        tuple(range(each.start + offset, each.stop + offset, each.step) for each in data.draw(shares(size)))
        for offset, size in ((packed.q_offset, packed.num_queries), (packed.k_offset, packed.num_keys))
    )
    heads = range(packed.num_heads)
    found = attended_keys(pattern, queries=queries, keys=keys, heads=heads, num_heads_global=packed.num_heads)
    assert_found(found, seen_in(table, queries, keys))


ALMOST = [
    # Eight queries in a row leave out one residue of nine; window after window leaves out every third key.
    (masks.strided(9), range(4, 12), [key for key in range(100) if key % 9 != 3]),
    (masks.strided(9), range(4, 13), [*range(100)]),
    (masks.local_window(left=1, right=0), range(1, 99, 3), [key for key in range(98) if key % 3 != 2]),
    (masks.local_window(left=1, right=1), range(1, 99, 3), [*range(99)]),
    (~masks.fixed(16), range(3, 40), [key for key in range(100) if key % 16 != 15]),
    (masks.blockwise(masks.causal(), 8), range(0, 20, 8), [*range(24)]),
    (masks.blockwise(masks.strided(2), 8), range(0, 33, 16), [key for key in range(100) if key // 8 % 2 == 0]),
]


@pytest.mark.parametrize("few", [0, 1 << 16])
def test_keys_that_just_miss_a_query(few, monkeypatch):
    """One query fewer, or one step more, and a key is not needed any more."""
    monkeypatch.setattr(_search, "_FEW_PAIRS", few)
    monkeypatch.setattr(_search, "_MOST_CLASS_PAIRS", few)
    for pattern, queries, expected in ALMOST:
        found = attended_keys(pattern, queries=(queries,), keys=(range(100),), heads=[0], num_heads_global=1)
        assert_found(found, expected)


MILLION = 1 << 20
LADDER = masks.longnet([2048 << power for power in range(10)], [1 << power for power in range(10)])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        # A rank's own eighth is two segments or more of all but the three widest branches.
        (LADDER, [3072] * 8),
        (LADDER & masks.causal(), [0, 1024, 1024, 2048, 1024, 2048, 2048, 3072]),
        (masks.local_window(left=4095, right=0), [0, *[4095] * 7]),
        (masks.strided(128) & masks.causal(), [MILLION // 8 * rank for rank in range(8)]),
        (masks.first_tokens(4) & masks.causal(), [0, *[4] * 7]),
    ],
)
def test_a_million_tokens_on_eight_ranks(pattern: masks.Pattern, expected: list[int]):
    """Each rank's foreign keys for one head, in far less than a look at each token would take."""
    length = MILLION // 8
    begin = process_time()
    found = []
    for rank in range(8):
        mine = range(rank * length, (rank + 1) * length)
        others = tuple(part for part in (range(mine.start), range(mine.stop, MILLION)) if part)
        found.append(attended_keys(pattern, queries=(mine,), keys=others, heads=[5], num_heads_global=16))
    assert [len(members(each)) for each in found] == expected
    assert all(len(each) <= 10 for each in found)
    assert process_time() - begin < 5


STEPS = strategies.strided_kinds() | strategies.dilated_windows()
PROGRESSIONS = st.builds(operator.or_, STEPS, STEPS)  # that may meet


@settings(max_examples=50)
@given(data=st.data(), base=st.sampled_from([0, 0, 2**30]))
def test_closed_forms_are_the_rules(data: st.DataObject, base: int) -> None:
    """Of any set: ranges without overlap, none of them empty, of just the keys that are seen, wherever these lie.

    At 2^30 a list of all keys before would not end.
    """
    num_heads = data.draw(st.integers(1, 3))
    pattern = data.draw(PROGRESSIONS if data.draw(st.booleans()) else strategies.sets(num_heads)).pattern
    query, begin = (base + data.draw(st.integers(0, 40)) for _ in range(2))
    keys = range(begin, begin + data.draw(st.integers(0, 40)))
    allowed = pattern.mask_mod(num_heads=num_heads, device=torch.device("cpu"))
    for head in range(num_heads):
        ranges = pattern.for_head(head, num_heads).row(query, keys)
        of_query = torch.tensor(0), torch.tensor(head), torch.tensor(query)
        seen = allowed(*of_query, torch.tensor([*keys], dtype=torch.int64))
        if ranges is not None:
            assert all(ranges)
            assert len(ranges) <= len(keys)
            found = sorted(key for each in ranges for key in each)
            assert found == [keys[n] for n in seen.nonzero().flatten().tolist()]


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


def test_what_does_not_bind_is_refused() -> None:
    with pytest.raises(ValueError, match="within the 64 tokens of a 8x8 grid"):
        work_of_ranks(masks.neighborhood((8, 8), 1), Sharding(65, 2), num_heads=1)
    with pytest.raises(ValueError, match="documents"):
        work_of_ranks(masks.documents("documents"), Sharding(64, 2), num_heads=1)
