"""Where chunks of a cache end: of patterns in which queries see later keys of their chunk."""

from __future__ import annotations

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
from tests.support import oracle, strategies
from tests.support.agreement import TIGHT

from .cases import FRAMES, chunked, crosses, draw_tensors, tree


def shortest(counts: Tensor) -> tuple[int, int] | None:
    """(first end, chunk) of the shortest chunk below half of the tokens, found by trying each; or None."""
    tokens = counts.shape[-1]
    fits = [not crosses(counts, 0, end) for end in range(tokens)]
    tried = ((first, chunk) for chunk in range(1, tokens // 2) for first in range(chunk))
    return next((each for each in tried if all(fits[each[0] :: each[1]])), None)


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
