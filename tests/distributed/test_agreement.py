"""Ranks that disagree find out before anything is sent and are told in what; of a peer that fails all others are told.

What they are told says what failed, who and when, and comes in bounded time.
"""

import os
import socket
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding, shard, unshard
from flexdilated.distributed.group._call import check_agreement
from flexdilated.distributed.group._messages import communicating
from flexdilated.distributed.group._ranks import Ranks, check_device
from tests.support.rank_worker import set_group_timeout
from tests.support.ranks import on_ranks, outcomes_on_ranks
from tests.support.sharded_cases import line


def all_ranks(device_type: str = "cpu") -> Ranks:
    return Ranks.of(init_device_mesh(device_type, (dist.get_world_size(),)))


def error_of(ranks: Ranks, facts: dict) -> str:
    try:
        check_agreement(ranks, facts)
    except ValueError as error:
        return str(error)
    return ""


def rounds() -> list[str]:
    """The ranks come in all orders; one has another pattern, or a fact less; they agree, and disagree again.

    Then 0 and 1 share one sequence, 2 and 3 another. The same function in two processes is no difference.
    """
    rank, ranks = dist.get_rank(), all_ranks()
    told = [error for number in range(60) if (error := error_of(ranks, {"number": number}))]
    for facts in (
        {"pattern": masks.chunked(4) if rank == 1 else masks.causal(), "dtype": torch.float32},
        {"num_tokens": 7, "function": lambda q, k: q >= k},
        {"pattern": masks.causal()} if rank else {"pattern": masks.causal(), "dtype": torch.float32},
    ):
        told.append(error_of(ranks, facts))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    row = Ranks.of(mesh["sequence"])
    return [*told, error_of(row, {"num_tokens": 8 + rank // 2}), error_of(row, {"num_tokens": rank})]


def test_all_ranks_are_told_who_has_what() -> None:
    head = "all ranks must make the same call; they disagree in"
    absent = f"{head} dtype: rank 0 has dtype=torch.float32; ranks 1, 2, 3 have dtype=not given"
    pattern = f"{head} pattern: ranks 0, 2, 3 have pattern={masks.causal()!r}; rank 1 has pattern={masks.chunked(4)!r}"
    for rank, told in enumerate(on_ranks(4, rounds)):
        first = rank // 2 * 2
        row = f"{head} num_tokens: rank 0 has num_tokens={first}; rank 1 has num_tokens={first + 1}"
        assert told == [pattern, "", absent, "", row]


def changes_on_rank_0() -> None:
    """Step 2 is a new call on rank 0 and the old one elsewhere, as if only rank 0 had changed its pattern."""
    ranks = all_ranks()
    check_agreement(ranks, {"pattern": "causal"})
    set_group_timeout(2)
    check_agreement(ranks, {"pattern": "chunked" if dist.get_rank() == 0 else "causal"})
    with communicating("the exchange of keys", ranks):
        dist.all_to_all_single(torch.empty(dist.get_world_size()), torch.ones(dist.get_world_size()))


@pytest.mark.slow
def test_a_rank_alone_with_a_new_call_ends_all_with_an_error() -> None:
    ended = outcomes_on_ranks(3, changes_on_rank_0)
    assert "rank 0 of 3: the check that all ranks make the same call failed: ranks 1, 2 did not" in ended[0].error
    assert "not make this rank's new call: pattern='chunked'" in ended[0].error
    for rank in (1, 2):
        assert f"DistError: rank {rank} of 3: the exchange of keys failed after" in ended[rank].error
        assert "the timeout of the process group is 2 s" in ended[rank].error
        assert "begun a call with other arguments (rank 0: pattern='chunked')" in ended[rank].error


def fail(how: str, who: int = 2) -> None:
    if dist.get_rank() == who:
        if how == "dies":
            os._exit(9)
        raise SystemExit("it lives on, its connections open, and takes no part")


def backward(how: str) -> None:
    """Of the second step, which needs no check any more; a loss of the first is thrown away."""
    part = shard(torch.ones(1, 1, 7, 2), line()).requires_grad_()
    for step in range(2):
        loss = unshard(part, line(), Sharding(7, 3)).sum()
        if step:
            fail(how)
        loss.backward()


def first_call(how: str) -> None:
    mesh = line()
    set_group_timeout(2)
    fail(how)
    unshard(torch.ones(1, 1, 2, 2), mesh)


def second_call(how: str, who: int = 2, **options) -> None:
    """The first agrees, so that the second fails at its messages."""
    module = fd.BlockSparseAttention(masks.causal(), mesh=line(), **options)
    x = torch.ones(1, 3, 4, 2)
    module(x, x, x)
    set_group_timeout(2)
    fail(how, who)
    module(x, x, x)


exchange = partial(second_call, schedule="exchange")
heads = partial(second_call, schedule="heads")
seed = partial(second_call, who=0, schedule="ring", dropout=0.1)  # others wait for it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "how", "what", "limit"),
    [
        (exchange, "dies", "the exchange of keys failed after ", "2 s"),
        (exchange, "hangs", "the exchange of keys failed after ", "2 s"),
        (backward, "dies", "sending and receiving shards failed after ", "4 s"),
        (backward, "hangs", "sending and receiving shards failed after ", "4 s"),
        (first_call, "dies", "the check that all ranks make the same call failed: rank 2 did not answer", "2 s"),
        (heads, "dies", "the exchange of heads failed after ", "2 s"),
        (seed, "dies", "the broadcast of the seed of dropout failed after ", "2 s"),
    ],
)
def test_every_other_rank_ends_with_an_error_that_says_what_who_and_when(function, how, what, limit) -> None:
    ended = outcomes_on_ranks(3, function, how, group_timeout=4)
    for outcome in ended[1:] if function is seed else ended[:2]:
        assert outcome.error is not None
        told = outcome.error[outcome.error.rindex("torch.distributed.DistError: ") :]
        assert told.startswith(f"torch.distributed.DistError: rank {outcome.rank} of 3: ")
        assert what in told
        assert limit in told


def store_dies(port: int) -> None:
    """With a store as torchrun makes it: rank 0 keeps it, and dies."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    options = {"rank": rank, "world_size": 3, "timeout": timedelta(seconds=30)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **options)
    part = torch.ones(1, 1, 2, 2)
    unshard(part, line())
    if rank == 0:
        os._exit(9)
    unshard(part.double(), line())


@pytest.mark.slow
def test_the_rank_that_keeps_the_store_dies() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for outcome in outcomes_on_ranks(3, store_dies, port)[1:]:
        assert outcome.error is not None
        assert f"DistError: rank {outcome.rank} of 3: the check that all ranks make the same call failed: " in (
            outcome.error
        )


def other_errors() -> list[str]:
    """Memory that runs out, and errors that are none of the transfers', stay what they are."""
    ranks, found = all_ranks(), []
    for error in (torch.OutOfMemoryError("full"), ValueError("odd"), KeyboardInterrupt()):
        try:
            with communicating("the exchange of keys", ranks):
                raise error
        except BaseException as raised:
            found.append(type(raised).__name__)
    return found


def tensors_of_two_devices() -> list[str]:
    """One that the group does not serve; one that it serves (as it serves both) while the mesh is of the other.

    And one in a group that serves no CPU.
    """
    ranks, found = all_ranks(), []
    check_device(ranks, torch.ones(2))

    def refused(of: Ranks, device: str) -> None:
        with pytest.raises(ValueError, match="got a tensor on") as error:
            check_device(of, torch.ones(2, device=device))
        found.append(str(error.value))

    refused(ranks, "meta")
    refused(replace(ranks, device_type="cuda"), "cpu")
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    refused(all_ranks(), "cpu")
    return found


def test_a_tensor_must_be_where_the_group_can_send_from() -> None:
    assert on_ranks(1, other_errors) == [["OutOfMemoryError", "ValueError", "KeyboardInterrupt"]]
    of_no_backend, of_another_mesh, without_cpu = on_ranks(1, tensors_of_two_devices)[0]
    assert "got a tensor on meta, a mesh of cpu devices" in of_no_backend
    assert "got a tensor on cpu, a mesh of cuda devices and a process group of cpu:gloo,cuda:gloo" in of_another_mesh
    assert without_cpu.endswith("got a tensor on cpu, a mesh of cpu devices and a process group of cuda:gloo")
