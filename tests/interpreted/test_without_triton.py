"""Attention on a CUDA device for which there is no Triton: all calls are computed by plain PyTorch operations."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import _engine_choice, masks
from tests.interpreted.emulated_cuda import CALLED, host_reads, require

require(interpreted=True)

N, H, G = 150, 4, 2
LONGNET = masks.longnet((32, 128), (1, 4)) & masks.causal()
DOCUMENTS = masks.documents("ids") & masks.causal()
CASES: dict[str, tuple[masks.Pattern | masks.Mixture, dict[str, Any]]] = {
    "mixture": (LONGNET, {}),
    "float64": (LONGNET, {"dtype": torch.float64}),
    "half precision": (masks.local_window(left=40, right=0), {"dtype": torch.bfloat16}),
    "run-time tensors": (DOCUMENTS, {"ids": torch.arange(N).reshape(1, N) // 37}),
    "score_mod": (LONGNET, {"learns": True}),
    "dropout": (LONGNET, {"dropout_p": 0.2}),
}


@pytest.fixture(autouse=True)
def no_triton(monkeypatch) -> None:
    monkeypatch.setattr(_engine_choice, "_has_triton", lambda: False)
    masks.cache().clear()
    CALLED.clear()


def results(
    device: str,
    pattern: masks.Pattern | masks.Mixture,
    *,
    engine: str | None = None,
    dtype: torch.dtype = torch.float32,
    ids: Tensor | None = None,
    learns: bool = False,
    **options: Any,
) -> list[Tensor]:
    """(out, lse, gradients of q, k, v, sinks and the table of biases) on a device."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, H, N, 16), (1, G, N, 16), (1, G, N, 8), (H,), (H, N)
    drawn = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    q, k, v, sinks, table = leaves = [x.to(device).requires_grad_() for x in drawn]
    options |= {"sinks": sinks, "enable_gqa": True, "return_lse": True, "engine": engine}
    if ids is not None:
        options["bindings"] = {"ids": ids.to(device)}
    if learns:
        options["score_mod"] = lambda score, b, h, q_idx, k_idx: score + table[h, k_idx]
    torch.manual_seed(7)  # of dropout
    out, lse = fd.attend(q, k, v, pattern, **options)
    grads = torch.autograd.grad(out.square().sum() + lse.sum(), leaves, materialize_grads=True, allow_unused=True)
    return [x.detach().cpu().double() for x in (out, lse, *grads)]


@pytest.mark.parametrize("name", CASES)
def test_training(name: str, caplog) -> None:
    pattern, options = CASES[name]
    caplog.set_level(logging.DEBUG, "flexdilated")
    _engine_choice._log_once.cache_clear()
    found, truth = results("cuda", pattern, **options), results("cpu", pattern, engine="reference", **options)
    assert not CALLED
    assert any("engine 'portable', as flex" in line for line in caplog.messages)
    close = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}[options.get("dtype", torch.float32)]
    for x, y in zip(found, truth, strict=True):
        assert (x - y).norm() <= close * y.norm()


def test_a_compiled_module_decodes() -> None:
    """A module in a graph whose backend needs no Triton, and a cache."""
    torch.manual_seed(0)
    module = fd.DilatedAttention((32, 128), (1, 4), causal=True)
    x = torch.randn(3, 1, H, N, 16)
    truth = module(*x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*x.to("cuda")).cpu(), truth, rtol=1e-4, atol=1e-5)
    cache = fd.KVCache(LONGNET, num_heads=H)
    q, k, v = x.to("cuda")
    parts = [cache.attend(*(each[:, :, at] for each in (q, k, v))) for at in (slice(0, 140), slice(140, 150))]
    torch.testing.assert_close(torch.cat(parts, 2).cpu(), truth, rtol=1e-4, atol=1e-5)
    assert not CALLED


def test_later_calls_read_nothing_on_the_host() -> None:
    """The lengths of block lists are read once for a program: the device need not be waited for."""
    pattern, counts = masks.local_window(left=40, right=0), []
    for _ in range(3):
        q, k, v = (torch.randn(1, H, N, 16, device="cuda", requires_grad=True) for _ in "qkv")
        before = host_reads()
        fd.attend(q, k, v, pattern).sum().backward()
        counts.append(host_reads() - before)
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
