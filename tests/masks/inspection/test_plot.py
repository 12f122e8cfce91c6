"""Pictures against the dense rule: each cell's color, windows, orders, heads, blocks; saved files; the gallery."""

import sys
from io import BytesIO
from math import log2, log10
from pathlib import Path
from runpy import run_path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdilated import masks

matplotlib = pytest.importorskip("matplotlib", reason="draws with matplotlib")
imread = pytest.importorskip("matplotlib.image", reason="draws with matplotlib").imread

WHITE, BEIGE, LIGHT, DARK = "#ffffff", "#f6ecd9", "#4292c6", "#08519c"
LONGNET = masks.longnet((16, 32, 64), (1, 2, 4)) & masks.causal()
WINDOW = masks.local_window(left=5, right=2)
PATTERNS = [
    LONGNET,
    WINDOW,
    WINDOW + masks.local_window(left=20, right=0) + WINDOW,
    masks.per_head([masks.causal(), masks.dilated(16, 4), WINDOW, ~masks.causal()]),
    masks.recipes.bigbird(24, block=4, num_random=2),
    masks.causal() & ~masks.causal(),
]


def image(figure, panel: int = 0) -> torch.Tensor:
    (drawn,) = figure.axes[panel].images
    return torch.tensor(drawn.get_array().tolist())


def color(text: str) -> torch.Tensor:
    return torch.tensor([int(text[at : at + 2], 16) for at in (1, 3, 5)])


def is_color(shown: torch.Tensor, text: str) -> torch.Tensor:
    return (shown == color(text)).all(-1)


def dense(pattern, queries: int, keys: int, head: int = 0, num_heads: int = 4) -> torch.Tensor:
    """One head's mask pair by pair, of each branch in turn."""
    q, k = torch.arange(queries)[:, None], torch.arange(keys)
    zero = torch.tensor(0)
    each = [
        branch.bind(num_heads=num_heads, num_queries=queries, num_keys=keys).mask_mod()(zero, zero + head, q, k)
        for branch in pattern.branches()
    ]
    return torch.stack([mask.expand(queries, keys) for mask in each])


def expected(shares: torch.Tensor) -> torch.Tensor:
    """The colors of cells by the rule of the docstring, one cell at a time; shares is (branches, rows, columns)."""
    result = torch.zeros(*shares.shape[1:], 3, dtype=torch.int64)
    for row in range(shares.shape[1]):
        for column in range(shares.shape[2]):
            shown, total = color(WHITE).double(), float(shares[:, row, column].sum())
            if total:
                strength = max(0.15, 1 + log10(min(1, total)) / 5)
                shown = shown + strength * (color(LIGHT) * 0.68 ** log2(max(1, total)) - shown)
            result[row, column] = shown.round().long()
    return result


@pytest.mark.parametrize(("pattern", "head"), [(PATTERNS[0], 0), *((pattern, 3) for pattern in PATTERNS)], ids=str)
def test_every_pair_has_its_color(pattern, head: int) -> None:
    shown = image(masks.plot(pattern, 24, num_heads=4, head=head))
    wanted = expected(dense(pattern, 24, 24, head).double())
    assert (shown - wanted).abs().max() <= 1
    assert torch.equal(is_color(shown, WHITE), ~dense(pattern, 24, 24, head).any(0))


@settings(max_examples=6)
@given(st.integers(1, 90), st.data())
def test_windows_are_cut_from_the_whole(size: int, data) -> None:
    """Of any number of tokens, pair by pair."""
    edges = [sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for _ in range(2)]
    rows, columns = (range(first, stop) for first, stop in edges)
    whole = image(masks.plot(LONGNET, size, num_heads=4, legend=False))
    part = masks.plot(LONGNET, size, num_heads=4, queries=rows, keys=columns, legend=False)
    assert torch.equal(image(part), whole[rows.start : rows.stop, columns.start : columns.stop])
    assert part.axes[0].get_xlim() == (columns.start, columns.stop)
    assert part.axes[0].get_ylim() == (rows.stop, rows.start)


def test_panels_of_heads_and_orders() -> None:
    """Residue order shows the same pairs by slot; each panel is the picture of its head and order alone."""
    figure = masks.plot(LONGNET, 62, num_heads=4, head=[3, 1], order=("residue", "natural"))
    for place, (head, order) in enumerate([(3, "residue"), (3, "natural"), (1, "residue"), (1, "natural")]):
        alone = masks.plot(LONGNET, 62, num_heads=4, head=head, order=order)
        assert torch.equal(image(figure, place), image(alone))
        assert figure.axes[place].get_title().startswith(f"head {head}, {order} order")
    positions = masks.layout(LONGNET, 62).positions()
    assert torch.equal(image(figure, 0), image(figure, 1)[positions][:, positions])
    assert [axes.get_xlabel() for axes in figure.axes] == ["key slot", "key position"] * 2


@pytest.mark.parametrize(("window", "cell"), [(range(500), 32), (range(37, 411), 32), (range(300, 500), 16)])
def test_cells_are_as_full_as_their_share(window: range, cell: int) -> None:
    """Cells begin at multiples of their side; at the border only pairs of the window count."""
    pattern = masks.longnet((64, 256), (1, 16)) & masks.causal()
    figure = masks.plot(pattern, 500, num_heads=4, queries=window, keys=window, size=16)
    shown = image(figure)
    first, last = window.start // cell, (window.stop - 1) // cell
    assert shown.shape == (last - first + 1, last - first + 1, 3)
    ends = (first * cell, (last + 1) * cell)
    assert tuple(figure.axes[0].images[0].get_extent()) == (*ends, *ends[::-1])
    assert figure.axes[0].get_xlim() == (window.start, window.stop)
    inside = torch.zeros(512, dtype=torch.bool)
    inside[window.start : window.stop] = True
    inside = inside[:, None] & inside
    padded = torch.zeros(2, 512, 512, dtype=torch.bool)
    padded[:, :500, :500] = dense(pattern, 500, 500)

    def count(mask: torch.Tensor) -> torch.Tensor:
        tiles = mask.double().unflatten(-2, (-1, cell)).unflatten(-1, (-1, cell)).sum((-3, -1))
        return tiles[..., first : last + 1, first : last + 1]

    wanted = expected(count(padded & inside) / count(inside))
    assert (shown - wanted).abs().max() <= 1


@pytest.mark.parametrize(
    ("block_size", "tokens", "order"), [(8, 61, "natural"), ((16, 4), 64, "residue"), (5, 33, "residue")]
)
def test_blocks_are_those_of_the_block_mask(block_size, tokens: int, order: str) -> None:
    layout = masks.layout(LONGNET, tokens) if order == "residue" else None
    listed = masks.block_mask(LONGNET, tokens, num_heads=4, layout=layout, block_size=block_size)
    sides = block_size if isinstance(block_size, tuple) else (block_size, block_size)

    def tokens_of(blocks: torch.Tensor) -> torch.Tensor:
        return blocks.repeat_interleave(sides[0], 0).repeat_interleave(sides[1], 1)[:tokens, :tokens]

    computed = listed.to_dense()[0, 2].bool()
    full = torch.zeros_like(computed)
    assert listed.full_kv_num_blocks is not None
    assert listed.full_kv_indices is not None
    for row, number in enumerate(listed.full_kv_num_blocks[0, 2].tolist()):
        full[row, listed.full_kv_indices[0, 2, row, :number].long()] = True
    positions = torch.arange(tokens) if layout is None else layout.positions()
    pairs = dense(LONGNET, tokens, tokens, 2).any(0)[positions][:, positions]
    given = {"num_heads": 4, "head": 2, "order": order, "block_size": block_size}

    figure = masks.plot(LONGNET, tokens, **given)
    shown = image(figure)
    assert torch.equal(is_color(shown, WHITE), ~tokens_of(computed))
    assert torch.equal(is_color(shown, DARK), tokens_of(full))
    assert torch.equal(is_color(shown, LIGHT), pairs & ~tokens_of(full))
    assert torch.equal(is_color(shown, BEIGE), tokens_of(computed) & ~pairs)
    useful = int(pairs.sum()) / int(tokens_of(computed).sum())
    text = f"{int(computed.sum())} of {computed.numel()} blocks computed, {int(full.sum())} full; {useful:.0%} of their"
    assert text in figure.axes[0].get_title().replace("\n", " ")


def texts(figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_the_legend_names_what_is_drawn() -> None:
    pattern = WINDOW + masks.causal() + WINDOW
    figure = masks.plot(pattern, 64)
    assert texts(figure) == ["allowed pair", "pair in 2 branches", "pair in 3 branches"]
    drawn = {tuple(each) for each in image(figure).flatten(0, 1).tolist()}
    patches = figure.legends[0].get_patches()
    assert drawn == {(255,) * 3, *(tuple(round(255 * part) for part in each.get_facecolor()[:3]) for each in patches)}
    blocks = ["pair of a full block", "pair of a partial block", "computed, no pair", "never computed"]
    assert texts(masks.plot(pattern, 64, block_size=8)) == blocks
    assert texts(masks.plot(WINDOW, 6400)) == ["1 pair in 1,000", "1 in 30", "every pair"]
    assert masks.plot(pattern, 64, legend=False).legends == []


def test_titles_and_ticks() -> None:
    """Of a million tokens at once, and of a few."""
    figure = masks.plot(LONGNET, 1 << 20, num_heads=4, head=2)
    assert torch.equal(~is_color(image(figure), WHITE), torch.eye(512, dtype=torch.bool))
    told = "1M tokens, head 2 of 4, a cell is 2K × 2K pairs"
    assert [text.get_text() for text in figure.texts] == [repr(LONGNET), told]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0", "256K", "512K", "768K", "1,024K"]
    assert [text.get_text() for text in masks.plot(WINDOW, 9, title="A window").texts] == ["A window", "9 tokens"]
    assert not masks.plot(WINDOW, 9, title="").texts


@settings(max_examples=8)
@given(st.data())
def test_both_axes_have_one_unit(data) -> None:
    """Of 1, 1,024 and 1,048,576 tokens, and so that each label is its slot; also where N is not M."""
    sizes = st.one_of(st.sampled_from([1, 1000, 1024, 4096, 1 << 20]), st.integers(1, 1 << 21))
    num_tokens, num_keys = data.draw(sizes), data.draw(sizes)
    axes = masks.plot(WINDOW, num_tokens, num_keys=num_keys, size=data.draw(st.sampled_from([64, 384]))).axes[0]
    slots = [*axes.get_yticks(), *axes.get_xticks()]
    labels = [label.get_text() for label in (*axes.get_yticklabels(), *axes.get_xticklabels())]
    units = {label.lstrip("0123456789,") for label in labels if label != "0"}
    assert len(units) <= 1, labels
    size = {"": 1, "K": 1 << 10, "M": 1 << 20}[units.pop()] if units else 1
    assert [size * int(label.strip("KM").replace(",", "")) for label in labels] == [int(slot) for slot in slots]


def saved(figure, kind: str) -> bytes:
    file = BytesIO()
    figure.savefig(file, format=kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_same_bytes_each_time(kind: str) -> None:
    first, second = (saved(masks.plot(LONGNET, 64, num_heads=4, block_size=8), kind) for _ in range(2))
    assert first == second
    assert b"Date" not in first


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flexdilated.masks.inspection._plot_figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'masks.plot draws with matplotlib: pip install "flexdilated\[plot\]"'):
        masks.plot(masks.causal(), 8)


def test_neither_pyplot_nor_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing pyplot fails here, and nobody does."""
    for module in ("_plot", "_plot_figure"):
        monkeypatch.delitem(sys.modules, f"flexdilated.masks.inspection.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    settings = {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}
    drawn = BytesIO()
    masks.plot(masks.causal(), 8).savefig(drawn, format="svg")
    assert drawn.getvalue().startswith(b"<?xml")
    assert {name: matplotlib.rcParams[name] for name in settings} == settings


DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_pictures_are_those_that_the_code_draws() -> None:
    """Within panels; letters may differ by the fonts at hand."""
    pictures = dict(run_path(str(DOCS / "images/make_gallery.py"))["pictures"]())
    assert set(pictures) == {f"gallery/{path.name}" for path in (DOCS / "images" / "gallery").iterdir()}
    for name, figure in pictures.items():
        stored, drawn = imread(DOCS / "images" / name), imread(BytesIO(saved(figure, "png")))
        assert stored.shape == drawn.shape, name
        for axes in figure.axes:
            (left, bottom), (right, top) = axes.get_window_extent().get_points().round().astype(int)
            panel = slice(len(stored) - top, len(stored) - bottom), slice(left, right)
            assert (stored[panel] == drawn[panel]).all(-1).mean() > 0.97, name
