"""Engine portable in chunks of every size, with what a score_mod captures, and in memory linear in the tokens."""

from __future__ import annotations

import gc
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Features
from flexdilated.engines.flex import _portable_op
from flexdilated.engines.flex._program import make_flex_program
from flexdilated.engines.kernels import _portable
from flexdilated.memory import LiveBytes
from tests.attend.test_dropout import SEED, features, inputs
from tests.attend.test_score_mod import modified
from tests.support.agreement import TIGHT, assert_agrees
from tests.support.padded import padded_cases, padded_plan
from tests.support.strategies import block_sides, cases, tensors

# B batch, H query heads, N queries, M keys

_EARLIER = masks.causal() & ~masks.local_window(left=0, right=0)
EARLIER = (
    _EARLIER,
    _EARLIER & masks.longnet((32, 128), (1, 4)),
    _EARLIER & masks.dilated(128, 4, offset=1),
    _EARLIER & masks.documents(torch.arange(300) // 70),
)


@given(st.data(), block_sides, st.sampled_from([1, 100, 2000]))
def test_chunks_of_any_size_are_the_oracle(data, side, scores):
    case = data.draw(cases())
    drawn = data.draw(tensors(case))
    rule = data.draw(modified(len(drawn[0]), case.num_heads_global))
    options = {"enable_gqa": True, "engine": "portable", "return_lse": True, "block_size": side, **case.sizes}

    def attend(q, k, v):
        return fd.attend(q, k, v, case.twin.pattern, score_mod=rule.score_mod(), **options)

    with patch.object(_portable, "_SCORES_AT_ONCE", scores):
        assert_agrees(attend, drawn, case.counts(), modify=rule.of(case))


@pytest.mark.parametrize("pattern", EARLIER, ids=str)
@pytest.mark.parametrize("learns", [False, True])
def test_only_allowed_pairs_are_asked_about(pattern, learns):
    """Also by the call that finds what a score_mod captures, where autograd is on; no query sees its own key."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 300, 16, dtype=torch.float64))
    table = torch.randn(300, dtype=torch.float64, requires_grad=learns)

    def score_mod(score, b, h, q_idx, k_idx):
        return score + table[torch.where(q_idx > k_idx, q_idx - k_idx, 1000)]

    out = fd.attend(q, k, v, pattern, score_mod=score_mod, engine="portable")
    leaves = (q, k, v, table) if learns else (q, k, v)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


@given(st.data(), padded_cases(), block_sides, st.sampled_from([1, 1 << 20]))
def test_lists_that_heads_share_are_masked_by_head(data, case, side, scores):
    """Padded segments: the lists of all heads are one, although heads have different tokens in a block."""
    drawn = data.draw(tensors(case))
    rule = data.draw(modified(len(drawn[0]), case.num_heads_global))
    sizes = {"num_kv_heads": drawn[1].shape[1], "block_size": (side, side), "device": torch.device("cpu")}
    program = make_flex_program(padded_plan(case), masks.Layout(case.num_queries), **sizes)
    run = _portable_op.Portable(program, Features(0.5, rule.score_mod()))

    def attend(q, k, v):
        return _portable_op.run_with_score_mod(run, q, k, v)

    with patch.object(_portable, "_SCORES_AT_ONCE", scores):
        assert_agrees(attend, drawn, case.counts(), scale=0.5, modify=rule.of(case))


def scores_of(**tensors):
    """Score functions that capture their tensors in different ways, by name."""
    table, slopes, module = tensors["table"], tensors["slopes"], tensors["module"]
    made, saved = table * 2 + 1, table.exp()  # not leaves
    slope = slopes[0]
    held = {"tables": [table, (slopes,)]}

    def in_containers(score, b, h, q_idx, k_idx):
        return score * held["tables"][1][0][h] + held["tables"][0][q_idx % 7, k_idx % 5]

    def by_another_function(score, b, h, q_idx, k_idx):
        return in_containers(score, b, h, q_idx, k_idx) + module(score[None])[0]

    return {
        "a leaf and a result": lambda score, b, h, q_idx, k_idx: score + made[q_idx % 7, k_idx % 5] * slopes[h],
        "a leaf and a function of it": lambda score, b, h, q_idx, k_idx: score * made[h, 0] + table[h, k_idx % 5],
        "another one, which saves": lambda score, b, h, q_idx, k_idx: score + saved[q_idx % 7, k_idx % 5] * table[h, 0],
        "in containers": in_containers,
        "a module, by another function": by_another_function,
        "without the score": lambda score, b, h, q_idx, k_idx: table[q_idx % 7, k_idx % 5] * slopes[h],
        "nothing": lambda score, b, h, q_idx, k_idx: score.tanh(),
        "nothing, a constant": lambda score, b, h, q_idx, k_idx: torch.zeros(()),
        "a single number": lambda score, b, h, q_idx, k_idx: slope,
        "in place, twice": lambda score, b, h, q_idx, k_idx: score + slopes[h].clone().mul_(2) + slopes[h],
    }


@pytest.mark.parametrize("name", scores_of(table=torch.zeros(1), slopes=torch.zeros(1), module=torch.nn.Identity()))
def test_every_captured_tensor_has_its_gradient(name):
    generator = torch.Generator().manual_seed(0)
    q, k, v, table, slopes = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((2, 4, 40, 8), (2, 2, 40, 8), (2, 2, 40, 8), (7, 5), (4,))
    )
    module = torch.nn.Linear(1, 1, dtype=torch.float64)
    leaves = (q, k, v, table, slopes, *module.parameters())
    score_mod = scores_of(table=table, slopes=slopes, module=module)[name]
    pattern = masks.longnet([8, 16], [1, 2]) & masks.causal()
    found = []
    for engine in ("portable", "reference"):
        out, lse = fd.attend(
            q, k, v, pattern, enable_gqa=True, score_mod=score_mod, engine=engine, return_lse=True, block_size=8
        )
        total = out.square().sum() + lse.sin().sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
        # Unused by one engine is 0 by the other.
        found.append([out, lse, *(torch.zeros(1) if x is None or not x.any() else x for x in grads)])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, **TIGHT, check_dtype=False)


@pytest.mark.parametrize("engine", ["portable"])
def test_a_score_mod_is_asked_about_allowed_pairs_alone(engine):
    """A table as wide as the window, and a function whose gradient is infinite beyond it."""
    x = torch.randn(1, 2, 300, 8, dtype=torch.float64, requires_grad=True)
    table = torch.randn(65, dtype=torch.float64, requires_grad=True)
    window = masks.local_window(left=32, right=32) & masks.chunked(70)

    def near(score, b, h, i, j):
        return score + table[i - j + 32] * (33.0 - (i - j).abs()).sqrt()

    def clamped(score, b, h, i, j):
        return score + table[(i - j + 32).clamp(0, 64)] * (33.0 - (i - j).abs()).clamp(min=1).sqrt()

    (out, *grads), (exact, *exact_grads) = (
        (out, *torch.autograd.grad(out.square().sum(), (x, table)))
        for out in (
            fd.attend(x, x, x, window, score_mod=near, engine=engine),
            fd.attend(x, x, x, window, score_mod=clamped, engine="reference"),
        )
    )
    assert_close((out, *grads), (exact, *exact_grads), **TIGHT)


@pytest.mark.parametrize("pattern", [masks.blockwise(masks.causal(), 8), masks.every()])
@pytest.mark.parametrize("num_tokens", [24, 20])
@pytest.mark.parametrize("compiled", [False, True])
def test_lists_of_full_blocks_alone(pattern, num_tokens, compiled):
    """Lists of different lengths in one chunk, without a mask that would hide what one lacks."""
    torch.compiler.reset()
    q, k, v = (torch.randn(1, 2, num_tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(q, k, v):
        options = {"engine": "portable", "block_size": 8, "score_mod": lambda s, b, h, i, j: s.tanh()}
        return fd.attend(q, k, v, pattern, **options)

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    exact = fd.attend(q, k, v, pattern, engine="reference", score_mod=lambda s, b, h, i, j: s.tanh())
    for found, wanted in zip(
        *((out, *torch.autograd.grad(out.square().sum(), (q, k, v))) for out in (run(q, k, v), exact)), strict=True
    ):
        assert_close(found, wanted, **TIGHT)


def test_large_scores_leave_no_trace_in_padding():
    """Rows beyond the last token, up to a whole block, have a score too: the exponential of 200 is infinite."""
    q, k, v = (torch.randn(1, 1, 10, 8, requires_grad=True) for _ in range(3))
    options = {"score_mod": lambda score, b, h, q_idx, k_idx: score + 200.0, "block_size": 8}
    found, exact = (
        torch.autograd.grad(fd.attend(q, k, v, masks.causal(), engine=engine, **options).square().sum(), (q, k, v))
        for engine in ("portable", "reference")
    )
    assert_close(found, exact, rtol=1e-3, atol=1e-4)  # float32 has 200 to 1.5e-5


def test_memory_is_linear():
    """Twice the tokens under a window: twice the peak of a step; all scores would be sixteen times the bound."""

    def peak(tokens: int) -> int:
        slopes = torch.rand(2, requires_grad=True)
        q, k, v = (torch.randn(1, 2, tokens, 32, requires_grad=True) for _ in range(3))
        gc.collect()
        with LiveBytes(q, k, v) as counted:
            window = masks.local_window(left=255, right=0)
            out = fd.attend(q, k, v, window, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j))
            out.sum().backward()
        return counted.peak

    with patch.object(_portable, "_SCORES_AT_ONCE", 1 << 17):
        small, large = peak(2048), peak(4096)
    assert large < 2.2 * small
    assert large < 4 * 2 * 4096 * 4096 / 4


@settings(phases=(Phase.generate,))
@given(st.data(), st.sampled_from([0.0, 0.3]), st.booleans(), st.sampled_from([1, 1 << 20]))
def test_second_derivatives_are_those_of_dense_attention(data, p, with_score_mod, scores):
    """Of the output and the lse, for q, k, v, sinks, and a table that score_mod reads and of which q is a function."""
    case = data.draw(cases())
    q, k, v, *sinks = data.draw(inputs(case))
    rule = data.draw(modified(len(q), case.num_heads_global, learnable=True))
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *sinks)] + [rule.table]
    weights = [torch.randn_like(x) for x in leaves]
    options = {"enable_gqa": True, "return_lse": True, "dropout_p": p, **case.sizes}
    options |= {"score_mod": rule.score_mod()} if with_score_mod else {}

    def second(engine: str) -> tuple[torch.Tensor, ...]:
        q, k, v, *sinks = leaves[:-1]
        q = q * (1 + rule.table.mean())
        torch.manual_seed(0)
        sink = sinks[0] if sinks else None
        out, lse = fd.attend(q, k, v, case.twin.pattern, engine=engine, sinks=sink, **options)
        total = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        total = sum((x * weight).sum() for x, weight in zip(first, weights, strict=True))
        return first + torch.autograd.grad(total, leaves, materialize_grads=True)

    with patch.object(_portable, "_SCORES_AT_ONCE", scores):
        assert_close(second("portable"), second("reference"), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("score_mod", [None, lambda score, b, h, q_idx, k_idx: score.tanh()])
def test_a_third_derivative_is_refused(score_mod):
    x = torch.randn(1, 1, 8, 4, requires_grad=True)
    out = fd.attend(x, x, x, masks.causal(), engine="portable", score_mod=score_mod)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"portable engine has no third derivative.*engine='reference'"):
        torch.autograd.grad(second.sum(), x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpoint_and_autocast_around_a_score_mod(compiled):
    """In a checkpoint the captured tensor is made twice; a graph too sums in float32 under autocast."""
    torch.compiler.reset()
    table = torch.randn(2, 40, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))

    def attend(q, k, v, engine="portable"):
        bias = table.sigmoid()
        return fd.attend(q, k, v, masks.causal(), score_mod=lambda s, b, h, i, j: s + bias[h, i - j], engine=engine)

    def again(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=False)

    run = torch.compile(again, fullgraph=True, backend="aot_eager") if compiled else again
    found, exact = (
        (x, *torch.autograd.grad(x.sin().sum(), (q, k, v, table))) for x in (run(q, k, v), attend(q, k, v, "reference"))
    )
    assert_close(found, exact, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(run(q, k, v), attend(q, k, v, "reference"), rtol=0.01, atol=0.01)


def test_an_export_takes_no_score_mod():
    class Model(torch.nn.Module):
        def forward(self, x):
            return fd.attend(x, x, x, masks.causal(), score_mod=lambda s, b, h, i, j: s.tanh())

    with pytest.raises(ValueError, match=r"portable with a score_mod is not exported; engine='flex' is"):
        torch.export.export(Model(), (torch.randn(1, 2, 32, 16),), strict=False)


@pytest.mark.slow
@settings(max_examples=6, phases=(Phase.generate,))
@given(st.data(), st.sampled_from([0.0, 0.3]), st.sampled_from([1, 1 << 20]))
def test_any_pattern_with_a_score_mod_in_a_graph(data, p, scores):
    case = data.draw(cases())
    drawn = data.draw(inputs(case))
    rule = data.draw(modified(len(drawn[0]), case.num_heads_global))
    torch.compiler.reset()  # every example compiles another function

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def attend(q, k, v, sinks=None):
        options = {"engine": "portable", "enable_gqa": True, "return_lse": True, **case.sizes}
        options |= {"score_mod": rule.score_mod(), "dropout_p": p}
        return fd.attend(q, k, v, case.twin.pattern, sinks=sinks, **options)

    def seeded(*given: torch.Tensor):
        torch.manual_seed(SEED)
        return attend(*given)

    how = features(case, drawn, p) if p else {}
    with patch.object(_portable, "_SCORES_AT_ONCE_IN_GRAPHS", scores):
        assert_agrees(seeded, drawn, case.counts(), modify=rule.of(case), **how)


@pytest.mark.slow
def test_one_graph_for_a_score_mod_and_any_run_time_values():
    """The first documents are short, so the lists of their blocks are; those of later calls are as long as can be."""
    torch.compiler.reset()
    table = torch.randn(40, dtype=torch.float64, requires_grad=True)
    q, k, v = (torch.randn(2, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    pattern = masks.documents("ids") & masks.causal()

    def attend(ids, engine=None):
        options = {"score_mod": lambda s, b, h, i, j: s.tanh() + table[i - j], "engine": engine, "block_size": 8}
        return fd.attend(q, k, v, pattern, bindings={"ids": ids}, **options)

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=graphs)
    for lengths in (2, 3), (40, 7), (11, 20):
        ids = torch.arange(40).div(torch.tensor(lengths)[:, None], rounding_mode="floor")
        found, exact = (
            (out, *torch.autograd.grad(out.square().sum(), (q, k, v, table)))
            for out in (compiled(ids), attend(ids, "reference"))
        )
        assert_close(found, exact, **TIGHT)
    assert graphs.frame_count == 1


@pytest.mark.slow
def test_a_graph_saves_no_scores_for_the_backward():
    """The scores of all allowed blocks would be 2 MiB or more; their tables are saved."""
    torch.compiler.reset()
    slopes = torch.rand(2, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 1024, 16, requires_grad=True) for _ in range(3))

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def attend(q, k, v):
        window = masks.local_window(left=127, right=0)
        return fd.attend(q, k, v, window, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j))

    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attend(q, k, v).sum().backward()
    assert 4 * q.nbytes < sum(saved.values()) < 6 * q.nbytes
