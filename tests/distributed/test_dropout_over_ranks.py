"""Attention dropout over ranks drops the pairs that one rank drops with the seed of rank 0."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding, _attend, traffic
from flexdilated.engines.flex import _flex_op
from tests.distributed.test_distributed_attend import shards
from tests.distributed.test_schedules import DRAWN
from tests.engines.test_flex import dense_flex
from tests.support.agreement import TIGHT
from tests.support.rank_worker import set_group_timeout
from tests.support.ranks import on_ranks, outcomes_on_ranks
from tests.support.sharded_cases import (
    HEADS,
    NAMES,
    WAYS,
    ShardedCase,
    Shares,
    compiled_on_the_last,
    line,
    sharded_cases,
    shares_of,
    tensors_for,
    together,
)

# B batch, H query heads, G key/value heads, N tokens of all ranks, D head dim

SEED = 7


def on_one_rank(case: ShardedCase, p: float) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) and, with sinks, their gradient, on one rank by engine "reference"."""
    leaves = [x.clone().requires_grad_() for x in case.tensors]
    torch.manual_seed(SEED)
    heads = {"head_offset": case.head_offset, "num_heads_global": case.num_heads_global, "enable_gqa": True}
    options = {"sinks": leaves[3] if leaves[3:] else None, "engine": "reference", "return_lse": True}
    out, lse = fd.attend(*leaves[:3], case.pattern, dropout_p=p, **heads, **options)
    grad_out, grad_lse = case.cotangents
    sent = (out * grad_out).sum() + (lse * grad_lse).masked_fill(lse == -torch.inf, 0.0).sum() * case.through_lse
    return out.detach(), lse.detach(), *torch.autograd.grad(sent, leaves)


def run(cases: list[ShardedCase], ways: list[dict[str, Any]]) -> list[list[Shares]]:
    """Return this rank's shares of every case for each way; generators of the ranks are in different states."""
    found = []
    for case in cases:
        found.append([])
        for way in ways:
            torch.manual_seed(SEED + dist.get_rank())
            found[-1].append(shares_of(case, **way))
    return found


def assert_many_are_one(cases: list[ShardedCase], ways: list[dict[str, Any]], p: float, run: Any = run) -> None:
    by_rank = on_ranks(cases[0].sharding.num_ranks, run, cases, [way | {"dropout_p": p} for way in ways])
    for place, case in enumerate(cases):
        truth = on_one_rank(case, p)
        for index, way in enumerate(ways):
            found = together(case, [shares[place][index] for shares in by_rank])
            for name, one, other in zip(NAMES, found, truth, strict=False):
                assert_close(one, other, **TIGHT, msg=lambda text, at=(name, case, way, p): f"{at}: {text}")


@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize("by_heads", [False, True])
@DRAWN
@given(data=st.data())
def test_many_ranks_drop_the_pairs_of_one(W: int, by_heads: bool, data: st.DataObject) -> None:
    """With drawn patterns and mixtures, head groups, shardings, sinks, and values of another head dim than keys."""
    cases = data.draw(st.lists(sharded_cases(W, by_heads=by_heads), min_size=3, max_size=5))
    assert_many_are_one(cases, [HEADS] if by_heads else [*WAYS], data.draw(st.sampled_from([0.1, 0.5, 0.9])))


def mixtures() -> dict[str, Any]:
    ids = torch.tensor([[0] * 20 + [1] * 9 + [2] * 19, [0] * 3 + [1] * 45])
    ladder = masks.longnet([8, 16, 48], [1, 2, 4])
    return {
        "branches that are equal": masks.causal() + masks.causal() + masks.local_window(left=9, right=0),
        "documents by run-time tensors": ladder.per_document(masks.documents(ids)),
        "zero padding": masks.longnet([8, 20, 48], [1, 2, 4], padding="zeros"),
    }


@pytest.mark.parametrize("split", [Sharding(48, 2, "zigzag"), Sharding(48, 3, shard_lengths=(30, 0, 18))], ids=str)
def test_mixtures(split: Sharding) -> None:
    """With sinks, run-time tensors, padding with zeros, and a rank without tokens."""
    tensors = tensors_for(6, 3, 48, B=2, D=4, E=3, sinks=True)
    cases = [ShardedCase(pattern, torch.empty(0), split, tensors) for pattern in mixtures().values()]
    assert_many_are_one(cases, [*WAYS, HEADS], 0.4)


def by_flex(cases: list[ShardedCase], ways: list[dict[str, Any]]) -> list[list[Shares]]:
    """Return this rank's results and gradients by engine "flex" with a dense kernel, for each way."""
    engine = {"choose_engine": lambda *_, **__: "flex", "placed_engine": lambda *_: "flex"}
    kernel = {"_in_parts": _flex_op._flex, "run_flex": partial(_flex_op.run_flex, kernel=dense_flex)}
    with patch.multiple(_attend, **engine), patch.multiple(_flex_op, **kernel):
        return run(cases, ways)


def test_flex_attends_to_the_kept_pairs_of_each_part() -> None:
    """In a ring, the lse of each part, by which parts are merged, is that without dropout."""
    tensors = tensors_for(4, 2, 48, B=2, D=4, sinks=True)
    documents = masks.longnet([8, 48], [1, 4]).per_document(masks.documents(torch.arange(48) // 19))
    patterns = mixtures()["branches that are equal"], documents
    cases = [ShardedCase(pattern, torch.empty(0), Sharding(48, 3, "zigzag"), tensors) for pattern in patterns]
    assert_many_are_one(cases, [*WAYS], 0.4, run=by_flex)


def set_up() -> list[tuple[tuple[int, ...], bool]]:
    """For each way and probability: (transfers, bytes sent, bytes received), and True if the RNG is as on one rank."""
    found, case = (
        [],
        ShardedCase(masks.causal(), torch.empty(0), Sharding(24, dist.get_world_size()), tensors_for(6, 6, 24)),
    )
    for way in (*WAYS, HEADS):
        for p in (0.0, 0.3):
            shares_of(case, **way, dropout_p=p)  # so that the counts exclude the check of agreement
            torch.manual_seed(SEED)
            shares_of(case, **way, dropout_p=p)
            counts = traffic()
            state = torch.get_rng_state()
            torch.manual_seed(SEED)
            fd.attend(*case.tensors, case.pattern, dropout_p=p)
            numbers = counts.transfers["set-up"], counts.sent["set-up"], counts.received["set-up"]
            found.append((numbers, torch.equal(state, torch.get_rng_state())))
    return found


def test_the_seed_is_eight_bytes_and_nothing_without_dropout() -> None:
    """Every rank's generator advances as on one rank, so that generators in equal states stay equal."""
    for rank, found in enumerate(on_ranks(3, set_up)):
        with_dropout = (1, 0, 8) if rank else (1, 8, 0)
        assert found == [((0, 0, 0), True), (with_dropout, True)] * 3


def compiled(backend: str) -> float:
    """Return the largest difference of outputs and gradients between one graph and eager mode, on this rank."""
    torch.compiler.reset()  # other tests in this process compiled the same method
    worst = 0.0
    for schedule in ("exchange", "ring", "heads"):
        module = fd.BlockSparseAttention(mixtures()["zero padding"], mesh=line(), schedule=schedule, dropout=0.3)
        leaves, results = shards(Sharding(100, 2), torch.float64), []
        for run in (module, compiled_on_the_last(module, backend=backend, dynamic=True)):
            torch.manual_seed(SEED + dist.get_rank())
            out = run(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
        worst = max(worst, *(float((x - y).abs().max()) for x, y in zip(*results, strict=True)))
    return worst


@pytest.mark.slow
def test_a_graph_draws_the_pairs_of_eager_code() -> None:
    assert max(on_ranks(2, compiled, "aot_eager")) < 1e-12


def drops_alone(schedule: str) -> str:
    with pytest.raises(ValueError, match="disagree") as error:
        _disagree(schedule)
    return str(error.value)


def _disagree(schedule: str) -> None:
    module = fd.BlockSparseAttention(
        masks.causal(), mesh=line(), schedule=schedule, dropout=0.1 if dist.get_rank() else 0.0
    )
    module(*shards(Sharding(100, 2)))


@pytest.mark.parametrize("schedule", ["exchange", "ring", "heads"])
def test_a_rank_with_another_probability_is_an_error_on_all(schedule: str) -> None:
    """It is raised before the broadcast of the seed, which ranks without dropout would not join."""
    for words in on_ranks(2, drops_alone, schedule):
        assert "disagree in dropout_p: rank 0 has dropout_p=0.0; rank 1 has dropout_p=0.1" in words


def die() -> None:
    """Rank 0 dies after the check of agreement, while rank 1 waits for its seed."""
    tensors, options = shards(Sharding(100, 2)), {"mesh": line(), "dropout_p": 0.1, "schedule": "ring"}
    fd.distributed.attend(*tensors, masks.causal(), **options)
    set_group_timeout(3)
    if dist.get_rank() == 0:
        os._exit(7)
    with pytest.raises(dist.DistError, match="the broadcast of the seed of dropout failed"):
        fd.distributed.attend(*tensors, masks.causal(), **options)


def test_a_peer_that_dies_is_an_error_in_time() -> None:
    dead, survivor = outcomes_on_ranks(2, die)
    assert survivor.error is None, survivor.error
    assert "exit code 7" in str(dead.error)
