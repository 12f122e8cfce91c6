"""What the viewer draws before it has counted: estimates that are marked, soon there, and near the truth."""

from __future__ import annotations

import pytest
import torch

from flexdilated import masks
from tests.viewer_pages import Shown

pytestmark = pytest.mark.slow

# Bounds of a union with strides left out, over a grid, are loose for a pixel: counting it takes a minute and more.
SLOW = (masks.neighborhood((1024, 1024), (31, 31)) | masks.landmark_tokens(256)) & ~masks.strided(7) & masks.causal()
MILLION = 1 << 20
# The numbers of cells that are drawn and certain, by the cells themselves.
RECOUNTED = """
(() => {
  const { density } = viewer.state.image;
  let [drawn, certain] = [0, 0];
  density.share.forEach((shares, branch) => shares.forEach((share, cell) => {
    drawn += share >= 0;
    certain += isSettled({ low: density.low[branch][cell], high: density.high[branch][cell] }, 1);
  }));
  return [density.drawn === drawn, density.certain === certain, drawn];
})()
"""
# The picture as it is begun: steps of work that no clock ends, as if so many milliseconds were spent.
WORKED = """
((counted) => {{
  const {{ rules, queries, keys, rows, columns }} = viewer.state.image.density;
  const density = new Density(rules, queries, keys, rows, columns);
  for (let step = 0; step < counted; step++) density.step(0);
  for (let step = 0; step < {steps} && !density.finished; step++) density.step({spent});
  viewer.state.image.density = density;
  return workText(density);
}})({counted})
"""
UNTIL_DRAWN = "1e9 && !density.isDrawn()"
CELLS = """
(() => {
  const { share, low, high, rows, columns, width, cells } = viewer.state.image.density;
  return Array.from({ length: 300 }, (_, index) => {
    const cell = (index * 7919 + 13) % cells;
    const [row, column] = [Math.floor(cell / width), cell % width];
    const found = [share[0][cell], low[0][cell], high[0][cell]];
    return { rows: [rows[row], rows[row + 1]], columns: [columns[column], columns[column + 1]], found };
  });
})()
"""


@pytest.fixture
def tab(show):
    opened = show(SLOW, MILLION, window={"width": 560, "height": 420}, link="q=0&k=0&span=1&block=0")
    opened.evaluate("cancelAnimationFrame(0), (viewer.askFrame = () => {})")  # the work is done by hand
    return opened


def test_the_first_picture_of_a_slow_pattern_is_soon_complete(show):
    tab = show(SLOW, MILLION, window={"width": 560, "height": 420}, settled=False)
    tab.wait("viewer.state.image.density.isDrawn()")
    spent, finished, state = tab.evaluate(
        "[viewer.state.image.density.spent, viewer.state.image.density.finished,"
        "(viewer.report(), document.getElementById('state').textContent)]"
    )
    assert not finished
    assert spent < 12_000  # milliseconds, on a machine that has much else to do; a second alone
    assert "% estimated, still counting" in state


def test_progress_counts_what_is_drawn(tab):
    tab.evaluate("viewer.followLink('q=0&k=0&span=1048576')")
    says = []
    for steps, spent in ((0, 0), (3, 0), (40, 0), (0, 0), (40, 10_000), (10**9, 0)):
        if steps == 10**9:
            tab.evaluate("viewer.followLink('q=3000&k=3000&span=90')")  # one that is counted to the end
        said = tab.evaluate(WORKED.format(steps=steps, spent=spent, counted=0))
        same_drawn, same_certain, drawn = tab.evaluate(RECOUNTED)
        assert same_drawn
        assert same_certain
        if said.endswith("drawn"):
            assert int(said.split()[0]) == 100 * drawn // tab.evaluate("viewer.state.image.density.cells")
        says.append(said)
    assert says[0] == says[3] == "0 % drawn"
    assert int(says[4].split()[0]) > 0
    assert says[5] == "counted"


def test_estimates_lie_near_the_truth_and_within_bounds(tab):
    tab.evaluate("viewer.followLink('q=300000&k=297000&span=6000')")
    tab.evaluate(WORKED.format(steps=UNTIL_DRAWN, spent=10_000, counted=0))
    case = Shown(SLOW, MILLION, heads=1)
    truths, shares, estimated = [], [], 0
    for cell in tab.evaluate(CELLS):
        q, k = (torch.arange(*(int(edge) for edge in cell[side])) for side in ("rows", "columns"))
        truth = float(case.counts(0, q[:, None], k[None, :]).double().mean())
        share, low, high = cell["found"]
        assert max(low, 0) * (1 - 1e-6) <= share <= min(high, 1) * (1 + 1e-6)
        assert low * (1 - 1e-6) <= truth <= high * (1 + 1e-6)
        if truth > 0:
            assert share > 0, "what may hold pairs is never blank"
        truths.append(truth)
        shares.append(share)
        estimated += low != high
    assert estimated > 50
    # 300 cells by 16 pairs each: the mean's standard error is below a hundredth.
    assert sum(shares) / 300 == pytest.approx(sum(truths) / 300, abs=0.03)


def test_an_estimate_stays_between_what_is_known(tab):
    """All of a cell's pairs are allowed, or none, as far as was asked: its bounds know better."""
    found = tab.evaluate(
        "[true, false].map((allowed) => { const estimates = new Estimates(9, 1); const order = orderOf(90, 1);"
        "estimates.ask(0, 4, { allowed: () => allowed }, order, order, [0, 90, 0, 90], 16);"
        "return [[-1, 2], [0.25, 0.5]].map((known) => estimates.shareOf(0, 4, ...known)); })"
    )
    assert found == [[1, 0.5], [1e-6, 0.25]]


def test_a_pixel_says_that_it_is_estimated(tab):
    tab.evaluate("viewer.followLink('q=0&k=0&span=1048576')")
    tab.evaluate(WORKED.format(steps=UNTIL_DRAWN, spent=10_000, counted=0))
    note = tab.evaluate("(viewer.state.cursor = { q: 900000, k: 300000 }, cellNote(viewer.state))")
    assert "(estimated from 16 of them" in note
    empty = tab.evaluate("(viewer.state.cursor = { q: 300000, k: 900000 }, cellNote(viewer.state))")
    assert empty.endswith("allowed: none found (estimated from 16 of them)")
    tab.evaluate(WORKED.format(steps=UNTIL_DRAWN, spent=10_000, counted=60))
    certain = tab.evaluate("cellNote(viewer.state)")
    assert certain.endswith("allowed: none")
    shares = "[...viewer.state.image.density.share[0]]"
    same = tab.evaluate(shares)
    tab.evaluate(WORKED.format(steps=UNTIL_DRAWN, spent=10_000, counted=60))
    assert tab.evaluate(shares) == same
