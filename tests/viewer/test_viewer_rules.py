"""Traced rules, evaluated by the viewer's page in a browser, against the rules in Python: pair by pair, at any size."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bench._catalogue import ENTRIES, MILLION, Entry
from flexdilated import masks
from flexdilated.masks.core._bound import Extent
from flexdilated.testing._drawn_inputs import in_range
from flexdilated.viewer import _page, page
from flexdilated.viewer._page import _page_data, _tiles
from tests.support.browser import Browser, Tab
from tests.support.run_time_strategies import packed_cases
from tests.support.strategies import Case, cases

pytestmark = pytest.mark.slow
LARGEST = 2**31 - 1
CPU = torch.device("cpu")
# The page may not give their reasons.
READS_LISTS = {"random_blocks", "block_list", "selected_blocks", "sparse", "neighborhood", "grid_window"}

# For each head and window: how many branches allow each pair, and which pairs each branch allows.
ASKED = """
(({ data, heads, windows }) => {
  const program = programOf(data.program);
  const nodes = data.branches.map(({ node }) => node);
  const needed = neededFor(program, nodes);
  return heads.map((head) => windows.map(([q, k]) => {
    const found = evaluate(program, nodes, needed, head, Float64Array.from(q), Float64Array.from(k));
    return {
      counts: [...found[0]].map((_, pair) => found.reduce((sum, allowed) => sum + allowed[pair], 0)),
      branches: found.map((allowed) => allowed.join("")),
    };
  }));
})
"""
# What the page says of each (head, query, key).
SAID = """
(({ data, pairs }) => {
  const program = programOf(data.program);
  return pairs.map(([head, q, k]) => answersFor({ data, program, head }, q, k));
})
"""


@pytest.fixture(scope="module")
def tab(browser: Browser, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("viewer") / "page.html"
    file.write_text(page(masks.causal(), 8), "utf-8")
    opened = browser.open(file.as_uri())
    opened.settle()
    yield opened
    opened.close()


def asked(tab: Tab, data: dict[str, Any], heads: Iterable[int], *windows: tuple[Any, Any]) -> list[list[dict]]:
    lists = [[[int(each) for each in side] for side in window] for window in windows]
    return tab.evaluate(f"{ASKED}({json.dumps({'data': data, 'heads': list(heads), 'windows': lists})})")


def hold_window(tab: Tab, pattern: Any, sizes: tuple[int, int, int], heads: list[int], *windows: tuple) -> None:
    """Branches, against `mask_mod`, where queries meet keys at these positions; and some of their reasons."""
    num_heads, num_queries, num_keys = sizes
    bound = pattern.bind(num_heads=num_heads, num_queries=num_queries, num_keys=num_keys).entry(0)
    data = _page_data(pattern, bound)
    found = asked(tab, data, heads, *windows)
    rules = list(bound.pattern.branches())
    mods = [rule.mask_mod(num_heads=num_heads, device=CPU) for rule in rules]
    for head, by_window in zip(heads, found, strict=True):
        for (q, k), answer in zip(windows, by_window, strict=True):
            zero = torch.zeros(len(q), len(k), dtype=torch.int64)
            for rule, mod, allowed in zip(rules, mods, answer["branches"], strict=True):
                truth = mod(zero, zero + head, q[:, None] + zero, k[None, :] + zero)
                assert allowed == "".join("01"[each] for each in truth.flatten().tolist()), (rule, head)
    pairs = [(head, int(q[at]), int(k[at])) for head in heads for q, k in windows for at in range(0, len(q), 4)]
    hold_reasons(tab, pattern, data, pairs)


def hold_reasons(
    tab: Tab, pattern: Any, data: dict[str, Any], pairs: list[tuple[int, int, int]], batch: int = 0
) -> None:
    """The page explains pairs as `explain` does."""
    sizes = {"num_tokens": data["num_queries"], "num_keys": data["num_keys"]} if pattern.varies else {}
    for (head, query, key), found in zip(pairs, said(tab, data, pairs), strict=True):
        why = masks.explain(pattern, query=query, key=key, head=head, num_heads=data["num_heads"], batch=batch, **sizes)
        branches = why.parts if isinstance(pattern, masks.Mixture) else (why.reason,)
        for each in zip(found, branches, strict=True):
            hold_reason(*each)


def said(tab: Tab, data: dict[str, Any], pairs: list[tuple[int, int, int]]) -> list[list[dict[str, Any]]]:
    return tab.evaluate(f"{SAID}({json.dumps({'data': data, 'pairs': pairs})})")


def hold_reason(found: dict[str, Any], reason: Any) -> None:
    assert found["allowed"] == reason.allowed, (found, reason)
    if not found["text"]:
        assert reason.pattern.kind in READS_LISTS or len(reason.parts) > 8, reason
        return
    assert (found["text"], found["phrase"][:100]) == (reason.text, repr(reason.pattern)[:100])
    for each in zip(found["parts"], reason.parts, strict=True):
        hold_reason(*each)


def drawn_windows(tokens: int, generator: torch.Generator, number: int, side: int) -> list[tuple]:
    """Positions near each other and near multiples of large numbers, from the first to the last."""
    windows = []
    for _ in range(number):
        q = torch.randint(0, tokens, (side,), generator=generator)
        near = q + torch.randint(-40, 40, (side,), generator=generator) * 3
        far = torch.randint(0, tokens, (side // 4,), generator=generator)
        windows.append((q, torch.cat([near, far, torch.tensor([0, tokens - 1])]).clamp(0, tokens - 1)))
    first = torch.arange(min(side, tokens))
    return [*windows, (first, first), (tokens - 1 - first, tokens - 1 - first)]


many = settings(suppress_health_check=list(HealthCheck))


@many
@given(st.data())
def test_rules_of_drawn_expressions(tab, data):
    """Of sets, mixtures and custom functions; for any of the heads, anywhere."""
    case = data.draw(cases(max_heads=3, largest=40))
    sizes = {"num_queries": case.q_offset + case.num_queries, "num_keys": case.k_offset + case.num_keys}
    bound = case.twin.pattern.bind(num_heads=case.num_heads_global, **sizes)
    q, k = range(case.q_offset, sizes["num_queries"]), range(case.k_offset, sizes["num_keys"])
    page_data = _page_data(case.twin.pattern, bound)
    found = asked(tab, page_data, case.heads, (q, k))
    assert [each["counts"] for (each,) in found] == [dense.flatten().tolist() for dense in case.counts()]
    hold_reasons(tab, case.twin.pattern, page_data, drawn_pairs(data, case.heads, q, k))


@many
@given(st.data())
def test_rules_with_run_time_tensors(tab, data):
    case = data.draw(packed_cases(max_heads=2, largest=30))
    assume((case.q_offset, case.k_offset) == (0, 0))
    queries, keys, heads = case.num_queries, case.num_keys, case.num_heads
    entries = case.pattern.resolve(case.pattern.given_tensors(), Extent(queries, keys)).num_entries()
    batch = data.draw(st.integers(0, entries - 1))
    bound = case.pattern.bind(num_heads=heads, num_queries=queries, num_keys=keys).entry(batch)
    page_data = _page_data(case.pattern, bound)
    found = asked(tab, page_data, range(heads), (range(queries), range(keys)))
    assert [each["counts"] for (each,) in found] == [dense.flatten().tolist() for dense in case.counts[batch]]
    hold_reasons(tab, case.pattern, page_data, drawn_pairs(data, range(heads), range(queries), range(keys)), batch)


def drawn_pairs(data: st.DataObject, *sides: Sequence[int]) -> list[tuple[int, int, int]]:
    """Some (head, query, key)."""
    return data.draw(st.lists(st.tuples(*map(st.sampled_from, sides)), min_size=6, max_size=6))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_rules_of_the_catalogue(tab, entry: Entry):
    """Every pattern and recipe, and each part of it: as it is drawn, and at a million tokens; 64K of a table."""
    generator = torch.Generator().manual_seed(len(entry.name))
    heads = sorted({0, entry.num_heads - 1})
    small = torch.arange(64)
    hold_window(tab, drawn := entry.pictured(), (entry.num_heads, 64, 64), heads, (small, small))
    is_table = drawn.varies or "random" in entry.text or "bigbird" in entry.text
    tokens = min(entry.largest, 1 << 16) if is_table else MILLION
    windows = drawn_windows(tokens, generator, 2, 32)
    hold_window(tab, entry.pattern(tokens), (entry.num_heads, tokens, tokens), heads, *windows)


WIDE = [
    masks.dilated_window(left=3, right=1_000_000, rate=1009),
    masks.strided(1_500_000_001),
    masks.dilated(1_073_741_827, 536_870_909, 7),
    masks.longnet([2048, LARGEST], [1, 512]) & masks.causal(),
    masks.landmark_tokens(1_234_567, rows=False),
    masks.blockwise(masks.local_window(left=1, right=1), 1_000_003),
    masks.random_blocks(LARGEST, block=1 << 20, count=5, seed=2**63 - 1),
    masks.neighborhood((40_000, 50_000), kernel_size=(34, 3000), rate=(1, 5), stride=(4, 10), wrap=True),
    ~masks.strided(7) & masks.neighborhood((40_000, 50_000), (17, 1000)),
    masks.custom(lambda b, h, q, k: ((q * 2_000_003 + k) % 1_000_003 < 9) | ((q ^ k) & 0x70000001 == 1)),
]


@pytest.mark.parametrize("pattern", WIDE, ids=repr)
def test_rules_hold_at_positions_up_to_two_to_the_31(tab, pattern):
    tokens = 2_000_000_000 if "neighborhood" in pattern.text else LARGEST
    windows = drawn_windows(tokens, torch.Generator().manual_seed(7), 3, 40)
    hold_window(tab, pattern, (8, tokens, tokens), [5], *windows)


KINDS = torch.tensor([[0, 3, -1], [5, 2, 2]])
FUNCTIONS = [
    lambda b, h, q, k: q - k * 3 >= -k // 4,
    lambda b, h, q, k: (k - q) % 5 == (q - k) // 3 % -7 + 7,
    lambda b, h, q, k: torch.fmod(k - q, 4) == -1,
    lambda b, h, q, k: 7 - q != k.neg().abs(),
    lambda b, h, q, k: torch.where(q > k, q - k, h).clamp(2, 9) <= torch.minimum(q, k).clamp(max=6),
    lambda b, h, q, k: torch.maximum(q, k).clamp_min(8) < 20 - (~k),
    lambda b, h, q, k: ((q & 12) | (k & 3)) ^ 5 > (q // 2).clamp_max(4),
    lambda b, h, q, k: torch.logical_xor(q % 2 == 0, ~(k < 9)) | torch.logical_not((q & k).bool()),
    lambda b, h, q, k: (q.int() - k.int()).abs().to(torch.int64) < 1 + h,
    lambda b, h, q, k: KINDS[h % 2, q % 3] == KINDS[0, -(k % 3) - 1],
    lambda b, h, q, k: torch.div(k - q, 3, rounding_mode="floor") == torch.zeros_like(q) - 2,
    lambda b, h, q, k: (2**h + (1 << h) < (q >> 1)) & (q**2 > (k << 2)) & (-k >> h < -3),
    lambda b, h, q, k: (KINDS[1, k % 3] > 2) & torch.logical_and(q >= k, q < 30),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_rules_of_custom_functions(tab, function):
    positions = torch.arange(40)
    hold_window(tab, masks.custom(function), (3, 40, 40), [0, 2], (positions, positions))


@given(cases(max_heads=3, largest=60).map(Case.from_zero).filter(lambda case: in_range(case.bind)))
def test_tiles_are_counted_by_the_dense_rule(case):
    """The share of a tile, and whether it is empty or full; in a causal pattern half of the tiles are known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_page, "_TILES", 7)
        tiles = _tiles(case.bind(), 0)
        causal = _tiles(masks.causal().bind(num_heads=1, num_queries=60, num_keys=60), 0)
    assert sum(each >= 0 for each in causal["grids"][0]) > 24
    high, wide = tiles["sides"]
    q, k, zero = torch.arange(case.num_queries)[:, None], torch.arange(case.num_keys), torch.tensor(0)
    for rule, grids in zip(case.bind().pattern.branches(), tiles["grid_of"], strict=True):
        mod = rule.mask_mod(num_heads=case.num_heads, device=CPU)
        for head, place in enumerate(grids):
            grid = torch.tensor(tiles["grids"][place], dtype=torch.float64)
            dense = mod(zero, zero + head, q, k).expand(len(q), len(k)).double()
            truth = torch.stack([tile.mean() for rows in dense.split(high) for tile in rows.split(wide, 1)])
            known = grid >= 0
            torch.testing.assert_close(grid[known], truth[known], rtol=1e-3, atol=1e-9)
            for share in (0, 1):
                assert torch.equal(grid[known] == share, truth[known] == share)
