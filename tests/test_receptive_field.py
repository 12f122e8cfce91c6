"""The receptive field: dense powers of drawn rules, and closed forms at a million tokens."""

import math
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings

from flexdilated import masks
from flexdilated.masks.core._bound import Bound
from flexdilated.masks.inspection._receptive_field import (
    FollowedTokens,
    ReceptiveField,
    follow_tokens,
    receptive_field_of,
)
from flexdilated.masks.inspection._relations import Relations
from tests import oracle, twins
from tests.reached import assert_same, fields
from tests.run_time_strategies import Packed, packed_cases
from tests.strategies import Case, whole_cases, whole_grids

MILLION = 1 << 20
LONGNET_5 = masks.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])


@given(whole_cases(largest=100))
def test_dense_powers(case: Case):
    assert_same(receptive_field_of(Relations(case.bind())), case.counts())


@given(whole_grids())
def test_grids(case: Case):
    """A neighbourhood alone is told axis by axis, one beside another rule as a whole."""
    assert_same(receptive_field_of(Relations(case.bind())), case.counts())


@pytest.mark.parametrize(
    ("grid", "radius", "rate"),
    [
        ((5, 6), (1, 1), (1, 2)),
        ((9, 4), (1, 1), (3, 1)),
        ((4, 3, 5), (1, 0, 1), (1, 1, 1)),
        ((3, 6, 4), (1, 1, 0), (1, 2, 3)),
        ((7, 7), (2, 3), (1, 1)),
    ],
)
def test_grids_whose_axes_differ(grid, radius, rate):
    """Axes along which all tokens meet, those of a residue, and none."""
    case = twins.neighborhood(grid, radius, rate=rate)
    tokens = math.prod(grid)
    assert_same(
        receptive_field_of(Relations(case.pattern.bind(num_heads=1, num_queries=tokens, num_keys=tokens))),
        oracle.counts(case.rule, range(1), 1, torch.arange(tokens), torch.arange(tokens)),
    )


@given(packed_cases())
def test_run_time_tensors(packed: Packed):
    """Documents apart, and documents that other rules cross; each batch entry by itself."""
    for entry in range(packed.batch):
        bound, counts = packed.bind().entry(entry), packed.counts[entry]
        if (packed.num_queries, packed.q_offset) != (packed.num_keys, packed.k_offset):
            with pytest.raises(ValueError, match="queries and keys that are the same tokens"):
                receptive_field_of(Relations(bound))
        else:
            assert_same(receptive_field_of(Relations(bound)), counts)


def told(pattern: masks.Pattern | masks.Mixture, num_tokens: int = MILLION, num_heads: int = 1) -> ReceptiveField:
    found = masks.describe(pattern, num_tokens, num_heads=num_heads).receptive_field()
    assert isinstance(found, ReceptiveField)
    return found


@pytest.mark.parametrize("num_tokens", [MILLION, 1_000_000])
@pytest.mark.parametrize("lookback", [1024, 999])
def test_a_window_looks_back_once_a_layer(lookback: int, num_tokens: int):
    found = told(masks.local_window(left=lookback, right=0), num_tokens)
    assert found.layers == math.ceil((num_tokens - 1) / lookback)
    for layers, pairs in found.growth:
        reach = min(layers * lookback, num_tokens - 1)
        assert pairs == reach * (reach + 1) // 2 + (num_tokens - reach) * (reach + 1)
    assert found.slowest == ((found.layers - 1) * lookback + 1, 0)
    assert (found.never_earlier, found.never_later) == (0, found.earlier_pairs)
    assert found.first_never_later == (0, 1)


def test_a_window_to_both_sides():
    found = told(masks.local_window(left=512, right=256))
    # To the farther side it takes longer.
    assert found.layers == math.ceil((MILLION - 1) / 256)
    assert found.never_earlier == found.never_later == 0


def test_strides_reach_everything_earlier_in_two_layers():
    found = told(masks.recipes.sparse_transformer_strided(1024))
    assert (found.layers, found.never_earlier, found.never_later) == (2, 0, found.earlier_pairs)


def test_rates_that_share_a_factor_keep_tokens_apart():
    """Tokens at even and at odd positions never reach each other."""
    found = told(masks.dilated_window(left=64, right=0, rate=4) | masks.dilated_window(left=64, right=64, rate=6))
    assert found.first_never_earlier == (1, 0)
    assert found.pairs == 2 * (MILLION // 2) ** 2


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_longnet_keeps_to_its_longest_segments(causal: bool):
    found = told(LONGNET_5 & masks.causal() if causal else LONGNET_5, num_heads=16)
    segments, length = MILLION // 32768, 32768
    assert found.first_never_earlier == ((2048, 2047) if causal else (32768, 0))
    # Full: all pairs of a segment meet. Causal: tokens that are in no branch of greater rate never look out of theirs.
    assert found.pairs == segments * length**2 if not causal else found.pairs < segments * length * (length + 1) // 2
    assert found.layers == (3 if causal else 2)


def test_global_tokens_reach_everyone_in_two_layers():
    found = told(masks.recipes.bigbird(MILLION, block=128), num_heads=2)
    assert (found.layers, found.pairs) == (2, MILLION**2)


def test_documents_never_meet():
    lengths = torch.tensor([1000, 48_576, 1_000_000 - 1000])
    ids = torch.repeat_interleave(torch.arange(3), lengths)
    found = told(masks.local_window(left=100, right=0) & masks.documents(ids), int(lengths.sum()))
    assert found.layers == math.ceil((999_000 - 1) / 100)
    assert found.never_earlier == 1000 * 48_576 + 49_576 * 999_000
    assert found.first_never_earlier == (1000, 0)


def test_neighbourhoods_by_axis():
    found = told(masks.neighborhood((1024, 1024), (32, 16)))
    # The window of a token at the border is shifted inwards: its first layer reaches twice as far as the others.
    assert found.layers == math.ceil(1023 / 16) - 1
    assert found.pairs == MILLION**2


@given(whole_cases(largest=60))
@settings(max_examples=30)
def test_followed_tokens(case: Case):
    """Each sampled token by itself, layer by layer, until the limit of searches."""
    bound = case.bind()
    found, dense = follow_tokens(bound), fields(case.counts())
    for token, reached, finished in zip(found.tokens, found.reached, found.finished, strict=True):
        sizes = [int(field[token].sum()) for field in dense]
        grown = [after for before, after in pairwise(sizes) if after > before]
        assert list(reached) == (grown if finished else grown[: len(reached)])
    assert found.layers_at_least <= len(dense) - 1
    assert all(0 <= token < bound.num_queries for token in found.tokens)
    if bound.num_queries <= 8:
        assert found.tokens == tuple(range(bound.num_queries))
        assert all(found.finished)
        for (layers, mean, error), (wanted, grown) in zip(found.growth, enumerate(dense[1:], 1), strict=True):
            assert (layers, error) == (wanted, 0.0)
            assert mean * bound.num_queries == pytest.approx(int(grown.sum()))


def test_a_sample_estimates_the_mean_within_its_error():
    """A causal pattern's receptive fields differ by token: 8 equal parts hold the mean to a part of their spread."""
    window = masks.local_window(left=50, right=0)
    exact = told(window, 1 << 12)
    found = follow_tokens(window.bind(num_heads=1, num_queries=1 << 12, num_keys=1 << 12))
    assert len(found.tokens) == 8
    assert [token * 8 >> 12 for token in found.tokens] == list(range(8))
    wanted = {layers: pairs / exact.num_tokens for layers, pairs in exact.growth}
    for layers, mean, error in found.growth:
        if layers in wanted:
            # Tokens near the start, few of which are drawn, reach fewer.
            assert mean == pytest.approx(wanted[layers], rel=0.06, abs=4 * error)
    assert found.growth[-1][0] == found.layers_at_least == 64
    assert [token for token, done in zip(found.tokens, found.finished, strict=True) if not done] == [
        token for token in found.tokens if token > 63 * 50
    ]


def test_too_many_squares_are_followed():
    generator = torch.Generator().manual_seed(0)
    visible = masks.visible_keys(torch.rand(200, generator=generator) < 0.5)
    pattern = visible & masks.dilated_window(left=50, right=0, rate=2)
    exact = masks.describe(pattern, 200, num_heads=1).receptive_field()
    with patch("flexdilated.masks.inspection._relations._MOST_SQUARES", 100):
        told = masks.describe(pattern, 200, num_heads=1)
        found = told.receptive_field()
        assert "from a sample of 8 of 200 tokens" in told.to_text(columns=200)
    assert isinstance(exact, ReceptiveField)
    assert isinstance(found, FollowedTokens)
    assert 1 < found.layers_at_least <= exact.layers
    assert told.gaps is None
    assert told.to_data()["receptive_field"] is None
    assert told.to_data()["followed_tokens"]["layers_at_least"] == found.layers_at_least


def test_other_tokens_have_no_field():
    bound: Bound = masks.causal().bind(num_heads=1, num_queries=4, num_keys=8, q_offset=4)
    with pytest.raises(ValueError, match="got 4 queries from 4 on and 8 keys from 0 on"):
        receptive_field_of(Relations(bound))
