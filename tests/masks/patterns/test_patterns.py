"""Patterns: the elementwise rule against the dense rules, the algebra, and mixtures as counts."""

import dataclasses

import pytest
import torch
from hypothesis import given

from flexdilated import masks
from flexdilated.engines._reference import multiplicity
from flexdilated.masks.blocks._blocks import estimate_blocks
from flexdilated.masks.planning.lowering._layouts import shared_terms
from tests.masks.blocks.test_block_mask import verdicts
from tests.support import oracle
from tests.support.ladders import LADDERS
from tests.support.strategies import cases


def evaluated(bound: masks.Bound) -> torch.Tensor:
    """(H, N, M): the mask_mod of a bound on every pair."""
    h = torch.arange(bound.num_heads)[:, None, None]
    q, k = torch.arange(bound.num_queries)[None, :, None], torch.arange(bound.num_keys)[None, None, :]
    mask = bound.mask_mod()(torch.tensor(0), h, q, k)
    assert mask.dtype == torch.bool
    return mask.expand(bound.num_heads, bound.num_queries, bound.num_keys)


@given(cases())
def test_mask_mod_is_the_dense_rule(case):
    assert torch.equal(evaluated(case.bind()), case.counts() > 0)


@given(cases())
def test_branches_count_as_the_dense_rule(case):
    assert torch.equal(multiplicity(case.bind(), torch.device("cpu"))[0], case.counts())


@pytest.mark.parametrize(
    ("name", "heads", "offsets"),
    [("longnet-5", "all", "contiguous"), ("longnet-5", "grouped", "interleaved"), ("paper-5", "all", "interleaved"),
     ("paper-5", "grouped", "contiguous"), ("gigapath-5", "grouped", "interleaved")],
)  # fmt: skip
def test_ladders_at_full_size(name, heads, offsets):
    """Longer segments than tokens, rates that divide neither segments nor heads; on a spread of queries."""
    rules = {"offsets": offsets, "heads": heads}
    bound = masks.longnet(*LADDERS[name], **rules).bind(num_heads=16, num_queries=1, num_keys=1501, q_offset=0)
    queries = torch.cat([torch.arange(0, 1501, 61), torch.tensor([1023, 1024, 1500])])
    expected = oracle.counts(oracle.longnet(*LADDERS[name], **rules), range(16), 16, queries, torch.arange(1501))
    h, k = torch.arange(16)[:, None, None], torch.arange(1501)[None, None, :]
    found = sum(
        branch.mask_mod(num_heads=16, device=torch.device("cpu"))(torch.tensor(0), h, queries[:, None], k).long()
        for branch in bound.pattern.branches()
    )
    assert torch.equal(found, expected)


_SET, _MIXTURE = masks.causal(), masks.longnet([8, 16], [1, 2])


def test_a_mixture_is_a_multiset_of_branches():
    """Sums concatenate branches, intersections apply to each."""
    causal, mixture = masks.causal(), masks.longnet([8, 16], [1, 2])
    assert (causal + causal + mixture).branches() == (causal, causal, *mixture.branches())
    assert (mixture & causal).branches() == tuple(branch & causal for branch in mixture.branches())


@pytest.mark.parametrize(
    "change",
    [
        {"pattern": _SET},
        {"pattern": _MIXTURE + _SET},
        *(
            {name: 9}
            for name in ("num_queries", "num_keys", "num_heads", "head_offset", "q_offset", "k_offset", "batch")
        ),
        {"num_heads_global": 30},
    ],
    ids=str,
)
def test_key_tells_bounds_apart(change):
    """A plan found by key is the plan of these sizes: everything a mask depends on is in the key."""
    bound = _MIXTURE.bind(num_heads=2, num_queries=4, num_keys=4, head_offset=1, num_heads_global=20)
    assert dataclasses.replace(bound, **change).key() != bound.key()
    assert dataclasses.replace(bound).key() == bound.key()
    assert hash(bound.key()) == hash(dataclasses.replace(bound).key())


def test_fitting_blocks_are_never_in_doubt():
    """Blocks of 64 in kernel blocks of 128: every listed pair of a window of blocks is useful."""
    told = masks.describe(masks.blockwise(masks.local_window(left=3, right=2) & masks.causal(), 128), 4096, num_heads=2)
    assert told.waste == 1.0


@pytest.mark.parametrize(
    ("pattern", "rate"),
    [
        (masks.dilated_window(left=255, right=256, rate=4), 4),
        (masks.strided(8), 8),
        (masks.fixed(8, summary=3), 8),
    ],
    ids=["dilated_window", "strided", "fixed"],
)
def test_dilation_is_dense_in_its_layout(pattern, rate):
    """2048 tokens: in residue-major order the blocks hold little but allowed pairs."""
    N = 2048
    assert masks.layout(pattern, N) == masks.Layout(N, rate)
    mask = masks.block_mask(pattern, N, num_heads=1, layout=masks.layout(pattern, N))
    listed, _ = verdicts(mask, (1, N // 128, N // 128))
    t = torch.arange(N)
    allowed = pattern.bind(num_heads=1, num_queries=N, num_keys=N).mask_mod()
    useful = int(allowed(torch.tensor(0), torch.tensor(0), t[:, None], t[None, :]).sum())
    assert int((listed > 0).sum()) * 128**2 <= 1.25 * useful


@pytest.mark.parametrize(
    "pattern",
    [
        masks.global_tokens(64) | masks.local_window(left=512, right=512),
        masks.first_tokens(4) | masks.local_window(left=1023, right=0),
        (masks.strided(128) | masks.fixed(256, summary=100)) & masks.causal(),
    ],
    ids=str,
)
def test_estimates_are_near(pattern):
    """What the planner weighs at 32,768 tokens: a first row that sees everyone does not stand for the others."""
    N = 1 << 15
    (term,) = shared_terms(pattern, 1, pattern.bind(num_heads=1, num_queries=N, num_keys=N), 1)
    listed = len(term.blocks(128, 128).row)
    assert estimate_blocks(term.table_rule(), q_block=128, k_block=128).blocks == pytest.approx(listed, rel=0.1)


def test_a_rule_of_one_head_goes_by_the_number_of_heads() -> None:
    """What was asked for before is kept: of other numbers of heads it is another rule."""
    pattern = masks.longnet([8], [4], offsets="contiguous") & masks.causal()
    for num_heads, offset in ((4, 3), (16, 0), (4, 3)):
        assert pattern.for_head(3, num_heads) == masks.dilated(8, 4, offset) & masks.causal()
