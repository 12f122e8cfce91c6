"""Engine portable: what a score_mod is asked about and captures, memory linear in the tokens, graphs."""

from __future__ import annotations

import gc
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines.kernels import _portable
from flexdilated.memory import LiveBytes
from tests.support.agreement import TIGHT

# B batch, H query heads, N queries, M keys

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
            window = masks.local_window(left=255, right=0)
            out = fd.attend(q, k, v, window, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j))
            out.sum().backward()
        return counted.peak

    with patch.object(_portable, "_SCORES_AT_ONCE", 1 << 17):
        small, large = peak(2048), peak(4096)
    assert large < 2.2 * small
    assert large < 4 * 2 * 4096 * 4096 / 4


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
