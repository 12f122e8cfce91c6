"""A scale for each head, which may be learned: scores are those of the oracle over scaled queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.distributed._heads import attend_heads
from flexdilated.distributed.group._ranks import Ranks
from tests.support import oracle
from tests.support.agreement import TIGHT, gradients
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import line
from tests.support.strategies import cases, tensors

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

PATTERN = masks.longnet([8, 16], [1, 2]) & masks.causal()


@settings(max_examples=15)
@given(st.data(), st.booleans())
@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_a_scale_of_each_head(engine: str, data: st.DataObject, is_shared: bool):
    """Grouped heads, any queries over any keys, gradients of q, k, v and the scale, through output and lse."""
    case = data.draw(cases())
    q, k, v = data.draw(tensors(case))
    scale = torch.linspace(-1, 2, q.shape[1], dtype=q.dtype)
    scale = (scale[0] if is_shared else scale).requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        options = {"enable_gqa": True, "engine": engine, "return_lse": True, **case.sizes}
        return fd.attend(q, k, v, case.twin.pattern, scale=scale, **options)

    def exact(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return oracle.attention(q * scale.reshape(-1, 1, 1), k, v, case.counts(), 1.0)

    given = (q, k, v, scale)
    for found, true in zip(
        (*attend(*given), *gradients(attend, given)), (*exact(*given), *gradients(exact, given)), strict=True
    ):
        assert_close(found, true, **TIGHT)


def drawn(N: int = 40) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, N, 8, generator=generator, dtype=torch.float64)
    return q, k[:, :2], v[:, :2], torch.tensor([0.2, 1.0, -0.5, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("features", ["a score_mod", "sinks", "zero keys"])
def test_beside_other_features(features: str):
    """The score_mod reads scaled scores; sinks and zero keys are not scaled."""
    q, k, v, scale = drawn()
    pattern, options = PATTERN, {}
    if features == "a score_mod":
        options = {"score_mod": lambda score, b, h, i, j: score.tanh() * (h + 1)}
    elif features == "sinks":
        options = {"sinks": torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=torch.float64)}
    else:
        pattern = masks.longnet([8, 16], [1, 2], padding="zeros")
    found = fd.attend(q, k, v, pattern, scale=scale, enable_gqa=True, **options)
    for head in range(4):
        own = {name: x[head, None] for name, x in options.items() if isinstance(x, Tensor)}
        whose = {"head_offset": head, "num_heads_global": 4, "scale": float(scale[head])}
        part = (q[:, head, None], k[:, head // 2, None], v[:, head // 2, None])
        assert_close(found[:, head, None], fd.attend(*part, pattern, **whose, **{**options, **own}), **TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_scaled_queries_once(dtype: torch.dtype):
    q, k, v, scale = (x.to(dtype) for x in drawn())
    scaled = (q.double() * scale.double()[:, None, None]).to(dtype)
    wanted = fd.attend(scaled, k, v, PATTERN, scale=1.0, enable_gqa=True)
    assert fd.attend(q, k, v, PATTERN, scale=scale, enable_gqa=True).equal(wanted)


def test_in_a_graph():
    torch.compiler.reset()
    q, k, v, scale = (x.requires_grad_() for x in drawn())

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return fd.attend(q, k, v, PATTERN, scale=scale, enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found, wanted = (each(q, k, v, scale) for each in (compiled, attend))
    assert_close(found, wanted, **TIGHT)
    grads = (torch.autograd.grad(out.sin().sum(), (q, k, v, scale)) for out in (found, wanted))
    for one, true in zip(*grads, strict=True):
        assert_close(one, true, **TIGHT)


@pytest.mark.parametrize("chunks", [[40], [17, 1, 22], [1] * 40])
def test_in_a_cache(chunks: list[int]):
    """Few queries, and chunks by an engine."""
    q, k, v, scale = drawn()
    cache = fd.KVCache(PATTERN, num_heads=4, scale=scale)
    parts = zip(*(x.split(chunks, 2) for x in (q, k, v)), strict=True)
    found = torch.cat([cache.attend(*part) for part in parts], 2)
    assert_close(found, fd.attend(q, k, v, PATTERN, scale=scale, enable_gqa=True), **TIGHT)


def test_caches_join_by_the_numbers_of_their_scales():
    q, k, v, scale = drawn()
    made = [fd.KVCache(PATTERN, num_heads=4, scale=each) for each in (scale, scale.clone(), scale + 1, 0.5)]
    for each in made:
        each.attend(q, k, v)
    made[0].join(made[1])
    assert len(made[0].positions) == 4
    for other in made[2:]:
        with pytest.raises(ValueError, match="got another scale"):
            made[0].join(other)
    with pytest.raises(ValueError, match="a cache computes no gradients"):
        fd.KVCache(PATTERN, num_heads=4, scale=scale.requires_grad_()).attend(q, k, v)


def test_attention_received_and_mass_of_scaled_scores():
    q, k, v, scale = drawn()
    by_hand = (q * scale[:, None, None], k)
    _, lse = fd.attend(q, k, v, PATTERN, scale=scale, enable_gqa=True, return_lse=True)
    for of in (fd.attention_received, fd.block_mass):
        options: dict[str, Any] = {"enable_gqa": True} | ({"block": 8} if of is fd.block_mass else {})
        found = of(q, k, lse, PATTERN, scale=scale, **options)
        assert_close(found, of(*by_hand, lse, PATTERN, scale=1.0, **options), **TIGHT)


ORDERS = {"exchange": "contiguous", "ring": "zigzag", "heads": "contiguous"}


def shares(schedule: str) -> tuple[Tensor, ...]:
    """On a rank: its tokens' output and its share of the scale's gradient."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    *whole, scale = drawn()
    sharding = Sharding(40, ranks, order=ORDERS[schedule])
    q, k, v = (x[:, :, sharding.positions(rank)] for x in whole)
    scale.requires_grad_()
    options = {"sharding": sharding, "enable_gqa": True, "scale": scale}
    if schedule == "heads":
        out = attend_heads(q, k, v, PATTERN, ranks=Ranks.of(line()), **options)
    else:
        out = fd.distributed.attend(q, k, v, PATTERN, mesh=line(), schedule=schedule, **options)
    assert isinstance(out, Tensor)
    return out.detach(), *torch.autograd.grad(out.sin().sum(), scale)


def shares_of_schedules() -> list[tuple[Tensor, ...]]:
    return [shares(schedule) for schedule in ORDERS]


def test_over_ranks():
    *whole, scale = drawn()
    scale.requires_grad_()
    wanted = fd.attend(*whole, PATTERN, scale=scale, enable_gqa=True)
    (of_scale,) = torch.autograd.grad(wanted.sin().sum(), scale)
    found = on_ranks(2, shares_of_schedules)
    for index, order in enumerate(ORDERS.values()):
        outs, parts = zip(*(each[index] for each in found), strict=True)
        sharding = Sharding(40, 2, order=order)
        for rank, out in enumerate(outs):
            assert_close(out, wanted.detach()[:, :, sharding.positions(rank)], **TIGHT)
        assert_close(sum(parts), of_scale, **TIGHT)
