"""Every engine computes what the dense oracle does: any pattern, sizes, features, layouts, limits and costs."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated._validate import run_time_tensors
from flexdilated.engines import _operands
from tests.support.agreement import assert_nothing_spreads
from tests.support.dense_flex import flex_on_cpu
from tests.support.drawn_calls import BAD, ENGINES, DrawnCall, drawn_calls

EXAMPLES = settings().max_examples  # of the profile


@pytest.mark.parametrize(("engine", "times"), list(zip(ENGINES, (6, 4, 4, 3), strict=True)))
def test_any_call_is_the_oracle(engine: str, times: int) -> None:
    """Output, lse and all gradients, those of sinks and of what a score_mod reads included."""

    @settings(max_examples=times * EXAMPLES)
    @given(drawn_calls(engine))
    def law(call: DrawnCall) -> None:
        call.assert_is_the_oracle()

    law()


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), value=BAD)
def test_hidden_slots_reach_nothing(engine: str, data: st.DataObject, value: float) -> None:
    """What is in keys that no query sees, and in queries that see no key."""
    call = data.draw(drawn_calls(engine, plain=True))
    with call.surroundings.entered():
        assert_nothing_spreads(call.run, call.inputs, call.counts, value)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["aten", "portable"])
@settings(max_examples=3, phases=(Phase.generate,))
@given(data=st.data())
def test_any_call_in_a_graph(engine: str, data: st.DataObject) -> None:
    call = replace(data.draw(drawn_calls(engine)), is_tied=False)
    torch.compiler.reset()  # every example compiles another function
    call.assert_is_the_oracle(torch.compile(call.run, fullgraph=True, backend="aot_eager"))


@settings(phases=(Phase.generate,))
@given(data=st.data())
def test_second_derivatives_are_those_of_dense_attention(data: st.DataObject) -> None:
    """For q, k, v, sinks, and a table that score_mod reads and of which q is a function."""
    call = data.draw(drawn_calls("portable"))
    leaves = [*(x.detach().requires_grad_() for x in call.inputs), *call.learned]
    weights = [torch.randn_like(x) for x in leaves]

    def second(engine: str) -> tuple[Tensor, ...]:
        q, *others = leaves[: len(call.inputs)]
        q = q * (1 + (leaves[-1] if call.learned else leaves[2]).mean())
        out, lse = replace(call, is_tied=False, options=call.options | {"engine": engine}).seeded(q, *others)
        total = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
        first = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
        total = sum((x * weight).sum() for x, weight in zip(first, weights, strict=True))
        return first + torch.autograd.grad(total, leaves, materialize_grads=True)

    with call.surroundings.entered():
        assert_close(second("portable"), second("reference"), rtol=1e-7, atol=1e-8)


LARGE = {
    "holes": lambda N: masks.visible_keys(torch.arange(N) % 3 > 0) & masks.causal(),
    "scattered holes": lambda N: masks.visible_keys(torch.rand(N, generator=torch.Generator().manual_seed(1)) > 0.5),
    "inactive tokens": lambda N: masks.dilated(32, 4),
    "padding": lambda N: masks.longnet([64, 256], [1, 4]) & masks.lengths(torch.tensor([N - 77])),
    "keys after queries": lambda N: masks.causal(),
    "future only": lambda N: ~masks.causal(),
    "some classes": lambda N: masks.strided(7) & masks.dilated(70, 5),
    "a function of which nothing is known": lambda N: masks.custom(lambda b, h, q, k: (q % 3 > 0) & (k % 5 > q % 2)),
    "a union": lambda N: masks.dilated(64, 8) | (masks.local_window(left=9, right=0) & masks.dilated(32, 3)),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize(
    ("engine", "N", "dtype", "bounds_cost"),
    [
        ("aten", 300, torch.bfloat16, 256),
        ("aten", 1100, torch.float32, 256),
        ("flex", 300, torch.float32, 0),
        ("flex", 300, torch.float32, 1 << 20),
    ],
)
def test_hidden_slots_among_many_blocks(
    engine: str, name: str, N: int, dtype: torch.dtype, bounds_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At lengths that span several blocks of the kernels, where the planner decides otherwise."""
    pattern, M = LARGE[name](N), N + 60 if name == "keys after queries" else N
    generator = torch.Generator().manual_seed(N)
    sizes = ((2, 2, N, 16), (2, 1, M, 16), (2, 1, M, 16))
    q, k, v = (torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes)
    bindings = dict(zip(masks.patterns.names(pattern), run_time_tensors(pattern, None), strict=True))
    rule = pattern.resolve(bindings, masks.core.Extent(N, M)) if bindings else pattern
    bound = rule.bind(num_heads=2, num_queries=N, num_keys=M, batch=2)
    counts = fd.engines.multiplicity(bound, torch.device("cpu"))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        block_size = 16 if engine == "flex" else None
        options = {"q_offset": 0, "enable_gqa": True, "return_lse": True, "engine": engine, "block_size": block_size}
        return fd.attend(q, k, v, pattern, **options)

    assert (counts == 0).all(3).any() or (counts == 0).all(2).any()
    monkeypatch.setattr(_operands, "_BOUNDS_COST", bounds_cost)
    with flex_on_cpu(trains=True) if engine == "flex" else nullcontext():
        assert_nothing_spreads(attend, (q, k, v), counts, float("nan"))
