"""Boxes of progressions: bounds that never lie, and that are exact where the builder counts on it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks.core._bound import EMPTY, FULL, PARTIAL
from flexdilated.masks.core._box import Box, Progression, clip, count_below, count_residue
from tests.support import oracle, twins
from tests.support.strategies import dilated, expressions, local_windows

BOXES = 12


@st.composite
def progressions(draw: st.DrawFn, step: int | None = None) -> Progression:
    """Twelve short progressions of one step."""
    numbers = st.lists(st.integers(0, 30), min_size=BOXES, max_size=BOXES)
    counts = st.lists(st.integers(1, 9), min_size=BOXES, max_size=BOXES)
    step = draw(st.integers(1, 6)) if step is None else step
    return Progression(torch.tensor(draw(numbers)), step, torch.tensor(draw(counts)))


@st.composite
def boxes(draw: st.DrawFn, num_heads: int) -> Box:
    """Equal steps, as in a layout that both sides share, or different ones."""
    q = draw(progressions())
    k = draw(st.one_of(progressions(q.step), progressions()))
    heads = st.lists(st.integers(0, num_heads - 1), min_size=BOXES, max_size=BOXES)
    return Box(torch.tensor(draw(heads)), q, k)


def terms(progression: Progression, index: int) -> Tensor:
    return progression.first[index] + progression.step * torch.arange(int(progression.count[index]))


def allowed(rule: oracle.Rule, box: Box, num_heads: int) -> Tensor:
    """Allowed pairs of each box, one by one."""
    return torch.stack([
        (rule(int(head), num_heads, terms(box.q, index), terms(box.k, index)) > 0).sum()
        for index, head in enumerate(box.head)
    ])  # fmt: skip


@given(st.data(), st.integers(1, 4))
def test_bounds_hold(data, num_heads):
    twin, box = data.draw(expressions(num_heads)), data.draw(boxes(num_heads))
    bound = twin.pattern.bind(num_heads=num_heads, num_queries=100, num_keys=100)
    found, truth = bound.count(box), allowed(twin.rule, box, num_heads)
    assert (found.low >= 0).all()
    assert (found.low <= truth).all()
    assert (truth <= found.high).all()
    assert (found.high <= box.area).all()


@given(st.data(), st.integers(1, 4))
def test_classes_are_certain(data, num_heads):
    twin, box = data.draw(expressions(num_heads)), data.draw(boxes(num_heads))
    verdict = twin.pattern.bind(num_heads=num_heads, num_queries=100, num_keys=100).classify(box)
    truth = allowed(twin.rule, box, num_heads)
    assert set(verdict.tolist()) <= {EMPTY, PARTIAL, FULL}
    assert (truth[verdict == EMPTY] == 0).all()
    assert torch.equal(truth[verdict == FULL], box.area[verdict == FULL])


@given(st.data(), st.integers(1, 4))
def test_dilated_counts_exactly(data, num_heads):
    """Over boxes of a few segments, in any steps: this is what prunes a reordered sequence."""
    twin, box = data.draw(dilated()), data.draw(boxes(num_heads))
    assume((torch.maximum(box.q.last, box.k.last) < 8 * twin.pattern.leaves()[0].segment).all())
    found, truth = twin.pattern.count(box, num_heads=num_heads), allowed(twin.rule, box, num_heads)
    assert torch.equal(found.low, truth)
    assert torch.equal(found.high, truth)


@given(st.one_of(local_windows(), st.builds(twins.causal)), st.data())
def test_order_and_windows_count_exactly_over_equal_steps(twin, data):
    q = data.draw(progressions())
    box = Box(torch.zeros(BOXES, dtype=torch.int64), q, data.draw(progressions(q.step)))
    found, truth = twin.pattern.count(box, num_heads=1), allowed(twin.rule, box, 1)
    assert torch.equal(found.low, truth)
    assert torch.equal(found.high, truth)


@given(st.data(), st.integers(-20, 20))
def test_order_knows_its_extremes_over_any_steps(data, shift):
    box = data.draw(boxes(1))
    found = count_below(box, shift)
    truth = allowed(lambda h, H, q, k: (k[None] - q[:, None] <= shift).long(), box, 1)
    assert torch.equal(found.high == 0, truth == 0)
    assert torch.equal(found.low == box.area, truth == box.area)


@given(progressions(), st.integers(1, 12), st.data())
def test_count_residue(progression, modulus, data):
    residue = torch.tensor(data.draw(st.lists(st.integers(0, 40), min_size=BOXES, max_size=BOXES)))
    truth = [((terms(progression, index) - residue[index]) % modulus == 0).sum() for index in range(BOXES)]
    assert count_residue(progression, modulus, residue).tolist() == [int(number) for number in truth]


@given(progressions(), st.data())
def test_clip(progression, data):
    number = st.lists(st.integers(0, 80), min_size=BOXES, max_size=BOXES)
    start, length = torch.tensor(data.draw(number)), torch.tensor(data.draw(number))
    clipped = clip(progression, start, start + length)
    for index in range(BOXES):
        inside = [t for t in terms(progression, index) if start[index] <= t < start[index] + length[index]]
        assert terms(clipped, index).tolist() == inside


def test_bounds_for_no_boxes():
    """The builder may ask about an empty list."""
    none = torch.zeros(0, dtype=torch.int64)
    box = Box(none, Progression(none, 1, none), Progression(none, 1, none))
    pattern = masks.per_head([masks.dilated(4, 2) & ~masks.causal(), masks.local_window(left=1, right=1)])
    assert len(pattern.count(box, num_heads=2).low) == 0


@pytest.mark.parametrize("rate", [2, 3, 16])
def test_a_residue_class_is_full_or_empty(rate):
    """In residue-major order a dilated segment has whole blocks: no doubt is left to settle."""
    first = torch.arange(rate)
    residues = Progression(first, rate, torch.full_like(first, 4))
    box = Box(torch.zeros_like(first), residues, residues)
    bound = masks.dilated(8 * rate, rate, 1).bind(num_heads=1, num_queries=99, num_keys=99)
    expected = torch.full_like(first, EMPTY)
    expected[1] = FULL
    assert torch.equal(bound.classify(box), expected)
    crossing = replace(box, k=Progression(first.flip(0), rate, box.k.count))
    assert (bound.classify(crossing)[first != rate - 1 - first] == EMPTY).all()


def test_a_complement_holds_no_more_than_all_pairs() -> None:
    count = torch.tensor([4, 2])
    sides = (Progression(torch.tensor([0, first]), 1, count) for first in (3, 9))
    box = Box(torch.tensor([0, 0]), *sides)
    bounds = (~masks.causal()).count(box, num_heads=1)
    assert bounds.low.tolist() == bounds.high.tolist() == [6, 4]


def test_a_table_reaches_as_far_as_any_of_its_rows() -> None:
    """Few rows that name late blocks, and one that names an early one."""
    pattern = masks.block_list([[9], [0]], block=4)
    side = [Progression(torch.tensor([0]), 1, torch.tensor([count])) for count in (8, 40)]
    bounds = pattern.count(Box(torch.tensor([0]), *side), num_heads=1)
    mask_mod, nothing = pattern.mask_mod(num_heads=1, device=torch.device("cpu")), torch.tensor(0)
    allowed = mask_mod(nothing, nothing, torch.arange(8)[:, None], torch.arange(40))
    assert int(bounds.low) <= int(allowed.sum()) == 32 <= int(bounds.high)


def test_bounds_in_grids_are_counts() -> None:
    """At least 0, where the keys that all queries reach are fewer than those that some miss."""
    pattern = masks.neighborhood((12,), radius=2)
    allowed = pattern.mask_mod(num_heads=1, device=torch.device("cpu"))(
        torch.tensor(0), torch.tensor(0), torch.arange(12)[:, None], torch.arange(12)
    )
    for q_step, k_step in ((1, 1), (2, 1), (1, 3), (3, 3)):
        box, truth = _progressions(allowed, q_step, k_step)
        bounds = pattern.count(box, num_heads=1)
        assert ((bounds.low >= 0) & (bounds.low <= truth) & (truth <= bounds.high) & (bounds.high <= box.area)).all()


@pytest.mark.parametrize("part", [masks.causal(), masks.every(), masks.dilated(4, 2)], ids=str)
def test_bounds_within_documents_are_sound(part: masks.Pattern) -> None:
    """Progressions that step over whole documents too."""
    ids = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, -1, 4])
    rule = part.per_document(ids).bind(num_heads=1, num_queries=12, num_keys=12).pattern
    places = torch.arange(12)
    allowed = rule.mask_mod(num_heads=1, device=torch.device("cpu"))(
        torch.tensor(0), torch.tensor(0), places[:, None], places[None]
    )
    for q_step in (1, 2, 5):
        for k_step in (1, 3, 7):
            box, truth = _progressions(allowed.expand(12, 12), q_step, k_step)
            bounds = rule.count(box, num_heads=1)
            assert ((bounds.low <= truth) & (truth <= bounds.high) & (bounds.high <= box.area)).all()


def _progressions(allowed: Tensor, q_step: int, k_step: int) -> tuple[Box, Tensor]:
    """Every box of these steps with up to four queries and keys, and how many pairs it holds."""
    sides = [
        [(first, count) for first in range(12) for count in range(1, 5) if first + step * (count - 1) < 12]
        for step in (q_step, k_step)
    ]
    boxes = [(q, k) for q in sides[0] for k in sides[1]]
    truth = [
        int(allowed[q : q + q_step * (n - 1) + 1 : q_step, k : k + k_step * (m - 1) + 1 : k_step].sum())
        for (q, n), (k, m) in boxes
    ]
    (q_first, q_count), (k_first, k_count) = (torch.tensor(side).T.contiguous() for side in zip(*boxes, strict=True))
    box = Box(torch.zeros_like(q_first), Progression(q_first, q_step, q_count), Progression(k_first, k_step, k_count))
    return box, torch.tensor(truth)
