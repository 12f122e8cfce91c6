"""attend: bad input is refused before any work, engines are chosen as written, options do what they say."""

import re

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import _engine_choice, masks
from tests.support import oracle
from tests.support.agreement import TIGHT

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

PATTERN = masks.longnet([8, 16], [1, 2])


def tensors(B=1, H=4, G=4, N=12, M=12, D=8, **options) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, tokens, D, **options) for heads, tokens in ((H, N), (G, M), (G, M)))
    return q, k, v


def changed(index: int, change) -> tuple[Tensor, ...]:
    """q, k, v with one of them changed."""
    return tuple(change(x) if place == index else x for place, x in enumerate(tensors()))


def refused(error: type[Exception], says: str, *given, **options) -> None:
    """The call raises, and leaves the cache and the inputs as they were."""
    before, inputs = (
        masks.cache().stats(),
        [x.clone() for x in given if isinstance(x, Tensor) and x.device.type == "cpu"],
    )
    with pytest.raises(error, match=says):
        fd.attend(*given, **options)
    assert masks.cache().stats() == before
    for x, copy in zip((x for x in given if isinstance(x, Tensor) and x.device.type == "cpu"), inputs, strict=True):
        assert torch.equal(x, copy)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (changed(0, lambda q: q.tolist()), TypeError, "q must be a tensor; got list"),
        (changed(2, lambda v: None), TypeError, "v must be a tensor; got NoneType"),
        (changed(1, lambda k: k[0]), ValueError, r"k must have the 4 dims .*; got \(4, 12, 8\)"),
        (
            changed(0, lambda q: q.int()),
            TypeError,
            "q must be float32, bfloat16, float16 or float64; got torch.int32",
        ),
        (changed(2, lambda v: v.to(torch.complex64)), TypeError, "v must be float32"),
        (changed(1, lambda k: k.bfloat16()), ValueError, "one dtype; got torch.float32, torch.bfloat16"),
        (changed(2, lambda v: v.double()), ValueError, "one dtype; .*torch.float64"),
        (changed(1, lambda k: k.to("meta")), ValueError, "one device; got cpu, meta and cpu"),
        (changed(2, lambda v: v[..., :0]), ValueError, "head dim must be at least 1"),
        (
            changed(2, lambda v: v[:, :, 1:]),
            ValueError,
            r"one shape, except for the head dim; got \(1, 4, 12, 8\) and \(1, 4, 11, 8\)",
        ),
        ((tensors(3)[0], *tensors(2)[1:]), ValueError, "agree in batch"),
        (changed(0, lambda q: q[..., :4]), ValueError, "agree in batch and head dim"),
        (tensors(D=0), ValueError, "head dim must be at least 1"),
        (tensors(H=4, G=3), ValueError, "multiple of the number of key/value heads; got 4 and 3"),
        (tensors(H=2, G=4), ValueError, "multiple of the number of key/value heads; got 2 and 4"),
        (tensors(H=4, G=2), ValueError, "enable_gqa=True; got 4 and 2"),
    ],
)
def test_bad_tensors(given, error, says):
    refused(error, says, *given, PATTERN)


def test_more_heads_than_models_have_are_likely_to_be_tokens():
    """It warns: some pack a batch into the heads."""
    q, k, v = (x.transpose(1, 2) for x in tensors(N=300, M=300))
    with pytest.warns(UserWarning, match=r"q has 300 heads of 4 tokens, .* as x\.transpose\(1, 2\)"):
        fd.attend(q, k, v, PATTERN)
    q, k, v = tensors(H=300, G=300, N=300, M=300, D=1)
    fd.attend(q, k, v, PATTERN)  # as many tokens


def test_few_causal_queries_say_where_they_are():
    """q_offset=0 is the answer None has elsewhere; what is not causal, and more queries, need none."""
    q, k, v = tensors(N=3, dtype=torch.float64)
    with pytest.raises(ValueError, match="write q_offset=9 if the queries are the last tokens, or q_offset=0"):
        fd.attend(q, k, v, PATTERN & masks.causal())
    first = fd.attend(q, k, v, PATTERN & masks.causal(), q_offset=0)
    assert_close(first, fd.attend(q, k[:, :, :3], v[:, :, :3], PATTERN & masks.causal()), **TIGHT)
    for pattern in (PATTERN, masks.prefix_lm(2), masks.local_window(left=2, right=1)):
        assert_close(fd.attend(q, k, v, pattern), fd.attend(q, k, v, pattern, q_offset=0), rtol=0, atol=0)
    fd.attend(k, q, q, masks.causal())


def test_sparse_tensors_are_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"q must be a dense tensor, such as q\.to_dense\(\)"):
        fd.attend(q.to_sparse(), k, v, PATTERN)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"scale": float("nan")}, ValueError, "scale must be finite; got scale=nan"),
        ({"scale": float("inf")}, ValueError, "scale must be finite; got scale=inf"),
        ({"scale": "1"}, TypeError, "scale must be a real number or None; got '1'"),
        ({"scale": True}, TypeError, "got True"),
        ({"scale": torch.tensor(1.0)}, TypeError, "scale must be a real number"),
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
        ({"layout": 2}, TypeError, "layout must come from masks.layout; got int"),
        ({"block_size": 0}, ValueError, "block_size"),
        ({"block_size": (128, 0)}, ValueError, "block_size"),
        ({"block_size": (128,)}, ValueError, "block_size"),
        ({"block_size": 64.0}, TypeError, "block_size"),
        (
            {"engine": "fast"},
            ValueError,
            "None or one of 'flex', 'flash', 'aten', 'portable', 'reference'; got engine='fast'",
        ),
        ({"engine": 1}, ValueError, "got engine=1"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p"),
    ],
    ids=str,
)
def test_bad_options(options, error, says):
    refused(error, says, *tensors(), PATTERN, **options)


@pytest.mark.parametrize(
    ("pattern", "error", "says"),
    [
        ("causal", TypeError, "pattern or mixture from flexdilated.masks; got str"),
        (None, TypeError, "got NoneType"),
        (masks.causal, TypeError, "got function"),
        (masks.causal().bind(num_heads=4, num_queries=12, num_keys=12), TypeError, "got Bound"),
        (masks.per_head([masks.causal()] * 3), ValueError, "one pattern for each head; got 3 for 4 heads"),
        (masks.longnet([4] * 5, [1] * 5, heads="grouped"), ValueError, "num_heads=4"),
    ],
)
def test_bad_patterns(pattern, error, says):
    refused(error, says, *tensors(), pattern)


def test_a_layout_is_for_as_many_queries_as_keys():
    refused(
        ValueError,
        "for 12 queries and 13 keys; got one for 12 tokens",
        *tensors(M=13),
        PATTERN,
        layout=masks.Layout(12),
    )


@pytest.mark.parametrize(
    ("given", "pattern", "options", "says"),
    [
        (tensors(requires_grad=True), masks.causal(), {}, "no backward on CPU.*engine='aten' serves it"),
        (tensors(), masks.causal(), {"return_lse": True}, "no lse on CPU; engine='aten' serves it"),
        (
            tensors(),
            masks.causal(),
            {"sinks": torch.zeros(4)},
            "no lse on CPU, which sinks need; engine='aten' serves",
        ),
        (tensors(), PATTERN, {}, "2 branches of a mixture need; engine='aten' serves it"),
        (tensors(dtype=torch.float64), masks.causal(), {}, "no float64.*engine='aten'"),
    ],
    ids=["gradient", "lse", "sinks", "mixture", "float64"],
)
def test_flex_says_what_it_cannot_serve_on_cpu(given, pattern, options, says):
    """Nothing falls back silently: the error names the engine that can."""
    refused(ValueError, says, *given, pattern, engine="flex", **options)


def test_flex_says_that_it_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused(ValueError, "no-such-compiler.*engine='aten' serves it", *tensors(), masks.causal(), engine="flex")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    refused(ValueError, "no C.. compiler.*engine='aten' serves it", *tensors(), masks.causal(), engine="flex")
    assert fd.attend(*tensors(), masks.causal()).isfinite().all()


def test_tiles_says_where_it_runs():
    with FakeTensorMode():  # stands in for devices that are not there
        given = tuple(torch.empty(1, 4, 12, 8, device="xpu") for _ in range(3))
        refused(ValueError, "on CPU and CUDA; got tensors on xpu:0. engine='portable'", *given, PATTERN, engine="aten")
        given = tuple(torch.empty(1, 4, 12, 8, device="cuda", dtype=torch.float64) for _ in range(3))
        refused(ValueError, "no float64 kernels on cuda; engine='portable'", *given, PATTERN, engine="aten")


@pytest.mark.parametrize("sides", [(128, 96), (96, 128), (32, 32)])
def test_flex_says_which_blocks_accelerators_take(monkeypatch, sides):
    monkeypatch.setattr(_engine_choice, "_has_triton", lambda: True)
    unit = 64 if torch.__version__ >= "2.15" else 128  # newer torch has smaller tiles
    with FakeTensorMode():
        given = tuple(torch.empty(1, 4, 12, 16, device="xpu", dtype=torch.bfloat16) for _ in range(3))
        says = rf"flex on xpu takes blocks whose sides are multiples of {unit} .*got block_size={re.escape(str(sides))}"
        refused(ValueError, says, *given, PATTERN, block_size=sides)


@pytest.mark.parametrize("engine", [None, "aten", "portable", "reference"])
def test_every_engine_is_the_oracle(engine):
    rule, positions = oracle.longnet([8, 16], [1, 2]), torch.arange(12)
    given = tensors(G=2, dtype=torch.float64)
    found = fd.attend(*given, PATTERN, enable_gqa=True, engine=engine, return_lse=True)
    expected = oracle.attention(*given, oracle.counts(rule, range(4), 4, positions, positions))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, **TIGHT)


def test_the_output_alone_or_with_its_lse():
    given = tensors()
    out = fd.attend(*given, PATTERN)
    pair = fd.attend(*given, PATTERN, return_lse=True)
    assert isinstance(pair, tuple)
    assert torch.equal(out, pair[0])
    assert (out.shape, pair[1].shape) == ((1, 4, 12, 8), (1, 4, 12))


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_sdpa_does(engine, dtype):
    q, k, v = tensors()
    with torch.autocast("cpu", dtype):
        found = fd.attend(q, k.half(), v.to(dtype), PATTERN, engine=engine)
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert found.dtype == dense.dtype == dtype
    assert torch.equal(found, fd.attend(q.to(dtype), k.half().to(dtype), v.to(dtype), PATTERN, engine=engine))


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_autocast_leaves_what_sdpa_leaves(engine):
    """Float64 stays float64, and integers stay an error."""
    q, k, v = (x.double() for x in tensors())
    with torch.autocast("cpu", torch.bfloat16):
        found = fd.attend(q, k, v, PATTERN, engine=engine)
        assert torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == found.dtype == torch.float64
        with pytest.raises(TypeError, match=r"q must be float32, .*; got torch\.int64"):
            fd.attend(q.long(), k, v, PATTERN, engine=engine)
    assert torch.equal(found, fd.attend(q, k, v, PATTERN, engine=engine))


def test_autocast_sends_gradients_back_in_the_input_dtype():
    given = tensors(requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = fd.attend(*given, PATTERN)
    found = torch.autograd.grad(out.float().square().sum(), given)
    expected = torch.autograd.grad(fd.attend(*given, PATTERN).square().sum(), given)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


def test_a_full_int_is_a_scale():
    given = tensors()
    assert torch.equal(fd.attend(*given, PATTERN, scale=1), fd.attend(*given, PATTERN, scale=1.0))
    mean = fd.attend(*given, masks.longnet([12], [1]), scale=0)
    assert_close(mean, given[2].mean(2, keepdim=True).expand_as(mean))


def test_one_tensor_may_be_all_three():
    x = tensors(dtype=torch.float64)[0].requires_grad_()
    (found,) = torch.autograd.grad(fd.attend(x, x, x, PATTERN).square().sum(), x)
    (expected,) = torch.autograd.grad(fd.attend(x, x, x, PATTERN, engine="reference").square().sum(), x)
    assert_close(found, expected, **TIGHT)


@pytest.mark.parametrize("D", [1, 3, 24, 48, 65])
def test_any_head_dim(D):
    given = tensors(D=D, dtype=torch.float64)
    assert_close(fd.attend(*given, PATTERN), fd.attend(*given, PATTERN, engine="reference"), **TIGHT)
