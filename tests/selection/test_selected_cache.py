"""The cache of SelectedAttention: chunks and steps choose and compute what one pass does."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from tests.selection.cases import Case, cases, with_coarse
from tests.selection.test_selected_attention import Gate

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


_WIDTH = {fd.TopK: "k", fd.TopP: "most", fd.Threshold: "most"}  # with a bias a place of the table is a call


@st.composite
def sequences(draw: st.DrawFn) -> Case:
    """Causal self-attention of some tokens, by any scorer that looks at no later one, maybe with a coarse choice."""
    case = draw(cases(scorers=("mean", "minmax", "mass"), tensors=False))
    options = case.options | {"within": case.options["within"] & masks.causal(), "future_in_choice": False}
    options["query_summary"] = "first"
    options["choose"] = replace(options["choose"], **{_WIDTH[type(options["choose"])]: draw(st.integers(1, 4))})
    if draw(st.booleans()):
        options |= {"scorer": Gate(case.q.shape[3]), "always": masks.chunked(options["block"]) | masks.first_tokens(3)}
        if isinstance(options["choose"], fd.TopP):  # whose shares may be of the whole row, which a gate does not know
            options["choose"] = fd.TopP(options["choose"].p, most=options["choose"].most)
    k = torch.randn(*case.k.shape[:2], case.q.shape[2], case.k.shape[3], dtype=torch.float64)
    case = replace(case, options=options, k=k, q_offset=0)
    if draw(st.booleans()):
        case = with_coarse(case, ratio=draw(st.integers(1, 2)), rows=draw(st.integers(1, 2)), most=2)
    return case


def cache_of(case: Case, gradient: str = "none", **options: Any):
    return fd.SelectedAttention(case.selector, gradient).cache(num_heads=case.q.shape[1], **options)


def drawn_chunks(data: st.DataObject, tokens: int) -> list[int]:
    sizes = []
    while sum(sizes) < tokens:
        sizes.append(min(data.draw(st.sampled_from([1, 1, 1, 2, 3, 7, 19]), label="chunk"), tokens - sum(sizes)))
    return sizes


@pytest.mark.parametrize("gradient", ["none", "bias"])
@settings(max_examples=8)
@given(case=sequences(), data=st.data())
def test_chunks_and_steps_are_one_pass(gradient: str, case: Case, data) -> None:
    """At any borders: the choice of the row that is under way bitwise, and the outputs."""
    q, k, v, own = case.q, case.k, case.k.roll(1, 2), case.selector
    options = {"scale": data.draw(st.sampled_from([None, 0.5]))}
    sinks = torch.randn(q.shape[1], dtype=q.dtype) if data.draw(st.booleans(), label="sinks") else None
    whole, found = fd.SelectedAttention(own, gradient)(
        q, k, v, sinks=sinks, enable_gqa=True, return_selection=True, **options
    )
    cache = cache_of(case, gradient, **options)
    sizes = drawn_chunks(data, q.shape[2])
    outs, seen = [], 0
    for chunk in zip(*(x.split(sizes, 2) for x in (q, k, v)), strict=True):
        outs.append(cache.attend(*chunk, sinks=sinks))
        seen += chunk[0].shape[2]
        assert cache.num_tokens == seen == cache.num_kept
        row = (seen - 1) // own.query_block
        assert cache._cohorts[0].state.blocks[:, :, 0].equal(found.blocks[:, :, row])
        assert all(pool.shape[2] == -(-seen // own.block) for pool in cache._cohorts[0].state.pools)
    assert_close(torch.cat(outs, 2), whole)


def test_a_row_that_is_not_known_is_refused() -> None:
    """A position within a row whose first query is forgotten, or was never there; the cache stays as it was."""
    torch.manual_seed(0)
    q = torch.randn(1, 2, 20, 4)
    options = {"block": 4, "query_block": 8, "query_summary": "first", "choose": fd.TopK(1)}
    selector = fd.BlockSelector(**options)
    whole = fd.SelectedAttention(selector)(q, q, q)
    cache = fd.SelectedAttention(selector).cache(num_heads=2)
    cache.attend(*(q[:, :, :18],) * 3)
    with pytest.raises(ValueError, match=r"crop to where a query block begins, .* got position 11, query_block=8"):
        cache.crop(11)
    cache.crop(17)
    assert_close(cache.attend(*(q[:, :, 17:],) * 3), whole[:, :, 17:])
    cache.crop(8)
    cache.append(*(q[:, :, 8:10],) * 2)
    with pytest.raises(ValueError, match=r"append whole query blocks; got position 10, query_block=8"):
        cache.attend(*(q[:, :, 10:],) * 3)
    assert cache.num_tokens == 10
    coarse = fd.BlockSelector(**options | {"query_block": 16, "choose": fd.TopK(3)})
    cache = fd.SelectedAttention(fd.BlockSelector(**options, coarse=coarse)).cache(num_heads=2)
    cache.attend(q, q, q)
    with pytest.raises(ValueError, match=r"got position 8, query_block=16"):
        cache.crop(8)


def test_a_call_that_raises_leaves_the_cache_as_it_was() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 30, 4)
    attention = fd.SelectedAttention(fd.BlockSelector(block=4, choose=fd.TopK(2)))
    cache = attention.cache(num_heads=2, capacity=25)
    cache.attend(*(q[:, :, :20],) * 3)
    with pytest.raises(ValueError, match="the cache holds at most capacity=25 keys"):
        cache.attend(*(q[:, :, 20:],) * 3)
    with pytest.raises(ValueError, match="computes no gradients"):
        cache.attend(*(q[:, :, 20:22].clone().requires_grad_(),) * 3)
    assert_close(cache.attend(*(q[:, :, 20:25],) * 3), attention(q, q, q)[:, :, 20:25])
    copied = pickle.loads(pickle.dumps(cache))
    assert (copied.num_tokens, copied.nbytes) == (25, cache.nbytes)
    assert "SelectedCache(causal(), num_heads=2, engine=None: 25 tokens seen" in repr(cache)


@settings(max_examples=8)
@given(case=sequences(), data=st.data())
def test_entries_at_different_positions(case: Case, data: st.DataObject) -> None:
    """Of whole query blocks: lengths, crops, joins, selections, other tokens that are taken back, and appended ones.

    Each entry chooses and computes what one pass of it does.
    """
    q, k, tokens = case.q[:1], case.k[:1], case.q.shape[2]
    rows = [case.selector.query_block] + [own.query_block for own in [case.selector.coarse] if own is not None]
    begins = st.sampled_from([at for at in range(tokens + 1) if not any(at % side for side in rows)])
    whole = fd.SelectedAttention(case.selector)(q, k, k, enable_gqa=True)

    def begun(batch: int) -> fd.KVCache:
        cache, lengths = cache_of(case), data.draw(st.lists(begins, min_size=batch, max_size=batch), label="lengths")
        out = cache.attend(*(x.expand(batch, -1, -1, -1) for x in (q, k, k)), lengths=torch.tensor(lengths))
        for row, length in zip(out, lengths, strict=True):
            assert_close(row[:, :length], whole[0, :, :length])
        return cache

    def rest(starts: list[int]) -> list[torch.Tensor]:
        return [torch.cat([torch.cat([x[:, :, at:], x[:, :, :at]], 2) for at in starts]) for x in (q, k, k)]

    cache = begun(3)
    assume(len(cache.positions))
    cache.crop(torch.tensor([data.draw(begins.filter(lambda at, most=most: at <= most)) for most in cache.positions]))
    other, kept = data.draw(st.integers(0, 2), label="other rows") * max(rows), cache.positions
    cache.attend(*(-x[:, :, :1].expand(len(kept), -1, other, -1) for x in (q, k, k)))
    cache.crop(kept)
    cache.join(begun(1))
    number = len(cache.positions)
    cache.select(torch.tensor(data.draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=4), label="entries")))
    starts = cache.positions.tolist()
    ends = [data.draw(begins.filter(lambda at, least=least: at >= least), label="appended") for least in starts]
    cache.append(*rest(starts)[1:], lengths=torch.tensor(ends) - cache.positions)
    out = cache.attend(*rest(ends), lengths=tokens - torch.tensor(ends))
    for row, at in zip(out, ends, strict=True):
        assert_close(row[:, : tokens - at], whole[0, :, at:])
    assert set(cache.positions.tolist()) == {tokens}
    unequal = fd.BlockSelector(**(case.options | {"choose": fd.TopK(7)}))
    with pytest.raises(ValueError, match="equal arguments; got another selector"):
        cache.join(fd.SelectedAttention(unequal).cache(num_heads=q.shape[1]))
