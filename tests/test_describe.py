"""describe: its numbers are those of the dense rule and of the planner's blocks."""

import pytest
import torch
from hypothesis import assume, given

from flexdilated import masks
from tests import oracle
from tests.ladders import LADDERS
from tests.strategies import cases


@given(cases())
def test_pairs_are_counted(case):
    """Each pair once for each branch that allows it, whichever layout the planner counts them in."""
    assume(case.num_heads == case.num_heads_global)
    offsets = {"q_offset": case.q_offset, "k_offset": case.k_offset}
    told = masks.describe(case.twin.pattern, case.num_queries, case.num_keys, num_heads=case.num_heads, **offsets)
    useful, everything = int(case.counts().sum()), case.num_heads * case.num_queries * case.num_keys
    assert told.useful_pairs == useful
    assert told.density == useful / everything
    assert sum(branch.multiplicity for branch in told.branches) == len(case.twin.pattern.branches())
    assert (told.waste == float("inf")) == (useful == 0)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", LADDERS)
def test_ladders(name, causal):
    segments, rates = LADDERS[name]
    N, H, D = 16411, 16, 48
    pattern = masks.longnet(segments, rates)
    pattern = pattern & masks.causal() if causal else pattern
    told = masks.describe(pattern, N, num_heads=H, head_dim=D)
    useful = oracle.useful_pairs(segments, rates, num_heads=H, N=N, causal=causal)
    assert told.useful_pairs == useful
    # Segments that double share pairs, which are computed once.
    assert 0.75 <= told.waste <= 1.15
    assert told.waste == told.computed_pairs / useful
    assert told.forward_flops == 4 * D * useful
    assert told.backward_flops == 10 * D * useful
    assert told.block_density == pytest.approx(told.waste * told.density)


def test_computed_pairs_are_those_of_blocks():
    """A causal triangle over 300 tokens has 6 of 9 blocks of side 128."""
    told = masks.describe(masks.causal(), 300, num_heads=2)
    assert told.computed_pairs == 2 * 6 * 128**2
    assert told.useful_pairs == 2 * 300 * 301 // 2
    assert told.table_bytes > 0


def test_a_branch_that_counts_twice_is_useful_twice_and_computed_once():
    once, twice = (masks.describe(p, 300, num_heads=1) for p in (masks.causal(), masks.causal() + masks.causal()))
    assert twice.useful_pairs == 2 * once.useful_pairs
    assert twice.computed_pairs == once.computed_pairs


def test_the_text_states_the_numbers():
    told = masks.describe(masks.longnet([2048, 4096], [1, 4]) & masks.causal(), 8192, num_heads=4)
    text = told.to_text(columns=200)
    for number in (
        f"{told.useful_pairs:,}",
        f"{told.computed_pairs:,}",
        f"{told.density:.4%}",
        f"{told.table_bytes:,}",
    ):
        assert number in text
    for branch in told.branches:
        assert all(option.layout in text for option in branch.options)
        assert repr(branch.pattern) in text


def test_nothing_allowed():
    told = masks.describe(masks.causal() & ~masks.causal(), 10, num_heads=1)
    assert (told.useful_pairs, told.density, told.waste) == (0, 0.0, float("inf"))
    assert "inf" in str(told)
    assert torch.isfinite(torch.tensor(told.block_density))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"num_queries": 0}, ValueError, "num_queries=0"),
        ({"num_heads": 0}, ValueError, "num_heads=0"),
        ({"q_offset": -1}, ValueError, "q_offset=-1"),
        ({"head_dim": 0}, ValueError, "head_dim=0"),
        ({"head_dim": 64.0}, TypeError, "head_dim=64.0"),
    ],
    ids=str,
)
def test_bad_input(change, error, says):
    with pytest.raises(error, match=says):
        masks.describe(masks.causal(), **{"num_queries": 10, "num_heads": 1} | change)
