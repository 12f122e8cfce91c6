"""The viewer in a browser: wheel, pointers, keys, controls, links and reasons; pixels as full as the rule says."""

import re
import shlex
from functools import partial

import pytest
import torch

from flexdilated import cli, masks
from flexdilated.viewer import page
from tests.support.browser import Tab
from tests.support.viewer_pages import Shown, hold, look, sampled

pytestmark = pytest.mark.slow

LONGNET = masks.longnet([512, 2048, 8192], [1, 4, 8]) & masks.causal()
SMALL = {"width": 420, "height": 320}
MIDDLE = {"width": 720, "height": 560}
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
    pattern = masks.dilated(1 << 17, 8) & masks.causal()
    tab = show(pattern, 1 << 20, num_heads=4, window=MIDDLE)
    x, y = 400.0, 380.0
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
    case = Shown(pattern, 1 << 20)
    assert hold(sampled(tab, torch.Generator().manual_seed(1)), lambda q, k: case.counts(0, q, k)) >= 0
    for _ in range(200):
        tab.wheel(x, y, 1200)
        if tab.evaluate("viewer.state.view.scale === viewer.state.view.wholeScale"):
            break
    assert tab.evaluate("viewer.state.view.scale") == scales[0]


def test_dragging_arrows_two_fingers_and_keys(show):
    tab = show(masks.causal(), 100_000, link="q=50000&k=50000&span=2000", window=MIDDLE)
    view = tab.evaluate("viewer.state.view")
    tab.drag((400, 400), (300, 330))
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
    tab.touch("touchStart", [(200, 300), (300, 300)])
    tab.touch("touchMove", [(150, 300), (350, 300)])
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
    tab = show(LONGNET, 20_000, num_heads=4, window=MIDDLE)
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
    tab = show(LONGNET, 20_000, num_heads=4, link="q=4990&k=4090&span=30&head=1&block=0", window=MIDDLE)
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


@pytest.mark.parametrize(
    "name",
    [
        "longnet",
        "heads",
        "cross",
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ("grid and strides", "packed")),
    ],
)
def test_pixels_are_as_full_as_the_rule_says(show, name):
    """From afar, closer, and pair by pair; for two heads; in both orders."""
    case = SHOWN[name]
    generator = torch.Generator().manual_seed(len(name))
    close = "q=0&k=0&span=30"  # a view that is counted at once
    sizes = {} if case.keys is None else {"num_keys": case.keys}
    tab = show(case.pattern, case.tokens, num_heads=case.heads, **sizes, window=SMALL, link=close)
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
