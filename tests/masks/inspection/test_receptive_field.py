"""The receptive field: dense powers of drawn rules, and what is known of samples at a million tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.core._bound import Bound
from flexdilated.masks.inspection import ReceptiveField
from flexdilated.masks.inspection._receptive_field import follow_tokens, receptive_field_of
from tests.support.irregular import bound_rules, dense, run_rules, stretch_rules
from tests.support.reached import assert_same, fields
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import Case, whole_cases, whole_grids

MILLION = 1 << 20


def assert_field(bound: Bound, counts: torch.Tensor) -> None:
    """By powers of all tokens, and followed one by one."""
    exact = receptive_field_of(bound)
    assert exact.exact
    assert_same(exact, counts)
    assert_same(follow_tokens(bound, 8), counts)


@settings(max_examples=20)
@given(whole_cases(largest=60) | whole_grids())
def test_dense_powers(case: Case):
    assert_field(case.bind(), case.counts())


@settings(max_examples=8)
@given(packed_cases())
def test_run_time_tensors(packed: Packed):
    """Documents apart, and documents that other rules cross; each batch entry by itself."""
    for entry in range(packed.batch):
        bound, counts = packed.bind().entry(entry), packed.counts[entry]
        if (packed.num_queries, packed.q_offset) != (packed.num_keys, packed.k_offset):
            with pytest.raises(ValueError, match="queries and keys that are the same tokens"):
                receptive_field_of(bound)
        else:
            assert_field(bound, counts)


@settings(max_examples=8)
@given(bound_rules(stretch_rules) | bound_rules(run_rules, visible=True))
def test_rules_by_blocks_and_windows_over_visible_keys(bound: Bound):
    assert_field(bound, dense(bound))


@st.composite
def selected(draw: st.DrawFn) -> Bound:
    """A table of one or both heads, of rows from position 0 or only of later queries."""
    num_tokens, first, sides = draw(st.integers(1, 60)), draw(st.sampled_from([0, 6])), draw(st.sampled_from(SIDES))
    rows, columns = (-(-(first + num_tokens) // side) for side in sides)
    rows -= draw(st.sampled_from([0, first // sides[0]]))
    entries = torch.tensor(draw(st.lists(st.integers(-1, columns - 1), min_size=6 * rows, max_size=6 * rows)))
    table = entries.view(2, rows, 3)[draw(st.sampled_from([slice(1), slice(2)]))]
    sizes = {"num_queries": num_tokens, "num_keys": num_tokens, "q_offset": first, "k_offset": first}
    return masks.selected_blocks(table, block=sides, most=3).bind(num_heads=2, **sizes)


SIDES = [(1, 1), (1, 2), (3, 1), (2, 3)]


@settings(max_examples=30)
@given(selected())
def test_tables_by_their_rows(bound: Bound):
    assert_field(bound, dense(bound))


def told(pattern: masks.Pattern | masks.Mixture, num_tokens: int = MILLION, num_heads: int = 1) -> ReceptiveField:
    found = masks.describe(pattern, num_tokens, num_heads=num_heads).receptive_field()
    assert not found.exact
    assert [token * 8 // num_tokens for token in found.tokens] == list(range(8))
    assert found == masks.describe(pattern, num_tokens, num_heads=num_heads).receptive_field()
    return found


@pytest.mark.parametrize(("num_tokens", "lookback"), [(MILLION, 1024), (1_000_000, 999)])
def test_a_window_looks_back_once_a_layer(lookback: int, num_tokens: int):
    found = told(masks.local_window(left=lookback, right=0), num_tokens)
    for token, reached in zip(found.tokens, found.reached, strict=True):
        layers = range(1, min(found.layers_at_least, -(-token // lookback)) + 1)
        assert list(reached) == [min(each * lookback, token) + 1 for each in layers]
    assert found.finished == tuple(token <= lookback * 64 for token in found.tokens)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_longnet_keeps_to_its_longest_segments(causal: bool):
    pattern = masks.longnet([2048, 32768], [1, 4])
    found = told(pattern & masks.causal() if causal else pattern, num_heads=4)
    places = [token % 32768 for token in found.tokens]
    assert all(found.finished)
    # Full: all pairs of a segment meet. Causal: the last tokens before a border see a part of what is before them.
    for reached, place in zip(found.reached, places, strict=True):
        assert reached[-1] <= place + 1 if causal else reached[-1] == 32768


def test_documents_never_meet():
    lengths = torch.tensor([60, 3_000, 62_476])
    ids = torch.repeat_interleave(torch.arange(3), lengths)
    found = told(masks.local_window(left=1300, right=1300) & masks.documents(ids), int(lengths.sum()))
    assert all(found.finished)
    assert [reached[-1] for reached in found.reached] == [int(lengths[ids[token]]) for token in found.tokens]


@pytest.mark.parametrize("number", [2, 8])
def test_samples_estimate_without_bias(monkeypatch: pytest.MonkeyPatch, number: int):
    """Over many samples the mean is that of all tokens, and standard errors are about as large as the errors."""
    bound = (masks.dilated(32, 2) & masks.causal()).bind(num_heads=1, num_queries=64, num_keys=64)
    wanted, found = float(fields(dense(bound))[1].double().sum(1).mean()), []
    for seed in range(60):
        monkeypatch.setattr("flexdilated.masks.inspection._receptive_field._SEED", seed)
        growth = follow_tokens(bound, number).growth
        found.append(growth[0][1:] if growth else (1.0, 0.0))  # tokens of odd number reach themselves alone
    means, errors = torch.tensor(found).unbind(1)
    assert abs(float(means.mean()) - wanted) <= 4 * float(means.std()) / math.sqrt(len(means))
    # One token of each of equal parts varies less than as many of all tokens, for which the standard error is.
    assert float(means.std()) <= 1.2 * float(errors.square().mean().sqrt())
