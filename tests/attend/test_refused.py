"""What `attend` refuses: with the rule and the remedy, before any work."""

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

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

CAUSAL, LONGNET = masks.causal(), masks.longnet([8, 16], [1, 2])
Q, K, V = torch.randn(3, 1, 4, 12, 8)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05])


def drawn(B: int = 1, H: int = 4, G: int = 4, N: int = 12, M: int = 12, D: int = 8, **how: Any) -> dict[str, Tensor]:
    sizes = {"q": (B, H, N, D), "k": (B, G, M, D), "v": (B, G, M, D)}
    return {name: torch.randn(size, **how) for name, size in sizes.items()}


def batches(*sizes: int) -> dict[str, Tensor]:
    return {name: torch.randn(size, 2, 12, 8) for name, size in zip("qkv", sizes, strict=True)}


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


TENSORS = [
    ({"q": Q.tolist()}, TypeError, "q must be a tensor; got list"),
    ({"v": None}, TypeError, "v must be a tensor; got NoneType"),
    ({"k": K[0]}, ValueError, r"k must have the 4 dims .*; got \(4, 12, 8\)"),
    ({"q": Q.int()}, TypeError, "q must be float32, bfloat16, float16 or float64; got torch.int32"),
    ({"v": V.to(torch.complex64)}, TypeError, "v must be float32"),
    ({"k": K.bfloat16()}, ValueError, "one dtype; got torch.float32, torch.bfloat16"),
    ({"v": V.double()}, ValueError, "one dtype; .*torch.float64"),
    ({"k": K.to("meta")}, ValueError, "one device; got cpu, meta and cpu"),
    ({"v": V[..., :0]}, ValueError, "head dim must be at least 1"),
    ({"v": V[:, :, 1:]}, ValueError, r"one shape, except for the head dim; got \(1, 4, 12, 8\) and \(1, 4, 11, 8\)"),
    ({"q": Q[..., :4]}, ValueError, "agree in batch and head dim"),
    ({"q": Q.to_sparse()}, ValueError, r"q must be a dense tensor, such as q\.to_dense\(\)"),
    (drawn(D=0), ValueError, "head dim must be at least 1"),
    (drawn(H=4, G=3), ValueError, "multiple of the number of key/value heads; got 4 and 3"),
    (drawn(H=2, G=4), ValueError, "multiple of the number of key/value heads; got 2 and 4"),
    (drawn(H=4, G=2), ValueError, "enable_gqa=True; got 4 and 2"),
    (batches(3, 2, 2), ValueError, "must agree in batch"),
    (batches(1, 3, 3), ValueError, "must agree in batch"),
    (batches(3, 2, 1), ValueError, "k and v must have one shape"),
    (batches(3, 1, 3), ValueError, "k and v must have one shape"),
    (batches(3, 3, 1), ValueError, "k and v must have one shape"),
]
OPTIONS = [
    ({"scale": float("nan")}, ValueError, "scale must be finite; got scale=nan"),
    ({"scale": float("inf")}, ValueError, "scale must be finite; got scale=inf"),
    ({"scale": "1"}, TypeError, "scale must be a real number or None; got '1'"),
    ({"scale": True}, TypeError, "got True"),
    ({"scale": torch.tensor(1)}, TypeError, "a tensor as scale must hold real numbers; got torch.int64"),
    ({"scale": torch.ones(3)}, ValueError, r"needs a number for each head, shape \(4,\); got \(3,\)"),
    ({"scale": torch.ones(4, device="meta")}, ValueError, "scale must be on the device of q, cpu; got meta"),
    ({"q_offset": -1}, ValueError, "q_offset must be at least 0; got q_offset=-1"),
    ({"q_offset": 1.0}, TypeError, "q_offset must be an integer; got q_offset=1.0"),
    ({"q_offset": True}, TypeError, "q_offset must be an integer; got q_offset=True"),
    ({"k_offset": -1}, ValueError, "k_offset must be at least 0; got k_offset=-1"),
    ({"head_offset": -1}, ValueError, "head_offset must be at least 0; got head_offset=-1"),
    ({"head_offset": None}, TypeError, "head_offset must be an integer; got head_offset=None"),
    ({"head_offset": 1, "num_heads_global": 4}, ValueError, "num_heads_global"),
    ({"num_heads_global": 3}, ValueError, "num_heads_global"),
    ({"num_heads_global": 4.5}, TypeError, "num_heads_global"),
    ({"layout": masks.Layout(13, 2)}, ValueError, "for 12 queries and 12 keys; got one for 13 tokens"),
    ({"layout": masks.Layout(12), **drawn(M=13)}, ValueError, "for 12 queries and 13 keys; got one for 12 tokens"),
    ({"layout": 2}, TypeError, "layout must come from masks.layout; got int"),
    ({"block_size": 0}, ValueError, "block_size"),
    ({"block_size": (128, 0)}, ValueError, "block_size"),
    ({"block_size": (128,)}, ValueError, "block_size"),
    ({"block_size": 64.0}, TypeError, "block_size"),
    ({"engine": "fast"}, ValueError, "one of 'flex', 'flash', 'aten', 'portable', 'reference'; got engine='fast'"),
    ({"engine": 1}, ValueError, "got engine=1"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p"),
    ({"sinks": [0.0] * 4}, TypeError, "sinks must be a tensor or None; got list"),
    ({"sinks": torch.zeros(4, dtype=torch.int64)}, TypeError, "sinks must be float32, .*; got torch.int64"),
    ({"sinks": torch.zeros(3)}, ValueError, r"one logit for each head of q, shape \(4,\); got \(3,\)"),
    ({"sinks": torch.zeros(())}, ValueError, r"shape \(4,\); got \(\)"),
    ({"sinks": torch.zeros(1, 4)}, ValueError, r"shape \(4,\); got \(1, 4\)"),
    ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks must be on the device of q, cpu; got meta"),
]
PATTERNS = [
    ({"pattern": "causal"}, TypeError, "pattern or mixture from flexdilated.masks; got str"),
    ({"pattern": None}, TypeError, "got NoneType"),
    ({"pattern": masks.causal}, TypeError, "got function"),
    ({"pattern": CAUSAL.bind(num_heads=4, num_queries=12, num_keys=12)}, TypeError, "got Bound"),
    ({"pattern": masks.per_head([CAUSAL] * 3)}, ValueError, "one pattern for each head; got 3 for 4 heads"),
    ({"pattern": masks.longnet([4] * 5, [1] * 5, heads="grouped")}, ValueError, "num_heads=4"),
]
FLEX = {"engine": "flex", "pattern": CAUSAL}
# Nothing falls back silently: the error names the engine that can.
ENGINES = [
    (FLEX | drawn(requires_grad=True), ValueError, "no backward on CPU.*engine='aten' serves it"),
    (FLEX | {"return_lse": True}, ValueError, "no lse on CPU; engine='aten' serves it"),
    (FLEX | {"sinks": torch.zeros(4)}, ValueError, "no lse on CPU, which sinks need; engine='aten' serves"),
    (FLEX | {"pattern": LONGNET}, ValueError, "2 branches of a mixture need; engine='aten' serves it"),
    (FLEX | drawn(dtype=torch.float64), ValueError, "no float64.*engine='aten'"),
    ({"engine": "aten", "dropout_p": 0.1}, ValueError, "aten runs .* without attention dropout; engine='portable'"),
    (
        {"engine": "flash", "dropout_p": 0.1},
        ValueError,
        "flash runs .* without attention dropout; engine='flex' serves",
    ),
]


@pytest.mark.parametrize(("call", "error", "says"), [*TENSORS, *OPTIONS, *PATTERNS, *ENGINES])
def test_before_any_work(call, error, says) -> None:
    refused(error, says, call)


def alibi(slopes: Tensor):
    def score_mod(score, b, h, q_idx, k_idx):
        return score - slopes[h] * (q_idx - k_idx).abs()

    return score_mod


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"engine": "aten"}, "aten takes no score_mod: write engine='portable' or engine='flex'"),
        ({"engine": "flex", "return_lse": True}, "no lse on CPU; engine='portable' serves it$"),
        ({"engine": "flex", "pattern": LONGNET}, "2 branches of a mixture need; engine='portable' serves it$"),
        (
            {"engine": "flex", "q": Q.clone().requires_grad_()},
            "q, k or v requires a gradient; engine='portable' serves",
        ),
        ({"engine": "flex", **drawn(dtype=torch.float64)}, "no float64 kernels; engine='portable' serves float64$"),
    ],
)
def test_engines_without_score_mod(options, says) -> None:
    refused(ValueError, says, {"pattern": CAUSAL, "score_mod": alibi(SLOPES)} | options)


def test_flex_has_no_gradients_of_a_score_mod_on_cpu() -> None:
    says = "score_mod uses a tensor that requires a gradient; engine='portable' serves"
    refused(ValueError, says, FLEX | {"score_mod": alibi(SLOPES.clone().requires_grad_())})


def wrong_number(score, b, h, q_idx):
    return score


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
        (1.0, TypeError, r"must be a function of \(score, b, h, q_idx, k_idx\); got float"),
        (Callable4(), TypeError, r"must take .*; got \(score, b, h, q_idx\)"),
        (partial(alibi(SLOPES), 1.0), TypeError, r"must take .*; got \(b, h, q_idx, k_idx\)"),
        (wrong_number, TypeError, r"must take \(score, b, h, q_idx, k_idx\); got \(score, b, h, q_idx\)"),
        (branching, ValueError, "must not branch on values of tensors .*; it called Tensor.__bool__"),
        (lambda s, b, h, q, k: torch.func.grad(torch.square)(s), TypeError, "without TorchScript and torch.func"),
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
    refused(ValueError, "no-such-compiler.*engine='aten' serves it", FLEX)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    refused(ValueError, "no C.. compiler.*engine='aten' serves it", FLEX)
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
