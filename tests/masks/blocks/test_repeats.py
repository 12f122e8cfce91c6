"""Rules that repeat from period to period: their blocks are copies of one square's, and the same as without copying."""

import pytest

from flexdilated import masks
from flexdilated.masks.core._pattern import Pattern
from flexdilated.masks.planning.lowering._term import Term
from flexdilated.masks.planning.lowering._ways import shared_terms
from tests.masks.blocks.test_packed_blocks import assert_same

UNION = masks.dilated(64, 2) | masks.dilated(32, 1)
CONFINED = {
    "one branch": masks.dilated(64, 4, 3),
    "causal": masks.dilated(64, 2) & masks.causal(),
    "union": UNION & masks.local_window(left=40, right=3),
    "head groups": masks.longnet([32, 64], [1, 2], heads="grouped"),
    "per head": masks.per_head([masks.dilated(64, 1), masks.dilated(32, 2), UNION, masks.dilated(128, 4)]),
}
FREE = {
    "causal": masks.causal(),
    "window": masks.local_window(left=3, right=3),
    "complement": ~masks.dilated(64, 1),
    "half free": masks.dilated(64, 1) | masks.causal(),
}


def term(pattern: Pattern, num_tokens: int, rate: int) -> Term:
    sizes = {"num_heads": 4, "num_queries": num_tokens, "num_keys": num_tokens}
    (shared,) = shared_terms(pattern, 1, pattern.bind(**sizes), rate)
    return shared


@pytest.mark.parametrize(("rate", "q_block", "k_block"), [(1, 8, 8), (2, 16, 4), (4, 8, 8)])
@pytest.mark.parametrize("name", CONFINED)
def test_copies_are_what_building_gives(monkeypatch, name, rate, q_block, k_block):
    """Whole periods are copied; without copying every list is the same, count and all."""
    shared = term(CONFINED[name], 256, rate)
    assert shared._square(q_block, k_block) is not None
    copied = shared.blocks(q_block, k_block)
    monkeypatch.setattr(Term, "_square", lambda *_: None)
    built = shared.blocks(q_block, k_block)
    assert_same(copied, built)


@pytest.mark.parametrize("name", FREE)
def test_rules_that_reach_further_are_not_copied(name):
    assert not FREE[name].confined()
    assert term(FREE[name], 512, 1)._square(8, 8) is None


@pytest.mark.parametrize(
    ("num_tokens", "rate", "side"), [(320 + 1, 1, 8), (64, 1, 8), (512, 3, 8), (512, 4, 32), (512, 1, 48)]
)
def test_squares_that_do_not_fit_are_not_copied(num_tokens, rate, side):
    """A ragged end, a single period, and classes or blocks that straddle periods."""
    assert term(CONFINED["one branch"], num_tokens, rate)._square(side, side) is None
