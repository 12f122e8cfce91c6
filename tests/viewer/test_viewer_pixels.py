"""The viewer's pixels in a browser, from a million tokens to single pairs: as full as the rule says; samples marked."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flexdilated import masks
from tests.support.viewer_pages import Shown, hold, look, sampled

pytestmark = pytest.mark.slow

LONGNET = masks.longnet([512, 2048, 8192], [1, 4, 8]) & masks.causal()
DOCUMENTS = torch.tensor([0] * 700 + [1] * 1 + [2] * 2000 + [3] * 33 + [-1] * 266)
# What drawing tells apart: branches, orders, heads, unequal sides, tables, and rules whose tiles are known or not.
SHOWN = {
    "longnet": Shown(LONGNET, 20_000),
    "grid and strides": Shown(~masks.strided(7) & masks.neighborhood((60, 90), (4, 6)), 5_400),
    "heads": Shown(
        masks.per_head([masks.causal(), masks.every(), ~masks.causal(), masks.dilated(999, 5, "interleaved")]), 7_000
    ),
    "packed": Shown(LONGNET.per_document(DOCUMENTS), 3_000),
    "cross": Shown(masks.local_window(left=99, right=5), 4_000, keys=9_000),
}


@pytest.mark.parametrize("name", SHOWN)
def test_pixels_are_as_full_as_the_rule_says(show, name):
    """From afar, closer, and pair by pair; for two heads; in both orders."""
    case = SHOWN[name]
    generator = torch.Generator().manual_seed(len(name))
    small = {"width": 560, "height": 420}
    close = "q=0&k=0&span=30"  # a view that is counted at once
    tab = show(case.pattern, case.tokens, num_heads=case.heads, num_keys=case.keys, window=small, link=close)
    rate = tab.evaluate("viewer.state.data.residue")
    assert (rate or 1) == masks.layout(case.pattern, case.tokens).rate
    filled = 0
    sides = case.tokens, case.keys or case.tokens
    views = ((0, 0, 10**6), (sides[0] // 3, sides[1] // 3, 1500), (sides[0] // 4, sides[1] // 4, 60))
    orders = ("natural", "residue") if rate else ("natural",)
    for number, order in enumerate(orders):
        layouts = [masks.Layout(size, rate if order == "residue" else 1).positions() for size in sides]
        for head, (q, k, span) in zip(alternating(case.heads, number), views, strict=True):
            look(tab, f"q={q}&k={k}&span={span}&head={head}&order={order}&block=0")
            found = sampled(tab, generator)
            counts = partial(case.counts_of_slots, head, layouts)
            filled += hold(found, counts, tiles=order == "natural")
    assert filled >= 2 * len(orders), "of three views in each"


def alternating(heads: int, number: int) -> list[int]:
    """The first and the last head in turn, and the other way round."""
    ends = [0, heads - 1]
    return [ends[(view + number) % 2] for view in range(3)]


# Bounds of a union with strides left out, over a grid, decide few tiles.
SLOW = (masks.neighborhood((1024, 1024), (31, 31)) | masks.landmark_tokens(256)) & ~masks.strided(7) & masks.causal()
# The picture as it is begun: so many steps of work, with the label of the picture after each part of them.
WORKED = """
((steps) => {
  const { state } = viewer;
  const { rows, columns } = state.image.density;
  const density = new Density({ ...state, tiles: state.data.tiles, grids: gridsOf(state) }, rows, columns);
  state.image.density = density;
  return steps.map((number) => {
    for (let step = 0; step < number && !density.finished; step++) density.step();
    return [density.progress, density.round, density.finished];
  });
})
"""
NOTE = "(viewer.state.cursor = {{ q: {}, k: {} }}, cellNote(viewer.state))"


def test_samples_are_marked_and_alike_at_every_visit(show):
    tab = show(SLOW, 1 << 20, window={"width": 560, "height": 420}, link="block=0")
    tab.wait("viewer.state.image.density.finished", 60)
    tab.evaluate("(viewer.askFrame = () => {})")  # the work is done by hand
    strips = tab.evaluate("Math.ceil(viewer.state.image.density.height / viewer.state.image.density.high)")
    (none, *_), (some, *_), (first, one, _), (last, *_, finished) = tab.evaluate(f"{WORKED}([0, 1, {strips - 1}, 1e9])")
    assert none == "0 % drawn"
    assert 1 <= int(some.split()[0]) <= 100 // (strips - 1)
    assert one == 1
    assert finished
    assert first.partition(" from ")[0] == last.partition(" from ")[0]
    assert 45 <= int(last.split()[1]) <= 60  # the lower triangle, in percent
    assert last.endswith("% sampled from 64 pairs a pixel")
    assert last in tab.evaluate("(viewer.report(), document.getElementById('state').textContent)")
    assert "(sampled: 64 of them)" in tab.evaluate(NOTE.format(900_000, 300_000))
    assert tab.evaluate(NOTE.format(300_000, 900_000)).endswith("allowed: none")
    shares = "[...viewer.state.image.density.share[0]]"
    same = tab.evaluate(shares)
    tab.evaluate(f"{WORKED}([1e9])")
    assert tab.evaluate(shares) == same
