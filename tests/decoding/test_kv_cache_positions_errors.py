"""KVCache with batch entries at different positions: refused and interrupted calls, which change nothing."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.decoding import _reader
from tests.support.agreement import TIGHT

from .test_kv_cache import LONGNET, WINDOW, draw_tensors
from .test_kv_cache_chunks import FRAMES
from .test_kv_cache_positions import alone, assert_goes_on, next_tokens, ragged


def state(cache: fd.KVCache) -> tuple[list[int], int, int]:
    return cache.positions.tolist(), cache.num_kept, cache.nbytes


Q, K, _ = draw_tensors(N=30, B=3)
WIDE = torch.zeros(3, 2, 30, 9, dtype=torch.float64)
BAD = {
    "a list": (
        lambda cache: cache.append(K, K, lengths=[1, 2, 3]),
        TypeError,
        r"lengths must be a tensor of int32 or int64, ",
    ),
    "floats": (
        lambda cache: cache.attend(Q, K, K, lengths=torch.ones(3)),
        TypeError,
        r"lengths must be a tensor of int32 or int64, one for each batch entry; got tensor\(\[1., 1., 1.\]\)",
    ),
    "few": (
        lambda cache: cache.attend(Q, K, K, lengths=torch.tensor([1, 2])),
        ValueError,
        r"lengths must have shape \(3,\), a number for each batch entry; got \(2,\)",
    ),
    "beyond": (
        lambda cache: cache.append(K, K, lengths=torch.tensor([30, 1, 31])),
        ValueError,
        r"lengths\[2\] must be at most 30; got lengths\[2\]=31",
    ),
    "negative": (
        lambda cache: cache.attend(Q, K, K, lengths=torch.tensor([30, -1, 3])),
        ValueError,
        r"lengths\[1\] must be at least 0",
    ),
    "another batch": (
        lambda cache: cache.attend(Q[1:], K[1:], K[1:]),
        ValueError,
        "in the cache, batch 3, .*got batch 2",
    ),
    "crop of one": (
        lambda cache: cache.crop(torch.tensor([250, 8, 130])),
        ValueError,
        r"num_tokens\[1\] must be at most 7; got num_tokens\[1\]=8",
    ),
    "crop of all": (lambda cache: cache.crop(8), ValueError, "num_tokens must be at most 7; got num_tokens=8"),
    "crop to floats": (
        lambda cache: cache.crop(torch.zeros(3)),
        TypeError,
        "num_tokens must be a tensor of int32 or int64",
    ),
    "held": (lambda cache: cache.held(), ValueError, r"cache.held\(0\), .* seen \[250, 7, 130\] tokens"),
    "held of no entry": (lambda cache: cache.held(3), ValueError, "entry must be at most 2; got entry=3"),
    "capacity": (
        lambda cache: cache.attend(*(x.repeat(1, 1, 7, 1) for x in (Q, K, K)), lengths=torch.tensor([3, 210, 200])),
        ValueError,
        r"batch entry 2: the cache holds at most capacity=256 keys; 130 that later queries may see and 200 new ones",
    ),
    "join of a list": (lambda cache: cache.join([cache]), TypeError, "join takes another KVCache; got list"),
    "join of another pattern": (
        lambda cache: cache.join(fd.KVCache(LONGNET, num_heads=4, capacity=256, undo=8)),
        ValueError,
        "join takes a cache that was made with equal arguments; got another pattern",
    ),
    "join of another undo": (
        lambda cache: cache.join(fd.KVCache(WINDOW, num_heads=4, capacity=256, undo=9)),
        ValueError,
        "equal arguments; got another undo",
    ),
    "join of another scale": (
        lambda cache: cache.join(fd.KVCache(WINDOW, num_heads=4, capacity=256, undo=8, scale=1.0)),
        ValueError,
        "equal arguments; got another scale",
    ),
    "join of another width": (
        lambda cache: cache.join(of_width_9()),
        ValueError,
        r"match those in this one, 2 key/value heads, head dim 8, .*; got 2 key/value heads, head dim 9, torch.float64",
    ),
}


def of_width_9() -> fd.KVCache:
    cache = fd.KVCache(WINDOW, num_heads=4, capacity=256, undo=8)
    cache.append(WIDE, WIDE)
    return cache


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_a_refused_call_changes_nothing(call, error, message) -> None:
    cache, tensors = ragged(WINDOW, undo=8, capacity=256)
    before = state(cache)
    with pytest.raises(error, match=message):
        call(cache)
    assert state(cache) == before
    assert_goes_on(cache, tensors)


@pytest.mark.parametrize("computed", [0, 1, 2])
def test_a_call_that_fails_leaves_no_trace(computed: int, monkeypatch) -> None:
    """An interrupt after some entries are computed leaves all of them where they were."""
    cache, tensors = ragged()
    before, attend = state(cache), _reader.Reader.attend
    results = mock.Mock(side_effect=[None] * computed + [KeyboardInterrupt])
    with monkeypatch.context() as patch:
        patch.setattr(_reader.Reader, "attend", lambda *args, **named: (results(), attend(*args, **named))[1])
        for lengths in (None, torch.tensor([20, 18, 16])):
            with pytest.raises(KeyboardInterrupt):
                cache.attend(*next_tokens(cache, tensors, 20), lengths=lengths)
            results.side_effect = [None] * computed + [KeyboardInterrupt]
    assert state(cache) == before
    assert_goes_on(cache, tensors)


def test_the_first_call_is_refused() -> None:
    """Sizes that a refused first call would have set are not kept."""
    q, k, v = draw_tensors(N=30, B=3)
    cache = fd.KVCache(WINDOW, num_heads=4, capacity=20)
    with pytest.raises(
        ValueError, match=r"batch entries 0, 2: the cache holds at most capacity=20 keys; 0 .* and 30 new"
    ):
        cache.attend(q, k, v, lengths=torch.tensor([30, 4, 30]))
    assert cache.attend(*(x[:1, :, :5] for x in (q, k, v))).shape == (1, 4, 5, 8)


def test_keys_that_are_gone() -> None:
    """The crop of one entry is refused, so none is cropped."""
    _, k, v = draw_tensors(N=900, B=2)
    cache = fd.KVCache(WINDOW, num_heads=4)
    cache.append(k, v, lengths=torch.tensor([900, 50]))
    with pytest.raises(
        ValueError, match=r"batch entry 0: the cache no longer holds .* undo=0 tokens, and has seen 900"
    ):
        cache.crop(torch.tensor([10, 20]))
    assert cache.positions.tolist() == [900, 50]
    cache.crop(torch.tensor([0, 20]))
    assert cache.positions.tolist() == [0, 20]


def test_entries_that_end_inside_a_chunk() -> None:
    """The error names the entry, and the numbers of tokens that fit at its position; a crop names it as well."""
    q, k, v = draw_tensors(N=48, B=3)
    cache = fd.KVCache(FRAMES, num_heads=4)
    cache.attend(q, k, v, lengths=torch.tensor([16, 8, 0]))
    with pytest.raises(
        ValueError, match=r"batch entry 1: the new tokens must end .* query 16 sees key 23: bring 16 or 24 tokens,"
    ):
        cache.attend(q, k, v, lengths=torch.tensor([16, 9, 24]))
    cache.append(k[:, :, :9], v[:, :, :9], lengths=torch.tensor([0, 9, 0]))
    assert cache.positions.tolist() == [16, 17, 0]
    with pytest.raises(ValueError, match=r"batch entry 0: a crop must end .* got 12 tokens to keep"):
        cache.crop(torch.tensor([12, 16, 0]))
    cache.crop(torch.tensor([16, 8, 0]))
    new = next_tokens(cache, (q, k, v), 16)
    out = cache.attend(*new, lengths=torch.tensor([16, 8, 16]))
    for row, sequence, first, length in zip(out, alone((q, k, v), FRAMES), (16, 8, 0), (16, 8, 16), strict=True):
        assert_close(row[:, :length], sequence[:, first : first + length], **TIGHT)


def test_an_entry_beyond_a_grid_is_named() -> None:
    x = torch.zeros(2, 4, 20, 8)
    cache = fd.KVCache(masks.neighborhood((4, 4), 1) & WINDOW, num_heads=4)
    cache.append(x, x, lengths=torch.tensor([10, 16]))
    with pytest.raises(
        ValueError, match=r"batch entry 1: .*within the 16 tokens of a 4x4 grid; got queries up to position 1"
    ):
        cache.append(x, x, lengths=torch.tensor([6, 1]))
    cache.append(x, x, lengths=torch.tensor([6, 0]))
    assert cache.num_tokens == 16
