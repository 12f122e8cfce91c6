"""Diagonals: exact counts of rules that repeat, and blocks that are settled without a look at single pairs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.blocks._pair_search import settle_by_diagonals
from flexdilated.masks.blocks._rule import Rule
from flexdilated.masks.core._box import Bounds
from flexdilated.masks.orders._layout import Layout
from tests.masks.core.test_boxes import BOXES, allowed, boxes
from tests.support.strategies import sets


@given(st.data(), st.integers(1, 3))
def test_settles_what_it_can(data, num_heads):
    """From bounds without knowledge, on boxes of any steps: exact counts, or the bounds as they were."""
    twin, box = data.draw(sets(num_heads)), data.draw(boxes(num_heads))
    none = torch.zeros_like(box.area)
    where = torch.tensor(data.draw(st.lists(st.booleans(), min_size=BOXES, max_size=BOXES)))
    found = settle_by_diagonals(twin.pattern, box, Bounds(none, box.area), num_heads=num_heads, where=where)
    truth, settled = allowed(twin.rule, box, num_heads), found.low == found.high
    assert torch.equal(found.low[settled], truth[settled])
    assert torch.equal(found.high[settled], truth[settled])
    assert (found.low[~settled] == 0).all()
    assert torch.equal(found.high[~settled], box.area[~settled])
    assert not (settled & ~where).any()
    if twin.pattern.period() == 1 and box.q.step == box.k.step:
        assert torch.equal(settled, where)


@pytest.fixture
def looks(monkeypatch):
    """How many blocks were looked at pair by pair, call by call."""
    seen, allowed = [], Rule.allowed
    monkeypatch.setattr(Rule, "allowed", lambda self, *where: seen.append(len(where[0])) or allowed(self, *where))
    return seen


@pytest.mark.parametrize("stride", [4, 8])
def test_rules_that_repeat_need_no_look_at_pairs(stride, looks):
    """Bounds leave doubt about intersections; in residue-major order, diagonals settle all of it."""
    local = masks.local_window(left=40, right=9) | masks.chunked(stride)
    for sparse in (masks.strided(8), masks.fixed(stride, summary=2)):
        masks.block_mask((local | sparse) & masks.causal(), 1000, num_heads=1, layout=Layout(1000, 8), block_size=16)
    assert sum(looks) == 0


def test_what_is_all_or_nothing_on_a_block_repeats_there(looks):
    """First tokens and long segments do not repeat, but few blocks straddle their borders."""
    streaming = (masks.first_tokens(16) | masks.local_window(left=40, right=9) | masks.dilated(250, 1)) & masks.causal()
    pattern = masks.per_head([streaming, ~streaming | masks.causal()])
    mask = masks.block_mask(pattern, 1000, num_heads=2, block_size=16)
    assert int(mask.kv_num_blocks.sum()) > 150
    assert sum(looks) < 16
