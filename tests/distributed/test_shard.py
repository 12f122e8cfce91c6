"""shard and unshard: values, gradients, bytes, and what they say to bad input."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flexdilated.distributed import Sharding, shard, traffic, unshard
from flexdilated.testing.strategies import shardings
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import DRAWN, line

# B batch, H heads, N tokens, L of one rank, D head dim


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


def gradients_under_ddp(whole_loss: bool, weight: Tensor, x: Tensor) -> Tensor:
    """Of a layer before `shard`: with one loss of the whole on all ranks, or W times each rank's own tokens'."""
    mesh, sharding = line(), Sharding(7, 3, "zigzag")
    layer = torch.nn.Linear(4, 5, bias=False, dtype=torch.float64)
    layer.weight.data.copy_(weight)
    model = DistributedDataParallel(layer)  # it averages as long as it lives
    part = shard(model(x), mesh, sharding, dim=1).pow(2)
    if whole_loss:
        unshard(part, mesh, sharding, dim=1).sum().backward()
    else:
        (part.sum() * mesh.size()).backward()
    assert layer.weight.grad is not None
    return layer.weight.grad


@pytest.mark.parametrize("whole_loss", [True, False])
def test_ddp_makes_the_gradients_those_of_one_rank(whole_loss: bool) -> None:
    weight, x = torch.randn(5, 4, dtype=torch.float64), torch.randn(2, 7, 4, dtype=torch.float64)
    expected = 2 * torch.einsum("btj,btd->jd", torch.einsum("jd,btd->btj", weight, x), x)
    for found in on_ranks(3, gradients_under_ddp, whole_loss, weight, x):
        torch.testing.assert_close(found, expected)
