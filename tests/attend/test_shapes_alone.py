"""Calls as those of torch's attention: meta tensors, sizes of 0, outputs, autocast, offsets, and what is refused."""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import _engine_choice, masks
from tests.support.agreement import TIGHT

H, D = 2, 16
PATTERN = masks.longnet([4, 8], [1, 2]) & masks.causal()
PATTERNS = [PATTERN, masks.causal(), masks.local_window(left=2, right=1) | masks.global_tokens(1)]
ENGINES = [None, "aten", "flex", "portable", "reference"]
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
sizes = st.integers(0, 3)


def drawn(B: int, N: int, M: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    shapes = [(B, H, N, D), (B, H, M, D), (B, H, M, D)]
    return [torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


@given(
    B=sizes,
    N=sizes,
    M=sizes,
    dtype=dtypes,
    engine=st.sampled_from(ENGINES),
    sinks=st.booleans(),
    p=st.sampled_from(PATTERNS),
)
@settings(max_examples=20)
def test_meta_tensors_have_the_shapes_and_dtypes_of_torchs(B, N, M, dtype, engine, sinks, p) -> None:
    """Any engine, forward and backward, and the lse as wide as it is anywhere."""
    q, k, v = drawn(B, N, M, dtype, "meta")
    logits = torch.zeros(H, device="meta", requires_grad=True) if sinks else None
    out, lse = fd.attend(q, k, v, p, q_offset=0, engine=engine, sinks=logits, return_lse=True)
    expected = scaled_dot_product_attention(q, k, v)
    assert (out.shape, out.dtype, out.device) == (expected.shape, expected.dtype, expected.device)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.promote_types(dtype, torch.float32))
    leaves = [q, k, v] if logits is None else [q, k, v, logits]
    for grad, leaf in zip(torch.autograd.grad((out.sum(), lse.sum()), leaves), leaves, strict=True):
        assert (grad.shape, grad.dtype, grad.is_meta) == (leaf.shape, leaf.dtype, True)


@given(
    sizes=st.sampled_from([(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0), (1, 0, 0)]), dtype=dtypes, sinks=st.booleans()
)
@settings(max_examples=20)
def test_nothing_in_is_nothing_out(sizes, dtype, sinks) -> None:
    """As torch's attention: zeros where there is no key; the lse is -inf there, or the sink."""
    for engine in ("aten", "reference"):
        q, k, v = drawn(*sizes, dtype, "cpu")
        logits = torch.arange(H).to(dtype).requires_grad_() if sinks else None
        out, lse = fd.attend(q, k, v, PATTERN, engine=engine, sinks=logits, return_lse=True)
        assert_close(out, scaled_dot_product_attention(q, k, v))
        bare = torch.full(q.shape[:3], -torch.inf) if logits is None else logits.detach()[:, None].expand(q.shape[:3])
        assert_close(lse.detach(), bare.to(lse.dtype))
        for sent in (out.sum(), lse.masked_fill(lse == -torch.inf, 0.0).sum()):
            for grad, leaf in zip(torch.autograd.grad(sent, (q, k, v), retain_graph=True), (q, k, v), strict=True):
                assert_close(grad, torch.zeros_like(leaf))
        if logits is not None and q.numel():
            assert_close(torch.autograd.grad(lse.sum(), logits)[0], torch.full_like(logits, q.shape[0] * q.shape[2]))


def test_no_heads() -> None:
    q = torch.ones(2, 0, 5, D)
    assert fd.attend(q, q, q, PATTERN).shape == q.shape
    with pytest.raises(ValueError, match="must be a multiple"):
        fd.attend(torch.ones(2, 4, 5, D), q, q, PATTERN, enable_gqa=True)


@pytest.mark.parametrize(("B", "N"), [(0, 0), (0, 13), (2, 0), (1, 1), (2, 20)])
def test_modules_and_caches_take_an_empty_batch(B: int, N: int) -> None:
    """And, on the meta device, any."""
    config = fd.LongNetConfig(
        vocab_size=7, embed_dim=32, num_heads=H, depth=1, segment_lengths=[4, 8], dilation_rates=[1, 2], causal=True
    )
    for device in ("cpu", "meta") if B == 0 or N == 0 else ("meta",):
        x = torch.zeros(B, N, 32, device=device)
        module = fd.MultiheadDilatedAttention(32, H, [4], [2], batch_first=True, device=device)
        padding = torch.zeros(B, N, dtype=torch.bool, device=device)
        for out in (module(x, x, x)[0], module(x, x, x, key_padding_mask=padding)[0]):
            assert out.shape == x.shape
            assert len(torch.autograd.grad(out.sum(), list(module.parameters()))) == 4
        tokens = torch.zeros(B, N, dtype=torch.int64, device=device)
        assert fd.LongNet(config, device=device)(tokens).shape == (B, N, 7)
        heads = x.unflatten(2, (H, D)).transpose(1, 2)
        packed = PATTERN & masks.documents(tokens)
        assert fd.attend(heads, heads, heads, packed).shape == heads.shape
        assert fd.DilatedAttention([4], [1])(heads, heads, heads).shape == heads.shape
        cache = fd.KVCache(PATTERN, num_heads=H)
        for step in (heads, heads[:, :, :1]):
            assert cache.attend(step, step, step).shape == step.shape
        assert cache.num_tokens == N + min(N, 1)


def called(way: str, q: Tensor, p: Any, **options: Any) -> list[Tensor]:
    """All that comes out of a call, some of which autograd records."""
    if way == "cache":
        return [fd.KVCache(PATTERN, num_heads=H).attend(q, q, q)]
    found = fd.attend(q, q, q, p, **options)
    return [found] if isinstance(found, Tensor) else list(found)


WAYS: dict[str, dict[str, Any]] = {
    "out and lse": {"return_lse": True},
    "sinks": {"return_lse": True, "sinks": torch.zeros(H)},
    "reference": {"return_lse": True, "engine": "reference"},
    "layout": {"return_lse": True, "layout": masks.Layout(12, 2)},
    "blocks": {"block_size": 4},
    "cache": {},
}


@given(
    way=st.sampled_from(list(WAYS)),
    dtype=dtypes,
    recorded=st.booleans(),
    heads_last=st.booleans(),
    p=st.sampled_from(PATTERNS),
)
@settings(max_examples=20)
def test_what_comes_out_can_be_written_into(way, dtype, recorded, heads_last, p) -> None:
    """In place as out of place, with a factor that wants a gradient."""
    q = torch.randn(2, H, 12, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    if heads_last:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    factor = torch.full((), 3.0, dtype=dtype, requires_grad=True)
    q.requires_grad_(recorded and way != "cache")
    with torch.set_grad_enabled(q.requires_grad):
        outs, same = called(way, q, p, **WAYS[way]), called(way, q.detach(), p, **WAYS[way])
    for out, plain in zip(outs, same, strict=True):
        wide = factor.to(out.dtype)
        out += 1
        out.mul_(wide)
        assert_close(out.detach(), (plain.detach() + 1) * 3)
        if not q.requires_grad:
            (grad,) = torch.autograd.grad(out.masked_fill(out.isinf(), 0.0).sum(), factor, retain_graph=True)
            assert_close(grad, (plain + 1).masked_fill(plain.isinf(), 0.0).sum().to(dtype), rtol=2e-2, atol=1e-2)


def test_an_output_that_a_backward_needs_says_so() -> None:
    """As torch's own attention does: no gradient is computed from what was written over."""
    for attend in (lambda q: fd.attend(q, q, q, PATTERN), lambda q: scaled_dot_product_attention(q, q, q)):
        q = torch.randn(1, H, 8, D, requires_grad=True)
        out = attend(q)
        out += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("place", range(3))
def test_nested_tensors_are_refused(place: int, kind: torch.layout) -> None:
    """Whichever of q, k and v is one, by calls, modules and caches."""
    x = [torch.randn(2, H, 5, D) for _ in range(3)]
    x[place] = torch.nested.nested_tensor([torch.randn(n, H, D) for n in (3, 5)], layout=kind).transpose(1, 2)
    calls: list[Callable[..., Tensor]] = [
        lambda *x, engine=engine: fd.attend(*x, PATTERN, engine=engine) for engine in ENGINES
    ]
    calls += [fd.BlockSparseAttention(PATTERN), fd.DilatedAttention([4], [1]), fd.KVCache(PATTERN, num_heads=H).attend]
    for call in calls:
        with pytest.raises(ValueError, match=f"{'qkv'[place]} must be a dense tensor; got a nested one"):
            call(*x)


LONGNET = masks.longnet([8, 16], [1, 2])


def tensors(B=1, H=4, G=4, N=12, M=12, D=8, **options) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, tokens, D, **options) for heads, tokens in ((H, N), (G, M), (G, M)))
    return q, k, v


def test_more_heads_than_models_have_are_likely_to_be_tokens():
    """It warns: some pack a batch into the heads."""
    q, k, v = (x.transpose(1, 2) for x in tensors(N=300, M=300))
    with pytest.warns(UserWarning, match=r"q has 300 heads of 4 tokens, .* as x\.transpose\(1, 2\)"):
        fd.attend(q, k, v, CAUSAL)
    q, k, v = tensors(H=300, G=300, N=300, M=300, D=1)
    fd.attend(q, k, v, CAUSAL)  # as many tokens


def test_few_causal_queries_say_where_they_are():
    """q_offset=0 is the answer None has elsewhere; what is not causal, and more queries, need none."""
    q, k, v = tensors(N=3, dtype=torch.float64)
    with pytest.raises(ValueError, match="write q_offset=9 if the queries are the last tokens, or q_offset=0"):
        fd.attend(q, k, v, LONGNET & masks.causal())
    first = fd.attend(q, k, v, LONGNET & masks.causal(), q_offset=0)
    assert_close(first, fd.attend(q, k[:, :, :3], v[:, :, :3], LONGNET & masks.causal()), **TIGHT)
    for pattern in (LONGNET, masks.prefix_lm(2), masks.local_window(left=2, right=1)):
        assert_close(fd.attend(q, k, v, pattern), fd.attend(q, k, v, pattern, q_offset=0), rtol=0, atol=0)
    fd.attend(k, q, q, masks.causal())


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_sdpa_does(engine, dtype):
    q, k, v = tensors()
    with torch.autocast("cpu", dtype):
        found = fd.attend(q, k.half(), v.to(dtype), LONGNET, engine=engine)
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert found.dtype == dense.dtype == dtype
    assert torch.equal(found, fd.attend(q.to(dtype), k.half().to(dtype), v.to(dtype), LONGNET, engine=engine))


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_autocast_leaves_what_sdpa_leaves(engine):
    """Float64 stays float64, and integers stay an error."""
    q, k, v = (x.double() for x in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        found = fd.attend(q, k, v, LONGNET, engine=engine)
        assert torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == found.dtype == torch.float64
        with pytest.raises(TypeError, match=r"q must be float32, .*; got torch\.int64"):
            fd.attend(q.long(), k, v, LONGNET, engine=engine)
    assert torch.equal(found, fd.attend(q, k, v, LONGNET, engine=engine))


def test_autocast_sends_gradients_back_in_the_input_dtype():
    given = tensors(requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = fd.attend(*given, LONGNET)
    found = torch.autograd.grad(out.float().square().sum(), given)
    expected = torch.autograd.grad(fd.attend(*given, LONGNET).square().sum(), given)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


def test_a_full_int_is_a_scale():
    given = tensors()
    assert torch.equal(fd.attend(*given, LONGNET, scale=1), fd.attend(*given, LONGNET, scale=1.0))
    mean = fd.attend(*given, masks.longnet([12], [1]), scale=0)
    assert_close(mean, given[2].mean(2, keepdim=True).expand_as(mean))


CAUSAL, MIXTURE = masks.causal(), masks.longnet([8, 16], [1, 2])
Q, K, V = torch.randn(3, 1, 4, 12, 8)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05])


def fresh(D: int = 8, **how: Any) -> dict[str, Tensor]:
    return {name: torch.randn(1, 4, 12, D, **how) for name in "qkv"}


def refused(error: type[Exception], says: str, call: dict[str, Any]) -> None:
    """The call raises, and leaves the cache and the inputs as they were."""
    call = {"q": Q, "k": K, "v": V, "pattern": MIXTURE} | call
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
        (lambda s, b, h, q, k: scripted()(s, SLOPES[h]), TypeError, "without TorchScript and torch.func"),
        (lambda s, b, h, q, k: s + scripted()(SLOPES[h], SLOPES[h]), TypeError, "without TorchScript and torch.func"),
        (counting, ValueError, "must not write to tensors that it captured; it called __setitem__"),
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
        refused(ValueError, says, {"engine": "aten", **fresh(device="xpu")})
        says = "no float64 kernels on cuda; engine='portable'"
        refused(ValueError, says, {"engine": "aten", **fresh(device="cuda", dtype=torch.float64)})
        monkeypatch.setattr(_engine_choice, "_has_triton", lambda: True)
        for sides in ((128, 96), (96, 128), (32, 32)):
            rule = f"flex on xpu takes blocks whose sides are multiples of {unit} "
            says = rf"{rule}.*got block_size={re.escape(str(sides))}"
            refused(ValueError, says, {"block_size": sides, **fresh(D=16, device="xpu", dtype=torch.bfloat16)})
