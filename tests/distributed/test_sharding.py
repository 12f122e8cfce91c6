"""Sharding: each position is held once, in order, by the rank that the rule names."""

import pickle
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flexdilated.distributed import Sharding
from flexdilated.testing.strategies import shardings

drawn = st.integers(1, 60).flatmap(lambda tokens: shardings(tokens, max_ranks=13))


def held(sharding: Sharding) -> list[list[int]]:
    return [[position for run in sharding.ranges(rank) for position in run] for rank in range(sharding.num_ranks)]


@given(drawn)
@example(Sharding(3, 7))
@example(Sharding(3, 7, "zigzag"))
@example(Sharding(1, 1, "zigzag"))
@example(Sharding(4, 3, "zigzag", [2, 0, 2]))
def test_each_position_is_held_once_and_in_order(sharding: Sharding) -> None:
    by_rank = held(sharding)
    assert sorted(chain(*by_rank)) == list(range(sharding.num_tokens))
    assert all(positions == sorted(positions) for positions in by_rank)
    assert [len(positions) for positions in by_rank] == list(sharding.lengths)
    for rank, positions in enumerate(by_rank):
        assert sharding.length(rank) == len(positions)
        runs = sharding.ranges(rank)
        assert all(run.step == 1 and len(run) > 0 for run in runs)
        assert all(first.stop < second.start for first, second in pairwise(runs))
        found = sharding.positions(rank)
        assert found.dtype == torch.int64
        assert found.tolist() == positions
    laid_out = by_rank  # zigzag by the definition: chunks one after the other, rank r's being r and 2W - 1 - r
    if sharding.order == "zigzag":
        first = [positions[: (len(positions) + 1) // 2] for positions in by_rank]
        laid_out = [*first, *reversed([positions[(len(positions) + 1) // 2 :] for positions in by_rank])]
    assert [*chain(*laid_out)] == list(range(sharding.num_tokens))
    numbers = sharding.numbers()
    assert all(type(number) is int for number in numbers)
    assert Sharding.of(numbers) == sharding
    assert Sharding.of(list(numbers)).ranges(0) == sharding.ranges(0)
    assert pickle.loads(pickle.dumps(sharding)) == sharding
    assert eval(repr(sharding)) == sharding


@given(st.integers(1, 60), st.integers(1, 13))
def test_lengths_are_as_equal_as_can_be(num_tokens: int, num_ranks: int) -> None:
    lengths = Sharding(num_tokens, num_ranks).lengths
    assert max(lengths) - min(lengths) <= 1
    assert list(lengths) == sorted(lengths, reverse=True)
    zigzag = Sharding(num_tokens, num_ranks, "zigzag")
    starts = sorted(run.start for rank in range(num_ranks) for run in zigzag.ranges(rank))
    if num_tokens >= 2 * num_ranks:
        each, longer = divmod(num_tokens, 2 * num_ranks)
        chunks = [each + (index < longer) for index in range(2 * num_ranks)]
        expected = [sum(chunks[:index]) for index in range(2 * num_ranks) if index != num_ranks]
        assert starts == expected  # without the last rank's second chunk, which its first one touches


def test_a_billion_tokens_on_many_ranks_are_no_work() -> None:
    sharding = Sharding(2**30 + 1, 4096, "zigzag")
    assert sharding.ranges(0) == (range(131073), range(2**30 + 1 - 131072, 2**30 + 1))
    assert sum(sharding.lengths) == 2**30 + 1


@pytest.mark.parametrize("lengths", ["44", 8])
def test_lengths_must_be_a_sequence(lengths) -> None:
    with pytest.raises(TypeError, match="shard_lengths must be a sequence of integers or None; got "):
        Sharding(8, 2, shard_lengths=lengths)
