"""KVCache: what it refuses, and says about it."""

import pytest
import torch

import flexdilated as fd
from flexdilated import masks

WINDOW = masks.local_window(left=100, right=0)
X = torch.zeros(2, 4, 3, 8)
BAD = {
    "not a pattern": (lambda: fd.KVCache("causal", num_heads=4), TypeError, "pattern must be a pattern or mixture"),
    "no heads": (lambda: fd.KVCache(WINDOW, num_heads=0), ValueError, "num_heads must be at least 1; got num_heads=0"),
    "engine": (lambda: fd.KVCache(WINDOW, num_heads=4, engine="fast"), ValueError, "engine must be None or one of"),
    "capacity": (lambda: fd.KVCache(WINDOW, num_heads=4, capacity=0), ValueError, "capacity must be at least 1"),
    "scale": (lambda: fd.KVCache(WINDOW, num_heads=4, scale=float("inf")), ValueError, "scale must be finite"),
    "heads of all": (
        lambda: fd.KVCache(WINDOW, num_heads=4, head_offset=1, num_heads_global=4),
        ValueError,
        "heads 1 to 4 must lie within num_heads_global",
    ),
    "heads of the pattern": (
        lambda: fd.KVCache(masks.per_head([WINDOW, WINDOW]), num_heads=4),
        ValueError,
        "per_head needs one pattern a head; got 2 for 4 heads",
    ),
    "another number of heads": (lambda: used().attend(X[:, :2], X, X), ValueError, "multiple of the key/value heads"),
    "fewer heads": (lambda: used().attend(X[:, :2], X[:, :2], X[:, :2]), ValueError, "q must hold num_heads=4 heads"),
    "other tokens": (
        lambda: used().attend(X[:, :, :2], X, X),
        ValueError,
        r"the new tokens of k; got q \(2, 4, 2, 8\)",
    ),
    "another batch": (lambda: used().attend(X[:1], X[:1], X[:1]), ValueError, "those before, batch 2, .*got batch 1"),
    "other key heads": (lambda: used().attend(X, X[:, :1], X[:, :1]), ValueError, "got batch 2, 1 key/value heads"),
    "another head dim": (lambda: used().attend(*[X[..., :4]] * 3), ValueError, "got .*head dim 4"),
    "another dtype": (lambda: used().attend(*[X.double()] * 3), ValueError, "float32 on cpu; got .*float64"),
    "unequal dtypes": (lambda: used().attend(X, X.double(), X), ValueError, "must have one dtype"),
    "a list": (lambda: used().append([1], X), TypeError, "k must be a tensor; got list"),
    "appended heads": (lambda: used().append(X[:, :3], X[:, :3]), ValueError, "must be a multiple of the key/value"),
    "a gradient": (
        lambda: used().attend(X.clone().requires_grad_(), X, X),
        ValueError,
        r"a cache passes no gradient on, .*call it under torch.no_grad\(\)",
    ),
    "sinks": (lambda: used().attend(X, X, X, sinks=torch.zeros(3)), ValueError, "sinks must have one logit for each"),
    "tokens beyond a grid": (
        lambda: fd.KVCache(masks.neighborhood((4, 4), 1) & WINDOW, num_heads=4).append(*[X.repeat(1, 1, 6, 1)] * 2),
        ValueError,
        "a grid of 4x4 holds 16 tokens; got queries up to 18 and keys up to 18",
    ),
    "run-time tensors": (
        lambda: fd.KVCache(masks.documents(torch.tensor([0, 0, 1])) & WINDOW, num_heads=4),
        ValueError,
        r"a pattern without run-time tensors, .*got one with 'documents'",
    ),
}


def used() -> fd.KVCache:
    cache = fd.KVCache(WINDOW, num_heads=4)
    cache.attend(X, X, X)
    return cache


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("seen", [0, 3])
def test_a_refused_call_changes_nothing(seen: int) -> None:
    """Neither the first one, whose sizes would hold for those that follow, nor one that is taken in portions."""
    cache = fd.KVCache(masks.causal(), num_heads=1, capacity=5000)
    x = torch.randn(1, 1, 6000, 2)
    if seen:
        cache.append(x[:, :, :seen], x[:, :, :seen])
    before = cache.num_tokens, cache.num_kept, cache.nbytes
    with pytest.raises(ValueError, match="capacity=5000"):
        cache.append(x, x)
    with pytest.raises(ValueError, match="capacity=5000"):
        cache.attend(x, x, x)
    assert (cache.num_tokens, cache.num_kept, cache.nbytes) == before
    some = x[:, :, seen:100] if seen else x.repeat(2, 1, 1, 1)[:, :, :100]
    expected = fd.attend(x[:, :, :100], x[:, :, :100], x[:, :, :100], masks.causal())[:, :, seen:]
    torch.testing.assert_close(cache.attend(some, some, some)[:1], expected)
