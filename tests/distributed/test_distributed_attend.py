"""distributed.attend as a user meets it: compiled, with ranks that disagree, and with arguments that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from flexdilated import attend as one_device
from flexdilated import masks
from flexdilated.distributed import Sharding, attend
from flexdilated.distributed._heads import attend_heads
from flexdilated.distributed.group import Ranks
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import compiled_on_the_last, line

PATTERN = masks.longnet((16, 32, 64), (1, 2, 4)) & masks.causal()
N = 100


def shards(sharding: Sharding, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    here = sharding.positions(dist.get_rank())
    q, k, v = torch.randn(3, 1, 4, N, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    return [x[:, :, here].requires_grad_() for x in (q, k, v)]


def compiled_sizes(schedule: str, dynamic: bool | None) -> int:
    """How many graphs three sizes take, each as exact as without compiling, with sinks and through the lse."""
    torch._dynamo.reset()  # the limit on graphs counts those of calls before
    where, W = line(), dist.get_world_size()
    graphs = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, sinks):
        out, lse = attend(q.sin(), k, v, PATTERN, mesh=where, schedule=schedule, sinks=sinks, return_lse=True)
        return out * 2, lse

    function = compiled_on_the_last(call, backend=graphs, dynamic=dynamic)
    for batch, tokens in ((1, 24), (2, 24), (2, 31)):
        generator = torch.Generator().manual_seed(dist.get_rank() + W * tokens)
        tensors = [torch.randn(batch, 4, tokens, 16, generator=generator, requires_grad=True) for _ in range(3)]
        tensors.append(torch.randn(4, generator=generator, requires_grad=True))
        results = [each(*tensors) for each in (call, function)]
        grads = [torch.autograd.grad((out.square().sum(), lse.sum()), tensors) for out, lse in results]
        for x, y in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
            assert torch.equal(x, y)
    return graphs.frame_count


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "dynamic"), [("exchange", None), ("ring", True)])
def test_other_sizes_are_other_graphs(schedule: str, dynamic: bool | None):
    """What is sent is planned for one size: sizes become constants, where torch.compile would leave them open."""
    assert on_ranks(2, compiled_sizes, schedule, dynamic) == [0, 3]


def compiled_with_documents() -> float:
    sharding, where = Sharding(N, dist.get_world_size(), "zigzag"), line()
    pattern = masks.causal() & masks.documents("ids")

    def call(q, k, v, ids):
        return attend(q, k, v, pattern, mesh=where, sharding=sharding, schedule="exchange", bindings={"ids": ids})

    tensors, worst = shards(sharding), 0.0
    function = compiled_on_the_last(call, backend="aot_eager")
    for cut in (30, 60):  # one graph for both: how many keys come depends on values
        ids = (torch.arange(N) >= cut).long()
        one, other = call(*tensors, ids), function(*tensors, ids)
        grads = [torch.autograd.grad(out.square().sum(), tensors) for out in (one, other)]
        pairs = [(one, other), *zip(*grads, strict=True)]
        worst = max(worst, *(float((x - y).detach().abs().max()) for x, y in pairs))
    return worst


@pytest.mark.slow
def test_compiled_with_tensors_whose_values_decide_what_comes():
    assert max(on_ranks(2, compiled_with_documents)) == 0.0


def with_shared_keys() -> float:
    """Distance of output and gradients from those of one rank, over both schedules and head parallelism."""
    where, worst = line(), 0.0
    q, k, v = torch.randn(3, 3, 4, N, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = [x.requires_grad_() for x in (q, k[:1].clone(), v[:1].clone())]
    out = one_device(*whole, PATTERN)
    wanted = out, *torch.autograd.grad(out.square().sum(), whole)
    sharding = Sharding(N, dist.get_world_size())
    here = sharding.positions(dist.get_rank())
    for schedule in ("exchange", "ring", "heads"):
        mine = [x.detach()[:, :, here].requires_grad_() for x in whole]
        if schedule == "heads":
            out = attend_heads(*mine, PATTERN, ranks=Ranks.of(where), sharding=sharding)
        else:
            out = attend(*mine, PATTERN, mesh=where, schedule=schedule)
        found = out, *torch.autograd.grad(out.square().sum(), mine)
        worst = max(
            worst, *(float((x - y[:, :, here]).detach().abs().max()) for x, y in zip(found, wanted, strict=True))
        )
    return worst


@pytest.mark.slow
def test_keys_of_batch_1_are_those_of_every_entry():
    assert max(on_ranks(2, with_shared_keys)) < 1e-12


def disagreeing() -> dict[str, str]:
    """What this rank is told where rank 1 asks for something else, has other values, or wants no gradients."""
    rank, where, told = dist.get_rank(), line(), {}
    plain = [x.detach() for x in shards(Sharding(N, 2))]
    visible = masks.visible_keys(torch.arange(N) % 3 != rank) & masks.causal()
    packed = masks.causal() & masks.documents("ids")
    calls: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "pattern": (plain, masks.causal() if rank else PATTERN, {}),
        "sharding": (plain, PATTERN, {"sharding": Sharding(N + rank, 2, shard_lengths=(50 + rank, 50))}),
        "dtype": ([x.bfloat16() for x in plain] if rank else plain, PATTERN, {}),
        "schedule": (plain, PATTERN, {"schedule": "ring" if rank else "exchange"}),
        "scale": (plain, PATTERN, {"scale": 0.5 if rank else None}),
        "codec": (plain, PATTERN, {"codec": "int8" if rank else None}),
        "run-time tensor 'visible_keys'": (plain, visible, {}),
        "run-time tensor 'ids'": (plain, packed, {"bindings": {"ids": torch.arange(N) // (5 + rank)}}),
        "gradients wanted": (plain if rank else shards(Sharding(N, 2)), PATTERN, {}),
    }
    for place, (what, (tensors, pattern, options)) in enumerate(calls.items()):
        schedule = ("exchange", "ring")[place % 2]
        with pytest.raises(ValueError, match="disagree") as error:
            attend(*tensors, pattern, mesh=where, **{"schedule": schedule, **options})
        told[what] = str(error.value)
    return told


def test_ranks_that_disagree_are_told_in_what():
    for told in on_ranks(2, disagreeing):
        for what, text in told.items():
            assert f"disagree in {what}" in text
            assert "rank 0 has" in text
            assert "rank 1 has" in text
