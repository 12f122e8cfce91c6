"""What `attend` refuses before any work, on any engine and device; tests/project/errors.md has the texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flexdilated as fd
from flexdilated import _engine_choice, masks

CAUSAL, LONGNET = masks.causal(), masks.longnet([8, 16], [1, 2])
Q, K, V = torch.randn(3, 1, 4, 12, 8)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05])


def drawn(D: int = 8, **how: Any) -> dict[str, Tensor]:
    return {name: torch.randn(1, 4, 12, D, **how) for name in "qkv"}


def refused(error: type[Exception], says: str, call: dict[str, Any]) -> None:
    """The call raises, and leaves the cache and the inputs as they were."""
    call = {"q": Q, "k": K, "v": V, "pattern": LONGNET} | call
    inputs = [x for x in call.values() if isinstance(x, Tensor) and x.device.type == "cpu" and not x.is_sparse]
    before, copies = masks.cache().stats(), [x.clone() for x in inputs]
    given = [call.pop(name) for name in ("q", "k", "v", "pattern")]
    with pytest.raises(error, match=says):
        fd.attend(*given, **call)
    assert masks.cache().stats() == before
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


def alibi(slopes: Tensor):
    def score_mod(score, b, h, q_idx, k_idx):
        return score - slopes[h] * (q_idx - k_idx).abs()

    return score_mod


class Callable4:
    def __call__(self, score, b, h, q_idx):
        return score


def branching(score, b, h, q_idx, k_idx):
    return score if q_idx > k_idx else score + 1


def counting(score, b, h, q_idx, k_idx):
    SLOPES[h] = score
    return score


@cache
def scripted() -> Callable[[Tensor, Tensor], Tensor]:
    """It computes where nothing sees it; its result would be taken for a table."""
    code = "def add(score, bias):\n    # type: (Tensor, Tensor) -> Tensor\n    return score + bias\n"
    return torch.jit.CompilationUnit(code).add


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("score_mod", "error", "says"),
    [
        (Callable4(), TypeError, r"must take .*; got \(score, b, h, q_idx\)"),
        (partial(alibi(SLOPES), 1.0), TypeError, r"must take .*; got \(b, h, q_idx, k_idx\)"),
        (branching, ValueError, "must not branch on values of tensors .*; it called Tensor.__bool__"),
        (lambda s, b, h, q, k: scripted()(s, SLOPES[h]), TypeError, "without TorchScript and torch.func"),
        (lambda s, b, h, q, k: s + scripted()(SLOPES[h], SLOPES[h]), TypeError, "without TorchScript and torch.func"),
        (counting, ValueError, "must not write to tensors that it captured; it called __setitem__"),
        (lambda score, b, h, q_idx, k_idx: None, TypeError, "must return a tensor; got NoneType"),
        (lambda s, b, h, q, k: torch.zeros(3), ValueError, r"it is called with one score; got shape \(3,\)"),
    ],
)
@pytest.mark.parametrize("engine", ["flex", "reference", "portable"])
def test_score_mods(engine, score_mod, error, says) -> None:
    refused(error, says, {"engine": engine, "pattern": CAUSAL, "score_mod": score_mod})


def test_flex_says_that_it_needs_a_compiler(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    flex = {"engine": "flex", "pattern": CAUSAL}
    refused(ValueError, "no-such-compiler.*engine='aten' serves it", flex)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    refused(ValueError, "no C.. compiler.*engine='aten' serves it", flex)
    assert fd.attend(Q, K, V, CAUSAL).isfinite().all()


def test_a_refused_call_draws_no_seed() -> None:
    before = torch.get_rng_state()
    refused(ValueError, "without attention dropout", {"engine": "aten", "dropout_p": 0.1})
    assert torch.equal(torch.get_rng_state(), before)


def test_on_other_devices(monkeypatch) -> None:
    unit = 64 if torch.__version__ >= "2.15" else 128  # newer torch has smaller tiles
    with FakeTensorMode():  # stands in for devices that are not there
        says = "on CPU and CUDA; got tensors on xpu:0. engine='portable'"
        refused(ValueError, says, {"engine": "aten", **drawn(device="xpu")})
        says = "no float64 kernels on cuda; engine='portable'"
        refused(ValueError, says, {"engine": "aten", **drawn(device="cuda", dtype=torch.float64)})
        monkeypatch.setattr(_engine_choice, "_has_triton", lambda: True)
        for sides in ((128, 96), (96, 128), (32, 32)):
            rule = f"flex on xpu takes blocks whose sides are multiples of {unit} "
            says = rf"{rule}.*got block_size={re.escape(str(sides))}"
            refused(ValueError, says, {"block_size": sides, **drawn(D=16, device="xpu", dtype=torch.bfloat16)})
