"""Patterns: the elementwise rule against the dense rules, the algebra, and mixtures as counts."""

import dataclasses

import pytest
import torch
from hypothesis import given

from flexdilated import masks
from flexdilated.engines._reference import multiplicity
from tests.support.strategies import cases


def evaluated(bound: masks.Bound) -> torch.Tensor:
    """(H, N, M): the mask_mod of a bound on every pair."""
    h = torch.arange(bound.num_heads)[:, None, None]
    q, k = torch.arange(bound.num_queries)[None, :, None], torch.arange(bound.num_keys)[None, None, :]
    mask = bound.mask_mod()(torch.tensor(0), h, q, k)
    assert mask.dtype == torch.bool
    return mask.expand(bound.num_heads, bound.num_queries, bound.num_keys)


@given(cases())
def test_the_rule_and_the_counts_of_branches_are_the_dense_rule(case):
    counts = case.counts()
    assert torch.equal(evaluated(case.bind()), counts > 0)
    assert torch.equal(multiplicity(case.bind(), torch.device("cpu"))[0], counts)


def test_key_tells_bounds_apart():
    """A plan found by key is the plan of these sizes: everything a mask depends on is in the key."""
    mixture = masks.longnet([8, 16], [1, 2])
    bound = mixture.bind(num_heads=2, num_queries=4, num_keys=4, head_offset=1, num_heads_global=20)
    names = ("num_queries", "num_keys", "num_heads", "head_offset", "q_offset", "k_offset", "batch", "num_heads_global")
    patterns = [{"pattern": masks.causal()}, {"pattern": mixture + masks.causal()}]
    for change in (*patterns, *({name: 9 + 21 * (name == "num_heads_global")} for name in names)):
        assert dataclasses.replace(bound, **change).key() != bound.key()
    assert dataclasses.replace(bound).key() == bound.key()
    assert hash(bound.key()) == hash(dataclasses.replace(bound).key())


def test_fitting_blocks_are_never_in_doubt():
    """Blocks of 64 in kernel blocks of 128: every listed pair of a window of blocks is useful."""
    told = masks.describe(masks.blockwise(masks.local_window(left=3, right=2) & masks.causal(), 128), 4096, num_heads=2)
    assert told.waste == 1.0


@pytest.mark.parametrize(
    ("pattern", "rate", "most"),
    [
        (masks.dilated_window(left=255, right=256, rate=4), 4, 1.25),
        (masks.strided(8), 8, 1.25),
        (masks.fixed(8, summary=3), 8, 1.25),
        (masks.neighborhood((32, 64), 5, rate=2), 2, 7),  # windows of 11 x 11 in classes of 16 x 32 tokens
    ],
)
def test_dilation_is_dense_in_its_layout(pattern, rate, most):
    """2048 tokens: in residue-major order the blocks hold little but allowed pairs."""
    N, layout = 2048, masks.layout(pattern, 2048)
    assert layout == masks.Layout(N, rate)
    listed = int(masks.block_mask(pattern, N, num_heads=1, layout=layout).to_dense().sum())
    assert listed * 128**2 <= most * masks.describe(pattern, N).useful_pairs


def test_a_rule_of_one_head_goes_by_the_number_of_heads() -> None:
    """What was asked for before is kept: of other numbers of heads it is another rule."""
    pattern = masks.longnet([8], [4], offsets="contiguous") & masks.causal()
    for num_heads, offset in ((4, 3), (16, 0), (4, 3)):
        assert pattern.for_head(3, num_heads) == masks.dilated(8, 4, offset) & masks.causal()
