"""What describe tells where little repeats, such as listed blocks and visible keys, against the rule pair by pair."""

import operator
from dataclasses import replace
from itertools import count
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks._bound import Bound
from flexdilated.masks.inspection import _packed_rows, _receptive_field_stretches, _spread, _stretches
from flexdilated.masks.inspection._gaps import gaps_of
from flexdilated.masks.inspection._multiplicity import multiplicity_of
from flexdilated.masks.inspection._receptive_field import ReceptiveField, receptive_field_of
from flexdilated.masks.inspection._receptive_field_runs import RunField
from flexdilated.masks.inspection._receptive_field_stretches import StretchField
from flexdilated.masks.inspection._relations import Relations
from flexdilated.masks.inspection._squares import TooManySquaresError
from tests.heard import assert_same

MILLION = 1 << 20
FIELD = "flexdilated.masks.inspection._receptive_field._field"

_number = count()  # tensors of one pattern go by names of their own
joins = st.sampled_from([operator.and_, operator.or_])


def dense(bound: Bound, rule: masks.Pattern | None = None) -> Tensor:
    """(H, N, N), pair by pair: the whole pattern, or one rule of it."""
    if rule is not None:
        bound = replace(bound, pattern=rule)
    head, query, key = (torch.arange(size) for size in (bound.num_heads, bound.num_queries, bound.num_keys))
    allowed = bound.mask_mod()(torch.tensor(0), head[:, None, None], query[:, None], key)
    return allowed.expand(bound.num_heads, bound.num_queries, bound.num_keys)


def assert_told(bound: Bound, kind: type[RunField] | type[StretchField]) -> None:
    """By this way alone."""
    with patch(FIELD, kind.of):
        assert_same(receptive_field_of(Relations(bound)), dense(bound))


def marks(num_tokens: int, *, runs: int) -> st.SearchStrategy[Tensor]:
    """Of each token: runs of tokens that are marked or not."""
    lengths = st.lists(st.integers(1, runs), min_size=num_tokens, max_size=num_tokens).map(torch.tensor)
    return lengths.map(lambda sizes: torch.arange(num_tokens).repeat_interleave(sizes)[:num_tokens] % 2 > 0)


def documents(num_tokens: int) -> st.SearchStrategy[masks.Pattern]:
    """Documents with padding before, between and after some of them."""
    steps = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=num_tokens, max_size=num_tokens)
    padding = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=num_tokens, max_size=num_tokens)
    return st.builds(
        lambda steps, padding: masks.documents(
            torch.tensor(steps).cumsum(0).masked_fill(torch.tensor(padding) > 0, -1), name=f"documents_{next(_number)}"
        ),
        steps,
        padding,
    ).filter(lambda pattern: _is_sound(pattern, num_tokens))


def _is_sound(pattern: masks.Pattern, num_tokens: int) -> bool:
    try:
        pattern.bind(num_heads=1, num_queries=num_tokens, num_keys=num_tokens)
    except ValueError:
        return False
    return True


@st.composite
def stretch_leaves(draw: st.DrawFn, num_tokens: int) -> masks.Pattern:
    block = draw(st.sampled_from([1, 2, 3, 5, 8, 16]))
    blocks = -(-num_tokens // block)
    rows = st.lists(st.sets(st.integers(0, blocks - 1), max_size=3).map(sorted), min_size=1, max_size=blocks + 1)
    kinds = {
        "random": st.builds(
            masks.random_blocks,
            st.sampled_from([num_tokens, max(1, num_tokens - 3), num_tokens + 5]),
            block=st.just(block),
            count=st.just(1),
            seed=st.integers(0, 9),
        ),
        "listed": rows.map(lambda rows: masks.block_list(rows, block=block)),
        "blockwise": st.builds(masks.local_window, left=st.integers(0, 2), right=st.integers(0, 1)).map(
            lambda window: masks.blockwise(window, block)
        ),
        "causal": st.just(masks.causal()),
        "chunked": st.builds(masks.chunked, st.integers(1, 20)),
        "global": st.builds(masks.first_tokens, st.integers(1, 9)) | st.builds(masks.global_tokens, st.integers(1, 9)),
        "documents": documents(num_tokens),
        "restarted": documents(num_tokens).map(lambda ids: masks.causal().per_document(ids)),
        "visible": marks(num_tokens, runs=12).map(lambda seen: masks.visible_keys(seen, name=f"keys_{next(_number)}")),
    }
    return draw(kinds[draw(st.sampled_from([*kinds, "random", "listed", "listed"]))])


@st.composite
def stretch_rules(draw: st.DrawFn, num_tokens: int) -> masks.Pattern:
    rule = draw(stretch_leaves(num_tokens))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(stretch_leaves(num_tokens))
        rule = draw(joins)(rule, ~other if draw(st.integers(0, 3)) == 3 else other)
    return rule


@st.composite
def run_rules(draw: st.DrawFn, num_tokens: int, depth: int = 2) -> masks.Pattern:
    if depth and draw(st.booleans()):
        return draw(joins)(draw(run_rules(num_tokens, depth - 1)), draw(run_rules(num_tokens, depth - 1)))
    windows = st.builds(masks.local_window, left=st.integers(0, 7), right=st.sampled_from([0, 0, 1, 3]))
    leaves = windows | windows | st.builds(masks.chunked, st.integers(1, 20)) | documents(num_tokens)
    windows_anew = st.builds(lambda window, ids: window.per_document(ids), windows, documents(num_tokens))
    return draw(leaves | windows_anew | st.sampled_from([masks.causal(), masks.every()]))


@st.composite
def bound_rules(draw: st.DrawFn, rules, *, visible: bool = False) -> Bound:
    """One rule for all heads, one for each of two, or a sum; self-attention of some tokens."""
    num_tokens = draw(st.integers(1, 90))
    several = [draw(rules(num_tokens)) for _ in range(draw(st.sampled_from([1, 1, 2])))]
    if visible and draw(st.integers(0, 3)):
        keys = masks.visible_keys(draw(marks(num_tokens, runs=draw(st.sampled_from([1, 4, 30])))))
        several = [rule & keys for rule in several]
    pattern = several[0]
    if len(several) == 2:
        pattern = masks.per_head(several) if draw(st.booleans()) else several[0] + several[1]
    return pattern.bind(num_heads=2, num_queries=num_tokens, num_keys=num_tokens)


def listed(num_tokens: int, block: int) -> masks.Pattern:
    """Each block sees its own, or the one before, and one more."""
    blocks = -(-num_tokens // block)
    rows = [sorted({max(0, row - row % 2), (5 * row + 3) % blocks}) for row in range(blocks)]
    return masks.block_list(rows, block=block)


def padded(num_tokens: int) -> masks.Pattern:
    """Documents of 5 tokens, each second one padding."""
    number = torch.arange(num_tokens) // 5
    return masks.documents(torch.where(number % 2 == 0, number, -1))


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
    "chain": lambda N: masks.block_list([[max(0, row - 1)] for row in range(N)], block=1),
}


@pytest.mark.parametrize("bytes_a_pair", [0, 3, 1 << 30])
@pytest.mark.parametrize("name", STRETCHED)
def test_stretches_of_each_length(name: str, bytes_a_pair: int):
    """Word goes round piece by piece, all at once, or whichever is quicker."""
    for num_tokens in (*range(1, 14), 26, 65):
        bound = STRETCHED[name](num_tokens).bind(num_heads=2, num_queries=num_tokens, num_keys=num_tokens)
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


@st.composite
def sums_of_runs(draw: st.DrawFn) -> Bound:
    """A sum of rules by which tokens see runs, among them dilated ones."""
    num_tokens = draw(st.integers(1, 60))
    dilated = st.builds(masks.dilated, st.integers(1, 40), st.integers(1, 7), st.just("interleaved"))
    parts = draw(st.lists(dilated | run_rules(num_tokens), min_size=1, max_size=4))
    pattern = masks.Mixture(tuple(parts))
    if draw(st.booleans()):
        pattern = pattern & draw(st.just(masks.causal()) | dilated | run_rules(num_tokens, 0))
    if draw(st.booleans()):
        pattern = pattern & masks.visible_keys(draw(marks(num_tokens, runs=4)))
    return pattern.bind(num_heads=2, num_queries=num_tokens, num_keys=num_tokens)


@given(sums_of_runs())
def test_overlap_and_gaps_from_runs(bound: Bound):
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
    found = masks.describe(both, MILLION, num_heads=1)
    sizes = [-(-MILLION // rate) for rate in (13, 997, 13 * 997)]
    once = sizes[0] ** 2 + sizes[1] ** 2 - 2 * sizes[2] ** 2
    assert found.multiplicity == {0: MILLION**2 - once - sizes[2] ** 2, 1: once, 2: sizes[2] ** 2}
    assert found.gaps is not None
    assert found.gaps.queries.in_every_head == MILLION - sizes[0] - sizes[1] + sizes[2]
    assert found.gaps.keys.first_in_every_head == 1


def told(pattern: masks.Pattern | masks.Mixture, num_tokens: int = MILLION, num_heads: int = 1) -> ReceptiveField:
    found = masks.describe(pattern, num_tokens, num_heads=num_heads).receptive_field()
    assert isinstance(found, ReceptiveField)
    return found


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
    side = 256
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
