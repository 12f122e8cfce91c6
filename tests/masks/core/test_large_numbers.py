"""Large parameters: numbers up to 2**31 - 1 are counted without overflow."""

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.core._box import Box, Progression
from flexdilated.masks.core._check import LARGEST
from flexdilated.masks.patterns import _grid
from flexdilated.testing import check_pattern

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
        (masks.neighborhood((96,), 2, rate=3), 1),
        (masks.neighborhood((97,), 3, rate=5), 3),
        (masks.neighborhood((97,), kernel_size=6, rate=5, stride=4), 0),
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
