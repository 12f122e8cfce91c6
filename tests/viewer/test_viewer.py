"""The viewer in a browser: what wheel, pointers, keys, controls and links do, and how it explains a pair."""

from __future__ import annotations

import re
import shlex

import pytest
import torch

from flexdilated import cli, masks
from flexdilated.viewer import page
from tests.support.browser import Tab
from tests.support.viewer_pages import Shown, hold, look, sampled

pytestmark = pytest.mark.slow

LONGNET = masks.longnet([512, 2048, 8192], [1, 4, 8]) & masks.causal()
SMALL = {"width": 560, "height": 420}
# Where an element stands in the window, and the slots under a place there.
PLACE = "(() => {{ const box = document.querySelector('{}').getBoundingClientRect(); return [box.x, box.y]; }})()"
UNDER = """
(() => {{
  const box = viewer.canvas.getBoundingClientRect();
  const {{ q, k }} = viewer.state.view.slotsAt({} - RULER.left - box.left, {} - RULER.top - box.top);
  return [q, k];
}})()
"""
GO_TO = """
(() => {{
  const {{ query, key }} = viewer.form.elements;
  [query.value, key.value] = [{}, {}];
  viewer.form.requestSubmit();
}})()
"""


def test_the_wheel_zooms_from_everything_to_single_pairs(show):
    tab = show(LONGNET, 1 << 20, num_heads=4)
    x, y = 500.0, 480.0
    q, k = tab.evaluate(UNDER.format(x, y))
    scales = [tab.evaluate("viewer.state.view.scale")]
    while scales[-1] > 1 / 40:
        tab.wheel(x, y, -1200)
        tab.wait(f"viewer.state.view.scale < {scales[-1]}")
        scales.append(tab.evaluate("viewer.state.view.scale"))
        assert len(scales) < 60
    there = tab.evaluate(UNDER.format(x, y))
    assert abs(there[0] - q) <= scales[0]
    assert abs(there[1] - k) <= scales[0]
    tab.settle()
    case = Shown(LONGNET, 1 << 20)
    assert hold(sampled(tab, torch.Generator().manual_seed(1)), lambda q, k: case.counts(0, q, k)) >= 0
    for _ in range(200):
        tab.wheel(x, y, 1200)
        if tab.evaluate("viewer.state.view.scale === viewer.state.view.wholeScale"):
            break
    assert tab.evaluate("viewer.state.view.scale") == scales[0]


def test_dragging_arrows_two_fingers_and_keys(show):
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
    before = tab.evaluate("viewer.state.view.scale")
    tab.touch("touchStart", [(400, 400), (600, 400)])
    tab.touch("touchMove", [(300, 400), (700, 400)])
    tab.touch("touchEnd", [])
    assert tab.evaluate("viewer.state.view.scale") == pytest.approx(before / 2, rel=0.05)
    tab.press("0")
    whole = tab.evaluate("viewer.state.view.scale")
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
    tab = show(LONGNET, 20_000, num_heads=4, window={"width": 900, "height": 500})
    for field, value in (("head", "2"), ("block", "512")):
        choose(tab, field, value)
    box = tab.evaluate(PLACE.format("#residue"))
    tab.click(box[0] + 8, box[1] + 8)
    tab.settle()
    assert tab.evaluate("[viewer.state.head, viewer.state.order, viewer.state.block]") == [2, "residue", 512]
    tab.wait("location.hash.slice(1) === linkOf(viewer.state)")
    link = tab.evaluate("location.hash")
    assert re.fullmatch(r"#q=0&k=-?\d+&span=20000&head=2&order=residue&block=512", link)
    box = tab.evaluate(PLACE.format("[data-press=in]"))
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


def test_a_link_restores_what_was_seen_and_one_without_sense_is_left_out(show):
    link = "q=1000&k=900&span=700&head=3&order=residue&block=64"
    first = show(LONGNET, 20_000, num_heads=4, link=link, window=SMALL)
    assert first.evaluate("location.hash") == f"#{link}"
    picture = first.evaluate("viewer.canvas.toDataURL()")
    none = "q=x&k=&span=nan&head=99&order=upside&block=-1"
    other = show(LONGNET, 20_000, num_heads=4, link=none, window=SMALL)
    for link_without_sense in ("span=0", "span=1e300&q=9e99", "%%%"):
        assert other.evaluate("[viewer.state.head, viewer.state.order, viewer.state.block]") == [0, "natural", 128]
        assert other.evaluate("viewer.state.view.scale === viewer.state.view.wholeScale")
        look(other, link_without_sense)
    assert other.evaluate("viewer.canvas.toDataURL()") != picture
    other.evaluate(f"location.hash = '{link}'")
    other.wait("viewer.state.head === 3")
    other.settle()
    assert other.evaluate("viewer.canvas.toDataURL()") == picture


def test_a_pair_is_explained_as_by_the_command_that_the_page_names(show, capsys):
    tab = show(LONGNET, 20_000, num_heads=4, link="q=4990&k=4090&span=30&head=1&block=0")
    tab.evaluate(GO_TO.format(5001, 4097))
    said = tab.evaluate("document.getElementById('reasons').innerText")
    assert "query 5,001, key 4,097" in said
    assert "allowed by 2 of 3 branches: weight 2" in said
    assert "the key comes 904 tokens before the query" in said
    shown = "[...document.querySelectorAll('.branches > li')].map((item) => item.innerText)"
    assert [" ".join(text.split()) for text in tab.evaluate(shown)] == [
        f"{mark} {both!r} {why.text} {mark} {both.parts[0]!r} {why.parts[0].text} ✓ causal() {why.parts[1].text}"
        for mark, both in zip("✗✓✓", LONGNET.branches(), strict=True)
        for why in [masks.explain(both, query=5001, key=4097, head=1, num_heads=4)]
    ]
    tab.evaluate(GO_TO.format(4097, 5001))
    said = tab.evaluate("document.getElementById('reasons').innerText")
    assert "not allowed" in said
    assert "the key comes 904 tokens after the query" in said
    tab.evaluate(GO_TO.format(5001, 4097))
    program, *words = shlex.split(tab.evaluate("document.querySelector('.command').textContent"))
    assert [program, *words[:2]] == ["python", "-m", "flexdilated"]
    assert cli.main(words[2:]) == 0
    assert capsys.readouterr().out.startswith("query 5001, key 4097, head 1 of 4: allowed, 2 times\n")
    tab = show(masks.custom(lambda b, h, q, k: q >= k), 30)  # which no command can name
    tab.evaluate(GO_TO.format(5, 4))
    assert "query 5, key 4" in tab.evaluate("document.getElementById('reasons').innerText")
    assert tab.evaluate("document.querySelector('.command')") is None


def choose(tab: Tab, field: str, value: str) -> None:
    change = "dispatchEvent(new Event('change', { bubbles: true }))"
    tab.evaluate(f"(() => {{ const it = viewer.form.elements.{field}; it.value = '{value}'; it.{change}; }})()")
    tab.settle()


def test_the_page_may_not_ask_a_network(browser, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page(masks.causal(), 8), "utf-8")
    tab = browser.open(file.as_uri())
    assert tab.evaluate("fetch('https://127.0.0.1:9/').then(() => 'reached', (error) => String(error))") != "reached"
    assert any("Content Security Policy" in fault for fault in tab.faults)
    tab.close()
