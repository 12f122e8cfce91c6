"""The ranks that the other tests run on: results, exceptions and hangs."""

import time

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from tests.support import ranks
from tests.support.rank_worker import set_group_timeout
from tests.support.ranks import on_ranks


def scaled_sum(value: Tensor) -> Tensor:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


def fails_on_rank_1() -> None:
    set_group_timeout(3)
    if dist.get_rank() == 1:
        raise ValueError("it is rank 1 that fails")
    dist.barrier()


def hangs_on_rank_1() -> int:
    if dist.get_rank() == 1:
        time.sleep(1000)
    return dist.get_rank()


def says_where() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


@pytest.mark.parametrize("size", [1, 3])
def test_results_come_by_rank(size: int) -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    totals = on_ranks(size, scaled_sum, value.detach())
    for total in totals:
        torch.testing.assert_close(total, value.detach() * (size * (size + 1) // 2), rtol=0, atol=0)
    assert on_ranks(size, says_where) == [(rank, size, 1) for rank in range(size)]


def test_an_exception_on_one_rank_is_raised_with_all_ranks_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    with pytest.raises(AssertionError, match=r"(?s)rank 0 of 2: did not end.*rank 1 of 2.*it is rank 1 that fails"):
        on_ranks(2, fails_on_rank_1)
    assert on_ranks(2, says_where)[1][:2] == (1, 2)


def test_a_hang_ends_at_the_timeout_and_says_where() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2: did not end in .* in hangs_on_rank_1"):
        on_ranks(2, hangs_on_rank_1, timeout=2)
    assert on_ranks(2, says_where)[1][:2] == (1, 2)
