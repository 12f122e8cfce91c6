"""describe: its numbers are those of the dense rule, counted pair by pair and block by block."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks.inspection._gaps import Gap, Gaps
from flexdilated.masks.orders._layout import Compact
from flexdilated.masks.planning.lowering._term import Term
from tests.support import oracle
from tests.support.ladders import LADDERS

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


def histogram(counts: Tensor) -> dict[int, int]:
    numbers, pairs = counts.unique(return_counts=True)
    return {0: 0} | dict(zip(numbers.tolist(), pairs.tolist(), strict=True))


def gap(empty: Tensor) -> Gap:
    """Of (H, tokens), True where a token has no pair."""
    sides = [empty.all(0), empty.any(0)]
    firsts = [int(side.nonzero()[0]) if bool(side.any()) else None for side in sides]
    return Gap(*(int(side.sum()) for side in sides), *firsts)


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
    assert (told.multiplicity.exact, told.multiplicity.queries) == (True, N)
    assert told.multiplicity.pairs == histogram(counts)
    assert set(told.multiplicity.standard_errors.values()) == {0.0}
    assert told.distinct_pairs == int((counts > 0).sum())
    assert told.gaps == Gaps(gap((counts == 0).all(2)), gap((counts == 0).all(1)))

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


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", LADDERS)
def test_ladders(name, causal):
    segments, rates = LADDERS[name]
    N, H = 16411, 16
    pattern = masks.longnet(segments, rates)
    told = masks.describe(pattern & masks.causal() if causal else pattern, N, num_heads=H)
    assert told.useful_pairs == oracle.useful_pairs(segments, rates, num_heads=H, N=N, causal=causal)
    # Segments that double share pairs, which are computed once.
    assert 0.75 <= told.waste <= 1.15


@pytest.mark.parametrize(
    ("pattern", "full", "partial", "listed"),
    [
        # 300 tokens, blocks of 128: a last one that is shorter is not whole.
        (masks.causal(), 1, 5, 6),
        (masks.every(), 4, 5, 9),
        (masks.causal() & ~masks.causal(), 0, 0, 0),
    ],
    ids=repr,
)
def test_blocks_by_hand(pattern, full: int, partial: int, listed: int):
    told = masks.describe(pattern, 300, num_heads=3)
    assert (told.full_blocks, told.partial_blocks) == (3 * full, 3 * partial)
    assert told.computed_pairs == 3 * listed * 128**2
    assert told.table_bytes == listed * (4 * 4 + 1)  # four int32 and a bool each, in one table for all heads


def test_a_branch_that_counts_twice_is_useful_twice_and_computed_once():
    once, twice = (masks.describe(p, 300, num_heads=1) for p in (masks.causal(), masks.causal() + masks.causal()))
    assert twice.useful_pairs == 2 * once.useful_pairs
    assert twice.computed_pairs == once.computed_pairs


def test_the_text_states_the_numbers():
    """Counted by hand, apart from one another, so that none stands in another's place."""
    text = masks.describe(masks.causal(), 300, num_heads=2).to_text(columns=200)
    for number in (f"{2 * 45150:,}", f"{2 * 6 * 128**2:,}", f"{150.5 / 300:.4%}", f"{6 * 17:,}", "causal()", "natural"):
        assert number in text


def test_nothing_allowed():
    told = masks.describe(masks.causal() & ~masks.causal(), 10, num_heads=1)
    assert (told.useful_pairs, told.density, told.waste) == (0, 0.0, float("inf"))
    assert "inf" in str(told)
    assert torch.isfinite(torch.tensor(told.block_density))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"num_queries": 0}, ValueError, "num_queries=0"),
        ({"num_heads": 0}, ValueError, "num_heads=0"),
        ({"q_offset": -1}, ValueError, "q_offset=-1"),
        ({"head_dim": 0}, ValueError, "head_dim=0"),
        ({"head_dim": 64.0}, TypeError, "head_dim=64.0"),
    ],
    ids=str,
)
def test_bad_input(change, error, says):
    with pytest.raises(error, match=says):
        masks.describe(masks.causal(), **{"num_queries": 10, "num_heads": 1} | change)
