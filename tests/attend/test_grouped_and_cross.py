"""Grouped key/value heads under patterns that differ by head, and queries over other keys: every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import flexdilated as fd
from tests.engines.test_flex import attend_by, call_key
from tests.support import twins
from tests.support.agreement import assert_agrees
from tests.support.strategies import Case, block_sides, cases, leaves, tensors
from tests.support.twins import Twin

# B batch, H query heads, G key/value heads, N queries, M keys

ENGINES = ("tiles", "reference", "portable", "flex")  # flex around a dense stand-in for its kernel


def by(engine: str, case: Case, kv_heads: int, side: int) -> Callable[..., Any]:
    if engine == "flex":
        return attend_by(call_key(case, kv_heads, side), 0.5)
    options = {"enable_gqa": True, "scale": 0.5, "engine": engine, "block_size": side, "return_lse": True}
    return lambda q, k, v: fd.attend(q, k, v, case.twin.pattern, **options, **case.sizes)


@st.composite
def one_a_head(draw: st.DrawFn, num_heads: int) -> Twin:
    """A pattern for each head, two of them at least different."""
    parts = [draw(leaves) for _ in range(num_heads)]
    assume(num_heads == 1 or len({part.pattern for part in parts}) > 1)
    return twins.per_head(parts)


@settings(max_examples=12)
@given(st.data(), block_sides)
@pytest.mark.parametrize("engine", ENGINES)
def test_heads_that_share_keys_look_in_different_places(engine, data, side):
    """All the heads or some of them, with fewer key/value heads."""
    case = data.draw(cases(one_a_head).filter(lambda case: case.num_heads > 1))
    drawn = data.draw(tensors(case).filter(lambda drawn: drawn[1].shape[1] < case.num_heads))
    assert_agrees(by(engine, case, drawn[1].shape[1], side), drawn, case.counts(), scale=0.5)


@given(st.data(), block_sides, st.sampled_from([1, 5, 1000]))
def test_only_the_distance_of_windows_counts(data, side, shift):
    """Queries and keys moved together see what they saw."""
    left, right = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    twin = twins.local_window(left=left, right=right)
    case = data.draw(cases(lambda num_heads: st.just(twin)))
    q, k, v = data.draw(tensors(case))
    moved = replace(case, q_offset=case.q_offset + shift, k_offset=case.k_offset + shift)
    for one, other in zip(*(by("tiles", each, k.shape[1], side)(q, k, v) for each in (case, moved)), strict=True):
        assert_close(one, other)
