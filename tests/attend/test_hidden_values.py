"""What a slot without partners holds reaches nothing: keys that no query sees, queries that see no key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated._validate import run_time_tensors
from flexdilated.engines.flex._flex_op import run_time_program, static_program
from tests.engines.test_flex import CPU, around_dense, call_key
from tests.engines.test_run_time_flex import entry_by_entry, key_of
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import block_sides, cases, tensors

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

Attention = Callable[..., tuple[Tensor, Tensor]]
BAD = st.sampled_from([float("nan"), float("inf"), -float("inf")])


def spoilt(x: Tensor, rows: Tensor, value: float) -> Tensor:
    """x with a value in all of some rows, as a leaf."""
    return x.detach().masked_fill(rows[..., None], value).requires_grad_(x.requires_grad)


def outcome(attend: Attention, leaves: list[Tensor], grad_out: Tensor, grad_lse: Tensor) -> list[Tensor]:
    out, lse = attend(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))]


def assert_nothing_spreads(attend: Attention, given: tuple[Tensor, ...], counts: Tensor, value: float) -> None:
    """Results and gradients are to the last bit those of zeros in hidden slots, whose own gradients are 0."""
    q, k, v, *sinks = given
    seen = (counts > 0).expand(*q.shape[:3], -1)
    queries = ~seen.any(3)
    keys = ~seen.any(2).unflatten(1, (k.shape[1], -1)).any(2)
    generator = torch.Generator().manual_seed(0)
    grad_out = torch.randn(*q.shape[:3], v.shape[3], generator=generator, dtype=q.dtype)
    grad_lse = torch.randn(q.shape[:3], generator=generator, dtype=q.dtype).masked_fill(queries, 0.0)

    def run(bad: float) -> list[Tensor]:
        leaves = [spoilt(q, queries, bad), spoilt(k, keys, bad), spoilt(v, keys, bad), *sinks]
        return outcome(attend, leaves, spoilt(grad_out, queries, bad), grad_lse)

    clean, found = run(0.0), run(value)
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), found, clean, strict=False):
        assert torch.equal(one, other), name
        assert not one.isnan().any(), name
    assert found[0][queries].eq(0).all()
    for grad, rows in zip(found[2:5], (queries, keys, keys), strict=True):
        assert grad[rows].eq(0).all()


def with_sinks(drawn: tuple[Tensor, ...], wanted: bool) -> tuple[Tensor, ...]:
    return (
        (*drawn, torch.linspace(-1, 1, drawn[0].shape[1], dtype=drawn[0].dtype).requires_grad_()) if wanted else drawn
    )


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
@given(data=st.data(), value=BAD)
def test_in_any_pattern(engine: str, data: st.DataObject, value: float):
    case = data.draw(cases())
    given = with_sinks(data.draw(tensors(case)), data.draw(st.booleans()))

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None):
        options = {"enable_gqa": True, "return_lse": True, "engine": engine, "sinks": sinks}
        return fd.attend(q, k, v, case.twin.pattern, **options, **case.sizes)

    assert_nothing_spreads(attend, given, case.counts(), value)


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
@given(packed=packed_cases(), data=st.data(), value=BAD)
def test_in_any_pattern_with_run_time_tensors(engine: str, packed: Packed, data: st.DataObject, value: float):
    given = data.draw(tensors(packed, batch=packed.batch))

    def attend(q: Tensor, k: Tensor, v: Tensor):
        options = {"enable_gqa": True, "return_lse": True, "engine": engine}
        return fd.attend(q, k, v, packed.pattern, **options, **packed.offsets)

    assert_nothing_spreads(attend, given, packed.counts, value)


@given(st.data(), block_sides, BAD)
def test_around_the_kernel_of_flex(data: st.DataObject, side: int, value: float):
    case = data.draw(cases())
    given = with_sinks(data.draw(tensors(case)), data.draw(st.booleans()))
    program = static_program(call_key(case, given[1].shape[1], side), CPU)
    assert_nothing_spreads(around_dense(program, 0.5), given, case.counts(), value)


@given(packed_cases(), st.data(), block_sides, BAD)
def test_around_the_kernel_of_flex_with_run_time_tensors(packed: Packed, data, side: int, value: float):
    given = data.draw(tensors(packed, batch=packed.batch))
    key = key_of(packed, given[1].shape[1], side)
    program = run_time_program(key, CPU, run_time_tensors(packed.pattern, None), packed.batch)
    around = around_dense(program, 0.5, kernel=entry_by_entry)
    assert_nothing_spreads(around, given, packed.counts, value)


LARGE = {
    "holes": lambda N: masks.visible_keys(torch.arange(N) % 3 > 0) & masks.causal(),
    "scattered holes": lambda N: masks.visible_keys(torch.rand(N, generator=torch.Generator().manual_seed(1)) > 0.5),
    "inactive tokens": lambda N: masks.dilated(32, 4),
    "padding": lambda N: masks.longnet([64, 256], [1, 4]) & masks.lengths(torch.tensor([N - 77])),
    "keys after queries": lambda N: masks.causal(),
    "future only": lambda N: ~masks.causal(),
    "some classes": lambda N: masks.strided(7) & masks.dilated(70, 5),
    "a union": lambda N: masks.dilated(64, 8) | (masks.local_window(left=9, right=0) & masks.dilated(32, 3)),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("N", [144, 300, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_over_many_blocks(name: str, N: int, dtype: torch.dtype):
    """At lengths that span several blocks of the kernels, where the planner decides otherwise."""
    pattern, M = LARGE[name](N), N + 60 if name == "keys after queries" else N
    generator = torch.Generator().manual_seed(N)
    sizes = ((2, 2, N, 16), (2, 1, M, 16), (2, 1, M, 16))
    q, k, v = (torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes)
    bindings = dict(zip(masks.patterns.names(pattern), run_time_tensors(pattern, None), strict=True))
    extent = masks.core._bound.Extent(N, M)
    rule = pattern.resolve(bindings, extent) if bindings else pattern
    bound = rule.bind(num_heads=2, num_queries=N, num_keys=M, batch=2)
    counts = fd.engines._reference.multiplicity(bound, CPU)

    def attend(q: Tensor, k: Tensor, v: Tensor):
        return fd.attend(q, k, v, pattern, q_offset=0, enable_gqa=True, return_lse=True)

    queries = ~(counts > 0).any(3).expand(2, 2, N)
    keys = ~(counts > 0).any(2).any(1, keepdim=True).expand(2, 1, M)
    assert queries.any() or keys.any()
    wide = torch.promote_types(dtype, torch.float32)
    ones, grad_lse = torch.ones_like(q), torch.ones(2, 2, N, dtype=wide).masked_fill(queries, 0.0)

    def run(bad: float) -> list[Tensor]:
        leaves = [spoilt(q, queries, bad), spoilt(k, keys, bad), spoilt(v, keys, bad)]
        return outcome(attend, leaves, spoilt(ones, queries, bad), grad_lse)

    for one, other in zip(run(float("nan")), run(0.0), strict=True):
        assert torch.equal(one, other)
        assert not one.isnan().any()


FEW = {
    "inactive tokens": masks.dilated(8, 3),
    "of each head": masks.longnet([8, 16], [3, 5]),
    "a union": masks.dilated(8, 3) | masks.landmark_tokens(5, columns=False),
    "a table": masks.block_list([[0], [], [1, 5], [], [], [2]], block=4) & masks.dilated(40, 3),
}


@pytest.mark.parametrize("name", FEW)
@given(first=st.integers(0, 23), num_queries=st.integers(1, 16), value=BAD)
def test_over_few_queries(name: str, first: int, num_queries: int, value: float):
    """Queries that go without a plan, together with those between them that see no key."""
    generator = torch.Generator().manual_seed(first)
    sizes = ((2, 4, num_queries, 3), (2, 2, 40, 3), (2, 2, 40, 3))
    given = tuple(torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes)
    bound = FEW[name].bind(num_heads=4, num_queries=num_queries, num_keys=40, q_offset=first)

    def attend(q: Tensor, k: Tensor, v: Tensor):
        return fd.attend(q, k, v, FEW[name], q_offset=first, enable_gqa=True, return_lse=True)

    assert_nothing_spreads(attend, given, fd.engines._reference.multiplicity(bound, CPU), value)
