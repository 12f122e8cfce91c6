"""What describe tells where little repeats, such as listed blocks and visible keys, against the rule pair by pair."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.core._bound import Bound
from flexdilated.masks.inspection import _packed_rows, _receptive_field_stretches, _runs, _spread, _stretches
from flexdilated.masks.inspection._gaps import gaps_of
from flexdilated.masks.inspection._multiplicity import multiplicity_of
from flexdilated.masks.inspection._receptive_field import ReceptiveField, receptive_field_of
from flexdilated.masks.inspection._receptive_field_runs import RunField
from flexdilated.masks.inspection._receptive_field_stretches import StretchField
from flexdilated.masks.inspection._relations import Relations
from flexdilated.masks.inspection._runs import runs_of
from flexdilated.masks.inspection._squares import TooManySquaresError
from tests.heard import assert_same
from tests.irregular import bound_rules, dense, listed, padded, run_rules, stretch_rules, sums_of_runs

MILLION = 1 << 20
FIELD = "flexdilated.masks.inspection._receptive_field._field"


def assert_told(bound: Bound, kind: type[RunField] | type[StretchField]) -> None:
    """By this way alone."""
    with patch(FIELD, kind.of):
        assert_same(receptive_field_of(Relations(bound)), dense(bound))


STRETCHED = {
    "drawn": lambda N: masks.random_blocks(max(1, N - 3), block=4, count=1, seed=N),
    "drawn for later tokens too": lambda N: masks.random_blocks(N + 6, block=4, count=1, seed=N),
    "drawn, causal": lambda N: masks.random_blocks(N, block=3, count=1, seed=N) & masks.causal(),
    "listed": lambda N: listed(N, 3),
    "listed, causal": lambda N: listed(N, 3) & masks.causal(),
    "listed, later": lambda N: listed(N, 3) & ~masks.causal(),
    "listed, both": lambda N: masks.per_head([listed(N, 3) & masks.causal(), listed(N, 4) & ~masks.causal()]),
    "beside global tokens": lambda N: listed(N, 7) & masks.causal() | masks.global_tokens(3),
    "beside padded documents": lambda N: listed(N, 8) & masks.causal() | padded(N),
    "in documents": lambda N: listed(N, 8) & masks.causal().per_document(torch.arange(N) // 9),
    "anew in documents": lambda N: masks.random_blocks(9, block=2, count=1).per_document(torch.arange(N) // 9),
    "chain": lambda N: masks.block_list([[max(0, row - 1)] for row in range(N)], block=1),
}


@pytest.mark.parametrize("bytes_a_pair", [0, 3, 1 << 30])
@pytest.mark.parametrize("name", STRETCHED)
def test_stretches_of_each_length(name: str, bytes_a_pair: int):
    """Word goes round piece by piece, all at once, or whichever is quicker."""
    for num_tokens in (*range(1, 14), 26, 65):
        first = num_tokens % 2 * 3
        sizes = {"num_queries": num_tokens, "num_keys": num_tokens, "q_offset": first, "k_offset": first}
        bound = STRETCHED[name](first + num_tokens).bind(num_heads=2, **sizes)
        with patch.object(_spread, "_BYTES_A_PAIR", bytes_a_pair), patch.object(_stretches, "_PAIRS_AT_ONCE", 100):
            assert_told(bound, StretchField)


@pytest.mark.parametrize(
    "pattern",
    [
        masks.local_window(left=3, right=0) | listed(40, 8),
        masks.chunked(4).per_document(torch.arange(40) // 9) | listed(40, 8),
        masks.dilated(8, 2),
        masks.strided(3),
    ],
    ids=repr,
)
def test_other_rules_have_no_stretches(pattern: masks.Pattern):
    relations = Relations(pattern.bind(num_heads=1, num_queries=40, num_keys=40))
    assert all(StretchField.of(relations, section) is None for section in relations.sections)


@given(bound_rules(stretch_rules), st.sampled_from([0, 3, 1 << 30]))
def test_stretches(bound: Bound, bytes_a_pair: int):
    with (
        patch.object(_spread, "_BYTES_A_PAIR", bytes_a_pair),
        patch.object(_stretches, "_PAIRS_AT_ONCE", 300),
        patch.object(_packed_rows, "_BYTES_AT_ONCE", 40),
    ):
        assert_told(bound, StretchField)


@given(bound_rules(run_rules, visible=True))
def test_runs(bound: Bound):
    assert_told(bound, RunField)


@given(sums_of_runs())
def test_overlap_and_gaps_from_runs(bound: Bound):
    assert_overlap_and_gaps(bound)


@pytest.mark.parametrize(
    "pattern",
    [
        padded(40) | masks.local_window(left=2, right=0),
        masks.local_window(left=2, right=0) | padded(40),
        padded(40) & masks.documents(torch.arange(40) // 3, name="others"),
        masks.dilated(9, 3, 1) & masks.dilated(16, 2) & masks.causal(),
        masks.dilated(7, 3) + masks.dilated(40, 5) + masks.dilated(40, 5) + masks.causal(),
    ],
    ids=repr,
)
def test_overlap_and_gaps_of_some_runs(pattern: masks.Pattern | masks.Mixture):
    assert_overlap_and_gaps(pattern.bind(num_heads=1, num_queries=40, num_keys=40))


@pytest.mark.parametrize("num_tokens", [1, 5, 30, 31])
def test_runs_of_active_tokens(num_tokens: int):
    rule = masks.dilated(9, 3, 1) & masks.local_window(left=4, right=3)
    assert_told(rule.bind(num_heads=1, num_queries=num_tokens, num_keys=num_tokens), RunField)


def test_other_rules_have_no_runs():
    window = masks.local_window(left=3, right=0)
    odd, third = (masks.visible_keys(torch.arange(40) % rate == 1, name=f"each_{rate}") for rate in (2, 3))
    anew = masks.chunked(4).per_document(torch.arange(40) // 13) | window
    for pattern in ((odd & window) | (third & window), (odd & window) + window, masks.strided(3), ~window, anew):
        relations = Relations(pattern.bind(num_heads=1, num_queries=40, num_keys=40))
        assert RunField.of(relations, relations.sections[0]) is None


def test_runs_of_more_tokens_than_fit_into_memory_are_not_followed():
    most = _runs._MOST_TOKENS
    assert runs_of(masks.causal(), range(7, 9)) is not None
    assert runs_of(masks.dilated(9, 3, 1) & masks.causal(), range(7, 8 + most)) is None


def assert_overlap_and_gaps(bound: Bound) -> None:
    """By runs alone."""
    with patch.object(Relations, "of", side_effect=TooManySquaresError):
        overlap, gaps = multiplicity_of(Relations(bound)), gaps_of(Relations(bound))
    counts = sum((dense(bound, branch).long() for branch in bound.pattern.branches()), torch.tensor(0))
    numbers, pairs = counts.unique(return_counts=True)
    assert overlap == {0: 0} | dict(zip(numbers.tolist(), pairs.tolist(), strict=True))
    for told, lacking in ((gaps.queries, (counts == 0).all(2)), (gaps.keys, (counts == 0).all(1))):
        assert (told.in_every_head, told.in_some_head) == (int(lacking.all(0).sum()), int(lacking.any(0).sum()))


def test_rates_whose_multiple_is_large():
    """Tokens at multiples of 13 and of 997 see their own kind; those of both are seen by both rules."""
    both = masks.dilated(MILLION, 13) + masks.dilated(MILLION, 997)
    relations = Relations(both.bind(num_heads=1, num_queries=MILLION, num_keys=MILLION)).ask()
    with patch.object(Relations, "of", side_effect=TooManySquaresError):
        overlap, gaps = multiplicity_of(relations), gaps_of(relations)
    sizes = [-(-MILLION // rate) for rate in (13, 997, 13 * 997)]
    once = sizes[0] ** 2 + sizes[1] ** 2 - 2 * sizes[2] ** 2
    assert overlap == {0: MILLION**2 - once - sizes[2] ** 2, 1: once, 2: sizes[2] ** 2}
    assert gaps.queries.in_every_head == MILLION - sizes[0] - sizes[1] + sizes[2]
    assert gaps.keys.first_in_every_head == 1


def told(pattern: masks.Pattern | masks.Mixture, num_tokens: int = MILLION, num_heads: int = 1) -> ReceptiveField:
    bound = pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens)
    return receptive_field_of(Relations(bound).ask())


def test_random_blocks_at_a_million_tokens():
    """Blocks that nobody drew are unheard of, whatever the depth: about e**-3 of them."""
    side = 1024
    blocks = MILLION // side
    found = told(masks.random_blocks(MILLION, block=side, count=3))
    among = told(masks.random_blocks(blocks, block=1, count=3), blocks)
    assert found.layers == among.layers
    for (layers, pairs), (same, of_blocks) in zip(found.growth, among.growth, strict=True):
        # A block that nobody has told of itself is a thousand tokens that know one token each.
        itself = _blocks_that_know_themselves(layers, blocks)
        assert layers == same
        assert pairs == (of_blocks - blocks + itself) * side**2 + (blocks - itself) * side
    assert 0.9 < found.pairs / MILLION**2 < 0.96


def _blocks_that_know_themselves(layers: int, blocks: int) -> int:
    rows = masks.random_blocks(blocks, block=1, count=3).squares(0, 1)  # type: ignore[attr-defined]
    seen = torch.zeros(blocks, blocks)
    seen[rows.q_first, rows.k_first] = 1
    known = seen
    for _ in range(layers - 1):
        known = ((known + seen @ known) > 0).float()
    return int(known.diagonal().sum())


def test_a_chain_of_listed_blocks():
    """Each block sees the one before it: as many layers as there are blocks, one block more a layer."""
    side = 1024
    found = told(masks.block_list([[max(0, row - 1)] for row in range(MILLION // side)], block=side))
    blocks = MILLION // side
    assert found.layers == blocks - 1
    assert found.growth[0] == (1, (blocks - 1) * side**2 + side**2 + (blocks - 1) * side)
    assert found.slowest == ((blocks - 1) * side, 0)
    assert found.first_never_earlier == (side + 1, side)


@pytest.mark.parametrize("hidden", [0, 7])
def test_a_window_over_visible_keys_at_a_million_tokens(hidden: int):
    """Of every 8 tokens the last ones are hidden: a hop of 1023 reaches the next multiple of 8."""
    seen = torch.arange(MILLION) % 8 < 8 - hidden
    found = told(masks.visible_keys(seen) & masks.local_window(left=1023, right=0))
    hop = 1016 if hidden else 1023  # between visible tokens
    layers = -(-(MILLION - 1) // hop) if not hidden else 1 + -(-(MILLION - 8 - 1016) // hop)
    assert found.layers == layers
    assert found.never_later == found.earlier_pairs
    assert found.first_never_earlier == ((2, 1) if hidden else None)


@pytest.mark.parametrize("limit", ["_MOST_BYTES", "_MOST_STRETCHES", "_MOST_SEEN"])
def test_what_takes_too_long_is_followed(limit: str):
    where = _receptive_field_stretches if limit == "_MOST_BYTES" else _stretches
    with patch.object(where, limit, 1), patch("flexdilated.masks.inspection._relations._MOST_SQUARES", 100):
        found = masks.describe(masks.random_blocks(512, block=8, count=3), 512, num_heads=1).receptive_field()
    assert not isinstance(found, ReceptiveField)
