"""Calls of few queries: nothing is planned or kept, wherever the queries stand."""

from contextlib import nullcontext, suppress
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines._rows import MOST_ROWS
from flexdilated.masks.patterns import table_split
from tests.support.agreement import assert_agrees
from tests.support.run_time_strategies import packed_cases
from tests.support.strategies import cases, tensors

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

LONGNET_4 = masks.longnet([32, 64, 128, 256], [1, 2, 4, 8]) & masks.causal()
# What a decoding loop asks for: with rows in closed form, without, without keys, a table a head, and of grids.
DECODED = {
    "longnet-4": LONGNET_4,
    "searched": ~masks.strided(3) & masks.causal() & masks.local_window(left=40, right=40),
    "window and sinks": (masks.local_window(left=9, right=0) | masks.first_tokens(2)) & masks.causal(),
    "two heads apart": masks.per_head([masks.causal(), masks.chunked(7) & masks.causal()]),
    "random blocks": masks.random_blocks(4096, block=8, count=3) & masks.causal(),
    "blocks that are not drawn": ~masks.random_blocks(1024, block=2, count=200) & masks.causal(),
    "no keys": masks.dilated(64, 8, offset=5) & masks.causal(),
}


def drawn(N: int, M: int, *, D: int = 4, B: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(N + M)
    return tuple(torch.randn(B, 2, tokens, D, generator=generator) for tokens in (N, M, M))


@given(st.data())
def test_calls_need_no_plan_and_share_rules(data) -> None:
    """Of every pattern: what an earlier call over fewer keys has kept serves this one, too."""
    case = data.draw(cases())
    case = replace(case, num_queries=min(case.num_queries, MOST_ROWS))
    q, k, v = drawn = data.draw(tensors(case))

    def attend(q, k, v):
        return fd.attend(q, k, v, case.twin.pattern, enable_gqa=True, return_lse=True, **case.sizes)

    same = (case.num_queries, case.q_offset) == (case.num_keys, case.k_offset)
    unplanned = mock.patch("flexdilated.engines.aten._aten_op.make_program", side_effect=AssertionError("planned"))
    with suppress(ValueError):
        few = data.draw(st.integers(1, case.num_keys))
        where = {**case.sizes, "q_offset": data.draw(st.integers(0, case.q_offset))}
        fd.attend(q[:, :, :1], k[:, :, :few], v[:, :, :few], case.twin.pattern, enable_gqa=True, **where)
    with nullcontext() if same else unplanned:
        assert_agrees(attend, drawn, case.counts())


@given(packed_cases(), st.data())
def test_nothing_made_of_run_time_values_is_kept(packed, data) -> None:
    few = min(packed.num_queries, MOST_ROWS)
    where = {**packed.offsets, "q_offset": packed.q_offset + packed.num_queries - few}
    q, k, v = data.draw(tensors(replace(packed, num_queries=few), batch=packed.batch))
    same = (few, where["q_offset"]) == (packed.num_keys, packed.k_offset)
    before = masks.cache().stats().entries
    fd.attend(q, k, v, packed.pattern, enable_gqa=True, **where)
    parted = table_split(packed.pattern)
    fixed = packed.pattern if parted is None or parted.others is None else parted.others
    assert same or not fixed.varies or masks.cache().stats().entries == before


@pytest.mark.parametrize(
    ("name", "num_queries", "steps"),
    [("longnet-4", 4, 60), *((name, number, 12) for name in DECODED for number in (1, MOST_ROWS))],
)
def test_many_steps_leave_the_cache_as_the_first_did(name, num_queries, steps) -> None:
    """A new q_offset and one key more at each step, as loops with a cache of their own call it."""
    q, k, v = drawn(num_queries, num_queries + steps, D=2)
    masks.cache().clear()
    out = q
    for step in range(1, steps + 1):
        keys = slice(0, num_queries + step)
        out = fd.attend(q, k[:, :, keys], v[:, :, keys], DECODED[name], q_offset=step)
    stats = masks.cache().stats()
    assert (stats.misses, stats.entries) == (1, 1)
    # What is kept of the first step serves the last.
    assert_close(out, fd.attend(q, k, v, DECODED[name], q_offset=steps, engine="reference"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_offsets_as_tensors(dtype) -> None:
    """As caches of a fixed size hand them over: the same as numbers, and checked."""
    q, k, v = drawn(1, 40)
    first, second, negative = (torch.tensor(at, dtype=dtype) for at in (30, 2, -1))
    expected = fd.attend(q, k, v, LONGNET_4, q_offset=30, k_offset=2)
    assert torch.equal(fd.attend(q, k, v, LONGNET_4, q_offset=first, k_offset=second), expected)
    assert torch.equal(fd.BlockSparseAttention(LONGNET_4)(q, k, v, q_offset=first, k_offset=2), expected)
    with pytest.raises(ValueError, match="q_offset must be at least 0; got q_offset=-1"):
        fd.attend(q, k, v, LONGNET_4, q_offset=negative)
    for wrong in (torch.tensor([[30]]), torch.tensor(30.0), torch.tensor(True)):
        with pytest.raises(TypeError, match=r"an integer tensor of shape \(\), such as .*; got a tensor"):
            fd.attend(q, k, v, LONGNET_4, q_offset=wrong)


def test_a_compiled_step_is_compiled_twice() -> None:
    """At the second offset q_offset becomes a symbol, and at no later one is anything compiled or kept."""
    q, k, v = (x.requires_grad_() for x in drawn(MOST_ROWS, MOST_ROWS + 8))

    def step(q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
        return fd.attend(q, k[:, :, : at + MOST_ROWS], v[:, :, : at + MOST_ROWS], LONGNET_4, q_offset=at)

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    masks.cache().clear()
    for at in range(2, 8):
        assert_close(compiled(q, k, v, at), step(q, k, v, at))
    assert counter.frame_count <= 2
    assert masks.cache().stats().entries == 1


def test_a_compiled_step_takes_a_tensor() -> None:
    """Read inside the graph where torch may capture numbers, and by a break of the graph where not."""
    q, k, v = drawn(1, 40)

    def step(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        return fd.attend(q, k, v, LONGNET_4, q_offset=at)

    for captured in (True, False):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        with torch._dynamo.config.patch(capture_scalar_outputs=captured):
            compiled = torch.compile(step, backend=counter, fullgraph=captured)
            for at in range(5, 9):
                assert_close(compiled(q, k, v, torch.tensor(at)), step(q, k, v, torch.tensor(at)))
        assert counter.frame_count <= 4  # two frames, of one number and of any
