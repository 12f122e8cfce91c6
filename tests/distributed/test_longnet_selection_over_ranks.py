"""LongNets whose layers choose their keys from the data, over ranks: loss and gradients of one rank."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

import flexdilated as fd
from flexdilated.distributed import Sharding
from tests.distributed.test_selection_over_ranks import SHARDINGS, N, summed
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import compiled_on_the_last, line


def config(**changes: Any) -> fd.LongNetConfig:
    selection = fd.SelectedLayers(block=4, most=2, layers=(1,), gradient="bias", query_block=4)
    sizes = {"vocab_size": 17, "embed_dim": 24, "depth": 2, "num_heads": 6, "num_kv_heads": 3}
    branches = {"segment_lengths": (8, 32), "dilation_rates": (1, 4), "selection": selection}
    return fd.LongNetConfig(**(sizes | branches | changes))


def longnet(changes: dict[str, Any], **over_ranks: Any) -> fd.LongNet:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return fd.LongNet(config(**changes), **over_ranks).double()


def loss_of(model: Any, tokens: Tensor, held: Tensor, **call: Any) -> Tensor:
    """A sum over tokens, so that shards' losses add up to the whole text's."""
    logits = model(tokens[:, held], **call)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, held + 1].flatten(), reduction="sum")


def text() -> Tensor:
    return torch.randint(17, (2, N + 1), generator=torch.Generator().manual_seed(1))


def train_longnet(
    sharding: Sharding, changes: dict[str, Any], call: dict[str, Any], schedule: str, trace: bool
) -> None:
    model = longnet(changes, mesh=line(), sharding=sharding, schedule=schedule)
    run = compiled_on_the_last(model, backend="aot_eager") if trace else model
    one = longnet(changes)
    loss = loss_of(run, text(), sharding.positions(dist.get_rank()), **call)
    expected = loss_of(one, text(), torch.arange(N), **call)
    for each in (loss, expected):
        each.backward()
    assert_close(summed(loss), expected.detach(), **TIGHT)
    for mine, true in zip(model.parameters(), one.parameters(), strict=True):
        assert_close(summed(mine.grad), true.grad, **TIGHT)


PADDED = {"key_padding_mask": torch.arange(N) >= torch.tensor([[N - 3], [N - 20]])}
MODELS = {
    "padded": ("zigzag", {}, PADDED, "heads"),
    "all layers choose": ("ragged zigzag", {"selection": fd.SelectedLayers(block=4, most=2)}, {}, "ring"),
    "checkpoint": ("ragged", {"checkpoint": True}, {}, "exchange"),
    "in no order": ("contiguous", {"causal": False, "checkpoint": True}, PADDED, "auto"),
}


def train_longnets() -> None:
    for sharding, changes, call, schedule in MODELS.values():
        train_longnet(SHARDINGS[sharding], changes, call, schedule, False)


def test_longnet_is_that_of_one_rank() -> None:
    """Loss and gradients, with layers that attend by a pattern beside those that choose."""
    on_ranks(3, train_longnets)


def test_longnet_traces_without_a_graph_break() -> None:
    """One layer, which chooses; those that attend by a pattern are traced in test_distributed_modules.py."""
    changes = {"depth": 1, "selection": replace(config().selection, layers=(0,))}
    on_ranks(3, train_longnet, SHARDINGS["ragged zigzag"], changes, {}, "exchange", True)


def refusals() -> list[str]:
    mesh, said = line(), []
    selector = fd.BlockSelector(block=4, choose=fd.TopK(2))

    def assigned(layer: fd.SelectedAttention, **over_ranks: Any) -> None:
        model = longnet({}, **over_ranks)
        model.blocks[0].selected = layer
        model(text()[:, :8])

    for call in (
        lambda: longnet({}, mesh=mesh).new_caches(),
        lambda: assigned(fd.SelectedAttention(selector), mesh=mesh),
        lambda: assigned(fd.SelectedAttention(selector, mesh=mesh)),
        lambda: assigned(fd.SelectedAttention(selector, mesh=mesh, sharding=Sharding(16, 2, "zigzag")), mesh=mesh),
    ):
        with pytest.raises(ValueError, match=r"must|needs") as error:
            call()
        said.append(str(error.value))
    return said


def test_what_it_refuses() -> None:
    assigned = "the attention that is assigned to a block must have the mesh and the sharding of its model"
    expected = ["new_caches needs a model on one rank", *[assigned] * 3]
    for found, beginning in zip(on_ranks(2, refusals)[0], expected, strict=True):
        assert found.startswith(beginning), found
