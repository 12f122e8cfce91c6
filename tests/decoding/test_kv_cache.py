"""KVCache: decoding equals prefill for every causal pattern, evicted or not; memory stays bounded; bad input."""

import copy
from contextlib import contextmanager
from itertools import cycle
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.decoding import _held_keys, _kv_cache, _reader
from flexdilated.engines._rows import matrix_forward
from tests.support import oracle, strategies
from tests.support.agreement import TIGHT

WINDOW = masks.local_window(left=100, right=0)
STREAMING = (masks.first_tokens(4) | masks.local_window(left=100, right=0)) & masks.causal()
LONGNET = masks.longnet([64, 128, 256], [1, 2, 4]) & masks.causal()
ODD_LONGNET = masks.longnet([50, 100, 333], [1, 3, 7], offsets="contiguous") & masks.causal()
SEARCHED = ~masks.strided(3) & WINDOW  # no closed form
BOUNDED = {
    "window": WINDOW,
    "streaming": STREAMING,
    "longnet": LONGNET,
    "odd longnet": ODD_LONGNET,
    "searched": SEARCHED,
}
UNBOUNDED = {
    "causal": masks.causal(),
    "sparse transformer": (masks.local_window(left=8, right=0) | masks.strided(8)) & masks.causal(),
    "searched to the beginning": ~masks.strided(3) & masks.causal(),
}


@contextmanager
def tiny_sizes(*, page: int, least_slots: int, rows: int):
    """Keys are evicted after a few tokens, in pages of a few; short chunks take either way."""
    held = mock.patch.multiple(_held_keys, _PAGE=page, _LEAST_SLOTS=least_slots)
    portions = mock.patch.multiple(_kv_cache, MOST_ROWS=rows, _APPENDED_AT_ONCE=7)
    with held, portions, mock.patch.object(_reader, "MOST_ROWS", rows):
        yield


def decode(cache, q, k, v, chunks):
    """The outputs of chunks of these sizes, over and over, up to the end."""
    sizes, outs = cycle(chunks), []
    while q.shape[2]:
        size = next(sizes)
        outs.append(cache.attend(q[:, :, :size], k[:, :, :size], v[:, :, :size]))
        q, k, v = (x[:, :, size:] for x in (q, k, v))
    return torch.cat(outs, dim=2)


def draw_tensors(H=4, G=2, N=700, D=8, B=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, heads, N, D, generator=generator, dtype=dtype) for heads in (H, G, G))


@given(data=st.data())
def test_decoding_equals_prefill(data: st.DataObject) -> None:
    """Every causal pattern, in chunks of any sizes, with keys evicted on the way: the dense oracle's output.

    The first tokens may come without queries.
    """
    case = data.draw(strategies.whole_cases(strategies.causal_twins))
    q, k, v = (x.detach() for x in data.draw(strategies.tensors(case)))
    chunks = data.draw(st.lists(st.sampled_from([1, 1, 2, 5, 30]), min_size=1, max_size=4))
    sizes = {name: data.draw(st.sampled_from([1, 2, 5])) for name in ("page", "least_slots", "rows")}
    begun = data.draw(st.one_of(st.just(0), st.integers(0, case.num_keys - 1)))
    with tiny_sizes(**sizes):
        cache = fd.KVCache(case.twin.pattern, num_heads=case.num_heads)
        cache.append(k[:, :, :begun], v[:, :, :begun])
        out = decode(cache, *(x[:, :, begun:] for x in (q, k, v)), chunks)
    assert_close(out, oracle.attention(q, k, v, case.counts())[0][:, :, begun:], **TIGHT)


@given(data=st.data())
def test_what_is_evicted_is_never_seen(data: st.DataObject) -> None:
    case = data.draw(strategies.whole_cases(strategies.causal_twins))
    query = data.draw(st.integers(0, case.num_keys - 1))
    _, k, v = (x.detach() for x in data.draw(strategies.tensors(case)))
    cache = fd.KVCache(case.twin.pattern, num_heads=case.num_heads)
    cache.append(k[:, :, : query + 1], v[:, :, : query + 1])
    with tiny_sizes(page=data.draw(st.integers(1, 6)), least_slots=1, rows=1):
        kept = [position for run in cache._cohorts[0].held.visible(query + 1) for position in run]
    evicted = sorted(set(range(query + 1)) - set(kept))
    assert not case.counts()[:, query + 1 :, evicted].any()


MIXED = (1, 40, 3, 150)
CHUNKS = {"window": [(1,), (16, 17)], "longnet": [(300,), MIXED]}


@pytest.mark.parametrize("name", [*BOUNDED, *UNBOUNDED])
def test_over_many_evictions(name) -> None:
    """At the cache's own sizes, over many times the look-back: one pass of `attend`, in float64."""
    q, k, v = draw_tensors(N=400)
    pattern = (BOUNDED | UNBOUNDED)[name]
    expected = fd.attend(q, k, v, pattern, enable_gqa=True)
    for chunks in CHUNKS.get(name, [MIXED]):
        assert_close(decode(fd.KVCache(pattern, num_heads=4), q, k, v, chunks), expected, **TIGHT)


@pytest.mark.parametrize(("name", "bound"), [("window", 164), ("streaming", 228), ("longnet", 256)])
def test_memory_stays_bounded(name, bound) -> None:
    """Far beyond the look-back: never more keys than twice those visible, which `bound` counts with whole pages."""
    N = 800
    q, k, v = draw_tensors(H=1, G=1, N=N, B=1, D=2, dtype=torch.float32)
    cache = fd.KVCache(BOUNDED[name], num_heads=1)
    most, most_bytes = 0, 0
    for token in range(N):
        part = slice(token, token + 1)
        cache.attend(q[:, :, part], k[:, :, part], v[:, :, part])
        most, most_bytes = max(most, cache.num_kept), max(most_bytes, cache.nbytes)
    assert cache.num_tokens == N
    assert bound <= most <= 2 * (bound + 1)
    assert most_bytes <= 2 * (bound + 1) * 2 * 2 * 4


def test_a_large_prompt_is_given_back() -> None:
    """After a chunk, and after tokens without queries, no more is held than steps would have left."""
    q, k, v = draw_tensors(H=1, G=1, N=5000, B=1)
    for fill in (lambda cache: cache.attend(q, k, v), lambda cache: cache.append(k, v)):
        cache = fd.KVCache(WINDOW, num_heads=1)
        fill(cache)
        assert cache.num_tokens == 5000
        assert cache.num_kept <= 2 * 164
        assert cache.nbytes <= 4 * 164 * k[0, 0, 0].nbytes * 2


def test_unbounded_patterns_keep_everything() -> None:
    q, k, v = draw_tensors()
    cache = fd.KVCache(masks.causal(), num_heads=4)
    decode(cache, q, k, v, (200, 1, 1))
    assert cache.num_kept == 700


@pytest.mark.parametrize("G", [2, 3])
def test_heads_with_rules_of_their_own(G) -> None:
    """Rules that split the heads of one key/value head, and that several branches give to a head twice."""
    rules = [masks.local_window(left=index % 3, right=0) for index in range(6)]
    branch = masks.per_head(rules) & masks.causal()
    pattern = masks.longnet([8, 32], [2, 4], offsets="contiguous") + branch + branch
    pattern = pattern & masks.causal()
    q, k, v = draw_tensors(H=6, G=G, N=100)
    out = decode(fd.KVCache(pattern, num_heads=6), q, k, v, (1, 20))
    assert_close(out, fd.attend(q, k, v, pattern, enable_gqa=True), **TIGHT)


def test_some_heads_of_all() -> None:
    """Two devices with two heads each compute what one does with four."""
    q, k, v = draw_tensors(H=4, G=4, N=90)
    whole = fd.attend(q, k, v, LONGNET)
    for first in (0, 2):
        cache = fd.KVCache(LONGNET, num_heads=2, head_offset=first, num_heads_global=4)
        mine = (x[:, first : first + 2] for x in (q, k, v))
        assert_close(decode(cache, *mine, (1, 30)), whole[:, first : first + 2], **TIGHT)


@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [(LONGNET, torch.float32), (LONGNET, torch.bfloat16), (STREAMING, torch.float16)],
    ids=["longnet", "longnet in bfloat16", "streaming in float16"],
)
def test_narrow_dtypes(pattern, dtype) -> None:
    """As close to float64 as one pass is, within twice its error."""
    q, k, v = draw_tensors(dtype=dtype, N=300)
    truth = fd.attend(q.double(), k.double(), v.double(), pattern, enable_gqa=True)
    out = decode(fd.KVCache(pattern, num_heads=4), q, k, v, (1, 50))
    assert out.dtype == dtype
    error = (fd.attend(q, k, v, pattern, enable_gqa=True).double() - truth).norm()
    assert (out.double() - truth).norm() <= 2 * error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_matrix_products_are_the_kernel(dtype) -> None:
    """What serves devices other than the CPU."""
    q, k, v = draw_tensors(H=2, G=2, N=33, dtype=dtype)
    out, lse = matrix_forward(q[:, :, :3], k, v, scale=0.3)
    truth = oracle.attention(q[:, :, :3], k, v, torch.ones(2, 3, 33), 0.3)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close((out.double(), lse.double()), truth, rtol=tolerance, atol=tolerance)


def test_rows_without_keys() -> None:
    """Output 0, in steps and in chunks: no query sees a key before position 8, and half of the heads none after."""
    beyond_7 = masks.local_window(left=20, right=0) & ~masks.local_window(left=7, right=0)
    pattern = masks.per_head([beyond_7, masks.dilated(64, 9, 8)]) & masks.causal()
    q, k, v = draw_tensors(H=2, G=2, N=60)
    for chunks in ((1,), (30,)):
        out = decode(fd.KVCache(pattern, num_heads=2), q, k, v, chunks)
        assert torch.equal(out[:, :, :8], torch.zeros_like(out[:, :, :8]))
        assert torch.equal(out[:, 1, 9], torch.zeros_like(out[:, 1, 9]))
        assert_close(out, fd.attend(q, k, v, pattern), **TIGHT)


def test_scale_and_sinks() -> None:
    q, k, v = draw_tensors(N=60)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)
    cache = fd.KVCache(LONGNET, num_heads=4, scale=-0.7)
    chunks = [(x[:, :, :40], x[:, :, 40:41], x[:, :, 41:]) for x in (q, k, v)]
    out = torch.cat([cache.attend(*part, sinks=sinks) for part in zip(*chunks, strict=True)], dim=2)
    assert_close(out, fd.attend(q, k, v, LONGNET, enable_gqa=True, scale=-0.7, sinks=sinks), **TIGHT)


def test_engine_of_chunks() -> None:
    q, k, v = draw_tensors(N=80)
    out = decode(fd.KVCache(ODD_LONGNET, num_heads=4, engine="reference"), q, k, v, (40,))
    assert_close(out, fd.attend(q, k, v, ODD_LONGNET, enable_gqa=True), **TIGHT)


def test_autocast() -> None:
    q, k, v = draw_tensors(dtype=torch.float32, N=40)
    with torch.autocast("cpu", torch.bfloat16):
        cache = fd.KVCache(LONGNET, num_heads=4)
        out = decode(cache, q, k, v, (30, 1))
        cache.append(k, v)
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), fd.attend(q, k, v, LONGNET, enable_gqa=True), rtol=0.05, atol=0.05)


def test_inference_mode_and_back() -> None:
    """Tokens of either kind of call go into one cache."""
    q, k, v = draw_tensors(N=400)
    cache = fd.KVCache(WINDOW, num_heads=4)
    with torch.inference_mode():
        first = decode(cache, *(x[:, :, :300] for x in (q, k, v)), (200, 1))
    second = decode(cache, *(x[:, :, 300:] for x in (q, k, v)), (1,))
    assert_close(torch.cat([first, second], 2), fd.attend(q, k, v, WINDOW, enable_gqa=True), **TIGHT)


def test_reset_and_copies() -> None:
    """After a reset other sizes may come; a copy goes its own way."""
    q, k, v = draw_tensors(N=50)
    cache = fd.KVCache(LONGNET, num_heads=4)
    expected = decode(cache, q, k, v, (20,))
    other = copy.deepcopy(cache)
    cache.reset()
    assert (cache.num_tokens, cache.num_kept, cache.nbytes) == (0, 0, 0)
    narrow = draw_tensors(N=50, B=1, G=1, dtype=torch.float32)
    assert decode(cache, *narrow, (20,)).shape == (1, 4, 50, 8)
    assert other.num_tokens == 50
    other.reset()
    assert_close(decode(other, q, k, v, (1,)), expected, **TIGHT)
    assert "50 tokens" in repr(other)


def test_capacity_is_all_that_is_allocated() -> None:
    """A window of 101 keys goes on for ever in 256 slots; where they do not suffice, nothing changes."""
    q, k, v = draw_tensors(N=1000)
    cache = fd.KVCache(WINDOW, num_heads=4, capacity=256)
    out = decode(cache, q, k, v, (20, 1, 60))
    assert cache.nbytes == 2 * 2 * 2 * 256 * 8 * 8
    assert_close(out, fd.attend(q, k, v, WINDOW, enable_gqa=True), **TIGHT)
    before = cache.num_tokens, cache.num_kept
    with pytest.raises(ValueError, match=r"at most capacity=256 keys; 1\d\d that later queries may see and 200 new"):
        cache.attend(q[:, :, :200], k[:, :, :200], v[:, :, :200])
    assert (cache.num_tokens, cache.num_kept) == before
    with pytest.raises(ValueError, match="at most capacity=10 keys; 0 that later queries may see and 11 new"):
        fd.KVCache(WINDOW, num_heads=4, capacity=10).attend(q[:, :, :11], k[:, :, :11], v[:, :, :11])
    kept = fd.KVCache(masks.local_window(left=3, right=0), num_heads=4, capacity=1000)
    for part in (slice(600), slice(600, 900)):  # chunks of which little stays visible
        kept.attend(*(x[:, :, part] for x in (q, k, v)))
        assert kept.nbytes == 2 * 2 * 2 * 1000 * 8 * 8


@pytest.mark.parametrize("seen", [1, 2, 30])
def test_a_call_that_fails_leaves_no_trace(seen, monkeypatch) -> None:
    q, k, v = draw_tensors(N=60)
    cache = fd.KVCache(LONGNET, num_heads=4)
    first = decode(cache, *(x[:, :, :seen] for x in (q, k, v)), (seen,))
    for name, stop in (("row_program", seen + 1), ("run", 60)):
        with monkeypatch.context() as patch:
            patch.setattr(_reader, name, mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                cache.attend(*(x[:, :, seen:stop] for x in (q, k, v)))
        assert cache.num_tokens == cache.num_kept == seen
    second = decode(cache, *(x[:, :, seen:] for x in (q, k, v)), (1,))
    assert_close(torch.cat([first, second], 2), fd.attend(q, k, v, LONGNET, enable_gqa=True), **TIGHT)


def test_causal_without_saying_so() -> None:
    """Rules that are causal by their numbers are served as they are; others are told which pair is not."""
    for pattern in (WINDOW, masks.dilated(1, 1), masks.local_window(left=5, right=0) | masks.dilated(1, 1)):
        fd.KVCache(pattern, num_heads=1)
    with pytest.raises(ValueError, match=r"query 3 sees key 4, .* write pattern & masks.causal\(\)"):
        fd.KVCache(masks.local_window(left=0, right=1) & ~masks.first_tokens(4), num_heads=1)
    with pytest.raises(ValueError, match="query 0 sees key 1"):
        fd.KVCache(LONGNET + masks.every(), num_heads=4)
    with pytest.raises(ValueError, match="query 0 sees key 1"):
        fd.KVCache(masks.per_head([masks.causal(), masks.every()]), num_heads=2)


def test_rows_that_name_later_keys() -> None:
    """A block list may name blocks that are not there yet: causal order hides them, and a later chunk has them.

    A grid beside it, which holds a limited number of tokens, is asked on its own.
    """
    rows = [[0, 3], [0, 1], [2, 5], [1, 3], [0, 4, 5], [5]]
    pattern = (masks.block_list(rows, block=20) | masks.neighborhood((10, 12), 2)) & masks.causal()
    q, k, v = draw_tensors(N=120)
    for chunks in ((30,), (1, 19)):
        out = decode(fd.KVCache(pattern, num_heads=4), q, k, v, chunks)
        assert_close(out, fd.attend(q, k, v, pattern, enable_gqa=True), **TIGHT)


def test_later_keys_beyond_the_search_stay_hidden() -> None:
    """A rule that sees later keys from position 3,000 on passes for causal: it is taken with causal order then."""
    late = masks.local_window(left=3, right=3) & ~masks.global_tokens(3000)
    pattern = WINDOW | late
    q, k, v = draw_tensors(N=3100, B=1)
    expected = fd.attend(q, k, v, pattern & masks.causal(), enable_gqa=True)[:, :, 3000:]
    for size in (1, 50):
        cache = fd.KVCache(pattern, num_heads=4)
        cache.append(k[:, :, :3000], v[:, :, :3000])
        out = decode(cache, *(x[:, :, 3000:] for x in (q, k, v)), (size,))
        assert_close(out, expected, **TIGHT)


@given(st.data())
def test_what_the_error_on_run_time_tensors_names_is_a_single_pass(data):
    """Keys are kept by the caller, with tensors that cover the tokens so far."""
    N = data.draw(st.integers(1, 9))
    q, k, v = torch.randn(3, 2, 2, N, 8, dtype=torch.float64)
    allowed = torch.rand(2, 1, N, N) < 0.5
    real, ids = torch.rand(2, N) < 0.7, (torch.rand(2, N) < 0.3).cumsum(1)

    def rule(n):
        kinds = (masks.mask(allowed[..., :n, :n]), masks.visible_keys(real[:, :n]), masks.documents(ids[:, :n]))
        return masks.causal() & kinds[kind]

    kind = data.draw(st.integers(0, 2))
    with pytest.raises(
        ValueError, match=r"keep k and v of all tokens, and write fd.attend\(q, k, v, pattern, q_offset="
    ):
        fd.KVCache(rule(N), num_heads=2)
    steps = [
        fd.attend(q[:, :, n : n + 1], k[:, :, : n + 1], v[:, :, : n + 1], rule(n + 1), q_offset=n) for n in range(N)
    ]
    assert_close(torch.cat(steps, 2), fd.attend(q, k, v, rule(N)), **TIGHT)
