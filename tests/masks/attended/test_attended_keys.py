"""The keys that given queries attend to are exactly those of the dense rule, however they are found."""

from __future__ import annotations

from itertools import pairwise
from time import process_time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks.attended import _search
from flexdilated.masks.attended._search import attended_keys
from flexdilated.masks.core import _ranges
from flexdilated.masks.core._bound import Extent
from flexdilated.masks.core._ranges import Ranges
from tests.support import oracle
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import Case, cases


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


@settings(max_examples=40)
@given(cases(), st.booleans(), st.data())
def test_needs_are_those_of_the_dense_rule(case: Case, in_small_steps, data):
    """As they are, and where every search goes to its end and all limits on what is done at a time are met."""
    queries = data.draw(shares(case.q_offset + case.num_queries))
    keys = data.draw(shares(case.k_offset + case.num_keys))
    heads = sorted(data.draw(st.sets(st.integers(0, case.num_heads_global - 1))))
    with pytest.MonkeyPatch.context() as patch:
        if in_small_steps:
            for name, limit in {"_FEW_PAIRS": 0, "_FRONTIER": 4, "_LOOKS": 2, "_CUTS": 2}.items():
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
    monkeypatch.setattr(_search, "_MOST_PIECES", few)
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
