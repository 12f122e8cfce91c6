"""The viewer's rules, in the browser, against the dense rule: pair by pair, in boxes, and at the largest positions."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.core._bound import Extent
from flexdilated.masks.core._box import Box, Progression, count_residue
from flexdilated.viewer import page
from flexdilated.viewer._page import _data
from tests.browser import Browser, Tab
from tests.run_time_strategies import packed_cases
from tests.strategies import cases, written_expressions

pytestmark = pytest.mark.slow
LARGEST = 2**31 - 1

# For each head: every pair as the number of branches that allow it, and for each box the sums of the branches' bounds.
ASKED = """
(({ data, heads, boxes }) => heads.map((head) => {
  const rules = data.branches.map((branch) => buildRule(branch, head, data.num_heads));
  const allowing = (q, k) => rules.filter((rule) => rule.allowed(q, k)).length;
  const counts = [];
  for (let q = 0; q < data.num_queries; q++) for (let k = 0; k < data.num_keys; k++) counts.push(allowing(q, k));
  const bounds = boxes.map(([q, k]) => {
    const sides = [q, k].map((side) => progression(...side));
    const found = rules.map((rule) => rule.count(...sides));
    return [found.reduce((sum, each) => sum + each.low, 0), found.reduce((sum, each) => sum + each.high, 0)];
  });
  return { counts, bounds };
}))
"""


@pytest.fixture(scope="module")
def tab(browser: Browser, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("viewer") / "page.html"
    file.write_text(page(masks.causal(), 8), "utf-8")
    opened = browser.open(file.as_uri())
    yield opened
    opened.close()


def data_of(pattern: Any, num_queries: int, num_keys: int, num_heads: int, batch: int = 0) -> dict[str, Any]:
    bound = pattern.bind(num_heads=num_heads, num_queries=num_queries, num_keys=num_keys)
    return _data(pattern, bound.entry(batch))


def asked(tab: Tab, script: str, **values: Any) -> Any:
    return tab.evaluate(f"{script}({json.dumps(values)})")


@st.composite
def sides(draw: st.DrawFn, tokens: int) -> tuple[int, int, int]:
    """First, step and count of a progression within the tokens: half of them of step 1, as in natural order."""
    first = draw(st.integers(0, tokens - 1))
    step = draw(st.sampled_from([1, 1, draw(st.integers(1, 6))]))
    return first, step, draw(st.integers(1, (tokens - 1 - first) // step + 1))


@st.composite
def boxes(draw: st.DrawFn, queries: int, keys: int) -> list[tuple]:
    """Pairs of progressions, of which some share their step, as the slots of a layout do."""
    drawn = []
    for _ in range(6):
        q, k = draw(sides(queries)), draw(sides(keys))
        if draw(st.booleans()):
            k = (k[0], q[1], min(k[2], (keys - 1 - k[0]) // q[1] + 1))
        drawn.append((q, k))
    return drawn


def hold(tab: Tab, data: dict[str, Any], counts: torch.Tensor, drawn: list[tuple]) -> None:
    """Counts of one batch entry, (H, N, M), are what the page finds, and its bounds hold them."""
    found = asked(tab, ASKED, data=data, heads=list(range(len(counts))), boxes=drawn)
    for head, (dense, each) in enumerate(zip(counts, found, strict=True)):
        assert each["counts"] == dense.flatten().tolist(), head
        for (q, k), (low, high) in zip(drawn, each["bounds"], strict=True):
            truth = int(dense[index(q)][:, index(k)].sum())
            assert low <= truth <= high, (head, q, k, low, truth, high)


def index(side: tuple[int, int, int]) -> torch.Tensor:
    first, step, count = side
    return first + step * torch.arange(count)


many = settings(max_examples=2 * settings().max_examples, suppress_health_check=list(HealthCheck))


@many
@given(st.data())
def test_rules_and_bounds_of_drawn_patterns(tab, data):
    case = data.draw(cases(written_expressions, max_heads=3, largest=40))
    assume((case.q_offset, case.k_offset, case.head_offset) == (0, 0, 0))
    assume(case.num_heads == case.num_heads_global)
    drawn = data.draw(boxes(case.num_queries, case.num_keys))
    hold(tab, data_of(case.twin.pattern, case.num_queries, case.num_keys, case.num_heads), case.counts(), drawn)


@settings(many)
@given(st.data())
def test_rules_and_bounds_with_run_time_tensors(tab, data):
    case = data.draw(packed_cases(max_heads=2, largest=30))
    assume((case.q_offset, case.k_offset) == (0, 0) and '"custom"' not in case.pattern.text)
    sizes = case.num_queries, case.num_keys, case.num_heads
    told_apart = case.pattern.resolve(case.pattern.given_tensors(), Extent(*sizes[:2])).num_entries()
    batch = data.draw(st.integers(0, told_apart - 1))
    drawn = data.draw(boxes(case.num_queries, case.num_keys))
    hold(tab, data_of(case.pattern, *sizes, batch), case.counts[batch], drawn)


WIDE = [
    masks.causal(),
    masks.local_window(left=5, right=1_000_000_007),
    masks.dilated_window(left=3, right=1_000_000, rate=1009),
    masks.strided(1_500_000_001),
    masks.strided(3),
    masks.dilated(1_073_741_827, 536_870_909, 7),
    masks.dilated(185_363, 8, "interleaved"),
    masks.longnet([2048, LARGEST], [1, 512]) & masks.causal(),
    masks.global_tokens(2_000_000_000),
    masks.landmark_tokens(1_234_567, rows=False),
    masks.fixed(1_000_003, summary=999),
    masks.blockwise(masks.local_window(left=1, right=1), 1_000_003),
    masks.random_blocks(LARGEST, block=1 << 20, count=5, seed=2**63 - 1),
    masks.neighborhood((40_000, 50_000), (17, 1000), rate=(3, 7)),
    ~masks.dilated(4096, 4, 1) & masks.causal(),
    ~masks.strided(7) & masks.neighborhood((40_000, 50_000), (17, 1000)),
]
FAR = """
(({ data, head, pairs, boxes }) => {
  const rules = data.branches.map((branch) => buildRule(branch, head, data.num_heads));
  const bounds = (rule, q, k) => {
    const { low, high } = rule.count(progression(...q), progression(...k));
    return [low, high];
  };
  return {
    counts: pairs.map(([q, k]) => rules.filter((rule) => rule.allowed(q, k)).length),
    bounds: boxes.map(([q, k]) => rules.map((rule) => bounds(rule, q, k))),
  };
})
"""


@pytest.mark.parametrize("pattern", WIDE, ids=repr)
def test_rules_hold_at_positions_up_to_two_to_the_31(tab, pattern):
    tokens = 2_000_000_000 if "neighborhood" in pattern.text else LARGEST
    generator = torch.Generator().manual_seed(7)
    q = torch.randint(0, tokens, (400,), generator=generator)
    near = (q + torch.randint(-40, 40, (400,), generator=generator) * 3).clamp(0, tokens - 1)
    far = torch.randint(0, tokens, (400,), generator=generator)
    k = torch.where(torch.rand(400, generator=generator) < 0.7, near, far)
    data = data_of(pattern, tokens, tokens, 8)
    drawn = [((int(q[i]), step, count), (int(k[i]), step, count)) for i, step, count in zip(
        range(24), [1, 1, 2, 7, 512, 65536] * 7, [1, 50, 1000, 20_000, 3, 999] * 7, strict=False)
        if max(int(q[i]), int(k[i])) + step * count < tokens]  # fmt: skip
    found = asked(tab, FAR, data=data, head=5, pairs=list(zip(q.tolist(), k.tolist(), strict=True)), boxes=drawn)
    heads, zero = torch.full_like(q, 5), torch.zeros_like(q)
    mods = [branch.mask_mod(num_heads=8, device=torch.device("cpu")) for branch in pattern.branches()]
    assert found["counts"] == sum(mod(zero, heads, q, k).long() for mod in mods).tolist()
    box = Box(torch.full((len(drawn),), 5), *(stacked(each) for each in zip(*drawn, strict=True)))
    for place in range(len(drawn)):
        here = single(box, place, drawn[place])
        for branch, (low, high) in zip(pattern.branches(), found["bounds"][place], strict=True):
            bounds = branch.count(here, num_heads=8)
            # Both are sound, so that they meet; where the library's is exact, the page's holds it.
            assert low <= int(bounds.high), drawn[place]
            assert high >= int(bounds.low), drawn[place]


def stacked(each: tuple) -> Progression:
    first, _, count = zip(*each, strict=True)
    return Progression(torch.tensor(first), 1, torch.tensor(count))


def single(box: Box, place: int, drawn: tuple) -> Box:
    """One box with its own steps."""
    chosen = box.select(torch.tensor([place]))
    q, k = (
        Progression(side.first, step, side.count)
        for side, (_, step, _) in zip((chosen.q, chosen.k), drawn, strict=True)
    )
    return Box(chosen.head, q, k)


@pytest.mark.parametrize(
    "pattern",
    [
        ~masks.strided(7) & masks.neighborhood((60, 50), (4, 6)),
        masks.strided(5) & masks.neighborhood((6, 10, 50), (1, 2, 6), rate=(1, 2, 1)),
        ~masks.global_tokens(40, rows=False) & masks.local_window(left=50, right=20),
    ],
    ids=repr,
)
def test_counts_that_are_exact(tab, pattern):
    """Boxes of a pixel's shape, for which no estimate is needed."""
    mod = pattern.mask_mod(num_heads=1, device=torch.device("cpu"))
    drawn = [((first, 1, 70), (first + shift, 1, 80)) for first in (0, 33, 490, 2100) for shift in (0, 37, 311)]
    found = asked(tab, FAR, data=data_of(pattern, 3000, 3000, 1), head=0, pairs=[], boxes=drawn)
    for (q, k), ((low, high),) in zip(drawn, found["bounds"], strict=True):
        queries, keys = index(q)[:, None], index(k)[None, :]
        zero = torch.zeros(queries.shape[0], keys.shape[1], dtype=torch.long)
        assert low == high == int(mod(zero, zero, queries + zero, keys + zero).sum()), (q, k)


@pytest.mark.parametrize(
    "pattern",
    [
        ~masks.strided(7) & masks.neighborhood((60, 50), (4, 6)),
        masks.strided(3) & masks.causal() & masks.neighborhood((60, 50), (9, 6)),
        ~masks.global_tokens(40) & ~masks.strided(2) & masks.local_window(left=50, right=20),
    ],
    ids=repr,
)
def test_bounds_of_parts_that_are_bounds_themselves(tab, pattern):
    """Large boxes, and those on the diagonal, of which the parts' counts are not exact."""
    mod = pattern.mask_mod(num_heads=1, device=torch.device("cpu"))
    large = [(0, 0, 1), (0, 0, 2), (33, 37, 1), (500, 311, 1), (20, 0, 4), (1000, -300, 3)]
    drawn = [((first, 1, 700), (first + shift, step, 600)) for first, shift, step in large]
    drawn += [((first, 1, 70), (first + 5, 1, 80)) for first in (0, 33, 490, 2100)]
    found = asked(tab, FAR, data=data_of(pattern, 3000, 3000, 1), head=0, pairs=[], boxes=drawn)
    for (q, k), ((low, high),) in zip(drawn, found["bounds"], strict=True):
        queries, keys = index(q)[:, None], index(k)[None, :]
        zero = torch.zeros(queries.shape[0], keys.shape[1], dtype=torch.long)
        assert low <= int(mod(zero, zero, queries + zero, keys + zero).sum()) <= high, (q, k)


def test_residues_of_numbers_whose_products_exceed_doubles(tab):
    generator = torch.Generator().manual_seed(11)
    drawn = [[int(torch.randint(1, most, (), generator=generator)) for most in (LARGEST, LARGEST, 2**20, LARGEST)]
             for _ in range(200)]  # fmt: skip
    asked_for = []
    for first, modulus, step, reached in drawn:
        count = reached % 5000 + 1  # the last term is one of the residue
        asked_for.append([first, step, count, modulus, (first + step * (count - 1)) % modulus])
    found = tab.evaluate(f"{asked_for}.map(([f, s, n, m, r]) => ofResidue(progression(f, s, n), m, r))")
    for (first, step, count, modulus, residue), term in zip(asked_for, found, strict=True):
        start, number = term["first"], term["count"]
        terms = Progression(torch.tensor([first]), step, torch.tensor([count]))
        assert number == int(count_residue(terms, modulus, torch.tensor([residue]))) > 0
        assert start % modulus == residue
        assert (start - first) % step == 0


def test_every_kind_of_the_json_has_a_rule(tab):
    from flexdilated.masks.core._pattern import KINDS

    known = set(tab.evaluate("Object.keys(RULES)"))
    assert known - {"spans"} == set(KINDS) - {"custom", "mixture", "documents", "lengths"}


@pytest.mark.parametrize("rate", [1, 2, 3, 7, 40, 60])
def test_orders_are_those_of_the_layout(tab, rate):
    for tokens in (1, 2, 6, 41):
        found = tab.evaluate(
            f"(() => {{ const order = orderOf({tokens}, {rate}); const all = [...Array({tokens}).keys()];"
            "return [all.map(order.position), all.map(order.slot), all.map((s) => order.runs(0, s + 1, 1e9)"
            ".flatMap((run) => Array.from({ length: run.count }, (_, i) => run.first + i * run.step)))]; })()"
        )
        layout = masks.Layout(tokens, rate)
        positions = layout.positions().tolist()
        assert found[:2] == [positions, layout.slots().tolist()]
        assert found[2] == [positions[: slot + 1] for slot in range(tokens)]
