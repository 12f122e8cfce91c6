"""Patterns: the elementwise rule against the dense rules, the algebra, and mixtures as counts."""

import torch
from hypothesis import example, given

from flexdilated import masks
from flexdilated.engines._reference import multiplicity
from tests.support import twins
from tests.support.strategies import Case, cases


def evaluated(bound: masks.Bound) -> torch.Tensor:
    """(H, N, M): the mask_mod of a bound on every pair."""
    h = torch.arange(bound.num_heads)[:, None, None]
    q, k = torch.arange(bound.num_queries)[None, :, None], torch.arange(bound.num_keys)[None, None, :]
    mask = bound.mask_mod()(torch.tensor(0), h, q, k)
    assert mask.dtype == torch.bool
    return mask.expand(bound.num_heads, bound.num_queries, bound.num_keys)


# Rows of more blocks than are compared one by one, beside short and empty ones.
LONG_ROWS = twins.block_list([range(0, 40, 3), range(1, 40, 2), [5], [], range(40)], block=2)


@given(cases())
@example(Case.whole(LONG_ROWS, 1, 81))
def test_the_rule_and_the_counts_of_branches_are_the_dense_rule(case):
    counts = case.counts()
    assert torch.equal(evaluated(case.bind()), counts > 0)
    assert torch.equal(multiplicity(case.bind(), torch.device("cpu"))[0], counts)


def test_a_rule_of_one_head_goes_by_the_number_of_heads() -> None:
    """What was asked for before is kept: of other numbers of heads it is another rule."""
    pattern = masks.longnet([8], [4], offsets="contiguous") & masks.causal()
    for num_heads, offset in ((4, 3), (16, 0), (4, 3)):
        assert pattern.for_head(3, num_heads) == masks.dilated(8, 4, offset) & masks.causal()
