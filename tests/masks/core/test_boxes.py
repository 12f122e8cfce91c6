"""Boxes of progressions: bounds that never lie, exact where the builder counts on it; numbers up to 2**31 - 1."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.core import Owned, halves
from flexdilated.masks.core._bound import EMPTY, FULL, PARTIAL
from flexdilated.masks.core._box import EXACT_RUNS, Bounds, Box, Progression, count_multiples
from flexdilated.masks.core._check import LARGEST
from flexdilated.masks.patterns import _grid, _on_grid
from flexdilated.masks.patterns._dilated import Dilated
from flexdilated.masks.patterns._grid import fits
from flexdilated.testing import check_pattern
from tests.support import oracle, strategies, twins
from tests.support.strategies import expressions
from tests.support.twins import Twin

BOXES = 12


def twelve(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[Tensor]:
    return st.lists(numbers, min_size=BOXES, max_size=BOXES).map(torch.tensor)


@st.composite
def progressions(draw: st.DrawFn, step: int | None = None) -> Progression:
    first, step = draw(twelve(st.integers(0, 30))), draw(st.integers(1, 6)) if step is None else step
    return Progression(first, step, draw(twelve(st.integers(0, 9))))


@st.composite
def boxes(draw: st.DrawFn, num_heads: int = 1) -> Box:
    """Equal steps, as in a layout that both sides share, or different ones."""
    q = draw(progressions())
    k = draw(st.one_of(progressions(q.step), progressions()))
    return Box(draw(twelve(st.integers(0, num_heads - 1))), q, k)


@st.composite
def boxes_of_one_step(draw: st.DrawFn, step: int | None = None) -> Box:
    q = draw(progressions(step))
    return Box(torch.zeros(BOXES, dtype=torch.int64), q, draw(progressions(q.step)))


def terms(progression: Progression, index: int) -> Tensor:
    return progression.first[index] + progression.step * torch.arange(int(progression.count[index]))


def allowed(rule: oracle.Rule, box: Box, num_heads: int) -> Tensor:
    zero = torch.tensor(0)
    return torch.stack([
        (rule(int(head), num_heads, terms(box.q, index), terms(box.k, index)) > 0).sum() if box.area[index] else zero
        for index, head in enumerate(box.head)
    ])  # fmt: skip


def assert_sound(found: Bounds, truth: Tensor, area: Tensor) -> None:
    assert ((found.low >= 0) & (found.low <= truth) & (truth <= found.high) & (found.high <= area)).all()


@given(st.data(), st.integers(1, 4))
def test_bounds_hold_and_classes_are_certain(data, num_heads):
    twin, box = data.draw(expressions(num_heads)), data.draw(boxes(num_heads))
    bound = twin.pattern.bind(num_heads=num_heads, num_queries=100, num_keys=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_on_grid, "_FEW_PAIRS", data.draw(st.sampled_from([0, 1 << 16])))
        truth, verdict = allowed(twin.rule, box, num_heads), bound.classify(box)
        assert_sound(bound.count(box), truth, box.area)
    assert set(verdict.tolist()) <= {EMPTY, PARTIAL, FULL}
    assert (truth[verdict == EMPTY] == 0).all()
    assert torch.equal(truth[verdict == FULL], box.area[verdict == FULL])


Draw = Callable[[Any], tuple[Twin, Box]]


def dilated_segments(data) -> tuple[Twin, Box]:
    """Boxes of a few segments, in any steps: this is what prunes a reordered sequence."""
    twin, box = data.draw(strategies.dilated()), data.draw(boxes(4))
    assume((torch.maximum(box.q.last, box.k.last) < 8 * twin.pattern.leaves()[0].segment).all())
    return twin, box


def strides(data) -> tuple[Twin, Box]:
    """In natural order and in every residue-major one; over many chunks the bounds are those of the area."""
    twin, box = data.draw(strategies.strided_kinds()), data.draw(boxes_of_one_step())
    if isinstance(twin.pattern, Dilated):
        spanned = torch.maximum(box.q.last, box.k.last) // twin.pattern.segment
        spanned -= torch.minimum(box.q.first, box.k.first) // twin.pattern.segment
        assume((spanned < EXACT_RUNS).all())
    return twin, box


def summaries(data) -> tuple[Twin, Box]:
    stride = data.draw(st.integers(1, 24))
    return twins.fixed(stride, summary=data.draw(st.integers(1, stride))), data.draw(boxes())


def grids(data) -> tuple[Twin, Box]:
    """Steps that go evenly through the rows: runs of tokens, and residue classes."""
    twin = data.draw(strategies.neighborhoods())
    step = data.draw(st.sampled_from([step for step in range(1, 13) if fits(step, twin.pattern.grid)]))
    return twin, data.draw(boxes_of_one_step(step))


def tables(data) -> tuple[Twin, Box]:
    """Eight rows of blocks at most, wherever they begin."""
    twin, box = data.draw(st.one_of(strategies.random_blocks(), strategies.block_lists())), data.draw(boxes(3))
    block = twin.pattern.block
    most = max(1, (8 * block - 1) // box.q.step)
    return twin, replace(box, q=Progression(box.q.first // block * block, box.q.step, box.q.count.clamp(max=most)))


BLOCK_PARTS = [
    twins.causal(),
    twins.local_window(left=1, right=2),
    twins.landmark_tokens(3, rows=True, columns=False),
    twins.dilated(40, 3, 1),
]


def blocks(data) -> tuple[Twin, Box]:
    """Steps that divide the block or are multiples of it; boxes that begin and end anywhere."""
    block = data.draw(st.sampled_from([1, 2, 4, 6]))
    step = data.draw(st.sampled_from([step for step in range(1, 13) if block % step == 0 or step % block == 0]))
    return twins.blockwise(data.draw(st.sampled_from(BLOCK_PARTS)), block), data.draw(boxes_of_one_step(step))


EXACT: dict[str, Draw] = {
    "dilated": dilated_segments,
    "order": lambda data: (twins.causal(), data.draw(boxes_of_one_step())),
    "windows": lambda data: (data.draw(strategies.local_windows()), data.draw(boxes_of_one_step())),
    "dilated windows": lambda data: (data.draw(strategies.dilated_windows()), data.draw(boxes_of_one_step())),
    "strides": strides,
    "global tokens": lambda data: (
        data.draw(strategies.global_kinds().filter(lambda twin: "causal" not in twin.pattern.text)),
        data.draw(boxes()),
    ),
    "summaries": summaries,
    "grids": grids,
    "tables": tables,
    "blocks": blocks,
}


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=10)
@given(data=st.data())
def test_counts_are_exact(name, data):
    twin, box = EXACT[name](data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_on_grid, "_FEW_PAIRS", 0)  # which are evaluated instead
        patch.setattr(_grid, "_FEW_CLASSES", data.draw(st.sampled_from([0, 3])))
        found, truth = twin.pattern.count(box, num_heads=4), allowed(twin.rule, box, 4)
    assert torch.equal(found.low, truth)
    assert torch.equal(found.high, truth)


@given(st.data(), st.integers(1, 12))
def test_multiples_over_unequal_steps(data, rate):
    """Bounds that hold, and that meet wherever every key, or every query, of a class fits alike."""
    box = data.draw(boxes())
    found = count_multiples(box, rate)
    assert_sound(found, allowed(oracle.strided(rate), box, 1), box.area)
    if box.k.step % rate == 0 or box.q.step % rate == 0:
        assert torch.equal(found.low, found.high)


@pytest.mark.parametrize("part", [masks.causal(), masks.dilated(4, 2)], ids=str)
def test_bounds_within_documents_are_sound(part: masks.Pattern) -> None:
    """Progressions that step over whole documents too."""
    ids = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, -1, 4])
    rule = part.per_document(ids).bind(num_heads=1, num_queries=12, num_keys=12).pattern
    check_pattern(rule, num_heads=1, max_tokens=12)


# For 40 tokens, what the rule is with the largest parameters.
FAR = masks.local_window(left=LARGEST, right=LARGEST)
TWINS = [
    (FAR, masks.every()),
    (masks.dilated_window(left=LARGEST, right=LARGEST, rate=LARGEST), masks.strided(64)),
    (masks.dilated_window(left=LARGEST, right=1, rate=3), masks.dilated_window(left=64, right=1, rate=3)),
    (masks.strided(LARGEST) & masks.strided(LARGEST - 1), masks.strided(64)),
    (masks.fixed(LARGEST, summary=LARGEST), masks.every()),
    (masks.fixed(LARGEST) | masks.chunked(8), masks.chunked(8)),
    (masks.dilated(LARGEST, LARGEST, LARGEST - 1) | masks.strided(8), masks.strided(8)),
    (masks.longnet([8, LARGEST, LARGEST - 1], [1, 2, 3]), masks.longnet([8, 64, 64], [1, 2, 3])),
    (masks.chunked(LARGEST) & masks.chunked(LARGEST - 1) & masks.chunked(LARGEST - 2) & masks.causal(), masks.causal()),
    (masks.blockwise(masks.blockwise(masks.chunked(LARGEST), LARGEST), LARGEST) & masks.causal(), masks.causal()),
    (masks.blockwise(FAR, LARGEST), masks.every()),
    (masks.neighborhood((LARGEST,), 2, rate=LARGEST // 5), masks.strided(64)),
]


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
def test_large_numbers_do_not_overflow(engine):
    q, k, v = torch.randn(3, 1, 2, 40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for large, small in TWINS:
        found, expected = (fd.attend(q, k, v, each, engine=engine) for each in (large, small))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        (masks.neighborhood((96,), kernel_size=6, rate=5, stride=4, causal=True), 1),
        (masks.neighborhood((12, 8), (1, 0), rate=(2, 5)), 3),
        (masks.neighborhood((4, 5, 6), 1, rate=(1, 1, 2)), 0),
        (masks.neighborhood((96,), kernel_size=5, rate=3, stride=2, wrap=True), 1),
    ],
)
def test_bounds_by_distance_are_sound(pattern, most, monkeypatch):
    """As large rates have them, and groups of many queries: at every rate, at those above 1, and at small ones."""
    monkeypatch.setattr(_grid, "_MOST_CLASSES", most)
    monkeypatch.setattr(_grid, "_FEW_CLASSES", 100)  # no counts by groups
    check_pattern(pattern, num_heads=1, max_tokens=97, examples=10)


def test_a_step_beyond_all_memory_between_keys():
    """One key is left, whose next one would be 2^62 tokens away."""
    pattern = masks.strided(LARGEST) & masks.strided(LARGEST - 1) & masks.causal()
    q, k, v = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 8).requires_grad_()
    for offset in range(9):
        out = fd.attend(q, k, v, pattern, q_offset=offset)
        assert torch.equal(out[0, 0, 0], v[0, 0, offset])
        (grad,) = torch.autograd.grad(out.sum(), v)
        assert grad[0, 0].sum(1).nonzero().flatten().tolist() == [offset]
    cache = fd.KVCache(pattern, num_heads=1)
    for step in v.detach().split(1, dim=2):
        assert torch.equal(cache.attend(q, step, step), step)


@given(st.integers(0, 50), st.integers(2, 200), st.sampled_from([1, 3, 8]), st.sampled_from([1, 2]))
def test_boxes_are_cut_near_their_middle_at_a_multiple(first, count, period, step):
    """Less than a period after the half, where a multiple lies within; the parts have all terms in order."""
    side = Progression(torch.tensor([first]), step, torch.tensor([count]))
    none = torch.zeros(1, dtype=torch.int64)
    parts = halves(Owned(none, Box(none, side, Progression(none, 1, none + 1))), period).box.q
    begin, end = (range(int(parts.first[i]), 1 << 20, step)[: int(parts.count[i])] for i in (0, 1))
    assert [*begin, *end] == [*range(first, 1 << 20, step)[:count]]
    assert begin
    assert end
    middle = first + step * (count // 2)
    multiple = -(-middle // period) * period
    fits = [cut for cut in (multiple, multiple - period) if first < cut <= first + step * (count - 1)]
    assert end[0] == (-(-(fits[0] - first) // step) * step + first if fits else middle)
