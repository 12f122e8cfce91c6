"""Where chunks of a cache end, what caches refuse, and calls that are interrupted: they change nothing."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.decoding import _reader
from tests.support.agreement import TIGHT

from .cases import FRAMES, LONGNET, WINDOW, alone, assert_goes_on, draw_tensors, next_tokens, ragged, tree

Q, K, _ = draw_tensors(N=30, B=3)
WIDE = torch.zeros(3, 2, 30, 9, dtype=torch.float64)


def equal(**options) -> fd.KVCache:
    """A cache with the arguments of the one that is asked, but for these."""
    cache = fd.KVCache(**{"pattern": WINDOW, "num_heads": 4, "capacity": 256, "undo": 8} | options)
    cache.append(WIDE, WIDE)
    return cache


def long(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.repeat(1, 1, 7, 1) for x in xs)


LENGTHS = "lengths must be a tensor of int32 or int64, one for each batch entry; got tensor"
ENTRIES = r"entries must be a tensor of integers of shape \(C,\); got "
REFUSED: list[tuple[Callable[[fd.KVCache], object], str]] = [
    (lambda cache: cache.attend(Q, K, K, lengths=torch.ones(3)), LENGTHS),
    (lambda cache: cache.attend(Q, K, K, lengths=torch.tensor([30, -1, 3])), r"lengths\[1\] must be at least 0"),
    (lambda cache: cache.attend(Q.float(), K.float(), K.float()), "float64 on cpu; got .*float32"),
    (lambda cache: cache.attend(Q, K, K, sinks=torch.zeros(3)), "sinks must have one logit for each"),
    (lambda cache: cache.append(Q[:, :3], Q[:, :3]), "must be a multiple of the key/value"),
    (
        lambda cache: cache.attend(*long(Q, K, K), lengths=torch.tensor([3, 210, 200])),
        r"batch entry 2: the cache holds at most capacity=256 keys; 130 that later queries may see and 200 new ones",
    ),
    (lambda cache: cache.crop(8), "num_tokens must be at most 7; got num_tokens=8"),
    (lambda cache: cache.crop(torch.zeros(3)), "num_tokens must be a tensor of int32 or int64"),
    (lambda cache: cache.held(3), "entry must be at most 2; got entry=3"),
    (lambda cache: cache.select([0]), ENTRIES + r"\[0\]"),
    (lambda cache: cache.select(torch.tensor([0.0])), ENTRIES),
    (lambda cache: cache.select(torch.tensor([3])), r"each between 0 and 2; got \[3\]"),
    (lambda cache: cache.select(torch.tensor([], dtype=torch.long)), "at least one batch entry,"),
    (lambda cache: cache.join([cache]), "join takes another KVCache; got list"),
    *(
        (
            lambda cache, each=each: cache.join(equal(**each)),
            f"made with equal arguments; got another {next(iter(each))}",
        )
        for each in ({"pattern": LONGNET}, {"undo": 9}, {"scale": 1.0})
    ),
    (
        lambda cache: cache.join(equal()),
        r"match those in this one, 2 key/value heads, head dim 8, .*; got 2 key/value heads, head dim 9, torch.float64",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_a_refused_call_changes_nothing(call, message) -> None:
    cache, tensors = ragged(WINDOW, undo=8, capacity=256)
    before = cache.positions.tolist(), cache.num_kept, cache.nbytes
    kind = TypeError if "tensor of int" in message or "list" in message or "an integer" in message else ValueError
    with pytest.raises(kind, match=message):
        call(cache)
    assert (cache.positions.tolist(), cache.num_kept, cache.nbytes) == before
    assert_goes_on(cache, tensors)


def test_before_the_first_tokens() -> None:
    """Nothing is held, to crop or to select from; sizes that a refused first call would have set are not kept."""
    q, k, v = draw_tensors(N=30, B=3)
    cache = fd.KVCache(WINDOW, num_heads=4, capacity=20)
    cache.crop(0)
    cache.select(torch.tensor([0]))
    with pytest.raises(ValueError, match="has seen no tokens holds no keys"):
        cache.held()
    with pytest.raises(ValueError, match=r"batch entries 0, 2: .* at most capacity=20 keys; 0 .* and 30 new"):
        cache.attend(q, k, v, lengths=torch.tensor([30, 4, 30]))
    assert cache.attend(*(x[:1, :, :5] for x in (q, k, v))).shape == (1, 4, 5, 8)


@pytest.mark.parametrize("seen", [0, 3])
def test_tokens_taken_in_portions_are_refused_as_one(seen: int) -> None:
    cache = fd.KVCache(masks.causal(), num_heads=1, capacity=5000)
    x = torch.randn(1, 1, 6000, 2)
    cache.append(x[:, :, :seen], x[:, :, :seen])
    before = cache.num_tokens, cache.num_kept, cache.nbytes
    for call in (lambda: cache.append(x, x), lambda: cache.attend(x, x, x)):
        with pytest.raises(ValueError, match="capacity=5000"):
            call()
        assert (cache.num_tokens, cache.num_kept, cache.nbytes) == before
    expected = fd.attend(x[:, :, :100], x[:, :, :100], x[:, :, :100], masks.causal())[:, :, seen:]
    assert_close(cache.attend(*(x[:, :, seen:100],) * 3), expected)


def test_keys_that_are_gone() -> None:
    """The crop of one entry is refused, so none is cropped; queries from the beginning see none of them."""
    q, k, v = draw_tensors(N=900)
    cache = fd.KVCache(WINDOW, num_heads=4)
    cache.append(k, v, lengths=torch.tensor([900, 50]))
    gone = r"batch entry 0: .* queries from position 10 on may see; .* undo=0 tokens, and has seen 900: .* larger undo"
    with pytest.raises(ValueError, match=gone):
        cache.crop(torch.tensor([10, 20]))
    assert cache.positions.tolist() == [900, 50]
    cache.crop(torch.tensor([0, 0]))
    assert_close(cache.attend(q, k, v), alone((q, k, v), WINDOW), **TIGHT)


@pytest.mark.parametrize("computed", [0, 1, 2])
@pytest.mark.parametrize("number", [1, 20])
def test_a_call_that_is_interrupted_leaves_no_trace(computed: int, number: int, monkeypatch) -> None:
    """After some entries are computed, for steps and for calls of an engine, all of them are where they were."""
    cache, tensors = ragged()
    before, attend = cache.positions.tolist(), _reader.Reader.attend
    for lengths in (None, torch.tensor([number] * 2 + [max(1, number - 4)])):
        results = mock.Mock(side_effect=[None] * computed + [KeyboardInterrupt])

        def stopped(*args, results=results, **named):
            out = attend(*args, **named)
            results()
            return out

        with monkeypatch.context() as patch:
            patch.setattr(_reader.Reader, "attend", stopped)
            with pytest.raises(KeyboardInterrupt):
                cache.attend(*next_tokens(cache, tensors, number), lengths=lengths)
    assert cache.positions.tolist() == before
    assert_goes_on(cache, tensors)


def test_entries_that_end_inside_a_chunk_are_named() -> None:
    """With the numbers of tokens that fit at its position; a crop names it as well."""
    tensors = draw_tensors(N=48, B=3)
    cache = fd.KVCache(FRAMES, num_heads=4)
    cache.attend(*tensors, lengths=torch.tensor([16, 8, 0]))
    named = r"batch entry 1: the new tokens must end .* query 16 sees key 23: bring 16 or 24 tokens,"
    with pytest.raises(ValueError, match=named):
        cache.attend(*tensors, lengths=torch.tensor([16, 9, 24]))
    with pytest.raises(ValueError, match=r"batch entry 0: a crop must end .* got 12 tokens to keep"):
        cache.crop(torch.tensor([12, 8, 0]))
    assert cache.positions.tolist() == [16, 8, 0]


def test_an_entry_beyond_a_grid_is_named() -> None:
    x = torch.zeros(2, 4, 20, 8)
    cache = fd.KVCache(masks.neighborhood((4, 4), 1) & WINDOW, num_heads=4)
    cache.append(x, x, lengths=torch.tensor([10, 16]))
    beyond = r"batch entry 1: .*within the 16 tokens of a 4x4 grid; got queries up to position 1"
    with pytest.raises(ValueError, match=beyond):
        cache.append(x, x, lengths=torch.tensor([6, 1]))
    cache.append(x, x, lengths=torch.tensor([6, 0]))
    assert cache.num_tokens == 16


def test_tensors_that_a_score_mod_captures_need_no_grad() -> None:
    tensors, slopes = draw_tensors(N=100), torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    learned, cache = fd.biases.alibi(slopes.clone().requires_grad_()), fd.KVCache(masks.causal(), num_heads=4)
    for number in (1, 100):
        with pytest.raises(ValueError, match=r"an input requires one: call it under torch\.no_grad"):
            cache.attend(*(x[:, :, :number] for x in tensors), score_mod=learned)
        assert (cache.num_tokens, cache.num_kept) == (0, 0)
    with torch.no_grad():
        found = cache.attend(*tensors, score_mod=learned)
    exact = fd.attend(*tensors, masks.causal(), score_mod=fd.biases.alibi(slopes), enable_gqa=True, engine="reference")
    assert_close(found, exact, **TIGHT)


FAR = [[*range(30), *[30, 31] * (row == 10)] for row in range(30)]  # queries 100 to 109 see keys up to 319


@pytest.mark.parametrize(
    ("pattern", "chunk", "proven"),
    [
        (FRAMES, 8, True),
        (FRAMES & masks.every(), 8, True),
        (FRAMES | masks.chunked(6), 24, True),
        (masks.chunked(8), 8, True),
        (masks.chunked(8) | masks.causal(), 8, True),
        (masks.chunked(8).after(3) | masks.first_tokens(3), 8, False),
        (masks.local_window(left=9, right=2) & masks.blockwise(masks.causal(), 6), 6, True),
        (masks.custom(tree), 4, False),
        (masks.prefix_lm(37), 37, False),
        (masks.per_head([masks.causal(), masks.chunked(6), masks.blockwise(masks.causal(), 4)]), 12, False),
        (masks.chunked(10) + masks.blockwise(masks.causal(), 15), 30, True),
        (masks.blockwise(masks.local_window(left=2, right=0), 4680), 4680, True),
        (masks.neighborhood((6, 10), kernel_size=(2, 5), causal=(True, False)), 10, False),
        (masks.longnet((8, 64), (1, 4)), 64, True),
        (masks.causal() | masks.block_list(FAR, block=10), 320, False),
        (masks.causal(), 1, True),
        (masks.local_window(left=5, right=0) | masks.dilated(1, 1), 1, True),
    ],
)
def test_chunks(pattern: masks.Pattern | masks.Mixture, chunk: int, proven: bool) -> None:
    """Where the form of a pattern does not prove its chunks, the cache has them as a rule beside it."""
    cache = fd.KVCache(pattern, num_heads=3)
    assert cache.chunk == chunk
    assert (cache.pattern == pattern) == proven


def test_ends_that_are_not_regular() -> None:
    """Single tokens, then a tree of five draft tokens in one call, then single tokens."""
    rule = masks.causal() | (masks.local_window(left=4, right=4) & masks.block_list([[]] * 20 + [[20]], block=5))
    q, k, v = draw_tensors(N=120)
    cache, outs = fd.KVCache(rule, num_heads=4), []
    for size in [1] * 100 + [5] + [1] * 15:
        begin = cache.num_tokens
        outs.append(cache.attend(*(x[:, :, begin : begin + size] for x in (q, k, v))))
    assert_close(torch.cat(outs, 2), fd.attend(q, k, v, rule, enable_gqa=True), **TIGHT)
    cache.crop(105)
    with pytest.raises(ValueError, match="here query 100 sees key 104; got 103 tokens to keep"):
        cache.crop(103)
    cache.crop(100)
    with pytest.raises(ValueError, match=r"bring 5 or 6 tokens, .* got 3 tokens from position 100 on"):
        cache.attend(*(x[:, :, 100:103] for x in (q, k, v)))
    assert_close(cache.attend(*(x[:, :, 100:105] for x in (q, k, v))), torch.cat(outs, 2)[:, :, 100:105], **TIGHT)
