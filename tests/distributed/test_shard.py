"""Sharding: each position is held once, in order; shard and unshard: values, gradients and bytes."""

import pickle
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist

from flexdilated.distributed import Sharding, shard, traffic, unshard
from flexdilated.testing.strategies import shardings
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import DRAWN, line


def there_and_back(x: Tensor, sharding: Sharding, dim: int, weights: Tensor) -> dict:
    """Each rank weights the whole in its own way; its loss counts its shard too, so both gradients are in play."""
    mesh, rank = line(), dist.get_rank()
    x = x.clone().requires_grad_()
    part = shard(x, mesh, sharding, dim=dim)
    part.retain_grad()
    whole = unshard(part, mesh, sharding, dim=dim)
    before = traffic().sent["shards"], traffic().received["shards"]
    (whole * weights[rank]).sum().backward()
    sent, received = traffic().sent["shards"] - before[0], traffic().received["shards"] - before[1]
    return {
        "part": part.detach(),
        "whole": whole.detach(),
        "part grad": part.grad,
        "grad": x.grad,
        "contiguous": part.is_contiguous() and whole.is_contiguous(),
        "sent": sent,
        "received": received,
    }


def all_there_and_back(cases: list[tuple]) -> list[dict]:
    return [there_and_back(*case) for case in cases]


@pytest.mark.parametrize("W", [1, 2, 3, 4])
@DRAWN
@given(data=st.data())
def test_values_and_gradients_are_those_of_the_sum_of_losses(W: int, data: st.DataObject) -> None:
    """And bytes are counted, and no more than needed."""
    cases = []
    for _ in range(6):
        sharding = data.draw(shardings(data.draw(st.integers(1, 9)), num_ranks=W))
        dim, dtype = (
            data.draw(st.sampled_from([0, 1, 2, -1])),
            data.draw(st.sampled_from([torch.float64, torch.float32])),
        )
        shape = [2, 3, 4]
        shape[dim] = sharding.num_tokens
        cases.append((torch.randn(shape, dtype=dtype), sharding, dim, torch.randn(W, *shape, dtype=dtype)))
    by_rank = on_ranks(W, all_there_and_back, cases)
    for place, (x, sharding, dim, weights) in enumerate(cases):
        found = [each[place] for each in by_rank]
        row_bytes = x.nbytes // sharding.num_tokens
        for rank, has in enumerate(found):
            own, length = sharding.positions(rank), sharding.length(rank)
            assert torch.equal(has["part"], x.index_select(dim, own))
            assert torch.equal(has["whole"], x)
            assert has["contiguous"]
            # d(sum of losses)/d(part): all ranks' weights at these tokens; x's is that, and 0 elsewhere.
            expected = weights.sum(0).index_select(dim, own)
            torch.testing.assert_close(has["part grad"], expected)
            torch.testing.assert_close(has["grad"], torch.zeros_like(x).index_add(dim, own, expected))
            assert has["sent"] == (sharding.num_tokens - length) * row_bytes
            assert has["received"] == length * (W - 1) * row_bytes
        torch.testing.assert_close(sum(has["grad"] for has in found), weights.sum(0))


def more_of_three_ranks() -> None:
    """Other dtypes travel, gradients add up in float32 and have gradients; without a sharding runs are equal."""
    mesh, rank = line(), dist.get_rank()
    sharding = Sharding(7, 3, "zigzag")
    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.float16, torch.uint8):
        x = (torch.arange(14).view(2, 7) % 5).to(dtype)
        assert torch.equal(unshard(shard(x, mesh, sharding, dim=1), mesh, sharding, dim=1), x)
    # One of three ranks' 256 and 1, 1: in bfloat16, one by one, the two would be lost.
    part = torch.zeros(2, sharding.length(rank), dtype=torch.bfloat16, requires_grad=True)
    unshard(part, mesh, sharding, dim=1).sum().mul(256 if rank == 0 else 1).backward()
    assert part.grad.eq(258).all()
    # d/dx of the sum of all ranks' sums of whole³: 3 W x²; again: 6 W x, and W ranks ask for it.
    x = torch.arange(1.0, 3.0, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(unshard(x, mesh, dim=0).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.tolist() == [3 * 3.0, 3 * 12.0]
    assert second.tolist() == [3 * 6.0, 3 * 12.0]
    x, before = torch.arange(2 * 3 * 6 * 2.0).view(2, 3, 6, 2), traffic().transfers.total()
    part = shard(x, mesh)
    assert traffic().transfers.total() == before, "shard sends nothing"
    assert torch.equal(part, x[:, :, 2 * rank : 2 * rank + 2])
    assert torch.equal(unshard(part, mesh), x)


def test_dtypes_second_derivatives_and_equal_runs() -> None:
    on_ranks(3, more_of_three_ranks)


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
    equal = Sharding(sharding.num_tokens, sharding.num_ranks).lengths  # as equal as can be
    assert max(equal) - min(equal) <= 1
    assert list(equal) == sorted(equal, reverse=True)


def test_a_billion_tokens_on_many_ranks_are_no_work() -> None:
    sharding = Sharding(2**30 + 1, 4096, "zigzag")
    assert sharding.ranges(0) == (range(131073), range(2**30 + 1 - 131072, 2**30 + 1))
    assert sum(sharding.lengths) == 2**30 + 1


@pytest.mark.parametrize("lengths", ["44", 8])
def test_lengths_must_be_a_sequence(lengths) -> None:
    with pytest.raises(TypeError, match="shard_lengths must be a sequence of integers or None; got "):
        Sharding(8, 2, shard_lengths=lengths)
