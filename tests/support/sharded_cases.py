"""Calls over ranks as values: what each rank runs, and the whole that its results must make."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding, _attend, attend, traffic
from flexdilated.distributed._heads import attend_heads
from flexdilated.distributed.group._ranks import Ranks
from flexdilated.engines import ScoreMod
from flexdilated.engines.flex import _flex_op
from flexdilated.testing import MEMORY_LAYOUTS, laid_out
from flexdilated.testing.strategies import shardings
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.dense_flex import dense_flex
from tests.support.ranks import on_ranks
from tests.support.run_time_strategies import packed_cases
from tests.support.strategies import longnets, written_expressions
from tests.support.twins import Twin

# B batch, H query heads, G key/value heads, N tokens of all ranks, D head dim

NAMES = ("out", "lse", "dq", "dk", "dv", "sums over ranks")
SEED, DISTANCES = 7, 7
T = TypeVar("T")
Way = Mapping[str, Any]  # options of the call
WAYS: tuple[Way, ...] = ({"schedule": "exchange"}, {"schedule": "ring"})
HEADS: Way = {"schedule": "heads"}

# A failure is shown as it was drawn: to shrink it takes a call of all ranks a step.
DRAWN = settings(max_examples=max(2, settings.default.max_examples // 20), phases=(Phase.reuse, Phase.generate))


@dataclass(frozen=True)
class ShardedCase:
    """A call over all tokens, (B, H, N, D) and (B, G, N, D), and how often each pair is allowed, (..., H, N, N).

    The truth is the dense oracle's or, of calls with dropout, a score_mod or no counts, that of engine "reference".
    """

    pattern: masks.Pattern | masks.Mixture
    counts: Tensor | None
    sharding: Sharding
    tensors: tuple[Tensor, ...]  # q, k, v, and sinks if there are any
    head_offset: int = 0
    num_heads_global: int | None = None
    through_lse: bool = True
    layouts: tuple[str, ...] = (MEMORY_LAYOUTS[0],) * 4  # in memory, of q, k, v and the gradient of out on each rank
    dropout_p: float = 0.0
    biased: bool = False  # by a score_mod that reads all its arguments, and trained tensors
    scaled: bool = False  # by a trained scale of each head

    def __post_init__(self) -> None:
        laid = (laid_out(x, layout) for x, layout in zip(self.tensors[:3], self.layouts, strict=False))
        object.__setattr__(self, "tensors", (*laid, *self.tensors[3:]))

    def __repr__(self) -> str:
        shapes = [tuple(x.shape) for x in self.tensors]
        features = f"heads from {self.head_offset}, dropout {self.dropout_p}, {self.biased=}, {self.scaled=}"
        return f"{self.pattern!r} over {self.sharding}, {shapes}, {features}"

    @property
    def cotangents(self) -> tuple[Tensor, Tensor]:
        """Gradients to send back through out and lse."""
        generator = torch.Generator().manual_seed(1)
        q = self.tensors[0]
        out = torch.randn(*q.shape[:3], self.tensors[2].shape[3], generator=generator, dtype=torch.float64)
        lse = torch.randn(q.shape[:3], generator=generator, dtype=torch.float64)
        return laid_out(out.to(q.dtype), self.layouts[3]), lse.to(torch.promote_types(q.dtype, torch.float32))

    @property
    def options(self) -> dict[str, Any]:
        heads = {"head_offset": self.head_offset, "num_heads_global": self.num_heads_global}
        return {**heads, "dropout_p": self.dropout_p, "enable_gqa": True, "return_lse": True}

    def learned(self) -> list[Tensor]:
        """What is trained beside q, k, v and sinks: scales (H,), a table of biases (H, distances) and slopes (H,)."""
        heads = self.num_heads_global or self.tensors[0].shape[1]
        generator = torch.Generator().manual_seed(3)
        shapes = [(self.tensors[0].shape[1],)] * self.scaled + [(heads, DISTANCES), (heads,)] * self.biased
        return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    @cached_property
    def whole(self) -> tuple[Tensor, ...]:
        """(out, lse, dq, dk, dv and, if there are any, gradients that ranks share) of one rank, in float64."""
        leaves = [x.double().requires_grad_() for x in self.tensors]
        learned, sinks = self.learned(), leaves[3] if leaves[3:] else None
        scale = learned[0] if self.scaled else None
        if self.counts is None or self.dropout_p or self.biased:
            torch.manual_seed(SEED)
            how = {"score_mod": reading(learned[-2:]) if self.biased else None, "scale": scale, "sinks": sinks}
            how["engine"] = "reference"
            out, lse = fd.attend(*leaves[:3], self.pattern, **how, **self.options)
        else:
            scale = None if scale is None else scale.reshape(-1, 1, 1)
            out, lse = oracle.attention(*leaves[:3], self.counts, scale, sinks)
        grad_out, grad_lse = self.cotangents
        # A row without keys has a constant lse.
        sent = (out * grad_out).sum() + (lse * grad_lse).masked_fill(lse == -torch.inf, 0.0).sum() * self.through_lse
        found = torch.autograd.grad(sent, [*leaves, *learned])
        shared = [torch.cat([x.flatten() for x in found[3:]])] if found[3:] else []
        return out.detach(), lse.detach(), *found[:3], *shared


def reading(held: list[Tensor]) -> ScoreMod:
    """A function that reads all of its arguments, and tensors of a list."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        table, slopes = held
        return score * (1 + 0.1 * b) + table[h, (q_idx - k_idx) % DISTANCES] - slopes[h].cos() * 0.01 * k_idx

    return score_mod


@dataclass(frozen=True)
class Shares:
    """What one rank has of (out, lse, dq, dk, dv), its share of other gradients, and bytes sent and received."""

    parts: tuple[Tensor, ...]
    shared: Tensor | None
    sent: dict[str, int]
    received: dict[str, int]


def ways_of(case: ShardedCase, engine: str | None = None) -> list[Way]:
    """The schedules that serve a case, by this engine: a ring takes no score_mod, whole heads go round all ranks.

    A rank that has whole heads computes with any engine: with "reference" in place of "portable".
    """
    ways = [{"schedule": "auto"}] if case.biased else WAYS  # which then is an exchange
    found = [way | {"engine": engine} for way in ways]
    heads = case.tensors[0].shape[1] % case.sharding.num_ranks == 0
    return [*found, *[HEADS | {"engine": "reference" if engine == "portable" else None}] * heads]


def by_way(
    cases: Sequence[ShardedCase], ways: Sequence[Way] | None = WAYS
) -> Iterator[tuple[ShardedCase, Way, list[Shares]]]:
    """What all ranks have of each case, each way, or each that serves it, from one call of the ranks."""
    asked = [(case, ways_of(case) if ways is None else ways) for case in cases]
    yield from by_each_way(asked)


def by_each_way(asked: Sequence[tuple[ShardedCase, Sequence[Way]]]) -> Iterator[tuple[ShardedCase, Way, list[Shares]]]:
    by_rank = on_ranks(asked[0][0].sharding.num_ranks, run, asked)
    for place, (case, ways) in enumerate(asked):
        for index, way in enumerate(ways):
            yield case, way, [shares[place][index] for shares in by_rank]


def run(asked: Sequence[tuple[ShardedCase, Sequence[Way]]]) -> list[list[Shares]]:
    """On a rank: its shares of every case, each of its ways."""
    return [[shares_of(case, **way) for way in ways] for case, ways in asked]


def line() -> DeviceMesh:
    """On a rank: the mesh of all of them."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))


def summed(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """On a rank: the sum over ranks."""
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def on_rank_0(function: Callable[[], T]) -> T:
    """On a rank: what it returns on rank 0, for which the others wait."""
    found = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return cast(T, found[0])


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
    options = {"sharding": case.sharding, "sinks": sinks, **case.options, **way}
    if options["schedule"] == "heads":
        del options["schedule"]
        return attend_heads(q, k, v, case.pattern, ranks=Ranks.of(line()), **options)
    return attend(q, k, v, case.pattern, mesh=line(), **options)


def shares_of(case: ShardedCase, **way: Any) -> Shares:
    """On a rank: its part of a call and its backward; generators of the ranks are in different states."""
    leaves, here, learned = leaves_of(case), case.sharding.positions(dist.get_rank()), case.learned()
    grad_out, grad_lse = (x[:, :, here] for x in case.cotangents)
    grad_out, held = laid_out(grad_out, case.layouts[3]), learned[-2:] if case.biased else []
    traffic().reset()
    torch.manual_seed(SEED + dist.get_rank())
    with contextlib.ExitStack() as stack:
        if way.get("engine") == "flex":
            stack.enter_context(flex_by_dense_kernels())
            way = {name: value for name, value in way.items() if name != "engine"}
        scale = learned[0] if case.scaled else None
        out, lse = call(case, *leaves, score_mod=reading(held) if held else None, scale=scale, **way)
        held.clear()  # the backward needs them no more
        outputs, grads = ((out, lse), (grad_out, grad_lse)) if case.through_lse else ((out,), (grad_out,))
        # A rank without tokens has gradients of q, k, v and sinks, and none of what the score_mod captures.
        found = torch.autograd.grad(outputs, [*leaves, *learned], grads, allow_unused=bool(learned))
    assert all(grad is not None for grad in found[: len(leaves)])
    shared = [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, [*leaves, *learned], strict=True)]
    counts = traffic()
    return Shares(
        tuple(x.detach() for x in (out, lse, *found[:3])),
        torch.cat([x.flatten() for x in shared[3:]]) if shared[3:] else None,
        dict(counts.sent),
        dict(counts.received),
    )


@contextlib.contextmanager
def flex_by_dense_kernels() -> Iterator[None]:
    """Engine "flex" with a dense kernel, as this machine has none with a backward."""
    engine = {"choose_engine": lambda *_, **__: "flex", "placed_engine": lambda *_: "flex"}
    kernel = {"_attend_in_parts": _flex_op._attend, "run_flex": partial(_flex_op.run_flex, kernel=dense_flex)}
    with patch.multiple(_attend, **engine), patch.multiple(_flex_op, **kernel):
        yield


def together(case: ShardedCase, shares: Sequence[Shares]) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv and maybe the sums of what ranks share) over all tokens, from what the ranks have."""
    order = torch.cat([case.sharding.positions(rank) for rank in range(len(shares))]).argsort()
    whole = [torch.cat(parts, dim=2)[:, :, order] for parts in zip(*(each.parts for each in shares), strict=True)]
    shared = [each.shared for each in shares if each.shared is not None]
    return (*whole, torch.stack(shared).sum(0)) if shared else tuple(whole)


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
        allowed = case.counts.expand(1, *case.counts.shape) if case.counts.dim() == 3 else case.counts.flatten(0, -4)
        seen = allowed[:, :, rows][:, :, :, columns].bool().any(2).any(0)  # (H, keys)
        number = int(seen.unflatten(0, (k.shape[1], -1)).any(1).sum())
    return 2 * number * k.shape[0] * width * k.element_size()


def assert_whole(case: ShardedCase, way: Way, shares: Sequence[Shares]) -> None:
    """All ranks' results together are the definition's; keys' bytes are as many as the dense rule says."""
    whole = together(case, shares)
    assert len(whole) == len(case.whole)
    for name, found, truth in zip(NAMES, whole, case.whole, strict=False):
        assert_close(found, truth, **TIGHT, msg=lambda text, name=name: f"{name} of {case}, {way}: {text}")
    schedule = way["schedule"]
    if schedule not in ("exchange", "ring") or case.counts is None:
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
def sharded_cases(draw: st.DrawFn, W: int) -> ShardedCase:
    """Any pattern that can be written down over 1 to 40 tokens, any features; any heads, or as many on each rank."""
    by_heads, N = draw(st.booleans()), draw(st.integers(1, 40))
    first = draw(st.sampled_from([0, 0, 1, 3]))
    H = W * draw(st.integers(1, 2)) if by_heads else draw(st.integers(1, 4))
    num_heads = first + H + draw(st.sampled_from([0, 0, 2]))
    twin: Twin = draw(st.one_of(written_expressions(num_heads), longnets()))
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
    features = {
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.1, 0.9])),
        "biased": draw(st.sampled_from([0, 0, 1])) > 0,
        "scaled": draw(st.booleans()),
    }
    through_lse = draw(st.booleans())
    return ShardedCase(twin.pattern, counts, sharding, tensors, first, num_heads, through_lse, layouts, **features)


@st.composite
def run_time_cases(draw: st.DrawFn, W: int) -> ShardedCase:
    """Any pattern with run-time tensors, of all batch entries or of each."""
    packed = draw(packed_cases(max_heads=4, whole=True, closures=False))
    H, N = packed.num_heads, packed.num_keys
    G = draw(st.sampled_from([heads for heads in range(1, H + 1) if H % heads == 0]))
    tensors = tensors_for(H, G, N, B=packed.batch, D=4, sinks=draw(st.booleans()), seed=draw(st.integers(0, 999)))
    features = {"dropout_p": draw(st.sampled_from([0.0, 0.4])), "biased": draw(st.booleans())}
    return ShardedCase(packed.pattern, packed.counts, draw(shardings(N, num_ranks=W)), tensors, **features)
