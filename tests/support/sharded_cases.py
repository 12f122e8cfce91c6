"""Calls of the ring as values: what each rank runs, and the whole that its results must make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from flexdilated import masks
from flexdilated._validate import run_time_tensors
from flexdilated.distributed.group._call import PlainCall
from flexdilated.distributed.group._ranks import Ranks
from flexdilated.distributed.group._sharding import Sharding
from flexdilated.distributed.group._traffic import traffic
from flexdilated.distributed.ring._op import ring_op
from flexdilated.testing import MEMORY_LAYOUTS, laid_out
from flexdilated.testing.strategies import shardings
from tests.support import oracle
from tests.support.strategies import longnets, written_expressions
from tests.support.twins import Twin

# B batch, H query heads, G key/value heads, N tokens of all ranks, D head dim

Call = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RingCase:
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
        out = torch.randn(q.shape, generator=generator, dtype=torch.float64)
        lse = torch.randn(q.shape[:3], generator=generator, dtype=torch.float64)
        return laid_out(out.to(q.dtype), self.layouts[3]), lse.to(torch.promote_types(q.dtype, torch.float32))


def whole_of(case: RingCase) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv and maybe the sinks' gradient) of one rank, by the definition, in float64."""
    leaves = [x.double().requires_grad_() for x in case.tensors]
    out, lse = oracle.attention(*leaves[:3], case.counts, None, *leaves[3:])
    grad_out, grad_lse = case.cotangents
    # A row without keys has a constant lse.
    sent = (out * grad_out).sum() + (lse * grad_lse).masked_fill(lse == -torch.inf, 0.0).sum() * case.through_lse
    grads = torch.autograd.grad(sent, leaves)
    return out.detach(), lse.detach(), *grads


@dataclass(frozen=True)
class Shares:
    """What one rank has of (out, lse, dq, dk, dv), its share of the sinks' gradient, and bytes sent and received."""

    parts: tuple[Tensor, ...]
    sinks: Tensor | None
    sent: dict[str, int]
    received: dict[str, int]


def run(cases: Sequence[RingCase], options: Mapping[str, Any] = MappingProxyType({})) -> list[Shares]:
    """On a rank: its shares of every case; options are other values of the call."""
    return [shares_of(case, all_ranks(), **options) for case in cases]


def all_ranks() -> Ranks:
    return Ranks.of(init_device_mesh("cpu", (dist.get_world_size(),)))


def shares_of(case: RingCase, ranks: Ranks, call: Call | None = None, **options: Any) -> Shares:
    here = case.sharding.positions(ranks.rank)
    shards = (x[:, :, here] for x in case.tensors[:3])
    leaves = [laid_out(x, layout).requires_grad_() for x, layout in zip(shards, case.layouts, strict=False)]
    sinks = [x.clone().requires_grad_() for x in case.tensors[3:]]
    grad_out, grad_lse = (x[:, :, here] for x in case.cotangents)
    grad_out = laid_out(grad_out, case.layouts[3])
    traffic().reset()
    out, lse = (call or call_ring)(case, ranks, *leaves, sinks=sinks[0] if sinks else None, **options)
    outputs, grads = ((out, lse), (grad_out, grad_lse)) if case.through_lse else ((out,), (grad_out,))
    found = torch.autograd.grad(outputs, [*leaves, *sinks], grads)
    parts = tuple(x.detach() for x in (out, lse, *found[:3]))
    counts = traffic()
    return Shares(parts, found[3] if sinks else None, dict(counts.sent), dict(counts.received))


def call_ring(
    case: RingCase, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The ring on a rank's shards, with defaults for what a case does not say."""
    heads = case.head_offset + q.shape[1] if case.num_heads_global is None else case.num_heads_global
    values = {"pattern": case.pattern.text, "scale": q.shape[-1] ** -0.5, "engine": "tiles", "block_size": ()}
    values |= {"head_offset": case.head_offset, "num_heads_global": heads, "sharding": case.sharding.numbers()}
    values |= {"group": ranks.name, "codec": None, "error_bound": 0.0, "pool": ""}
    return ring_op(q, k, v, sinks, run_time_tensors(case.pattern, None), *PlainCall(**(values | options)))


def together(case: RingCase, shares: Sequence[Shares]) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv and maybe the sinks' gradient) over all tokens, from what the ranks have."""
    order = torch.cat([case.sharding.positions(rank) for rank in range(len(shares))]).argsort()
    whole = [torch.cat(parts, dim=2)[:, :, order] for parts in zip(*(each.parts for each in shares), strict=True)]
    sinks = [each.sinks for each in shares if each.sinks is not None]
    return (*whole, torch.stack(sinks).sum(0)) if sinks else tuple(whole)


def least_bytes(case: RingCase, receiver: int, sender: int) -> int:
    """Bytes of the sender's runs of which the dense rule gives some query of the receiver a key: K and V."""
    rows = case.counts.flatten(0, -3)[:, case.sharding.positions(receiver)]
    needed = [run for run in case.sharding.ranges(sender) if rows[:, :, run.start : run.stop].any()]
    k = case.tensors[1]
    return 2 * sum(map(len, needed)) * k.shape[0] * k.shape[1] * k.shape[3] * k.element_size()


def tensors_for(
    H: int, G: int, N: int, *, B: int = 1, D: int = 8, sinks: bool = False, seed: int = 0, **kind: Any
) -> tuple[Tensor, ...]:
    """q, k, v and maybe sinks, in float64 unless told."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, heads, N, D) for heads in (H, G, G)] + [(H,)] * sinks
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(**kind) for shape in shapes)


@st.composite
def ring_cases(draw: st.DrawFn, W: int) -> RingCase:
    """Any pattern that can be written down over 1 to 40 tokens, and any heads of it."""
    num_heads = draw(st.integers(1, 4))
    twin: Twin = draw(st.one_of(written_expressions(num_heads), longnets()))
    N = draw(st.integers(1, 40))
    first = draw(st.integers(0, num_heads - 1)) if draw(st.booleans()) else 0
    H = draw(st.integers(1, num_heads - first))
    G = draw(st.sampled_from([heads for heads in range(1, H + 1) if H % heads == 0]))
    size = {"B": draw(st.integers(1, 2)), "D": draw(st.sampled_from([1, 4])), "seed": draw(st.integers(0, 999))}
    tensors = tensors_for(H, G, N, sinks=draw(st.booleans()), **size)
    counts = oracle.counts(twin.rule, range(first, first + H), num_heads, torch.arange(N), torch.arange(N))
    sharding = draw(shardings(N, num_ranks=W))
    layouts = tuple(draw(st.sampled_from(MEMORY_LAYOUTS)) for _ in range(4))
    return RingCase(twin.pattern, counts, sharding, tensors, first, num_heads, draw(st.booleans()), layouts)
