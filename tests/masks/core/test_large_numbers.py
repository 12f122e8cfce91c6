"""Large parameters: numbers up to 2**31 - 1 are counted without overflow."""

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.core._box import Box, Progression
from flexdilated.masks.core._check import LARGEST
from flexdilated.masks.patterns import _grid
from flexdilated.testing import check_pattern


def test_a_grid_of_more_tokens_is_refused():
    with pytest.raises(ValueError, match="a grid must hold at most 2147483647 tokens; got grid="):
        masks.neighborhood((2**11, 2**10, 2**10), 1)


# For 40 tokens, what the rule is with the largest parameters.
TWINS = {
    "window": (masks.local_window(left=LARGEST, right=LARGEST), masks.every()),
    "dilated window": (masks.dilated_window(left=LARGEST, right=LARGEST, rate=LARGEST), masks.strided(64)),
    "near and far": (
        masks.dilated_window(left=LARGEST, right=1, rate=3),
        masks.dilated_window(left=64, right=1, rate=3),
    ),
    "strided twice": (masks.strided(LARGEST) & masks.strided(LARGEST - 1), masks.strided(64)),
    "fixed": (masks.fixed(LARGEST, summary=LARGEST), masks.every()),
    "no summary yet": (masks.fixed(LARGEST) | masks.chunked(8), masks.chunked(8)),
    "rate": (masks.dilated(LARGEST, LARGEST, LARGEST - 1) | masks.strided(8), masks.strided(8)),
    "branches": (masks.longnet([8, LARGEST, LARGEST - 1], [1, 2, 3]), masks.longnet([8, 64, 64], [1, 2, 3])),
    "three periods": (
        masks.chunked(LARGEST) & masks.chunked(LARGEST - 1) & masks.chunked(LARGEST - 2) & masks.causal(),
        masks.causal(),
    ),
    "blocks of blocks": (
        masks.blockwise(masks.blockwise(masks.chunked(LARGEST), LARGEST), LARGEST) & masks.causal(),
        masks.causal(),
    ),
    "blocks of windows": (masks.blockwise(masks.local_window(left=LARGEST, right=LARGEST), LARGEST), masks.every()),
    "grid": (masks.neighborhood((LARGEST,), 2, rate=LARGEST // 5), masks.strided(64)),
}


@pytest.mark.parametrize("engine", ["aten", "portable", "reference"])
@pytest.mark.parametrize(("large", "small"), TWINS.values(), ids=TWINS)
def test_large_numbers_do_not_overflow(large, small, engine):
    q, k, v = torch.randn(3, 1, 2, 40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = fd.attend(q, k, v, small, engine="reference")
    torch.testing.assert_close(fd.attend(q, k, v, large, engine=engine), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        (masks.neighborhood((96,), 2, rate=3), 1),
        (masks.neighborhood((97,), 3, rate=5), 3),
        (masks.neighborhood((97,), kernel_size=6, rate=5, stride=4), 0),
        (masks.neighborhood((96,), kernel_size=6, rate=5, stride=4, causal=True), 1),
        (masks.neighborhood((12, 8), (1, 0), rate=(2, 5)), 3),
        (masks.neighborhood((4, 5, 6), 1, rate=(1, 1, 2)), 0),
    ],
)
def test_bounds_by_distance_are_sound(pattern, most, monkeypatch):
    """As large rates have them, and groups of many queries: at every rate, at those above 1, and at small ones."""
    monkeypatch.setattr(_grid, "_MOST_CLASSES", most)
    monkeypatch.setattr(_grid, "_FEW_CLASSES", 100)  # no counts by groups
    check_pattern(pattern, num_heads=1, max_tokens=97, examples=10)


def test_a_row_of_large_numbers_is_short_work():
    assert masks.fixed(LARGEST, summary=LARGEST).row(39, range(40)) == (range(40),)
    assert masks.fixed(2**30, summary=2**29).row(39, range(40)) == ()


def test_steps_of_a_window_longer_than_any_sequence_are_counted():
    pattern = masks.dilated_window(left=100_000, right=100_000, rate=30_000)
    begin, count = torch.tensor([0]), torch.tensor([4])
    bounds = pattern.count(Box(begin, Progression(begin, 1, count), Progression(begin, 2, count)), num_heads=1)
    assert bounds.low <= 2 <= bounds.high  # of queries 0..3 and keys 0, 2, 4, 6


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


def test_heads_elsewhere_cost_nothing():
    """Of a billion heads a device has one: a list of all would not end."""
    for offset, expected in (("interleaved", 1), ("contiguous", 0)):
        pattern = masks.dilated(8, 2, offset=offset)
        box = Box(torch.tensor([3]), *(Progression(torch.tensor([expected]), 2, torch.tensor([4])),) * 2)
        assert pattern.count(box, num_heads=10**9).low == 16


def test_periods_beyond_any_sequence_are_none():
    chunks = masks.chunked(LARGEST) & masks.chunked(LARGEST - 1)
    assert chunks.period() is None
    assert masks.blockwise(masks.chunked(LARGEST), 2).period() is None
    assert masks.blockwise(masks.chunked(2**30), 1).period() == 2**30
