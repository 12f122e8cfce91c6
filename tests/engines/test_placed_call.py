"""Parts of a softmax: tokens at stated positions, merges by lse, and engine portable, which computes in chunks."""

import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import flexdilated as fd
from flexdilated import attend, masks
from flexdilated.engines._gather import merge_
from flexdilated.engines._merge import merge, with_sinks
from flexdilated.engines._placed_call import PlacedCall, placed_engine
from flexdilated.engines.flex._flex_op import static_program
from flexdilated.engines.kernels import _portable
from flexdilated.masks.orders._placement import Placement
from flexdilated.memory import LiveBytes
from tests.engines.test_flex import around_dense
from tests.support.agreement import TIGHT, assert_agrees
from tests.support.padded import everything_padded
from tests.support.placed import Part, parts
from tests.support.strategies import block_sides


def test_partly_overlapping_terms_start_from_nothing():
    """A later term that reaches rows no earlier one has written must not add to what memory happened to hold."""
    pattern = masks.longnet((16, 32, 64), (1, 2, 4)) & masks.causal()
    placement = Placement((range(12, 21), range(38, 44)), ((range(10, 14),),), complete=False, num_tokens=50)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 15, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 4, 8, generator=generator, dtype=torch.float64)
    call = PlacedCall(pattern.text, placement, 0.3, 0, 4, "aten")
    torch.full((1 << 16,), torch.nan)  # freed at once: what the next allocations may find
    found, _ = call.forward(q, k, v, [])
    options = {"scale": 0.3, "enable_gqa": True, "k_offset": 10}
    whole = [attend(rows, k, v, pattern, q_offset=at, **options) for rows, at in ((q[:, :, :9], 12), (q[:, :, 9:], 38))]
    assert_close(found, torch.cat(whole, dim=2), **TIGHT)


@given(
    part=st.booleans().flatmap(lambda complete: parts(complete=complete)),
    engine=st.sampled_from(["aten", "portable", "flex"]),
    padded=st.booleans(),
    side=block_sides,
)
def test_parts_are_the_oracle(part: Part, engine: str, padded: bool, side: int):
    """Rows and keys by index, some of them held, others left out; flex around a dense kernel."""
    (q, k, _), call = part.tensors(), part.call(engine)
    if engine == "flex":
        key = replace(call, sides=(side, side)).call(q, k)
        with everything_padded() if padded else nullcontext():
            run = around_dense(static_program(key, torch.device("cpu")), 0.5)
    else:
        run = lambda q, k, v: call.forward(q, k, v, [])  # noqa: E731
    assert_agrees(run, part.tensors(), part.counts, scale=0.5)
    assert Placement.read(part.placement.text) == part.placement


def test_engines_that_run_no_parts():
    with pytest.raises(ValueError, match="whole sequences"):
        placed_engine("reference", torch.device("cpu"))
    with pytest.raises(ValueError, match="on CPU only"):
        placed_engine("aten", torch.device("cuda"))


def in_place(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = out.clone(), lse.clone()
    merge_(out, lse, part, part_lse)
    return out, lse


def traced(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    return merge([(out, lse), (part, part_lse)])


both_merges = pytest.mark.parametrize("join", [traced, in_place], ids=["traced", "in place"])


@both_merges
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("lse", "part_lse", "joined", "share"),
    [
        (0.0, 0.0, 0.6931471805599453, 0.5),
        (1000.0, -1000.0, 1000.0, 0.0),
        (-1000.0, 1000.0, 1000.0, 1.0),
        (3e4, 3e4, 3e4 + 0.6931471805599453, 0.5),
        (-torch.inf, 5.0, 5.0, 1.0),
        (5.0, -torch.inf, 5.0, 0.0),
        (-torch.inf, -3e4, -3e4, 1.0),
        (-torch.inf, -torch.inf, -torch.inf, 0.0),
    ],
)
def test_extremes(join, dtype, lse, part_lse, joined, share):
    """Neither overflow nor NaN, whichever side weighs all or nothing."""
    out, part = (torch.tensor([[0.0, x]], dtype=dtype) for x in (2.0 if lse > -torch.inf else 0.0, 4.0))
    found, found_lse = join(out, torch.tensor([lse], dtype=dtype), part, torch.tensor([part_lse], dtype=dtype))
    assert_close(found, torch.lerp(out, part, share))
    assert_close(found_lse, torch.tensor([joined], dtype=dtype))


def test_a_score_keeps_no_wider_copy_of_the_output():
    """In half precision: of the output's size, the backward of sinks holds the output alone."""
    out = torch.randn(1, 2, 512, 64, dtype=torch.bfloat16, requires_grad=True)
    lse, sinks = torch.randn(1, 2, 512, requires_grad=True), torch.randn(2, requires_grad=True)
    held: dict[int, int] = {}

    def hold(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x):
        found, _ = with_sinks(out, lse, sinks)
    assert found.dtype == torch.bfloat16
    assert sum(held.values()) < 1.3 * out.nbytes


@pytest.mark.parametrize("logit", [torch.inf, 3e38])
def test_a_sink_that_takes_all(logit):
    out, lse = with_sinks(torch.ones(1, 1, 2, 3), torch.tensor([[[0.0, -torch.inf]]]), torch.tensor([logit]))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, logit))


def test_sums_over_terms_are_kept_wide():
    """Many small parts beside a large one: bfloat16 would lose them."""
    parts = [torch.full((1, 1, 4, 2), value, dtype=torch.bfloat16) for value in (256.0, *[1.0] * 64)]
    out, _ = merge([(part, torch.zeros(1, 1, 4)) for part in parts])
    assert torch.equal(out, torch.full_like(out, 320 / 65))


_EARLIER = masks.causal() & ~masks.local_window(left=0, right=0)
EARLIER = (
    _EARLIER,
    _EARLIER & masks.longnet((32, 128), (1, 4)),
    _EARLIER & masks.dilated(128, 4, offset=1),
    _EARLIER & masks.documents(torch.arange(300) // 70),
)


@pytest.mark.parametrize("pattern", EARLIER, ids=str)
@pytest.mark.parametrize("learns", [False, True])
def test_only_allowed_pairs_are_asked_about(pattern, learns):
    """Also by the call that finds what a score_mod captures, where autograd is on; no query sees its own key."""
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 300, 16, dtype=torch.float64))
    table = torch.randn(300, dtype=torch.float64, requires_grad=learns)
    leaves = (q, k, v, table) if learns else (q, k, v)

    def earlier(score, b, h, q_idx, k_idx):
        """Beyond earlier keys the table has no number, and the root none either."""
        ahead = q_idx - k_idx
        return score + table[torch.where(ahead > 0, ahead, 1000)] * ahead.double().sqrt()

    def clamped(score, b, h, q_idx, k_idx):
        ahead = (q_idx - k_idx).clamp(min=0)
        return score + table[ahead] * ahead.double().sqrt()

    found, exact = (
        (out, *torch.autograd.grad(out.square().sum(), leaves))
        for out in (
            fd.attend(q, k, v, pattern, score_mod=earlier, engine="portable"),
            fd.attend(q, k, v, pattern, score_mod=clamped, engine="reference"),
        )
    )
    assert_close(found, exact, **TIGHT)


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
            window = masks.local_window(left=127, right=0)
            out = fd.attend(q, k, v, window, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j))
            out.sum().backward()
        return counted.peak

    with patch.object(_portable, "_SCORES_AT_ONCE", 1 << 16):
        small, large = peak(1024), peak(2048)
    assert large < 2.2 * small
    assert large < 4 * 2 * 2048 * 2048 / 4


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
    """In a checkpoint the captured tensor is made twice; under autocast a graph, too, sums in float32."""
    torch.compiler.reset()
    table = torch.randn(2, 40, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))

    def attend(q, k, v, engine="portable"):
        bias = table.sigmoid()
        return fd.attend(q, k, v, masks.causal(), score_mod=lambda s, b, h, i, j: s + bias[h, i - j], engine=engine)

    def again(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=False)

    run = torch.compile(again, fullgraph=True, backend="eager") if compiled else again
    for half, near in ((False, 1e-5), (True, 0.02))[compiled:]:  # in a graph at once
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            outs = run(q, k, v), attend(q, k, v, "reference")
        found, exact = ((x, *torch.autograd.grad(x.float().sin().sum(), (q, k, v, table))) for x in outs)
        assert_close(found, exact, rtol=near, atol=near)


def test_an_export_takes_no_score_mod():
    class Model(torch.nn.Module):
        def forward(self, x):
            return fd.attend(x, x, x, masks.causal(), score_mod=lambda s, b, h, i, j: s.tanh())

    with pytest.raises(ValueError, match=r"portable with a score_mod is not exported; engine='flex' is"):
        torch.export.export(Model(), (torch.randn(1, 2, 32, 16),), strict=False)


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
