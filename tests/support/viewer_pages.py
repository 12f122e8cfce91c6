"""Pages of the viewer for tests: opened, looked at pixel by pixel, and held to the rule."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from flexdilated.viewer import page
from tests.support.browser import Browser, Tab

# A cell of the picture, what is drawn there, how full, and whether the page is certain.
SAMPLED = """
(({ places }) => {
  const { view, image } = viewer.state;
  const { rows, columns, share, coarse, width } = image.density;
  const paper = viewer.palette.paper.join();
  const blank = new OffscreenCanvas(viewer.canvas.width, viewer.canvas.height);
  const copy = blank.getContext("2d", { willReadFrequently: true });
  copy.drawImage(viewer.canvas, 0, 0);
  // Cells that are pixels stand side by side; those that are pairs are larger.
  const pixel = (edges, at, start) => view.scale > 1 ? Math.round((edges[0] - start) / view.scale) + at
    : Math.floor((edges[at] + 0.5 - start) / view.scale);
  // The first and the last pair may be cut off by the border of the picture.
  const cut = view.scale < 1 && Math.min(rows.length, columns.length) > 4 ? 1 : 0;
  const chosen = (edges, share) => cut + Math.floor(share * (edges.length - 1 - 2 * cut));
  return places.map(([across, down]) => {
    const row = chosen(rows, down), column = chosen(columns, across);
    const x = RULER.left + pixel(columns, column, view.k), y = RULER.top + pixel(rows, row, view.q);
    const color = [...copy.getImageData(x, y, 1, 1).data].slice(0, 3).join();
    const cell = row * width + column;
    return { rows: [rows[row], rows[row + 1]], columns: [columns[column], columns[column + 1]],
      empty: color === paper, share: share.reduce((total, each) => total + each[cell], 0),
      certain: image.density.isCertain(cell), coarse };
  });
})
"""


made_page = cache(page)  # whose tiles take a second


@contextmanager
def pages(browser: Browser, folder: Path) -> Iterator[Callable[..., Tab]]:
    """What opens a page of a pattern. At the end no page may have logged a fault, or asked for more than its file."""
    tabs: list[tuple[Tab, str]] = []

    def show(pattern: Any, tokens: int, *, link: str = "", window: dict[str, Any] | None = None, **how: Any) -> Tab:
        file = folder / f"{len(tabs)}.html"
        file.write_text(made_page(pattern, tokens, **how), "utf-8")
        tab = browser.open(file.as_uri() + (f"#{link}" if link else ""), **(window or {}))
        tabs.append((tab, file.as_uri()))
        tab.settle()
        return tab

    yield show
    for tab, address in tabs:
        assert tab.faults == []
        assert {request.partition("#")[0] for request in tab.requests} == {address}
        tab.close()


@dataclass(frozen=True)
class Shown:
    """A pattern with its sizes, and how often each pair of positions is allowed."""

    pattern: Any
    tokens: int
    heads: int = 4
    keys: int | None = None

    @cached_property
    def mods(self) -> list[Callable[..., torch.Tensor]]:
        """The rule of each branch."""
        sizes = {"num_queries": self.tokens, "num_keys": self.keys or self.tokens}
        bound = self.pattern.bind(num_heads=self.heads, **sizes)
        cpu = torch.device("cpu")
        return [branch.mask_mod(num_heads=self.heads, device=cpu) for branch in bound.pattern.branches()]

    def counts(self, head: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros_like(q + k)
        return torch.stack([mod(zero, zero + head, q + zero, k + zero).long() for mod in self.mods]).sum(0)

    def counts_of_slots(self, head: int, orders: list[torch.Tensor], q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The same of slots, by the positions of both orders' slots."""
        return self.counts(head, orders[0][q], orders[1][k])


def sampled(tab: Tab, generator: torch.Generator, number: int = 200) -> list[dict[str, Any]]:
    """Pixels at random, half of them near the diagonal of the view, where most patterns have their pairs."""
    places = torch.rand(number, 2, generator=generator, dtype=torch.float64)
    near = (places[::2, :1] + 0.03 * torch.randn(len(places[::2]), 1, generator=generator)).clamp(0, 0.999999)
    places[::2, 1:] = near
    return tab.evaluate(f"{SAMPLED}({json.dumps({'places': places.tolist()})})")


def look(tab: Tab, link: str) -> None:
    """Follow a link as the page does when its address changes, without its wait before it writes the address."""
    tab.evaluate(f"viewer.follow({json.dumps(link)})")
    tab.settle()


def hold(
    found: list[dict[str, Any]], counts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, tiles: bool = True
) -> int:
    """Pixels are as full as the rule says, or as their tiles, or in a sample. How many are not blank.

    With `aten`, as in natural order, none is blank in which the rule allows a pair.
    """
    difference, samples = 0.0, 0
    for cell in found:
        q, k = (torch.arange(*(int(edge) for edge in cell[side])) for side in ("rows", "columns"))
        truth = float(counts(q[:, None], k[None, :]).double().mean())
        assert cell["empty"] == (cell["share"] == 0), cell
        if tiles:
            assert cell["share"] > 0 or truth == 0, (cell, truth)
        if cell["certain"] and not (cell["coarse"] and cell["share"]):
            assert abs(cell["share"] - truth) <= 1e-6, (cell, truth)
        elif not cell["certain"]:
            difference += cell["share"] - truth
            samples += 1
    assert abs(difference) < 0.02 * max(samples, 60), (difference, samples)
    return sum(not cell["empty"] for cell in found)
