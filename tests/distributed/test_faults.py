"""A peer that dies or hangs: every other rank ends with an error that says what, who and when, in bounded time."""

import os
import socket
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flexdilated.distributed import Sharding, shard, unshard
from flexdilated.distributed.group._messages import communicating
from flexdilated.distributed.group._ranks import Ranks
from tests.support.ranks import on_ranks, outcomes_on_ranks

LAST = 2  # of three ranks: the one that fails


def fail(how: str) -> None:
    if dist.get_rank() == LAST:
        if how == "dies":
            os._exit(9)
        raise SystemExit("it lives on, its connections open, and takes no part")


def collective(how: str) -> None:
    mesh = init_device_mesh("cpu", (3,))
    fail(how)
    with communicating("the exchange of keys", Ranks.of(mesh)):
        dist.all_to_all_single(torch.empty(3), torch.ones(3))


def unsharding(how: str) -> None:
    """The first step agrees, so that the second fails at its messages."""
    mesh = init_device_mesh("cpu", (3,))
    part = shard(torch.ones(1, 1, 7, 2), mesh)
    unshard(part, mesh, Sharding(7, 3))
    fail(how)
    unshard(part, mesh, Sharding(7, 3))


def backward(how: str) -> None:
    mesh = init_device_mesh("cpu", (3,))
    part = shard(torch.ones(1, 1, 7, 2), mesh).requires_grad_()
    for step in range(2):
        loss = unshard(part, mesh, Sharding(7, 3)).sum()
        if step:
            fail(how)
        loss.backward()


def first_call(how: str) -> None:
    mesh = init_device_mesh("cpu", (3,))
    fail(how)
    unshard(torch.ones(1, 1, 2, 2), mesh)


def store_dies(port: int) -> None:
    """With a store as torchrun makes it: rank 0 keeps it, and dies."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    options = {"rank": rank, "world_size": 3, "timeout": timedelta(seconds=30)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **options)
    mesh = init_device_mesh("cpu", (3,))
    part = torch.ones(1, 1, 2, 2)
    unshard(part, mesh)
    if rank == 0:
        os._exit(9)
    unshard(part.double(), mesh)


def other_errors() -> list[str]:
    """Memory that runs out, and errors that are none of the transfers', stay what they are."""
    ranks, found = Ranks.of(init_device_mesh("cpu", (1,))), []
    for error in (torch.OutOfMemoryError("full"), ValueError("odd"), KeyboardInterrupt()):
        try:
            with communicating("the exchange of keys", ranks):
                raise error
        except BaseException as raised:
            found.append(type(raised).__name__)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize(
    ("function", "what"),
    [
        (collective, "the exchange of keys failed after "),
        (unsharding, "sending and receiving shards failed after "),
        (backward, "sending and receiving shards failed after "),
        (first_call, "the check that all ranks make the same call failed: rank 2 did not answer"),
    ],
    ids=["collective", "unshard", "backward", "set-up"],
)
def test_every_other_rank_ends_with_an_error_that_says_what_who_and_when(how: str, function, what: str) -> None:
    ended = outcomes_on_ranks(3, function, how, group_timeout=6)
    for outcome in ended[:LAST]:
        assert outcome.error is not None
        told = outcome.error[outcome.error.rindex("torch.distributed.DistError: ") :]
        assert told.startswith(f"torch.distributed.DistError: rank {outcome.rank} of 3: ")
        assert what in told
        assert "6 s" in told


@pytest.mark.slow
def test_the_rank_that_keeps_the_store_dies() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for outcome in outcomes_on_ranks(3, store_dies, port)[1:]:
        assert outcome.error is not None
        assert f"DistError: rank {outcome.rank} of 3: the check that all ranks make the same call failed: " in (
            outcome.error
        )


def test_other_errors_pass() -> None:
    assert on_ranks(1, other_errors) == [["OutOfMemoryError", "ValueError", "KeyboardInterrupt"]]
