"""KVCache for patterns in which queries see later keys of their chunk: ends of chunks, steps, and errors."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.attended import Ends, RowSource, _ends, regular_ends
from tests.support import oracle, strategies, twins
from tests.support.agreement import TIGHT
from tests.support.strategies import Case
from tests.support.twins import Twin

from .test_kv_cache import decode, draw_tensors, tiny_sizes

FRAMES = masks.blockwise(masks.local_window(left=4, right=0), 8)
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)


def tree(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Mask function of consecutive trees of four draft tokens, in which the second token sees the last."""
    return (q // 4 > k // 4) | ((q // 4 == k // 4) & TREE[q % 4, k % 4])


# --- where chunks end ---


def crosses(counts: Tensor, first: int, end: int) -> bool:
    """True if a query in [first, end) sees a key at or after `end`; counts: (H, N, N)."""
    return bool(counts[:, first:end, end:].any())


def shortest(counts: Tensor) -> tuple[int, int] | None:
    """(first end, chunk) of the shortest chunk below half of the tokens, found by trying each; or None."""
    tokens = counts.shape[-1]
    fits = [not crosses(counts, 0, end) for end in range(tokens)]
    tried = ((first, chunk) for chunk in range(1, tokens // 2) for first in range(chunk))
    return next((each for each in tried if all(fits[each[0] :: each[1]])), None)


@st.composite
def chunked(draw: st.DrawFn, num_heads: int, longest: int = 9) -> tuple[Twin, int, int]:
    """Draw (expression without look-ahead beyond chunks, first end, chunk), with chunks of at most `longest` tokens."""
    chunk = draw(st.integers(1, longest))
    first = draw(st.integers(0, chunk - 1))
    rule = twins.blockwise(twins.causal(), chunk).after(first)
    rule = rule | twins.first_tokens(first) if first else rule
    return draw(strategies.expressions(num_heads)) & rule, first, chunk


@given(st.data())
def test_the_shortest_chunk_is_found(data: st.DataObject) -> None:
    H = data.draw(st.integers(1, 3))
    drawn = data.draw(st.one_of(chunked(H, 40).map(lambda each: each[0]), strategies.expressions(H)))
    branches = [(branch.for_head(head, H), head) for branch in drawn.pattern.branches() for head in range(H)]
    position = torch.arange(96)
    expected = shortest(oracle.counts(drawn.rule, range(H), H, position, position))
    with mock.patch.multiple(_ends, _LEAST_TRIED=96, _MOST_TRIED=96, _BLOCK=data.draw(st.sampled_from([4, 16, 96]))):
        found = regular_ends([RowSource(rule, head, H) for rule, head in branches])
    if expected is None:
        assert isinstance(found, tuple)
        assert found[0] < found[1]
    else:
        assert found == Ends(*expected)


@pytest.mark.parametrize(
    ("pattern", "chunk"),
    [
        (FRAMES, 8),
        (masks.chunked(8) | masks.causal(), 8),
        (masks.chunked(8).after(3) | masks.first_tokens(3), 8),
        (masks.local_window(left=9, right=2) & masks.blockwise(masks.causal(), 6), 6),
        (masks.custom(tree), 4),
        (masks.prefix_lm(37), 37),
        (masks.per_head([masks.causal(), masks.chunked(6), masks.blockwise(masks.causal(), 4)]), 12),
        (masks.chunked(10) + masks.blockwise(masks.causal(), 15), 30),
        (masks.blockwise(masks.local_window(left=2, right=0), 4680), 4680),
        (masks.neighborhood((6, 10), kernel_size=(2, 5), causal=(True, False)), 10),
        (masks.longnet((8, 64), (1, 4)), 64),
        (masks.causal(), 1),
    ],
)
def test_chunks(pattern: masks.Pattern | masks.Mixture, chunk: int) -> None:
    assert fd.KVCache(pattern, num_heads=3).chunk == chunk


def test_a_query_far_before_a_chunk_prolongs_it() -> None:
    """Queries 100 to 109 see keys up to 319, so positions 301 to 319 are no ends of chunks."""
    rows = [[*range(30), *[30, 31] * (row == 10)] for row in range(30)]
    rule = masks.causal() | masks.block_list(rows, block=10)
    assert regular_ends([RowSource(rule, 0, 1)]) == Ends(0, 320)


@given(st.integers(1, 40), st.data())
def test_ends_are_the_rule_of_their_chunks(chunk: int, data: st.DataObject) -> None:
    ends = Ends(data.draw(st.integers(0, chunk - 1)), chunk)
    listed = list(range(ends.first, 200, chunk))
    assert [ends.next(position) for position in range(100)] == [
        min(end for end in listed if end >= position) for position in range(100)
    ]
    q, k = torch.arange(100)[:, None], torch.arange(100)
    across = torch.stack([(q < end) & (k >= end) for end in listed]).any(0)
    mask_mod = ends.rule().mask_mod(num_heads=1, device=torch.device("cpu"))
    assert torch.equal(mask_mod(torch.tensor(0), torch.tensor(0), q, k), ~across)


@given(st.data())
def test_a_form_that_shows_the_ends_is_right(data: st.DataObject) -> None:
    twin, chunk = data.draw(strategies.sets(1)), data.draw(st.integers(1, 30))
    ends = Ends(data.draw(st.integers(0, chunk - 1)), chunk)
    position = torch.arange(100)
    if ends.by_form(twin.pattern.for_head(0, 1)):
        counts = oracle.counts(twin.rule, range(1), 1, position, position)
        assert not any(crosses(counts, 0, end) for end in range(ends.first, 100, chunk))


@pytest.mark.parametrize(
    ("first", "chunk", "pattern", "shown"),
    [
        (0, 8, masks.chunked(8), True),
        (0, 16, masks.chunked(8), True),
        (3, 8, masks.chunked(8), False),
        (0, 12, masks.chunked(8), False),
        (0, 8, FRAMES, True),
        (3, 8, FRAMES, False),
        (0, 12, FRAMES, False),
        (0, 24, FRAMES | masks.chunked(6), True),
        (0, 24, FRAMES | masks.chunked(5), False),
        (0, 8, FRAMES & masks.every(), True),
        (3, 7, masks.local_window(left=4, right=0), True),
        (3, 7, masks.local_window(left=4, right=1), False),
    ],
)
def test_forms(first: int, chunk: int, pattern: masks.Pattern, shown: bool) -> None:
    assert Ends(first, chunk).by_form(pattern) == shown


# --- steps ---


@given(st.data())
def test_steps_of_whole_chunks_equal_one_pass(data: st.DataObject) -> None:
    """A step with any end is exact, or raises an error that lists valid sizes and leaves the cache unchanged."""
    H = data.draw(st.integers(1, 4))
    twin, first, chunk = data.draw(chunked(H))
    N = first + chunk * data.draw(st.integers(1, 40 // chunk))
    case = Case.whole(twin, H, N)
    q, k, v = (x.detach() for x in data.draw(strategies.tensors(case)))
    counts = case.counts()
    expected, _ = oracle.attention(q, k, v, counts)
    sizes = {name: data.draw(st.sampled_from([1, 2, 5])) for name in ("page", "least_slots", "rows")}
    with tiny_sizes(**sizes):
        cache = fd.KVCache(twin.pattern, num_heads=H)
        assert cache.chunk <= chunk
        while (begin := cache.num_tokens) < N:
            end = data.draw(st.integers(begin + 1, N))
            if data.draw(st.integers(0, 5)) == 5:
                cache.append(k[:, :, begin:end], v[:, :, begin:end])
                continue
            if crosses(counts, begin, end):
                with pytest.raises(ValueError, match="must end where none of them sees a later key") as refused:
                    cache.attend(*(x[:, :, begin:end] for x in (q, k, v)))
                assert cache.num_tokens == begin
                fits = [stop for stop in range(end, N + 1) if not crosses(counts, begin, stop)]
                bring = re.search(r"bring (\d+) or (\d+) tokens", str(refused.value))
                assert bring is not None
                assert [begin + int(number) for number in bring.groups()][: len(fits)] == fits[:2]
                end = fits[0]
            out = cache.attend(*(x[:, :, begin:end] for x in (q, k, v)))
            assert_close(out, expected[:, :, begin:end], **TIGHT)


PATTERNS = {
    "frames": FRAMES,
    "chunks and what came before": masks.chunked(8) | masks.local_window(left=70, right=0),
    "frames behind a prompt": (FRAMES.after(4) | masks.first_tokens(4)),
    "drafts": masks.custom(tree),
    "listed": masks.block_list([[0], [0, 1], [1, 2, 3], [2, 3], *([0, row] for row in range(4, 38))], block=8),
    "mixture": masks.chunked(8) + FRAMES,
    "longnet": masks.longnet((4, 8), (1, 2)),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_several_chunks_a_step(name: str, chunks: int) -> None:
    """With grouped heads, a batch, and step sizes that are computed with and without an engine."""
    q, k, v = draw_tensors(N=300)
    cache = fd.KVCache(PATTERNS[name], num_heads=4)
    start = 4 if name == "frames behind a prompt" else 0
    stop = start + (300 - start) // (16 * chunks) * 16 * chunks
    outs = [cache.attend(*(x[:, :, :start] for x in (q, k, v)))]
    outs.append(decode(cache, *(x[:, :, start:stop] for x in (q, k, v)), (8 * chunks if name != "listed" else 16,)))
    expected = fd.attend(*(x[:, :, :stop] for x in (q, k, v)), PATTERNS[name], enable_gqa=True)
    assert_close(torch.cat(outs, 2), expected, **TIGHT)


def test_rows_that_name_later_keys() -> None:
    """Block lists name blocks after the query; each part of a call must see the keys of its whole chunk."""
    rows = [[0, 3], [0, 1], [2, 5], [1, 3], [0, 4, 5], [5]]
    pattern = masks.block_list(rows, block=20) & masks.blockwise(masks.causal(), 40)
    q, k, v = draw_tensors(N=120)
    cache = fd.KVCache(pattern, num_heads=4)
    assert cache.chunk == 40
    for size in (40, 80, 120):
        cache.reset()
        out = decode(cache, q, k, v, (size,))
        assert_close(out, fd.attend(q, k, v, pattern, enable_gqa=True), **TIGHT)


def test_frames_are_evicted() -> None:
    """With a window of five frames the cache holds at most about twice the window, for any number of tokens."""
    q, k, v = draw_tensors(H=2, G=1, N=2000, B=1)
    cache, most = fd.KVCache(FRAMES, num_heads=2), 0
    for begin in range(0, 2000, 8):
        cache.attend(*(x[:, :, begin : begin + 8] for x in (q, k, v)))
        most = max(most, cache.num_kept)
    assert most <= 2 * (40 + 64) + 48
    assert cache.nbytes <= 2 * 256 * 8 * 8


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


def test_look_ahead_beyond_the_search_stays_hidden() -> None:
    """Look-ahead that begins beyond the searched positions is cut at the ends of the chunks that were found."""
    rule = masks.chunked(8) | (masks.local_window(left=3, right=3) & ~masks.global_tokens(3000))
    q, k, v = draw_tensors(N=3040, B=1)
    cache = fd.KVCache(rule, num_heads=4)
    assert cache.chunk == 8
    cache.append(k[:, :, :3000], v[:, :, :3000])
    out = decode(cache, *(x[:, :, 3000:] for x in (q, k, v)), (8,))
    hidden = rule & masks.blockwise(masks.causal(), 8)
    assert_close(out, fd.attend(q, k, v, hidden, enable_gqa=True)[:, :, 3000:], **TIGHT)


# --- models ---


@torch.no_grad()
def test_a_longnet_of_segments_takes_whole_segments() -> None:
    """Calls with whole segments of a model that is not causal equal one pass; single tokens raise an error."""
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "vocab_size": 50}
    config = fd.LongNetConfig(**sizes, segment_lengths=(4, 8), dilation_rates=(1, 2), causal=False)
    torch.manual_seed(0)
    model, tokens = fd.LongNet(config).eval(), torch.randint(50, (2, 32))
    caches = model.new_caches()
    parts = [model(part, caches=caches) for part in tokens.split(8, 1)]
    assert_close(torch.cat(parts, 1), model(tokens))
    with pytest.raises(ValueError, match=r"chunk of 8 tokens; here query 32 sees key .*: bring 8 or 16 tokens"):
        model(tokens[:, :1], caches=caches)
    assert [cache.num_tokens for cache in caches] == [32, 32]
