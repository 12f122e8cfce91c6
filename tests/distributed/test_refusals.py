"""What ranks refuse, before anything is sent: calls in which they disagree, and what does not go over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding, attend, traffic, unshard
from tests.distributed.test_distributed_modules import ROWS, N, longnet, text
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import line

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
