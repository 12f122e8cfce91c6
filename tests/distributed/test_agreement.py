"""Ranks that disagree find out before anything is sent and are told in what; of a peer that fails all are told."""

import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding, attend, shard, traffic, unshard
from flexdilated.distributed._heads import attend_heads
from flexdilated.distributed.group._call import check_agreement
from flexdilated.distributed.group._messages import communicating
from flexdilated.distributed.group._ranks import Ranks, check_device
from tests.distributed.test_distributed_modules import ROWS, N, longnet, text
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
    set_group_timeout(1)
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
        assert "the timeout of the process group is 1 s" in ended[rank].error
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
            set_group_timeout(1)
            fail(how)
        loss.backward()


def first_call(how: str) -> None:
    mesh = line()
    set_group_timeout(1)
    fail(how)
    unshard(torch.ones(1, 1, 2, 2), mesh)


def second_call(how: str, who: int = 2, **options) -> None:
    """The first agrees, so that the second fails at its messages."""
    module = fd.BlockSparseAttention(masks.causal(), mesh=line(), **options)
    x = torch.ones(1, 3, 4, 2)
    module(x, x, x)
    set_group_timeout(1)
    fail(how, who)
    module(x, x, x)


exchange = partial(second_call, schedule="exchange")
heads = partial(second_call, schedule="heads")
seed = partial(second_call, who=0, schedule="ring", dropout=0.1)  # others wait for it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "how", "what"),
    [
        (exchange, "hangs", "the exchange of keys failed after "),
        (backward, "dies", "sending and receiving shards failed after "),
        (first_call, "dies", "the check that all ranks make the same call failed: rank 2 did not answer"),
        (heads, "dies", "the exchange of heads failed after "),
        (seed, "dies", "the broadcast of the seed of dropout failed after "),
    ],
)
def test_every_other_rank_ends_with_an_error_that_says_what_who_and_when(function, how, what) -> None:
    ended = outcomes_on_ranks(3, function, how, group_timeout=4)
    for outcome in ended[1:] if function is seed else ended[:2]:
        assert outcome.error is not None
        told = outcome.error[outcome.error.rindex("torch.distributed.DistError: ") :]
        assert told.startswith(f"torch.distributed.DistError: rank {outcome.rank} of 3: ")
        assert what in told
        assert re.search("the process group(?: is|,) 1 s", told)


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


PATTERN = masks.longnet((16, 32, 64), (1, 2, 4)) & masks.causal()
TOKENS = 40
Calls = dict[str, Callable[[], Any]]


def tensors(*shape: int, **kind: Any) -> list[Tensor]:
    return [torch.ones(shape or (1, 4, TOKENS // 2, 8), **kind) for _ in range(3)]


def told(calls: Calls) -> dict[str, str]:
    """On a rank: what each call says, and whether it sent something before."""
    found = {}
    for name, call in calls.items():
        traffic().reset()
        try:
            call()
        except (TypeError, ValueError) as error:
            sent = [role for role, number in traffic().sent.items() if number and role != "set-up"]
            found[name] = f"{type(error).__name__}: {error}{' after sending ' * bool(sent)}{sent or ''}"
        else:
            found[name] = "no error"
    return found


def selected(most: int = 2, sharding: Sharding | None = None, **options: Any) -> fd.SelectedAttention:
    selector = fd.BlockSelector(choose=fd.TopK(most), **{"block": 4, **options})
    return fd.SelectedAttention(selector, mesh=line(), sharding=sharding)


def module(pattern: masks.Pattern | masks.Mixture = PATTERN, **options: Any) -> Any:
    return fd.BlockSparseAttention(pattern, mesh=line(), **options)(*tensors())


def disagreeing() -> dict[str, str]:
    """What this rank is told where rank 1 asks for something else, has other values, or wants no gradients."""
    rank, where = dist.get_rank(), line()

    def call(pattern: Any = PATTERN, qkv: list[Tensor] | None = None, **options: Any) -> Callable[[], Any]:
        qkv = tensors() if qkv is None else qkv
        return lambda: attend(*qkv, pattern, mesh=where, **{"schedule": "exchange", **options})

    def heads(qkv: list[Tensor] | None = None, **options: Any) -> Callable[[], Any]:
        options |= {"ranks": Ranks.of(where), "sharding": Sharding(TOKENS, 2)}
        return lambda: attend_heads(*(tensors() if qkv is None else qkv), PATTERN, **options)

    wanting, x = tensors(requires_grad=rank == 0), tensors(1, 2, 8, 4)[0]
    packed = masks.causal() & masks.documents("ids")
    visible = masks.visible_keys(torch.arange(TOKENS) % 3 != rank) & masks.causal()
    halve = {"score_mod": (lambda score, b, h, q, k: score / 2) if rank else None}
    split = Sharding(TOKENS + rank, 2, shard_lengths=(TOKENS // 2 + rank, TOKENS // 2))
    return told(
        {
            "pattern": call(masks.causal() if rank else PATTERN),
            "sharding": call(sharding=split, schedule="ring"),
            "dtype": call(qkv=tensors(dtype=torch.bfloat16 if rank else torch.float32)),
            "schedule": call(schedule="ring" if rank else "exchange"),
            "scale": call(scale=0.5 if rank else None, schedule="ring"),
            "codec": call(codec="int8" if rank else None),
            "run-time tensor 'visible_keys'": call(visible, schedule="ring"),
            "run-time tensor 'ids'": call(packed, bindings={"ids": torch.arange(TOKENS) // (5 + rank)}),
            "gradients wanted": call(qkv=wanting, schedule="ring"),
            "score_mod": call(**halve),
            # Before the broadcast of the seed, which ranks without dropout would not join.
            **{
                f"dropout_p of {schedule}": lambda schedule=schedule: module(schedule=schedule, dropout=0.1 * rank)
                for schedule in ("exchange", "ring", "heads")
            },
            "pattern of heads": lambda: module(masks.causal() if rank else PATTERN, schedule="heads"),
            "gradients wanted of heads": heads(wanting),
            "gradients wanted by sinks or score_mod": heads(sinks=wanting[0][0, :, 0, 0]),
            "lse wanted": heads(return_lse=rank == 1),
            "sharding of shards": lambda: unshard(torch.ones(1, 1, 2 + rank, 2), where),
            "other dims": lambda: unshard(torch.ones(1, 1 + rank, 3, 2), where),
            "dtype of shards": lambda: unshard(
                torch.ones(1, 1, 3, 2, dtype=(torch.float32, torch.float64)[rank]), where
            ),
            "most": lambda: selected(most=2 + rank)(x, x, x),
            "gradients wanted of a selection": lambda: selected()(x, x.clone().requires_grad_(rank == 0), x),
            "sharding of a selection": lambda: selected()(*[x[:, :, : 8 - rank]] * 3),
        }
    )


def test_ranks_that_disagree_are_told_in_what() -> None:
    first, second = on_ranks(2, disagreeing)
    for name, words in first.items():
        what = name.partition(" of ")[0]
        assert words.startswith(f"ValueError: all ranks must make the same call; they disagree in {what}: rank 0 has ")
        assert f"; rank 1 has {what}=" in words
        assert "after sending" not in words
    assert "rank 0 has dropout_p=0.0; rank 1 has dropout_p=0.1" in first["dropout_p of ring"]
    assert "rank 0 has score_mod=False; rank 1 has score_mod=True" in first["score_mod"]
    assert "causal" in first["pattern of heads"]
    assert first == second


def assigned(models: DeviceMesh | None, layers: DeviceMesh | None) -> None:
    """A layer that chooses, over other ranks than its model."""
    model = longnet(selection=ROWS, mesh=models)
    model.blocks[0].selected = fd.SelectedAttention(fd.BlockSelector(block=4, choose=fd.TopK(2)), mesh=layers)
    model(text()[0])


BLOCKS = {"block": 4, "query_block": 4, "query_summary": "first"}
MULTIPLES = (
    "ValueError: the queries of a query block must be on one rank, so runs of a rank's positions must begin at "
    "multiples of 4, the largest query_block: give the sharding shard_lengths that are multiples of 4, or in zigzag "
    "order of 8; got positions that begin at "
)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {  # tests/project/errors.md has more
    "heads": (
        lambda: fd.BlockSparseAttention(masks.causal(), mesh=line(), schedule="heads")(*tensors(1, 5, 4, 8)),
        "multiple of the number of ranks; got 5 heads and 2 ranks: 5 heads go on 1 or 5",
    ),
    "its layer's mesh": (lambda: assigned(line(), None), "must have the mesh and the sharding of its model"),
    "its model's mesh": (lambda: assigned(None, line()), "must have the mesh and the sharding of its model"),
    "tokens": (lambda: longnet(mesh=line(), sharding=Sharding(N, 2))(text()[0]), "21 of 41 tokens for rank 0 of 2"),
    "padding": (
        lambda: longnet(mesh=line())(text()[0], key_padding_mask=torch.zeros(2, N, dtype=torch.bool)),
        "key_padding_mask must have shape (2, 82)",
    ),
    "query blocks": (lambda: selected(**BLOCKS)(*tensors(1, 2, 6, 4)), f"{MULTIPLES}6 in Sharding(num_tokens=12"),
    "query blocks in zigzag order": (
        lambda: selected(**BLOCKS, sharding=Sharding(24, 2, "zigzag"))(*tensors(1, 2, 12, 4)),
        f"{MULTIPLES}18 in Sharding(num_tokens=24",
    ),
    "query blocks of a coarse choice": (
        lambda: selected(block=2, query_block=2, query_summary="first", coarse=nested())(*tensors(1, 2, 4, 4)),
        "must begin at multiples of 8",
    ),
}


def nested() -> fd.BlockSelector:
    largest = fd.BlockSelector(**BLOCKS | {"query_block": 8}, choose=fd.TopK(2))
    return fd.BlockSelector(**BLOCKS, choose=fd.TopK(2), coarse=largest)


def refusals() -> dict[str, str]:
    return told({name: call for name, (call, _) in REFUSED.items()})


def test_what_does_not_go_over_ranks_is_refused() -> None:
    found = on_ranks(2, refusals)[0]
    wrong = {name: words for name, words in found.items() if REFUSED[name][1] not in words or "after sending" in words}
    assert wrong == {}


def of_own_queries() -> None:
    """A table of this rank's queries alone, which fails for all others."""
    own = Sharding(96, dist.get_world_size()).positions(dist.get_rank())
    table = torch.randn(len(own), dtype=torch.float64).requires_grad_()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return score * torch.where(q_idx >= own[0], table[q_idx - own[0]], torch.nan)

    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, len(own), 8, dtype=torch.float64))
    attend(q, k, v, masks.causal(), mesh=line(), score_mod=score_mod).sum().backward()
    assert table.grad is not None
    assert table.grad.isfinite().all()


def test_a_rank_asks_a_score_mod_about_its_own_queries() -> None:
    on_ranks(3, of_own_queries)
