"""describe and the receptive field: every number is that of the dense rule."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor

from flexdilated import masks
from flexdilated.masks.core._bound import Bound
from flexdilated.masks.inspection import ReceptiveField
from flexdilated.masks.inspection._pair_counts import head_shares
from flexdilated.masks.inspection._receptive_field import follow_tokens, receptive_field_of
from flexdilated.masks.orders._layout import Compact
from flexdilated.masks.planning.lowering._term import Term
from tests.support.irregular import bound_rules, dense, run_rules, stretch_rules, sums_of_runs
from tests.support.ladders import GIGAPATH_5
from tests.support.reached import assert_same, fields
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import Case, cases, whole_cases, whole_grids

pytestmark = pytest.mark.usefixtures("without_masks")

CPU = torch.device("cpu")

sets = st.one_of(
    st.builds(masks.local_window, left=st.integers(0, 300), right=st.integers(0, 300)),
    st.builds(masks.dilated, st.integers(5, 300), st.integers(1, 4), offset=st.just("interleaved")),
    st.builds(masks.dilated, st.integers(100, 300), st.just(2)),
    st.builds(masks.first_tokens, st.integers(1, 200)),
    st.sampled_from([masks.causal(), masks.every(), masks.causal() & ~masks.causal()]),
)
patterns = st.one_of(
    sets,
    st.builds(lambda each, other: each & other, sets, sets),
    st.builds(lambda each, other: each | ~other, sets, sets),
    st.builds(lambda each, other: each + other, sets, sets),
    st.builds(lambda each, other: each + other + each, sets, sets),
)


def allowed(pattern: masks.Pattern, N: int, H: int) -> Tensor:
    """(H, N, N) from the closure that FlexAttention gets."""
    rule, tokens = pattern.mask_mod(num_heads=H, device=CPU), torch.arange(N)
    return rule(torch.tensor(0), torch.arange(H)[:, None, None], tokens[:, None], tokens).expand(H, N, N)


def tiles_of(term: Term, pairs: Tensor) -> Tensor:
    """[full, partial] of the blocks with a pair, over the tokens that each head has in each fold of the term."""
    side, counted = term.block_side, torch.zeros(2, dtype=torch.int64)
    orders = [each.tokens() if isinstance(each, Compact) else each.positions() for each in (term.q, term.k)]
    for index, head in enumerate(term.heads):
        for fold in range(term.folds):
            q, k = (tokens[index, fold] if tokens.dim() == 3 else tokens for tokens in orders)
            for rows in pairs[head][q][:, k].split(side):
                for block in rows.split(side, dim=1):
                    full = bool(block.all()) and block.shape == (side, side)
                    counted += torch.tensor([full, bool(block.any()) and not full])
    return counted


@settings(max_examples=8)
@given(patterns, st.integers(1, 400), st.integers(1, 4))
@example(masks.dilated(300, 2, offset="interleaved") + masks.local_window(left=130, right=0), 390, 3)
@example(masks.causal() + masks.local_window(left=9, right=3) + masks.causal(), 150, 2)
@example(masks.causal() & ~masks.causal(), 10, 1)
@example(masks.every(), 300, 3)
def test_every_number_is_counted_pair_by_pair(pattern, N, H):
    told = masks.describe(pattern, N, num_heads=H, head_dim=48)
    each = [allowed(branch, N, H).long() for branch in pattern.branches()]
    counts = torch.stack(each).sum(0)
    useful, everything = int(counts.sum()), H * N * N

    assert told.useful_pairs == useful
    assert told.density == useful / everything
    assert (told.forward_flops, told.backward_flops) == (4 * 48 * useful, 10 * 48 * useful)
    of_heads = {head: share.pairs for share in told.heads for head in share.heads}
    assert of_heads == dict(enumerate(counts.sum((1, 2)).tolist()))
    of_branches = dict.fromkeys(pattern.branches(), 0)
    for branch, pairs in zip(pattern.branches(), each, strict=True):
        of_branches[branch] += int(pairs.sum())
    assert {share.pattern: share.pairs for share in told.branch_shares} == of_branches
    distinct = masks.describe(pattern.union, N, num_heads=H).useful_pairs
    assert distinct == int((counts > 0).sum())

    blocks, computed = torch.zeros(2, dtype=torch.int64), 0
    for branch in told.branches:
        own = allowed(branch.pattern, N, H)
        for term in branch.options[0].terms:
            found = tiles_of(term, own)
            blocks += found
            computed += int(found.sum()) * term.block_side**2
    assert [told.full_blocks, told.partial_blocks] == blocks.tolist()
    assert told.computed_pairs == computed
    assert told.waste == (computed / useful if useful else float("inf"))
    assert told.block_density == computed / everything


def assert_heads(bound: masks.Bound, counts: Tensor) -> None:
    """Pairs of each head; counts (H, N, M)."""
    shares = head_shares(bound, {})
    found = {head: share.pairs for share in shares for head in share.heads}
    assert found == dict(enumerate(counts.sum((1, 2)).tolist()))


@settings(max_examples=8)
@given(cases(), st.booleans())
def test_pairs_of_drawn_patterns(case: Case, same_tokens: bool):
    """Queries and keys that begin anywhere, also at one place."""
    if same_tokens:
        case = replace(case, num_keys=case.num_queries, k_offset=case.q_offset)
    try:
        bound = case.bind()
    except ValueError:  # a table or a grid that names other keys
        reject()
    assert_heads(bound, case.counts())
    if case.num_heads == case.num_heads_global:
        offsets = {"q_offset": case.q_offset, "k_offset": case.k_offset}
        told = masks.describe(case.twin.pattern, case.num_queries, case.num_keys, num_heads=case.num_heads, **offsets)
        assert told.useful_pairs == int(case.counts().sum())
        assert told.density == float(case.counts().double().mean())
        json.dumps(told.to_data(), allow_nan=False)


@settings(max_examples=8)
@given(packed_cases(), sums_of_runs() | bound_rules(stretch_rules) | bound_rules(run_rules, visible=True))
def test_pairs_with_run_time_tensors_and_of_irregular_patterns(packed: Packed, irregular: masks.Bound):
    """Listed blocks, documents with padding, visible keys and runs of them."""
    for entry in range(packed.batch):
        assert_heads(packed.bind().entry(entry), packed.counts[entry])
    assert_heads(
        irregular, torch.stack([dense(irregular, each) for each in irregular.pattern.branches()]).long().sum(0)
    )


def test_the_text_states_the_numbers():
    """Counted by hand, apart from one another, so that none stands in another's place."""
    text = str(masks.describe(masks.causal(), 300, num_heads=2))
    for number in (f"{2 * 45150:,}", f"{2 * 6 * 128**2:,}", f"{150.5 / 300:.4%}", f"{6 * 17:,}", "causal()", "natural"):
        assert number in text
    mixed = str(masks.describe(masks.causal() + masks.every(), 10, num_heads=2))
    assert f"{55 / 155:.2%}" in mixed, "share of a branch in the pairs of a head"
    told = masks.describe(masks.longnet(*GIGAPATH_5) & masks.causal(), 600, num_heads=2)
    layers = told.receptive_field().layers_at_least
    assert f"at least {layers} layer until the receptive field saturates" in str(told)
    assert "sample of 8 of 600 tokens" in " ".join(str(told).split())
    assert "no token reaches another" in str(masks.describe(masks.dilated(4, 4), 16, num_heads=1))


MILLION = 1 << 20


def assert_field(bound: Bound, counts: torch.Tensor) -> None:
    """By powers of all tokens, and followed one by one."""
    exact = receptive_field_of(bound)
    assert exact.exact
    assert_same(exact, counts)
    assert_same(follow_tokens(bound, 8), counts)


@settings(max_examples=12)
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


@settings(max_examples=12)
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


def test_the_gain_of_an_order_is_that_of_the_sorted_matrix() -> None:
    """Of a ring in random order, with two diagonals of its own; and only where blocks of one matrix are listed."""
    tokens = 1024
    ring = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs() % (tokens - 2) <= 2
    mixed = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    given = ring[mixed][:, mixed]
    order = torch.from_numpy(reverse_cuthill_mckee(csr_array(given.numpy())).copy())
    counts = masks.describe(masks.mask(given), tokens, device="cuda")
    after = masks.describe(masks.mask(given[order][:, order]), tokens, device="cuda")
    assert counts.order_gain == counts.computed_pairs / after.computed_pairs > 2
    assert f"{counts.order_gain:.1f} times fewer blocks if sorted by reverse Cuthill-McKee order" in str(counts)
    assert after.order_gain == pytest.approx(1, rel=0.1)
    sparse = masks.sparse(given.to_sparse())
    assert masks.describe(sparse | masks.local_window(left=1, right=1), tokens).order_gain == counts.order_gain
    assert masks.describe(sparse, tokens).order_gain is None  # keys are gathered
    assert masks.describe(masks.mask(given[:512]), 512, tokens, device="cuda").order_gain is None
