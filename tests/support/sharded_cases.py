"""Calls over ranks as values: what each rank runs, and the whole that its results must make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing import assert_close

from flexdilated import masks
from flexdilated.distributed import Sharding, attend, traffic
from flexdilated.distributed._heads import attend_heads
from flexdilated.distributed.group._ranks import Ranks
from flexdilated.testing import MEMORY_LAYOUTS, laid_out
from flexdilated.testing.strategies import shardings
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks
from tests.support.strategies import longnets, written_expressions
from tests.support.twins import Twin

# B batch, H query heads, G key/value heads, N tokens of all ranks, D head dim

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
Way = Mapping[str, Any]  # options of the call
WAYS: tuple[Way, ...] = ({"schedule": "exchange"}, {"schedule": "ring"})
HEADS: Way = {"schedule": "heads"}


@dataclass(frozen=True)
class ShardedCase:
    """A call over all tokens, (B, H, N, D) and (B, G, N, D), and how often each pair is allowed, (..., H, N, N)."""

    pattern: masks.Pattern | masks.Mixture
    counts: Tensor
    sharding: Sharding
    tensors: tuple[Tensor, ...]  # q, k, v, and sinks if there are any
    head_offset: int = 0
    num_heads_global: int | None = None
    through_lse: bool = True
    layouts: tuple[str, ...] = (MEMORY_LAYOUTS[0],) * 4  # in memory, of q, k, v and the gradient of out on each rank

    def __post_init__(self) -> None:
        laid = (laid_out(x, layout) for x, layout in zip(self.tensors[:3], self.layouts, strict=False))
        object.__setattr__(self, "tensors", (*laid, *self.tensors[3:]))

    def __repr__(self) -> str:
        shapes = [tuple(x.shape) for x in self.tensors]
        return f"{self.pattern!r} over {self.sharding}, {shapes}, heads from {self.head_offset}"

    @property
    def cotangents(self) -> tuple[Tensor, Tensor]:
        """Gradients to send back through out and lse."""
        generator = torch.Generator().manual_seed(1)
        q = self.tensors[0]
        out = torch.randn(*q.shape[:3], self.tensors[2].shape[3], generator=generator, dtype=torch.float64)
        lse = torch.randn(q.shape[:3], generator=generator, dtype=torch.float64)
        return laid_out(out.to(q.dtype), self.layouts[3]), lse.to(torch.promote_types(q.dtype, torch.float32))

    @cached_property
    def whole(self) -> tuple[Tensor, ...]:
        """(out, lse, dq, dk, dv and maybe the sinks' gradient) of one rank, by the definition, in float64."""
        leaves = [x.double().requires_grad_() for x in self.tensors]
        out, lse = oracle.attention(*leaves[:3], self.counts, None, *leaves[3:])
        grad_out, grad_lse = self.cotangents
        # A row without keys has a constant lse.
        sent = (out * grad_out).sum() + (lse * grad_lse).masked_fill(lse == -torch.inf, 0.0).sum() * self.through_lse
        return out.detach(), lse.detach(), *torch.autograd.grad(sent, leaves)


@dataclass(frozen=True)
class Shares:
    """What one rank has of (out, lse, dq, dk, dv), its share of the sinks' gradient, and bytes sent and received."""

    parts: tuple[Tensor, ...]
    sinks: Tensor | None
    sent: dict[str, int]
    received: dict[str, int]


def by_way(cases: Sequence[ShardedCase], ways: Sequence[Way] = WAYS) -> Iterator[tuple[ShardedCase, Way, list[Shares]]]:
    """What all ranks have of each case, each way, from one call of the ranks."""
    by_rank = on_ranks(cases[0].sharding.num_ranks, run, cases, ways)
    for place, case in enumerate(cases):
        for index, way in enumerate(ways):
            yield case, way, [shares[place][index] for shares in by_rank]


def run(cases: Sequence[ShardedCase], ways: Sequence[Way]) -> list[list[Shares]]:
    """On a rank: its shares of every case, each way."""
    return [[shares_of(case, **way) for way in ways] for case in cases]


def line() -> DeviceMesh:
    """On a rank: the mesh of all of them."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def compiled_on_the_last(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """On a rank: the function in one graph if it is the last; the others run it as it is, and do their part in it."""
    last = dist.get_rank() == dist.get_world_size() - 1
    return torch.compile(function, fullgraph=True, **options) if last else function


def leaves_of(case: ShardedCase) -> list[Tensor]:
    """On a rank: its shards of q, k and v, and the sinks if there are any, which want gradients."""
    here = case.sharding.positions(dist.get_rank())
    shards = [x[:, :, here] for x in case.tensors[:3]]
    shards = [laid_out(x, layout) for x, layout in zip(shards, case.layouts, strict=False)]
    return [x.requires_grad_() for x in (*shards, *(x.clone() for x in case.tensors[3:]))]


def call(case: ShardedCase, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **way: Any) -> Any:
    """On a rank: the case, with lse."""
    heads = {"head_offset": case.head_offset, "num_heads_global": case.num_heads_global, "enable_gqa": True}
    options = {"sharding": case.sharding, "sinks": sinks, "return_lse": True} | heads
    if way["schedule"] == "heads":
        options |= {name: value for name, value in way.items() if name != "schedule"}
        return attend_heads(q, k, v, case.pattern, ranks=Ranks.of(line()), **options)
    return attend(q, k, v, case.pattern, mesh=line(), **options, **way)


def shares_of(case: ShardedCase, **way: Any) -> Shares:
    leaves, here = leaves_of(case), case.sharding.positions(dist.get_rank())
    grad_out, grad_lse = (x[:, :, here] for x in case.cotangents)
    grad_out = laid_out(grad_out, case.layouts[3])
    traffic().reset()
    out, lse = call(case, *leaves, **way)
    outputs, grads = ((out, lse), (grad_out, grad_lse)) if case.through_lse else ((out,), (grad_out,))
    found = torch.autograd.grad(outputs, leaves, grads)
    parts = tuple(x.detach() for x in (out, lse, *found[:3]))
    counts = traffic()
    return Shares(parts, found[3] if leaves[3:] else None, dict(counts.sent), dict(counts.received))


def together(case: ShardedCase, shares: Sequence[Shares]) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv and maybe the sinks' gradient) over all tokens, from what the ranks have."""
    order = torch.cat([case.sharding.positions(rank) for rank in range(len(shares))]).argsort()
    whole = [torch.cat(parts, dim=2)[:, :, order] for parts in zip(*(each.parts for each in shares), strict=True)]
    sinks = [each.sinks for each in shares if each.sinks is not None]
    return (*whole, torch.stack(sinks).sum(0)) if sinks else tuple(whole)


def needed_bytes(case: ShardedCase, receiver: int, sender: int, schedule: str) -> int:
    """K and V of what the dense rule gives the receiver's queries of the sender's tokens.

    In an exchange each token and key/value head that some query needs, in any batch entry; in a ring whole runs of
    which a key is needed, in all heads.
    """
    k, width = case.tensors[1], max(x.shape[3] for x in case.tensors[:3])  # messages have one row length
    rows, columns = case.sharding.positions(receiver), case.sharding.positions(sender)
    if schedule == "ring":
        seen = case.counts.flatten(0, -3)[:, rows]
        runs = [run for run in case.sharding.ranges(sender) if seen[:, :, run.start : run.stop].any()]
        number = sum(map(len, runs)) * k.shape[1]
    else:
        allowed = case.counts.flatten(0, -4) if case.counts.dim() > 3 else case.counts[None]
        seen = allowed[:, :, rows][:, :, :, columns].bool().any(2).any(0)  # (H, keys)
        number = int(seen.unflatten(0, (k.shape[1], -1)).any(1).sum())
    return 2 * number * k.shape[0] * width * k.element_size()


def assert_whole(case: ShardedCase, way: Way, shares: Sequence[Shares]) -> None:
    """All ranks' results together are the definition's; keys' bytes are as many as the dense rule says."""
    for name, found, truth in zip(NAMES, together(case, shares), case.whole, strict=False):
        assert_close(found, truth, **TIGHT, msg=lambda text, name=name: f"{name} of {case}, {way}: {text}")
    schedule = way["schedule"]
    if schedule == "heads":
        return
    fetches = 2 if schedule == "ring" else 1  # in the backward once more
    for rank, share in enumerate(shares):
        others = [other for other in range(len(shares)) if other != rank]
        needed = sum(needed_bytes(case, rank, other, schedule) for other in others)
        wanted = sum(needed_bytes(case, other, rank, schedule) for other in others)
        moved = [side.get(role, 0) for role in ("keys", "gradients") for side in (share.received, share.sent)]
        assert moved == [fetches * needed, fetches * wanted, wanted, needed], f"bytes on rank {rank} of {case}, {way}"


def tensors_for(
    H: int, G: int, N: int, *, B: int = 1, D: int = 8, E: int = 0, sinks: bool = False, seed: int = 0, **kind: Any
) -> tuple[Tensor, ...]:
    """q, k, v and maybe sinks, in float64 by default. E: head dim of v; 0 for D."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, H, N, D), (B, G, N, D), (B, G, N, E or D), *[(H,)] * sinks]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(**kind) for shape in shapes)


@st.composite
def sharded_cases(draw: st.DrawFn, W: int, *, by_heads: bool = False) -> ShardedCase:
    """Any pattern that can be written down over 1 to 40 tokens, and any heads of it; by_heads: as many a rank."""
    num_heads = W * draw(st.integers(1, 2)) if by_heads else draw(st.integers(1, 4))
    twin: Twin = draw(st.one_of(written_expressions(num_heads), longnets()))
    N = draw(st.integers(1, 40))
    first = 0 if by_heads or not draw(st.booleans()) else draw(st.integers(0, num_heads - 1))
    H = num_heads if by_heads else draw(st.integers(1, num_heads - first))
    G = draw(st.sampled_from([heads for heads in range(1, H + 1) if H % heads == 0]))
    size = {
        "B": draw(st.integers(1, 2)),
        "D": draw(st.sampled_from([1, 4])),
        "E": draw(st.sampled_from([0, 3])),
        "seed": draw(st.integers(0, 999)),
    }
    tensors = tensors_for(H, G, N, sinks=draw(st.booleans()), **size)
    counts = oracle.counts(twin.rule, range(first, first + H), num_heads, torch.arange(N), torch.arange(N))
    sharding = draw(shardings(N, num_ranks=W))
    layouts = tuple(draw(st.sampled_from(MEMORY_LAYOUTS)) for _ in range(4))
    return ShardedCase(twin.pattern, counts, sharding, tensors, first, num_heads, draw(st.booleans()), layouts)


@st.composite
def block_cases(draw: st.DrawFn, W: int) -> ShardedCase:
    """Any blocks of keys for each block of queries: ranks whose queries see no own key, or no other, or none at all."""
    N, block = 48, 8
    rows = st.lists(st.sets(st.integers(0, N // block - 1), max_size=3).map(sorted), min_size=6, max_size=6)
    tables = draw(st.lists(rows, min_size=4, max_size=4))
    counts = oracle.counts(oracle.block_list(tables, block), range(4), 4, torch.arange(N), torch.arange(N))
    heads, seed = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 999))
    tensors = tensors_for(4, heads, N, B=2, D=4, sinks=draw(st.booleans()), seed=seed)
    sharding = draw(shardings(N, num_ranks=W))
    return ShardedCase(
        masks.block_list(tables, block=block), counts, sharding, tensors, through_lse=draw(st.booleans())
    )
