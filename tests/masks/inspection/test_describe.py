"""describe: its numbers are those of the dense rule, counted pair by pair and block by block."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks.inspection._pair_counts import head_shares
from flexdilated.masks.orders._layout import Compact
from flexdilated.masks.planning.lowering._term import Term
from tests.support import oracle
from tests.support.irregular import bound_rules, dense, run_rules, stretch_rules, sums_of_runs
from tests.support.ladders import GIGAPATH_5
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import Case, cases

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


def test_blocks_of_strips():
    """Branches that nest run as strips: two rows of blocks with all blocks up to the last of them."""
    told = masks.describe(masks.longnet([2048, 4096], [1, 4]) & masks.causal(), 8192, num_heads=4)
    strips, dense = 4 * 4 * 8, 4 * 2  # 4 heads with 4 segments of 8 strips, and with 2 segments' later halves
    assert told.partial_blocks == strips * 3
    assert told.full_blocks == 4 * 4 * sum(2 * 2 * row - 3 for row in range(1, 9)) + dense * (512 // 128) ** 2
    assert told.computed_pairs == 2432 * 128**2
    assert told.useful_pairs == oracle.useful_pairs([2048, 4096], [1, 4], num_heads=4, N=8192, causal=True)


def test_heads_that_follow_one_rule_share_an_entry():
    told = masks.describe(masks.dilated(1024, 4, offset="interleaved"), 4000, num_heads=6)
    assert [share.heads for share in told.heads] == [(0, 4), (1, 5), (2,), (3,)]
    # The last segment has 928 tokens, of which each offset finds 232.
    assert [share.pairs for share in told.heads] == [3 * 256**2 + 232**2] * 4


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
