"""Windows of run-time tensors: inside each a rule is computed in any way that it has without them, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flexdilated import masks
from flexdilated.masks.core import Extent
from flexdilated.masks.orders import Folded
from flexdilated.masks.planning import _candidates
from flexdilated.masks.planning._planner import Plan, plan
from flexdilated.masks.planning.lowering import _windows
from tests.masks.blocks.test_packed_blocks import assert_same
from tests.masks.planning.test_many_documents import packings, randn, results
from tests.masks.planning.test_planner import weight_of_all
from tests.support.run_time_strategies import packed_cases

LOCAL, CAUSAL = masks.local_window(left=3, right=2), masks.causal()
SPARSE = masks.dilated_window(left=2, right=1, rate=4)
FIXED = masks.fixed(4) | masks.dilated(8, 2)
FORMS: dict[str, Callable[[masks.Pattern, Tensor], masks.Pattern]] = {
    "union": lambda t, seen: (LOCAL | SPARSE) & t,
    "distributed": lambda t, seen: (LOCAL & t) | (SPARSE & t),
    "of unions": lambda t, seen: (LOCAL | SPARSE) & (CAUSAL | masks.strided(2)) & t,
    "with a period": lambda t, seen: (LOCAL | FIXED) & t,
    "one part": lambda t, seen: (LOCAL & t) | SPARSE,
    "by head": lambda t, seen: masks.per_head([(LOCAL | SPARSE) & t, FIXED & t]),
    "twice": lambda t, seen: (LOCAL | SPARSE) & t & masks.visible_keys(seen),
    "of keys": lambda t, seen: (LOCAL | FIXED) & masks.visible_keys(seen),
}
ANEW: dict[str, Callable[[masks.Pattern, Tensor], masks.Pattern]] = {
    "anew": lambda t, seen: (LOCAL | FIXED).per_document(t),
    "each anew": lambda t, seen: LOCAL.per_document(t) | (FIXED.per_document(t) & CAUSAL),
    "anew and cut": lambda t, seen: (LOCAL & t) | FIXED.per_document(t),
    "anew and not": lambda t, seen: (FIXED & t) | FIXED.per_document(t),
    "a grid a document": lambda t, seen: masks.neighborhood((4, 4), 1).per_document(t),
}


@contextmanager
def ways_in_turn(turn: int) -> Iterator[None]:
    """Windows of any size are weighed, and of the ways the one at this place in turn counts as the cheapest."""

    def rotated(options: list[_candidates.Option]) -> tuple[_candidates.Option, ...]:
        first = turn % len(options)
        return (*options[first:], *options[:first])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_windows, "_WORTH_WEIGHING", 0)
        patch.setattr(_candidates, "_in_best_blocks", rotated)
        masks.cache().clear()
        yield
    masks.cache().clear()


@given(packed_cases(), st.integers(0, 4))
def test_terms_add_up_to_the_rule_in_any_way(case, turn):
    with ways_in_turn(turn):
        for index in range(case.batch):
            found, counts = plan(case.bind().entry(index)), case.counts[index]
            assert torch.equal(weight_of_all(found.terms, counts.shape), counts)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([*FORMS, *ANEW]), st.integers(0, 4))
def test_out_lse_and_gradients_are_the_dense_rule(data, form, turn):
    num_tokens = data.draw(st.integers(1, 40), label="tokens")
    if form == "a grid a document":
        ids = torch.arange(num_tokens) // 16
    else:
        ids = data.draw(packings(num_tokens, 2), label="ids")
    length = torch.tensor(data.draw(st.integers(0, num_tokens), label="length"))
    table = masks.documents(ids) if form in ANEW or data.draw(st.booleans()) else masks.lengths(length)
    seen = torch.arange(num_tokens) % data.draw(st.sampled_from([3, 11, 64]), label="hidden") != 1
    pattern = (FORMS | ANEW)[form](table, seen)
    x = [randn(2, heads, num_tokens, 8, order=(0, 1, 2, 3)) for heads in (2, 1, 1)]
    with ways_in_turn(turn):
        found = results(x, pattern, None)
    assert_close(found, results(x, pattern, "reference"), rtol=1e-9, atol=1e-9)


def planned(pattern: masks.Pattern, num_tokens: int) -> Plan:
    rule = pattern.resolve(pattern.given_tensors(), Extent(num_tokens, num_tokens))
    return plan(rule.bind(num_heads=2, num_queries=num_tokens, num_keys=num_tokens))


N = 1 << 14
WIDE = masks.local_window(left=64, right=64) | masks.dilated_window(left=32, right=32, rate=32)
RULES = {
    "union": WIDE,
    "of unions": WIDE & (CAUSAL | masks.global_tokens(8)),
    "with a period": masks.local_window(left=127, right=0) & CAUSAL | masks.fixed(128) & CAUSAL,
    "by head": masks.per_head([WIDE, masks.dilated_window(left=64, right=0, rate=16)]),
    "dilated": masks.dilated(4096, 8) | masks.local_window(left=64, right=64),
    "grid": masks.neighborhood((128, 128), 4),
}
HALVES, REAL = torch.arange(N) // (N // 2), torch.tensor(N - 700)
FACTORS: dict[str, Callable[[masks.Pattern], masks.Pattern]] = {
    "lengths": lambda rule: rule & masks.lengths(REAL),
    "keys": lambda rule: rule & masks.visible_keys(torch.arange(N) < REAL),
    "some keys": lambda rule: rule & masks.visible_keys(torch.arange(N) % 50 > 0),
    "documents": lambda rule: rule & masks.documents(HALVES),
    "anew": lambda rule: rule.per_document(HALVES),
}


@pytest.mark.parametrize("name", RULES)
def test_a_factor_that_allows_all_changes_nothing(name):
    rule, every = RULES[name], masks.lengths(torch.tensor(N))
    assert planned(rule & every, N).terms == planned(rule, N).terms


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", [name for name in RULES if name != "grid"])
def test_a_run_time_factor_leaves_every_way_open(name, factor):
    """As few pairs are computed as without it, but for the edges of windows."""
    rule = RULES[name]
    assert planned(FACTORS[factor](rule), N).cost.computed_pairs <= 1.3 * planned(rule, N).cost.computed_pairs


def test_grids_are_tiled_in_each_document():
    """Packed grids: each in tiles, as one term."""
    grid, tokens = masks.neighborhood((16, 32, 32), 3), 1 << 14
    (term,) = planned(grid.per_document(torch.arange(2 * tokens) // tokens), 2 * tokens).terms
    (alone,) = planned(grid, tokens).terms
    assert isinstance(term.q, Folded)
    assert (term.q.order, term.folds, term.block_side) == (alone.q, 2, alone.block_side)
    assert_same(term.moved(7, 7).blocks(128, 128), alone.blocks(128, 128))
