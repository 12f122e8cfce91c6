"""KVCache: tokens that are taken back, batch entries that are chosen, what it holds, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.support import oracle, strategies
from tests.support.agreement import TIGHT

from .test_kv_cache import BOUNDED, LONGNET, WINDOW, decode, draw_tensors, tiny_sizes


@given(data=st.data())
def test_tokens_taken_back(data: st.DataObject) -> None:
    """Others go in and come out again: the result is that of one pass, or the cache says that it cannot."""
    case = data.draw(strategies.whole_cases(strategies.causal_twins))
    q, k, v = (x.detach() for x in data.draw(strategies.tensors(case)))
    first = data.draw(st.integers(0, case.num_keys))
    wrong = data.draw(st.integers(0, case.num_keys - first))
    undo = data.draw(st.integers(0, 12))
    sizes = {name: data.draw(st.sampled_from([1, 2, 5])) for name in ("page", "least_slots", "rows")}
    with tiny_sizes(**sizes):
        cache = fd.KVCache(case.twin.pattern, num_heads=case.num_heads, undo=undo)
        outs = [decode(cache, *(x[:, :, :first] for x in (q, k, v)), (3, 1))] if first else []
        for begin in range(first, first + wrong, 2):
            cache.append(*(x[:, :, begin : min(begin + 2, first + wrong)] + 1 for x in (k, v)))
        try:
            cache.crop(first)
        except ValueError:
            assert wrong > undo
            return
        assert cache.num_tokens == first
        if first < case.num_keys:
            outs.append(decode(cache, *(x[:, :, first:] for x in (q, k, v)), (1, 4)))
    assert_close(torch.cat(outs, dim=2), oracle.attention(q, k, v, case.counts())[0], **TIGHT)


@given(data=st.data())
def test_undo_can_take_back_as_many_tokens_at_any_time(data: st.DataObject) -> None:
    """Draft after draft over a small window, whether a full buffer evicts or the end of a chunk does."""
    pattern = masks.local_window(left=data.draw(st.integers(0, 8)), right=0)
    undo, chunks = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([(1,), (2,), (1, 9)]))
    sizes = {name: data.draw(st.sampled_from([1, 2, 5])) for name in ("page", "least_slots", "rows")}
    q, k, v = draw_tensors(N=40, B=1)
    cache, found = fd.KVCache(pattern, num_heads=4, undo=undo), []
    with tiny_sizes(**sizes):
        while cache.num_tokens < 40:
            begin, taken = cache.num_tokens, data.draw(st.integers(1, undo))
            decode(cache, *(torch.zeros_like(x[:, :, :undo]) for x in (q, k, v)), chunks)
            cache.crop(begin)
            found.append(decode(cache, *(x[:, :, begin : begin + taken] for x in (q, k, v)), chunks))
    assert_close(torch.cat(found, dim=2), fd.attend(q, k, v, pattern, enable_gqa=True), **TIGHT)


@pytest.mark.parametrize("name", ["window", "streaming", "longnet"])
def test_what_undo_keeps(name: str) -> None:
    """Draft after draft, at the cache's own sizes, far beyond the look-back."""
    q, k, v = draw_tensors(N=300)
    cache, found = fd.KVCache(BOUNDED[name], num_heads=4, undo=40), []
    for begin in range(0, 300, 30):
        draft = slice(begin, begin + 40)
        cache.attend(*(torch.randn_like(x[:, :, draft]) for x in (q, k, v)))
        cache.crop(begin)
        found.append(cache.attend(*(x[:, :, begin : begin + 30] for x in (q, k, v))))
    assert_close(torch.cat(found, dim=2), fd.attend(q, k, v, BOUNDED[name], enable_gqa=True), **TIGHT)
    if name == "window":
        assert cache.num_kept <= 2 * (164 + 40 + 64)


def test_keys_that_are_gone() -> None:
    q, k, v = draw_tensors(N=900)
    cache = fd.KVCache(WINDOW, num_heads=4)
    cache.attend(q, k, v)
    with pytest.raises(ValueError, match=r"queries from position 10 on may see; .* undo=0 tokens, and has seen 900"):
        cache.crop(10)
    assert cache.num_tokens == 900
    cache.crop(0)  # queries from the beginning see none of the keys that are gone
    assert_close(cache.attend(q, k, v), fd.attend(q, k, v, WINDOW, enable_gqa=True), **TIGHT)


@pytest.mark.parametrize(("entries", "cut"), [([1], 1), ([2, 0, 2, 1, 1], 150), ([0, 2], 299)])
def test_entries_of_the_batch(entries: list[int], cut: int) -> None:
    q, k, v = draw_tensors(N=300, B=3)
    cache, chosen = fd.KVCache(LONGNET, num_heads=4), torch.tensor(entries)
    cache.attend(*(x[:, :, :cut] for x in (q, k, v)))
    cache.select(chosen)
    rest = cache.attend(*(x[chosen, :, cut:] for x in (q, k, v)))
    assert_close(rest, fd.attend(q, k, v, LONGNET, enable_gqa=True)[chosen, :, cut:], **TIGHT)


def test_what_is_held() -> None:
    _, k, v = draw_tensors(N=900)
    cache = fd.KVCache(masks.first_tokens(4) & masks.causal() | WINDOW, num_heads=4)
    with pytest.raises(ValueError, match="has seen no tokens holds no keys"):
        cache.held()
    cache.append(k, v)
    positions, keys, values = cache.held()
    assert len(positions) == cache.num_kept < 900
    assert positions[0] == 0
    assert torch.equal(keys, k[:, :, positions])
    assert torch.equal(values, v[:, :, positions])


def test_bad_changes() -> None:
    cache = fd.KVCache(WINDOW, num_heads=4)
    cache.crop(0)
    cache.select(torch.tensor([0]))
    cache.append(*draw_tensors(N=5)[1:])
    for call, error, said in [
        (lambda: cache.crop(6), ValueError, "num_tokens must be at most 5; got num_tokens=6"),
        (lambda: cache.crop(-1), ValueError, "num_tokens must be at least 0"),
        (lambda: cache.crop(1.0), TypeError, "num_tokens must be an integer"),
        (lambda: cache.select([0]), TypeError, r"entries must be a tensor of integers of shape \(C,\); got \[0\]"),
        (lambda: cache.select(torch.tensor([0.0])), TypeError, "entries must be a tensor of integers"),
        (
            lambda: cache.select(torch.tensor([2])),
            ValueError,
            r"each between 0 and 1; got \[2\]",
        ),
        (
            lambda: cache.select(torch.tensor([], dtype=torch.long)),
            ValueError,
            r"at least one batch entry,",
        ),
        (lambda: fd.KVCache(WINDOW, num_heads=4, undo=-1), ValueError, "undo must be at least 0; got undo=-1"),
    ]:
        with pytest.raises(error, match=said):
            call()
    assert cache.num_tokens == 5


X = torch.zeros(2, 4, 3, 8)
BAD = {
    "not a pattern": (lambda: fd.KVCache("causal", num_heads=4), TypeError, "pattern must be a pattern or mixture"),
    "engine": (lambda: fd.KVCache(WINDOW, num_heads=4, engine="fast"), ValueError, "engine must be None or one of"),
    "scale": (lambda: fd.KVCache(WINDOW, num_heads=4, scale=float("inf")), ValueError, "scale must be finite"),
    "heads of all": (
        lambda: fd.KVCache(WINDOW, num_heads=4, head_offset=1, num_heads_global=4),
        ValueError,
        "heads 1 to 4 must lie within num_heads_global",
    ),
    "heads of the pattern": (
        lambda: fd.KVCache(masks.per_head([WINDOW, WINDOW]), num_heads=4),
        ValueError,
        "per_head needs one pattern for each head; got 2 for 4 heads",
    ),
    "another number of heads": (
        lambda: used().attend(X[:, :2], X, X),
        ValueError,
        "multiple of the number of key/value heads",
    ),
    "fewer heads": (lambda: used().attend(X[:, :2], X[:, :2], X[:, :2]), ValueError, "q must hold num_heads=4 heads"),
    "another batch": (
        lambda: used().attend(X[:1], X[:1], X[:1]),
        ValueError,
        "those in the cache, batch 2, .*got batch 1",
    ),
    "another head dim": (lambda: used().attend(*[X[..., :4]] * 3), ValueError, "got .*head dim 4"),
    "another dtype": (lambda: used().attend(*[X.double()] * 3), ValueError, "float32 on cpu; got .*float64"),
    "a list": (lambda: used().append([1], X), TypeError, "k must be a tensor; got list"),
    "appended heads": (lambda: used().append(X[:, :3], X[:, :3]), ValueError, "must be a multiple of the key/value"),
    "sinks": (lambda: used().attend(X, X, X, sinks=torch.zeros(3)), ValueError, "sinks must have one logit for each"),
    "tokens beyond a grid": (
        lambda: fd.KVCache(masks.neighborhood((4, 4), 1) & WINDOW, num_heads=4).append(*[X.repeat(1, 1, 6, 1)] * 2),
        ValueError,
        "within the 16 tokens of a 4x4 grid; got queries up to position 17 and keys up to position 17",
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
    assert_close(cache.attend(some, some, some)[:1], expected)
