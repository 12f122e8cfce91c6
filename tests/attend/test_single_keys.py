"""Tables of single keys by engine portable: the keys of each query are gathered, with every feature of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Call, Dropout, Features, WholeRows, fixed_score_mod
from flexdilated.engines.flex import _portable_op
from flexdilated.engines.flex._portable_op import portable_run
from flexdilated.engines.kernels import _key_lists
from flexdilated.memory import AttentionSize, LiveBytes, attention_memory
from tests.attend.test_selected_blocks import BESIDE, packed

HUBS = torch.cat([torch.full((1, 4), 600), torch.full((1, 600), 3)], 1)[0]  # lengths of rows: a few hubs among others


def ragged(lengths: Tensor, num_keys: int, seed: int = 0) -> Tensor:
    """A table (1, rows, most) of different keys, rows of these lengths padded with -1."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(len(lengths), num_keys, generator=generator).argsort(1)[:, : int(lengths.max())]
    return keys.where(torch.arange(keys.shape[1]) < lengths[:, None], -1)[None]


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[_key_lists.ListChunk]:
    """The chunks that are computed."""
    found, of = [], _key_lists.ListProblems.chunks

    def watched(problems: _key_lists.ListProblems) -> Iterator[_key_lists.ListChunk]:
        for chunk in of(problems):
            found.append(chunk)
            yield chunk

    monkeypatch.setattr(_key_lists.ListProblems, "chunks", watched)
    return found


@pytest.mark.parametrize("beside", BESIDE)
@settings(max_examples=8)
@given(data=st.data(), gathered=st.sampled_from([1, 300, 4000, 1 << 23]))
def test_every_feature_is_that_of_dense_attention(beside: str, gathered: int, data: st.DataObject) -> None:
    """Output, lse and all gradients in float64, at any offsets, in chunks of any size, with any of the features."""
    case = data.draw(packed(beside))
    groups = data.draw(st.sampled_from([each for each in (1, 2, 3) if case.num_heads % each == 0]))
    widths = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    shapes = (case.num_heads, case.num_queries, widths[0]), (groups, case.num_keys, widths[0])
    shapes = *shapes, (groups, case.num_keys, widths[1])
    leaves = [torch.randn(case.batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    bias, sinks = torch.randn(2, case.num_heads, 97, generator=generator, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*leaves, bias, sinks[:, 0].clone())]
    features: dict[str, Any] = {"score_mod": lambda score, b, h, q, k: score * (1 + b) + leaves[3][h, (3 * q + k) % 97]}
    features |= {"dropout_p": 0.4, "sinks": leaves[4]}
    features = {name: features[name] for name in features if data.draw(st.booleans())}

    def outcome(engine: str) -> list[Tensor]:
        torch.manual_seed(5)
        how = {"enable_gqa": True, "return_lse": True, "engine": engine} | case.offsets | features
        out, lse = fd.attend(*leaves[:3], case.pattern, **how)
        total = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
        return [out, lse, *torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)]

    with mock.patch.object(_key_lists, "GATHERED_BYTES", gathered):
        for found, true in zip(outcome("portable"), outcome("reference"), strict=True):
            assert_close(found, true, rtol=1e-9, atol=1e-10)


def test_only_listed_pairs_are_computed(chunks: list[_key_lists.ListChunk]) -> None:
    """No block list is made; rows of very different lengths are padded by less than their own number."""
    table, rows = ragged(HUBS, 2000), len(HUBS)
    q, k, v = torch.randn(1, 4, rows, 8), *torch.randn(2, 1, 2, 2000, 8)
    pattern = masks.selected_keys(table)
    with mock.patch.object(_portable_op, "_program", side_effect=AssertionError("block lists")):
        found = fd.attend(q, k, v, pattern, enable_gqa=True, engine="portable")
    assert_close(found, fd.attend(q, k, v, pattern, enable_gqa=True, engine="reference"))
    pairs = 2 * int(HUBS.sum())  # two key/value heads, each with two query heads in a gather
    assert pairs <= sum(chunk.block.numel() for chunk in chunks) < 1.1 * pairs
    assert all(chunk.head.shape[2] == 2 for chunk in chunks)


def test_chunks_bound_the_gathered_bytes(chunks: list[_key_lists.ListChunk]) -> None:
    """But for the list of a single query, which is not split."""
    table = ragged(torch.randint(1, 40, (300,), generator=torch.Generator().manual_seed(0)), 500)
    q, k, v = torch.randn(3, 6, 300, 8), *torch.randn(2, 3, 6, 500, 8)
    with mock.patch.object(_key_lists, "GATHERED_BYTES", 64 * 100):  # 100 keys and values of 8 floats
        fd.attend(q, k, v, masks.selected_keys(table), engine="portable")
    assert all(chunk.block.numel() <= 100 or chunk.block.shape[:2] == (1, 1) for chunk in chunks)
    assert sum(chunk.block.numel() for chunk in chunks) < 3 * 6 * 500 * 40


@settings(max_examples=6)
@given(
    tokens=st.integers(600, 1500),
    widths=st.sampled_from([(16, 16), (24, 64)]),
    kv_heads=st.sampled_from([1, 4]),
    drops=st.booleans(),
    beside=st.sampled_from(["alone", "causal", "own block"]),
    scored=st.booleans(),
)
def test_memory_is_predicted(tokens, widths, kv_heads, drops, beside, scored) -> None:
    table = ragged(torch.randint(1, 64, (tokens,), generator=torch.Generator().manual_seed(tokens)), tokens)
    pattern = BESIDE[beside][0](masks.selected_keys(table))
    size = AttentionSize(tokens, 4, widths[0], torch.float32, 2, kv_heads, value_dim=widths[1])
    score_mod = (lambda score, b, h, q, k: score + (q - k) * 0.1) if scored else None
    found = attention_memory(
        pattern.bind(num_heads=4, num_queries=tokens, num_keys=tokens).pattern,
        size,
        engine="portable",
        drops=drops,
        score_mod=score_mod,
    )
    q, k, v = (
        torch.randn(2, heads, tokens, dim)
        for heads, dim in ((4, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))
    )
    call = Call.at(q, k, pattern.text, num_heads_global=4)
    features = Features(0.25, fixed_score_mod(score_mod, q.dtype, q.device)).with_dropout(
        Dropout.drawn(0.2, q.device) if drops else None
    )
    with torch.no_grad(), LiveBytes(q, k, v) as live:
        out, lse = portable_run(call, q, [table], features).forward(q, k, v)
        forward = live.peak
        live.restart()
        portable_run(call, q, [table], features).backward(q, k, v, WholeRows(out, lse, torch.ones_like(out)))
    assert abs(found.forward_peak / forward - 1) < 0.03
    assert abs(found.backward_peak / live.peak - 1) < 0.03


def test_a_plan_counts_the_gathered_pairs() -> None:
    table = ragged(torch.full((512,), 4), 512)
    pattern = masks.selected_keys(table)
    for engine in (None, "portable"):
        report = fd.plan(pattern, 512, num_heads=2, engine=engine, dropout_p=0.1 if engine is None else 0.0)
        assert (report.engine, report.computed_pairs) == ("portable", 2 * 512 * 4)
        assert "table, keys gathered" in str(report)
    assert fd.plan(pattern, 512, device="cuda").computed_pairs > 50 * report.computed_pairs


def test_selected_keys_are_blocks_of_one_token() -> None:
    """By value and by name; each prints and reads back."""
    table = ragged(torch.full((8,), 3), 8)
    carried = masks.selected_keys(table, name="near")
    assert carried == masks.selected_blocks(table, block=1, most=3, name="near")
    by_name = masks.selected_keys("near", most=3)
    assert repr(by_name) == repr(carried) == "selected_keys('near', most=3)"
    assert masks.parse(repr(by_name)) == masks.from_json(masks.to_json(by_name)) == by_name
    q = torch.randn(3, 2, 8, 4)
    for each, bindings in ((carried, None), (by_name, {"near": table})):
        found = fd.attend(q, q, q, each & masks.causal(), bindings=bindings)
        allowed = torch.zeros(8, 8, dtype=torch.bool).scatter(1, table[0], True).tril()
        assert_close(found, fd.attend(q, q, q, masks.mask(allowed)))
