"""No derivative of attention passes a tie that torch decides: under a watch, on inputs that are full of ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

import flexdilated as fd
from flexdilated._validate import run_time_tensors
from flexdilated.engines._merge import merge, shares_of, with_sinks, with_zero_keys
from flexdilated.engines.flex._flex_op import run_time_program
from tests.engines.test_flex import CPU, around_dense, attend_by, call_key
from tests.engines.test_run_time_flex import entry_by_entry, key_of
from tests.engines.test_selected_flex import attend_by_table, tables
from tests.support import twins
from tests.support.agreement import TIGHT, assert_agrees, gradients_of
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import Case, block_sides, cases, sinks
from tests.support.ties import NoTies, tied

OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "clamp": lambda x: torch.clamp(x, min=1.0),
    "clamp to a tensor": lambda x: x.clamp(max=torch.ones(3)),
    "clamp_min": lambda x: x.clamp_min(1.0),
    "clip": lambda x: x.clip(-5.0, 1.0),
    "in place": lambda x: (x * 1).clamp_max_(1.0),
    "relu": lambda x: F.relu(x - 1),
    "relu6": lambda x: F.relu6(x + 5),
    "abs": lambda x: (x - 1).abs(),
    "maximum": lambda x: torch.maximum(x, torch.ones(3)),
    "min of two": lambda x: torch.min(torch.ones(3), x),
    "amax": lambda x: x.expand(2, 3).amax(0),
    "max over a dim": lambda x: x.expand(2, 3).max(0),
    "min of all": lambda x: torch.min(x.expand(2, 3)),
    "topk": lambda x: x.expand(2, 3).topk(1, 0),
    "loss": lambda x: F.hinge_embedding_loss(x, -torch.ones(3), margin=1.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_watch_sees(name):
    x = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
    with NoTies():
        with pytest.raises(AssertionError, match="through a tie"):
            OPERATIONS[name](x)
        OPERATIONS[name](x.detach())
        with torch.no_grad():
            OPERATIONS[name](x)
        if "expand" not in OPERATIONS[name].__code__.co_names:
            OPERATIONS[name](x + 0.25)


def watched(case: Case | Packed, attend: Callable, drawn: tuple[Tensor, ...], **features: Any) -> None:
    """Runs the forward under the watch; compares its results and gradients with the oracle, which is smooth at ties."""

    def under_watch(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        with NoTies():
            return attend(*tensors)

    counts = case.counts() if isinstance(case, Case) else case.counts
    assert_agrees(under_watch, drawn, counts, scale=0.5, **features)


def drawn_inputs(data: st.DataObject, case: Case | Packed) -> tuple[Tensor, ...]:
    """q, k, v of grouped heads, and half of the time sinks."""
    seed, batch = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 2))
    batch = case.batch if isinstance(case, Packed) else batch
    groups = data.draw(st.sampled_from([n for n in range(1, case.num_heads + 1) if case.num_heads % n == 0]))
    sides = (case.num_heads, case.num_queries), (groups, case.num_keys), (groups, case.num_keys)
    qkv = tuple(tied(batch, *side, 3, seed=seed + place) for place, side in enumerate(sides))
    return (*qkv, data.draw(sinks(case.num_heads))) if data.draw(st.booleans()) else qkv


@pytest.mark.parametrize("engine", ["reference", "aten", "portable"])
@settings(max_examples=12)
@given(data=st.data(), case=cases())
def test_engines(engine, case, data):
    """Whole vocabulary, mixtures, grouped heads, sinks: and the gradients are the oracle's, which are smooth here."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        options = {"scale": 0.5, "enable_gqa": True, "engine": engine, "return_lse": True, "sinks": sinks}
        return fd.attend(q, k, v, case.twin.pattern, **options, **case.sizes)

    watched(case, attend, drawn_inputs(data, case))


@settings(max_examples=12)
@given(data=st.data(), case=cases(), side=block_sides)
def test_flex(data, case, side):
    drawn = drawn_inputs(data, case)
    watched(case, attend_by(call_key(case, drawn[1].shape[1], side), 0.5), drawn)


@pytest.mark.parametrize("engine", ["reference", "aten", "portable", "flex"])
@settings(max_examples=12)
@given(data=st.data(), packed=packed_cases(), side=block_sides)
def test_run_time_tensors(engine, packed, data, side):
    """Documents, padding and tables, some of which leave rows empty."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Any:
        if engine == "flex":
            bindings = run_time_tensors(packed.pattern, None)
            program = run_time_program(key_of(packed, k.shape[1], side), CPU, bindings, packed.batch)
            return around_dense(program, 0.5, kernel=entry_by_entry)(q, k, v, sinks)
        options = {"scale": 0.5, "enable_gqa": True, "engine": engine, "return_lse": True, "sinks": sinks}
        return fd.attend(q, k, v, packed.pattern, **options, q_offset=packed.q_offset, k_offset=packed.k_offset)

    watched(packed, attend, drawn_inputs(data, packed))


@settings(max_examples=12)
@given(drawn=tables(), seed=st.integers(0, 99))
def test_selected_blocks_on_flex(drawn, seed):
    """Parts of a row by blocks: one alone, several that are equal, and none."""
    case, block, rows = drawn
    shapes = (case.num_heads, case.num_queries), (rows.shape[1], case.num_keys), (rows.shape[1], case.num_keys)
    qkv = tuple(tied(case.batch, *shape, 3, seed=seed + place) for place, shape in enumerate(shapes))
    watched(case, attend_by_table(case, block, rows), qkv)


@pytest.mark.parametrize("engine", ["reference", "flex"])
def test_a_score_mod(engine):
    case = Case.whole(twins.causal(), 2, 9)

    def score_mod(score, b, h, q, k):
        return torch.tanh(score) * (q - k)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if engine == "flex":
            return attend_by(call_key(case, 2, 4), 0.5, score_mod=score_mod)(q, k, v)
        options = {"scale": 0.5, "engine": engine, "return_lse": True, "score_mod": score_mod}
        return fd.attend(q, k, v, case.twin.pattern, **options)

    ahead, qkv = torch.arange(9)[:, None] - torch.arange(9), tuple(tied(1, 2, 9, 3, seed=seed) for seed in range(3))
    watched(case, attend, qkv, modify=lambda scores: scores.tanh() * ahead)


def by_definition(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one softmax over parts along dim 0; rows without keys have output 0 and lse -inf."""
    none = (lses == -torch.inf).all(0)
    finite = lses.masked_fill(none, 0.0)
    out = (finite.softmax(0)[..., None] * outs).sum(0)
    return out, finite.logsumexp(0).masked_fill(none, -torch.inf)


def by_shares(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    shares, lse = shares_of(lses, 0)
    return (shares[..., None] * outs).sum(0), lse


def by_merges(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = outs[0], lses[0]
    for part, part_lse in zip(outs[1:], lses[1:], strict=True):
        out, lse = merge([(out, lse), (part, part_lse)])
    return out, lse


LSES = st.sampled_from([-torch.inf, -torch.inf, 0.0, 0.0, 1.0, -40.0])


@pytest.mark.parametrize("join", [by_shares, by_merges])
@given(lses=st.lists(st.lists(LSES, min_size=3, max_size=3), min_size=6, max_size=6), seed=st.integers(0, 99))
def test_joined_parts(join, lses, seed):
    """Rows of one part, of equal parts and of none: a dense softmax over the parts gives equal values and gradients."""
    drawn = torch.tensor(lses, dtype=torch.float64).T
    absent, leaves = drawn == -torch.inf, (tied(3, 6, 2, seed=seed), drawn.nan_to_num(neginf=0.0).requires_grad_())

    def joined(how: Callable) -> tuple[Tensor, ...]:
        outs, lses = leaves[0].masked_fill(absent[..., None], 0.0), leaves[1].masked_fill(absent, -torch.inf)
        out, lse = how(outs, lses)
        return out, lse, *gradients_of(out, lse.masked_fill(absent.all(0), 0.0), leaves)

    with NoTies():
        found = joined(join)
    assert_close(found, joined(by_definition), **TIGHT)


@given(
    lses=st.lists(LSES, min_size=6, max_size=6),
    logits=st.lists(LSES, min_size=2, max_size=2),
    count=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    seed=st.integers(0, 99),
)
def test_sinks_and_zero_keys(lses, logits, count, seed):
    """Each is one part more, with output 0."""
    drawn = torch.tensor(lses, dtype=torch.float64).view(1, 2, 3)
    sinks, number = torch.tensor(logits, dtype=torch.float64, requires_grad=True), torch.tensor(count).view(2, 3)
    absent = drawn == -torch.inf
    leaves = (tied(1, 2, 3, 2, seed=seed), drawn.nan_to_num(neginf=0.0).requires_grad_(), sinks)

    def with_both(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return with_zero_keys(*with_sinks(out, lse, sinks), number)

    def as_parts(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        scores = (sinks[:, None], number.double().log())
        outs = torch.stack([out, torch.zeros_like(out), torch.zeros_like(out)])
        return by_definition(outs, torch.stack([lse, *(score.expand_as(lse) for score in scores)]))

    def joined(how: Callable) -> tuple[Tensor, ...]:
        out, lse = how(leaves[0].masked_fill(absent[..., None], 0.0), leaves[1].masked_fill(absent, -torch.inf))
        return out, lse, *gradients_of(out, lse.masked_fill(lse == -torch.inf, 0.0), leaves)

    with NoTies():
        found = joined(with_both)
    assert_close(found, joined(as_parts), **TIGHT)
