"""The viewer in a browser: its pixels against the rule, and what wheel, pointers, keys and links do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.distributed._token_counts import token_counts
from flexdilated.viewer import Ranks, page
from tests.browser import Browser, Tab, needed_browser

pytestmark = pytest.mark.slow

LONGNET = masks.longnet([512, 2048, 8192], [1, 4, 8]) & masks.causal()
PIXELS = 200

# A cell of the picture, what is drawn there, and what the page thinks it knows.
SAMPLED = """
(({ places }) => {
  const { view, image } = viewer.state;
  const { rows, columns, low, high, width } = image.density;
  const paper = viewer.palette.paper.join();
  const copy = new OffscreenCanvas(viewer.canvas.width, viewer.canvas.height).getContext("2d", { willReadFrequently: true });
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
    const colour = [...copy.getImageData(x, y, 1, 1).data].slice(0, 3).join();
    const sum = (bounds) => bounds.reduce((total, each) => total + each[row * width + column], 0);
    return { rows: [rows[row], rows[row + 1]], columns: [columns[column], columns[column + 1]],
      empty: colour === paper, low: sum(low), high: sum(high) };
  });
})
"""


@pytest.fixture(scope="module")
def browser():
    with Browser(needed_browser()) as opened:
        yield opened


@pytest.fixture
def show(browser: Browser, tmp_path: Path):
    """Opens a page of a pattern; at the end no page may have logged a fault, or asked for more than its file."""
    tabs: list[tuple[Tab, str]] = []

    def opened(pattern: Any, tokens: int, *, link: str = "", window: dict[str, Any] | None = None, **how: Any) -> Tab:
        file = tmp_path / f"{len(tabs)}.html"
        file.write_text(page(pattern, tokens, **how), "utf-8")
        tab = browser.open(file.as_uri() + (f"#{link}" if link else ""), **(window or {}))
        tabs.append((tab, file.as_uri()))
        tab.settle()
        return tab

    yield opened
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

    def counts(self, head: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        num_keys = self.keys or self.tokens
        bound = self.pattern.bind(num_heads=self.heads, num_queries=self.tokens, num_keys=num_keys)
        cpu, zero = torch.device("cpu"), torch.zeros_like(q + k)
        mods = (branch.mask_mod(num_heads=self.heads, device=cpu) for branch in bound.pattern.branches())
        return torch.stack([mod(zero, zero + head, q + zero, k + zero).long() for mod in mods]).sum(0)


DOCUMENTS = torch.tensor([0] * 700 + [1] * 1 + [2] * 2000 + [3] * 33 + [-1] * 266)
SHOWN = {
    "longnet": Shown(LONGNET, 20_000),
    "contiguous": Shown(masks.longnet([300, 7000], [3, 7], offsets="contiguous"), 9_999),
    "windows": Shown(masks.local_window(left=40, right=0) | masks.dilated_window(left=9, right=9, rate=64), 30_000),
    "bigbird": Shown(masks.recipes.bigbird(16_384), 16_384),
    "random": Shown(masks.random_blocks(20_000, block=32, count=2, seed=9) & masks.causal(), 20_000),
    "sparse transformer": Shown(masks.recipes.sparse_transformer_fixed(256) & masks.causal(), 12_000),
    "strided": Shown(masks.strided(100) & ~masks.local_window(left=300, right=300), 12_000),
    "landmarks": Shown(masks.landmark_tokens(500, rows=False) & masks.causal(), 12_000),
    "grid": Shown(masks.neighborhood((60, 90), (4, 6), rate=(2, 1)), 5_400),
    "blocks": Shown(masks.block_list([[0], [], [0, 2], [1, 3]], block=700) + masks.first_tokens(5), 2_800),
    "blockwise": Shown(masks.blockwise(masks.dilated(6, 2, 1), 100), 9_000),
    "heads": Shown(
        masks.per_head([masks.causal(), masks.every(), ~masks.causal(), masks.dilated(999, 5, "interleaved")]), 7_000
    ),
    "groups": Shown(masks.longnet([64, 512], [1, 2], heads="grouped"), 6_000),
    "packed": Shown((LONGNET).per_document(DOCUMENTS), 3_000),
    "hidden": Shown(masks.causal() & masks.visible_keys(torch.arange(3_000) % 71 > 60), 3_000),
    "padded": Shown(masks.strided(9) & masks.lengths(torch.tensor(1_777), padding="left"), 3_000),
    "cross": Shown(masks.local_window(left=99, right=5), 4_000, keys=9_000),
}


def sampled(tab: Tab, generator: torch.Generator, number: int = PIXELS) -> list[dict[str, Any]]:
    """Pixels at random, half of them near the diagonal of the view, where most patterns have their pairs."""
    places = torch.rand(number, 2, generator=generator, dtype=torch.float64)
    near = (places[::2, :1] + 0.03 * torch.randn(len(places[::2]), 1, generator=generator)).clamp(0, 0.999999)
    places[::2, 1:] = near
    return tab.evaluate(f"{SAMPLED}({json.dumps({'places': places.tolist()})})")


def look(tab: Tab, link: str) -> None:
    tab.evaluate(f"location.hash = {json.dumps(link)}")
    tab.wait("location.hash.slice(1) === linkOf(viewer.state)")  # the page has read the link, and written its own
    tab.settle()


def hold(found: list[dict[str, Any]], counts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> int:
    """Every pixel is as full as the rule says, and blank only where it allows nothing. How many are not blank."""
    for cell in found:
        q, k = (torch.arange(*(int(edge) for edge in cell[side])) for side in ("rows", "columns"))
        truth = float(counts(q[:, None], k[None, :]).double().mean())
        assert cell["empty"] == (truth == 0), cell
        assert cell["low"] * (1 - 1e-6) <= truth <= cell["high"] * (1 + 1e-6), (cell, truth)
        assert cell["high"] - cell["low"] <= 0.1 * truth, (cell, truth)
    return sum(not cell["empty"] for cell in found)


@pytest.mark.parametrize("name", SHOWN)
def test_pixels_are_as_full_as_the_rule_says(show, name):
    """From afar, closer, and pair by pair; for two heads; in both orders."""
    case = SHOWN[name]
    generator = torch.Generator().manual_seed(len(name))
    small = {"width": 760, "height": 560}
    tab = show(case.pattern, case.tokens, num_heads=case.heads, num_keys=case.keys, window=small)
    rate = tab.evaluate("viewer.state.data.residue")
    assert (rate or 1) == masks.layout(case.pattern, case.tokens).rate
    filled = 0
    for order in ["natural", *(["residue"] if rate else [])]:
        sides = case.tokens, case.keys or case.tokens
        layouts = [masks.Layout(size, rate if order == "residue" else 1).positions() for size in sides]
        for head in (0, case.heads - 1):
            for q, k, span in ((0, 0, 10**6), (sides[0] // 3, sides[1] // 3, 1500), (sides[0] // 4, sides[1] // 4, 60)):
                look(tab, f"q={q}&k={k}&span={span}&head={head}&order={order}&block=0")
                found = sampled(tab, generator)
                filled += hold(found, lambda q, k: case.counts(head, layouts[0][q], layouts[1][k]))  # noqa: B023
    assert filled > 3


def test_a_million_tokens(show):
    """A window of 65 keys is seen among a million, and what is drawn is as full as the rule says."""
    pattern = masks.local_window(left=64, right=0) + (masks.longnet([4096, 65536], [1, 16]) & masks.causal())
    tab = show(pattern, 1 << 20, num_heads=4, link="q=0&k=0&span=1048576&head=1&block=0")
    assert tab.evaluate("viewer.state.view.scale") > 1000
    case = Shown(pattern, 1 << 20)
    found = sampled(tab, torch.Generator().manual_seed(0), 16)
    assert hold(found, lambda q, k: case.counts(1, q, k)) >= 3
    diagonal = sampled_diagonal(tab, PIXELS)
    assert not any(cell["empty"] for cell in diagonal)


def sampled_diagonal(tab: Tab, number: int) -> list[dict[str, Any]]:
    places = [[(each + 0.5) / number] * 2 for each in range(number)]
    return tab.evaluate(f"{SAMPLED}({json.dumps({'places': places})})")


def test_the_wheel_zooms_from_everything_to_single_pairs(show):
    tab = show(LONGNET, 1 << 20, num_heads=4)
    x, y = 500.0, 480.0
    under = "(() => { const { q, k } = viewer.slotsAt(%s - RULER.left - box.left, %s - RULER.top - box.top); return [q, k]; })()"
    under = "(() => { const box = viewer.canvas.getBoundingClientRect(); return " + under % (x, y) + "; })()"
    q, k = tab.evaluate(under)
    scales = [tab.evaluate("viewer.state.view.scale")]
    while scales[-1] > 1 / 40:
        tab.wheel(x, y, -600)
        tab.wait(f"viewer.state.view.scale < {scales[-1]}")
        scales.append(tab.evaluate("viewer.state.view.scale"))
        assert len(scales) < 60
    there = tab.evaluate(under)
    assert abs(there[0] - q) <= scales[0]
    assert abs(there[1] - k) <= scales[0]
    tab.settle()
    case = Shown(LONGNET, 1 << 20)
    assert hold(sampled(tab, torch.Generator().manual_seed(1)), lambda q, k: case.counts(0, q, k)) >= 0
    for _ in range(200):
        tab.wheel(x, y, 600)
        if tab.evaluate("viewer.state.view.scale === wholeScale(viewer.state.view)"):
            break
    assert tab.evaluate("viewer.state.view.scale") == scales[0]


def test_dragging_and_arrows_move(show):
    tab = show(LONGNET, 100_000, num_heads=4, link="q=50000&k=50000&span=2000&head=0")
    view = tab.evaluate("viewer.state.view")
    tab.drag((600, 500), (500, 430))
    moved = tab.evaluate("viewer.state.view")
    assert moved["k"] - view["k"] == pytest.approx(100 * view["scale"])
    assert moved["q"] - view["q"] == pytest.approx(70 * view["scale"])
    tab.evaluate("viewer.canvas.focus()")
    tab.press("ArrowRight")
    tab.press("ArrowUp")
    there = tab.evaluate("viewer.state.view")
    assert there["k"] - moved["k"] == pytest.approx(view["width"] * view["scale"] / 8)
    assert moved["q"] - there["q"] == pytest.approx(view["height"] * view["scale"] / 8)


def test_two_fingers_pinch(show):
    tab = show(LONGNET, 100_000, num_heads=4, link="q=50000&k=50000&span=2000&head=0")
    before = tab.evaluate("viewer.state.view.scale")
    tab.touch("touchStart", [(400, 400), (600, 400)])
    tab.touch("touchMove", [(300, 400), (700, 400)])
    tab.touch("touchEnd", [])
    assert tab.evaluate("viewer.state.view.scale") == pytest.approx(before / 2, rel=0.05)


def test_keys_do_all_that_a_mouse_does(show):
    tab = show(LONGNET, 100_000, num_heads=4)
    whole = tab.evaluate("viewer.state.view.scale")
    tab.evaluate("viewer.canvas.focus()")
    tab.press("+")
    assert tab.evaluate("viewer.state.view.scale") < whole
    tab.press("-")
    assert tab.evaluate("viewer.state.view.scale") == pytest.approx(whole)
    tab.press("ArrowDown", shift=True)
    q, k = tab.evaluate("[viewer.state.cursor.q, viewer.state.cursor.k]")
    assert abs(q - 50_000) <= 2 * whole
    assert abs(k - 50_000) <= 2 * whole
    assert tab.evaluate("document.getElementById('spoken').textContent").startswith(f"query {q:,}, key {k:,}: ")
    for _ in range(8):
        tab.press("Enter")
    assert tab.evaluate("viewer.state.view.scale") < 1
    tab.press("ArrowLeft", shift=True)
    assert tab.evaluate("[viewer.state.cursor.q, viewer.state.cursor.k]") == [q, k - 1]
    tab.press("Escape")
    assert tab.evaluate("viewer.state.cursor") is None
    tab.press("0")
    assert tab.evaluate("viewer.state.view.scale") == whole


def test_controls_choose_head_order_and_blocks(show):
    tab = show(LONGNET, 20_000, num_heads=4)
    for field, value in (("head", "2"), ("block", "512")):
        change = "dispatchEvent(new Event('change', { bubbles: true }))"
        tab.evaluate(f"(() => {{ const it = viewer.form.elements.{field}; it.value = '{value}'; it.{change}; }})()")
    box = tab.evaluate("(() => { const b = document.getElementById('residue').getBoundingClientRect(); return [b.x, b.y]; })()")
    tab.click(box[0] + 8, box[1] + 8)
    tab.settle()
    assert tab.evaluate("[viewer.state.head, viewer.state.order, viewer.state.block]") == [2, "residue", 512]
    link = tab.evaluate("location.hash")
    assert re.fullmatch(r"#q=0&k=-?\d+&span=20000&head=2&order=residue&block=512&ranks=off", link)
    box = tab.evaluate("(() => { const b = document.querySelector('[data-press=in]').getBoundingClientRect(); return [b.x, b.y]; })()")
    before = tab.evaluate("viewer.state.view.scale")
    tab.click(box[0] + 8, box[1] + 8)
    assert tab.evaluate("viewer.state.view.scale") == pytest.approx(before / 2)


def test_branches_can_be_hidden(show):
    tab = show(LONGNET, 20_000, num_heads=4, link="q=5000&k=5000&span=60&head=0&block=0")
    tab.evaluate("document.querySelectorAll('#legend input').forEach((box, at) => at === 1 || box.click())")
    tab.settle()
    only = Shown(masks.dilated(2048, 4, "interleaved") & masks.causal(), 20_000)
    found = sampled(tab, torch.Generator().manual_seed(2))
    for cell in found:
        q, k = torch.tensor(int(cell["rows"][0])), torch.tensor(int(cell["columns"][0]))
        assert cell["empty"] == (int(only.counts(0, q, k)) == 0)
    assert 20 < sum(cell["empty"] for cell in found) < len(found)


def test_a_link_restores_what_was_seen(show):
    link = "q=1000&k=900&span=700&head=3&order=residue&block=64&ranks=off"
    first = show(LONGNET, 20_000, num_heads=4, link=link)
    assert first.evaluate("location.hash") == f"#{link}"
    picture = first.evaluate("viewer.canvas.toDataURL()")
    other = show(LONGNET, 20_000, num_heads=4)
    assert other.evaluate("viewer.canvas.toDataURL()") != picture
    look(other, link)
    assert other.evaluate("viewer.canvas.toDataURL()") == picture


@pytest.mark.parametrize("link", ["q=x&k=&span=nan&head=99&order=upside&block=-1&ranks=many", "span=0", "span=1e300&q=9e99", "%%%"])
def test_a_link_that_makes_no_sense_is_left_out(show, link):
    tab = show(LONGNET, 5_000, num_heads=4, link=link)
    assert tab.evaluate("[viewer.state.head, viewer.state.order, viewer.state.block]") == [0, "natural", 128]
    assert tab.evaluate("viewer.state.view.scale === wholeScale(viewer.state.view)")


def test_a_pair_is_explained(show):
    tab = show(LONGNET, 20_000, num_heads=4, link="q=4990&k=4090&span=30&head=1&block=0")
    go = "(() => {{ const {{ query, key }} = viewer.form.elements; [query.value, key.value] = [{}, {}]; viewer.form.requestSubmit(); }})()"
    tab.evaluate(go.format(5001, 4097))
    said = tab.evaluate("document.getElementById('reasons').innerText")
    assert "query 5,001, key 4,097" in said
    assert "allowed by 2 of 3 branches: weight 2" in said
    assert "the query lies in segment 9, the key in segment 8 of 512 tokens" in said
    assert "both lie in segment 2; the query's place in it is 905, modulo 4 1: active" in said
    assert "the key comes 904 tokens before the query" in said
    tab.evaluate(go.format(4097, 5001))
    said = tab.evaluate("document.getElementById('reasons').innerText")
    assert "not allowed" in said
    assert "the key comes 904 tokens after the query" in said


def test_hovering_explains_what_is_under_the_pointer(show):
    tab = show(LONGNET.per_document(DOCUMENTS), 3_000, num_heads=4, link="q=690&k=690&span=30&head=0&block=0")
    for query, key, says in ((703, 699, "the query lies in document 2 (701 to 2,700), the key in document 0"),
                             (703, 701, "both lie in document 2, positions 701 to 2,700, where they are 2 and 0")):  # fmt: skip
        tab.move(*pixel_of(tab, query, key))
        tab.wait(f"viewer.state.cursor?.q === {query} && viewer.state.cursor?.k === {key}")
        said = tab.evaluate("document.getElementById('reasons').innerText")
        assert f"query {query:,}, key {key:,}" in said
        assert says in said


def pixel_of(tab: Tab, query: int, key: int) -> tuple[float, float]:
    """The middle of a pair, in pixels of the window."""
    x, y = tab.evaluate(
        "(() => { const { view } = viewer.state; const box = viewer.canvas.getBoundingClientRect();"
        f"return [box.x + RULER.left + ({key} + 0.5 - view.k) / view.scale,"
        f"box.y + RULER.top + ({query} + 0.5 - view.q) / view.scale]; }})()"
    )
    return x, y


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_ranks_and_their_bytes(show, sharding):
    ranks = Ranks(num_ranks=4, sharding=sharding, num_kv_heads=2, head_dim=32, dtype=torch.bfloat16)
    tab = show(LONGNET, 20_000, num_heads=4, ranks=ranks)
    held = Sharding(20_000, 4, sharding)
    counts = token_counts(LONGNET, held, num_heads=4, num_kv_heads=2)
    assert tab.evaluate("viewer.state.data.ranks.shardings[viewer.state.sharding].received") == (counts * 128).tolist()
    for rank in range(4):
        for run in held.ranges(rank):
            asked = f"[{run.start}, {run.stop - 1}].map((t) => rankOf(viewer.state.data.ranks.shardings.{sharding}, t))"
            assert tab.evaluate(asked) == [rank, rank]
    with_ranks = tab.evaluate("viewer.canvas.toDataURL()")
    tab.evaluate("viewer.chooseRanks('off')")
    tab.settle()
    assert tab.evaluate("viewer.canvas.toDataURL()") != with_ranks
    tab.evaluate(f"viewer.chooseRanks('{sharding}')")
    query = held.ranges(2)[0].start + 3
    tab.evaluate(f"viewer.hold({query}, 1)")
    tab.evaluate("viewer.explain()")
    size = int(counts[2, 0]) * 128
    much = f"{tab.evaluate(f'bytesText({size})')} of keys and values" if size else "nothing"
    said = tab.evaluate("document.getElementById('reasons').innerText")
    assert f"the query lies on rank 2, which receives {much} from the key's rank 0" in said


def test_narrow_windows_and_the_dark(show):
    dark = {"width": 380, "height": 700, "dark": True}
    tab = show(LONGNET, 20_000, num_heads=4, window=dark, link="q=4000&k=4000&span=3000&head=0&block=0")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 380
    assert tab.evaluate("viewer.palette.paper.every((part) => part < 40)")
    case = Shown(LONGNET, 20_000)
    assert hold(sampled(tab, torch.Generator().manual_seed(3)), lambda q, k: case.counts(0, q, k)) > 20
    tab.resize(900, 700)
    tab.settle()
    assert tab.evaluate("viewer.canvas.getBoundingClientRect().width") > 400


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 5), (3, 1), (2, 2**31 - 1), (2**31 - 1, 2**31 - 1)])
def test_any_size(show, tokens, keys):
    tab = show(masks.longnet([4, 2**31 - 1], [1, 3]), tokens, num_keys=keys, num_heads=2)
    assert tab.evaluate("viewer.state.image.density.estimates") == 0
    found = tab.evaluate(f"{SAMPLED}({json.dumps({'places': [[0, 0]]})})")[0]
    assert not found["empty"]


def test_the_page_may_not_ask_a_network(browser, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page(masks.causal(), 8), "utf-8")
    tab = browser.open(file.as_uri())
    assert tab.evaluate("fetch('https://127.0.0.1:9/').then(() => 'reached', (error) => String(error))") != "reached"
    assert any("Content Security Policy" in fault for fault in tab.faults)
    tab.close()
