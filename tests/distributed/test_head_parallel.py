"""Head parallelism: many ranks, each with some heads of the whole sequence, are one rank."""

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.distributed import Sharding, traffic
from flexdilated.distributed._heads import attend_heads, taken_heads
from flexdilated.distributed.group._ranks import Ranks
from tests.distributed.test_schedules import DRAWN, errors_of, on_one_rank
from tests.support import oracle
from tests.support.rank_worker import set_group_timeout
from tests.support.ranks import on_ranks, outcomes_on_ranks
from tests.support.sharded_cases import (
    HEADS,
    ShardedCase,
    assert_whole,
    by_way,
    call,
    leaves_of,
    line,
    sharded_cases,
    tensors_for,
    together,
)

D = 4
LONGNET = masks.longnet([8, 16, 40], [1, 2, 4])


@pytest.mark.parametrize("W", [1, 2, 3, 4])
@DRAWN
@given(data=st.data())
def test_many_ranks_are_one(W: int, data: st.DataObject) -> None:
    """Output, lse and all gradients, for any sharding, also with fewer key/value heads than ranks."""
    cases = data.draw(st.lists(sharded_cases(W, by_heads=True), min_size=3, max_size=6))
    for found in by_way(cases, [HEADS, HEADS | {"engine": "reference"}]):
        assert_whole(*found)


def a_case(sharding: Sharding, H: int, G: int) -> ShardedCase:
    rule, N = oracle.longnet([8, 16, 40], [1, 2, 4]), sharding.num_tokens
    counts = oracle.counts(rule, range(H), H, torch.arange(N), torch.arange(N))
    return ShardedCase(LONGNET, counts, sharding, tensors_for(H, G, N, B=2, D=D))


def test_heads_that_fit_no_groups() -> None:
    """12 query heads on 6 ranks, 4 key/value heads: some ranks read one of them, some two unequally."""
    assert taken_heads(12, 4, 6) == (range(1), range(2), range(1, 2), range(2, 3), range(2, 4), range(3, 4))
    assert taken_heads(10, 5, 2) == (range(3), range(2, 5))
    two = [a_case(Sharding(30, 2), 6, 2), a_case(Sharding(30, 2, "zigzag"), 10, 5)]
    for cases in ([a_case(Sharding(30, 6), 12, 4)], two):
        for found in by_way(cases, [HEADS]):
            assert_whole(*found)


def test_gradients_of_shared_heads_are_as_exact_as_on_one_rank() -> None:
    """In bfloat16, where several ranks have one key/value head: what they add up has not been rounded before."""
    N = 320
    counts = oracle.counts(oracle.local_window(150, 0), range(8), 8, torch.arange(N), torch.arange(N))
    window = masks.local_window(left=150, right=0)
    tensors = [tensors_for(8, G, N, B=2, D=D, dtype=torch.bfloat16) for G in (1, 4)]
    for case, _, shares in by_way([ShardedCase(window, counts, Sharding(N, 8), each) for each in tensors], [HEADS]):
        alone, many = errors_of(case, on_one_rank(case)), errors_of(case, together(case, shares))
        assert all(many[name] <= 1.1 * alone[name] for name in alone), (case, alone, many)


def counted(case: ShardedCase) -> list[tuple[dict, dict, dict]]:
    """Bytes sent and received, and transfers, of a forward and of the backward, by role."""
    found, leaves, counts = [], leaves_of(case), traffic()
    for _ in range(2):  # the first makes the check that all ranks make this call
        counts.reset()
        out, lse = call(case, *leaves, **HEADS)
        forward = dict(counts.sent), dict(counts.received), dict(counts.transfers)
        counts.reset()
        (out.sum() + lse.sum()).backward()
        found = [forward, (dict(counts.sent), dict(counts.received), dict(counts.transfers))]
    return found


def test_bytes_and_transfers_are_the_fewest() -> None:
    """Each head of a token goes once to each rank that computes with it, and comes back once; in two transfers each."""
    N, W = 20, 4
    case = a_case(Sharding(N, W, "zigzag", (8, 2, 3, 7)), H=8, G=2)
    number = 2 * 8  # bytes of one number of both batch entries
    for rank, (forward, backward) in enumerate(on_ranks(W, counted, case)):
        length = case.sharding.length(rank)
        # 2 query heads a rank, and one head of keys and of values; and 2 of output, where the lse is one number more.
        brought, returned = (2 + 1 + 1) * D * number, 2 * (D + 1) * number
        sent = 3 * length * brought + (N - length) * returned
        received = (N - length) * brought + 3 * length * returned
        assert forward == ({"heads": sent}, {"heads": received}, {"heads": 3})
        assert backward == ({"heads": received}, {"heads": sent}, {"heads": 3})


def refusals() -> list[str]:
    """6 heads on 4 ranks, nothing is sent before that; and a call where rank 0 has another pattern."""
    ranks, told = Ranks.of(line()), []
    for H, pattern in ((6, LONGNET), (4, masks.causal() if ranks.rank else masks.every())):
        x = torch.ones(1, H, 2, D)
        traffic().reset()
        with pytest.raises(ValueError, match=r"all ranks|head parallelism") as error:
            attend_heads(x, x, x, pattern, ranks=ranks, sharding=Sharding(8, 4))
        assert not traffic().sent["heads"]
        told.append(str(error.value))
    return told


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    for heads, pattern in on_ranks(4, refusals):
        assert "multiple of the number of ranks; got 6 heads and 4 ranks: 6 heads go on 1 or 2 or 3" in heads
        assert "disagree in pattern" in pattern
        assert "causal" in pattern


def die() -> None:
    ranks = Ranks.of(line())
    x = torch.ones(1, 2, 4, D)
    call = {"ranks": ranks, "sharding": Sharding(8, 2)}
    attend_heads(x, x, x, masks.causal(), **call)
    set_group_timeout(3)
    if ranks.rank == 1:
        os._exit(7)
    with pytest.raises(dist.DistError, match="the exchange of heads failed"):
        attend_heads(x, x, x, masks.causal(), **call)


def test_a_peer_that_dies_is_an_error_in_time() -> None:
    """Without the group's timeout the survivor would be ended where it waits."""
    survivor, dead = outcomes_on_ranks(2, die)
    assert survivor.error is None, survivor.error
    assert "exit code 7" in str(dead.error)
