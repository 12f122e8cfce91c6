"""distributed.attend as a user meets it: both schedules, compiled, failing, and with ranks that disagree."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import DistError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flexdilated import masks
from flexdilated.distributed import BufferPool, Sharding, attend
from flexdilated.distributed.wire._pool import PoolStatistics
from tests.support.rank_worker import set_group_timeout
from tests.support.ranks import on_ranks, outcomes_on_ranks

PATTERN = masks.longnet((16, 32, 64), (1, 2, 4)) & masks.causal()
N = 100


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shards(sharding: Sharding, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    here = sharding.positions(dist.get_rank())
    q, k, v = torch.randn(3, 1, 4, N, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    return [x[:, :, here].requires_grad_() for x in (q, k, v)]


def compiled(schedule: str) -> float:
    """The largest difference that compiling makes, in output and gradients; a graph break is an error."""
    sharding, where = Sharding(N, dist.get_world_size(), "zigzag"), mesh()

    def call(q, k, v):
        return attend(q * 2, k, v, PATTERN, mesh=where, sharding=sharding, schedule=schedule) * 2

    tensors = shards(sharding)
    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = function(*tensors)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), tensors)))
    return max(float((x - y).abs().max()) for x, y in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["exchange", "ring", "auto"])
def test_compiled_without_a_graph_break(schedule: str):
    assert max(on_ranks(2, compiled, schedule)) == 0.0


def compiled_with_documents() -> float:
    sharding, where = Sharding(N, dist.get_world_size()), mesh()
    pattern = masks.causal() & masks.documents("ids")

    def call(q, k, v, ids):
        return attend(q, k, v, pattern, mesh=where, sharding=sharding, schedule="exchange", bindings={"ids": ids})

    tensors, worst = shards(sharding), 0.0
    function = torch.compile(call, fullgraph=True, backend="aot_eager")
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


def flex_forward() -> tuple[float, str]:
    """How far flex, eager and in one graph, is from tiles, and what it answers where it needs an lse."""
    sharding, where = Sharding(N, dist.get_world_size(), "zigzag"), mesh()
    window = masks.causal() & masks.local_window(left=40, right=0)
    q, k, v = (x.detach() for x in shards(sharding))
    options: dict[str, Any] = {"mesh": where, "sharding": sharding}

    def call(engine: str) -> torch.Tensor:
        return attend(q, k, v, window, schedule="exchange", engine=engine, **options)

    flex = (call("flex"), torch.compile(call, fullgraph=True, backend="eager")("flex"))
    with pytest.raises(ValueError, match="flex gives no lse on CPU") as error:
        attend(q, k, v, window, schedule="ring", engine="flex", **options)
    return max(float((each - call("tiles")).abs().max()) for each in flex), str(error.value)


@pytest.mark.slow
def test_flex_attends_to_what_came():
    for difference, told in on_ranks(2, flex_forward):
        assert difference < 1e-5
        assert "engine='tiles' serves it" in told


def dying(when: int) -> tuple[str, PoolStatistics] | None:
    """Rank 1 dies at its transfer number `when`; the others say what they were told, and what they have left."""
    pool, sharding, where = BufferPool("cpu", threshold_bytes=0), Sharding(N, 3), mesh()
    transfers, transfer = [], dist.all_to_all_single

    def dies(*args, **options):
        transfers.append(None)
        if len(transfers) == when:
            os._exit(7)
        return transfer(*args, **options)

    tensors, options = shards(sharding), {"mesh": where, "sharding": sharding, "schedule": "exchange"}
    attend(*tensors, PATTERN, **options).sum().backward()  # plans, so that none is made while others wait
    set_group_timeout(4)
    if dist.get_rank() == 1:
        dist.all_to_all_single = dies
    try:
        for _ in range(2):
            out = attend(*tensors, PATTERN, **options, pool=pool)
            out.sum().backward()
    except DistError as error:
        return str(error), pool.statistics
    return None


@pytest.mark.parametrize("when", [1, 2, 3])
def test_a_rank_that_dies_leaves_no_other_waiting_and_no_buffer_leased(when: int):
    """In the first forward, the first backward, and the second forward."""
    outcomes = outcomes_on_ranks(3, dying, when)
    assert "died with exit code 7" in (outcomes[1].error or "")
    for outcome in (outcomes[0], outcomes[2]):
        told, statistics = outcome.result
        assert "the exchange of " in told
        assert "timeout of the process group is 4 s" in told
        assert statistics.leased_bytes == 0
        assert statistics.num_leases + statistics.num_plain == 2 * when


class Unused(torch.autograd.Function):
    """Zeros that send no gradient back: not even zeros."""

    @staticmethod
    def forward(ctx, x):
        return x * 0

    @staticmethod
    def backward(ctx, *_):
        return None


def used_elsewhere(schedule: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients where the first rank makes no use of its output, and where it uses it zero times."""
    found = []
    for ignored in (Unused.apply, lambda x: x * 0):
        tensors = shards(Sharding(N, 2))
        out = attend(*tensors, PATTERN, mesh=mesh(), schedule=schedule)
        found.append(torch.autograd.grad((ignored(out) if dist.get_rank() == 0 else out).sum(), tensors))
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("schedule", ["exchange", "ring"])
def test_a_rank_that_makes_no_use_of_its_output_keeps_no_other_waiting(schedule: str):
    for pairs in on_ranks(2, used_elsewhere, schedule):
        for unused, zero in pairs:
            assert torch.equal(unused, zero)


def disagreeing(what: str) -> str:
    """What this rank is told where rank 1 asks for something else."""
    other = dist.get_rank() == 1
    options: dict[str, Any] = {"sharding": Sharding(N, 2), "schedule": "exchange"}
    pattern, dtype = PATTERN, torch.float32
    if what == "pattern" and other:
        pattern = masks.causal()
    if what == "sharding" and other:
        options["sharding"] = Sharding(N + 1, 2, shard_lengths=(51, 50))
    if what == "dtype" and other:
        dtype = torch.bfloat16
    if what == "schedule" and other:
        options["schedule"] = "ring"
    if what == "scale" and other:
        options["scale"] = 0.5
    if what == "codec" and other:
        options["codec"] = "int8"
    tensors = shards(Sharding(N, 2), dtype)
    with pytest.raises(ValueError, match="disagree") as error:
        attend(*tensors, pattern, mesh=mesh(), **options)
    return str(error.value)


@pytest.mark.parametrize("what", ["pattern", "sharding", "dtype", "schedule", "scale", "codec"])
def test_ranks_that_disagree_are_told_in_what(what: str):
    told = on_ranks(2, disagreeing, what)
    for text in told:
        assert f"disagree in {what}" in text
        assert "rank 0 has" in text
        assert "rank 1 has" in text


def compiled_sizes(schedule: str, dynamic: bool | None) -> int:
    """How many graphs three sizes take, each as exact as without compiling."""
    torch._dynamo.reset()  # the limit on graphs counts those of calls before
    where, W = mesh(), dist.get_world_size()
    graphs = CompileCounterWithBackend("aot_eager")

    def call(q, k, v):
        return attend(q, k, v, PATTERN, mesh=where, schedule=schedule)

    function = torch.compile(call, fullgraph=True, backend=graphs, dynamic=dynamic)
    for batch, tokens in ((1, 24), (2, 24), (2, 31)):
        generator = torch.Generator().manual_seed(dist.get_rank() + W * tokens)
        tensors = [torch.randn(batch, 4, tokens, 16, generator=generator, requires_grad=True) for _ in range(3)]
        outs = [each(*tensors) for each in (call, function)]
        grads = [torch.autograd.grad(out.square().sum(), tensors) for out in outs]
        for x, y in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
            assert torch.equal(x, y)
    return graphs.frame_count


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "dynamic"), [("exchange", None), ("ring", True)])
def test_other_sizes_are_other_graphs(schedule: str, dynamic: bool | None):
    """What is sent is planned for one size: sizes become constants, where torch.compile would leave them open."""
    assert on_ranks(2, compiled_sizes, schedule, dynamic) == [3, 3]


def other_values(schedule: str) -> list[str]:
    """What this rank is told where the ranks' run-time tensors or wishes for gradients differ."""
    rank, where, told = dist.get_rank(), mesh(), []
    tensors = [x.detach() for x in shards(Sharding(N, 2))]
    visible = masks.visible_keys(torch.arange(N) % 3 != rank) & masks.causal()
    packed = masks.causal() & masks.documents("ids")
    ids = {"ids": torch.arange(N) // (5 + rank)}
    mine = [x.clone().requires_grad_() for x in tensors] if rank == 0 else tensors
    for given, pattern, bindings in ((tensors, visible, None), (tensors, packed, ids), (mine, PATTERN, None)):
        with pytest.raises(ValueError, match="disagree") as error:
            attend(*given, pattern, mesh=where, schedule=schedule, bindings=bindings)
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("schedule", ["exchange", "ring"])
def test_values_and_wishes_that_differ_are_told(schedule: str):
    for told in on_ranks(2, other_values, schedule):
        for text, what in zip(told, ("visible_keys", "ids", "gradients wanted"), strict=True):
            assert what in text
