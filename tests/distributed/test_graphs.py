"""Calls over ranks in one graph, on the last rank, are those of eager code, which the others run."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding, attend, shard, unshard
from tests.distributed.test_distributed_modules import longnet, text
from tests.support.agreement import TIGHT
from tests.support.compilers import without_inductor
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import SEED, ShardedCase, compiled_on_the_last, line, reading, tensors_for

PATTERN = masks.longnet((16, 32), (1, 2)) & masks.causal()


def compare(function: Callable[..., Tensor], inputs: Sequence[Tensor], leaves: Sequence[Tensor], **how: Any) -> None:
    """Output, and gradients of the leaves, in eager code and in a graph; generators of ranks differ."""
    torch.compiler.reset()  # other tests in this process compiled the same method
    results = []
    for each in (function, compiled_on_the_last(function, **{"backend": "aot_eager", **how})):
        torch.manual_seed(SEED + dist.get_rank())
        out = each(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    assert_close(*results, **TIGHT)


def shards(tokens: int, order: Any = "contiguous") -> list[Tensor]:
    """On a rank: its part of q, k and v."""
    here = Sharding(tokens, dist.get_world_size(), order).positions(dist.get_rank())
    return [x[:, :, here].requires_grad_() for x in tensors_for(4, 4, tokens)]


def with_dropout() -> None:
    """Every schedule, with zero keys; the sharding follows from the shape."""
    pattern = masks.longnet([8, 20], [1, 2], padding="zeros")
    for schedule in ("exchange", "ring", "heads"):
        module = fd.BlockSparseAttention(pattern, mesh=line(), schedule=schedule, dropout=0.3)
        # The ops of the others go through AOT below.
        how = {} if schedule == "heads" else {"backend": "eager", "dynamic": True}
        compare(module, qkv := shards(24), qkv, **how)


def with_a_score_mod() -> None:
    learned = ShardedCase(PATTERN, None, Sharding(1, 1), tensors_for(4, 4, 1), biased=True).learned()
    module = fd.BlockSparseAttention(masks.causal(), mesh=line())
    call = lambda *qkv: module(*qkv, score_mod=reading(learned))  # noqa: E731
    compare(call, qkv := shards(12), [*qkv, *learned], backend="eager")


def with_documents() -> None:
    """One graph for both: how many keys come depends on values."""
    sharding, pattern = Sharding(40, 2, "zigzag"), masks.causal() & masks.documents("ids")

    def call(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        how = {"sharding": sharding, "schedule": "exchange", "bindings": {"ids": ids}}
        return attend(q, k, v, pattern, mesh=where, **how)

    where, qkv, graphs = line(), shards(40, "zigzag"), CompileCounterWithBackend("aot_eager")
    function = compiled_on_the_last(call, backend=graphs)
    for cut in (12, 25):
        ids = (torch.arange(40) >= cut).long()
        results = [(out := each(*qkv, ids), *torch.autograd.grad(out.square().sum(), qkv)) for each in (call, function)]
        assert_close(*results, rtol=0, atol=0)
    assert graphs.frame_count == dist.get_rank()


def longnets() -> None:
    tokens, following = (x[:, Sharding(41, 2, "zigzag").positions(dist.get_rank())] for x in text())
    for schedule in ("auto", "heads"):
        model = longnet(mesh=line(), sharding=Sharding(41, 2, "zigzag"), schedule=schedule, depth=1)
        loss = partial(lambda model: F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()), model)
        compare(loss, [], list(model.parameters()), backend="eager")


def there_and_back() -> None:
    """`shard` and `unshard`, with open sizes."""
    where = line()

    def roundtrip(x: Tensor, sharding: Sharding) -> Tensor:
        return unshard(shard(x, where, sharding).square(), where, sharding)

    function = compiled_on_the_last(roundtrip, backend="aot_eager", dynamic=True)
    for sharding in (Sharding(7, 2), Sharding(9, 2, "zigzag")):
        x = torch.arange(sharding.num_tokens * 3.0).view(1, 1, -1, 3).requires_grad_()
        outs = [each(x, sharding) for each in (roundtrip, function)]
        assert_close(*((out, *torch.autograd.grad(out.pow(2).sum(), x)) for out in outs), rtol=0, atol=0)


def by_flex() -> None:
    """Only transfers are ops, then; tests/engines/test_placed_call.py has its parts."""
    where, qkv = line(), [x.detach().float() for x in shards(30)]

    def exchanged(engine: str) -> Tensor:
        return attend(*qkv, masks.local_window(left=10, right=0), mesh=where, schedule="exchange", engine=engine)

    with without_inductor():
        out = compiled_on_the_last(exchanged)("flex")
    assert_close(out, exchanged("aten"), rtol=1e-5, atol=1e-5)


def inductor() -> None:
    module = fd.BlockSparseAttention(PATTERN, mesh=line(), schedule="exchange")
    compare(module, qkv := shards(20), qkv, backend="inductor")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        *(with_documents, there_and_back, by_flex, inductor),
        *(pytest.param(each, marks=pytest.mark.thorough) for each in (with_dropout, with_a_score_mod, longnets)),
    ],
    ids=lambda function: function.__name__,
)
def test_a_graph_is_as_eager_code(function: Callable[[], None]) -> None:
    on_ranks(2, function)


def compiled_sizes(schedule: str, dynamic: bool | None) -> int:
    """How many graphs two sizes take, each as exact as without compiling, with sinks and through the lse."""
    torch._dynamo.reset()  # the limit on graphs counts those of calls before
    where, W = line(), dist.get_world_size()
    graphs = CompileCounterWithBackend("aot_eager")

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(q.sin(), k, v, PATTERN, mesh=where, schedule=schedule, sinks=sinks, return_lse=True)
        return out * 2, lse

    function = compiled_on_the_last(call, backend=graphs, dynamic=dynamic)
    for batch, tokens in ((1, 12), (2, 15)):
        generator = torch.Generator().manual_seed(dist.get_rank() + W * tokens)
        tensors = [torch.randn(batch, 4, tokens, 8, generator=generator, requires_grad=True) for _ in range(3)]
        tensors.append(torch.randn(4, generator=generator, requires_grad=True))
        results = [each(*tensors) for each in (call, function)]
        grads = [torch.autograd.grad((out.square().sum(), lse.sum()), tensors) for out, lse in results]
        for x, y in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
            assert torch.equal(x, y)
    return graphs.frame_count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "dynamic"), [pytest.param("exchange", None, marks=pytest.mark.thorough), ("ring", True)]
)
def test_other_sizes_are_other_graphs(schedule: str, dynamic: bool | None) -> None:
    """What is sent is planned for one size: sizes become constants, where torch.compile would leave them open."""
    assert on_ranks(2, compiled_sizes, schedule, dynamic) == [0, 2]
