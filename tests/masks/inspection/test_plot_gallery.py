"""The gallery: each picture is what the code above it draws."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("matplotlib", reason="draws with matplotlib")

DOCS = Path(__file__).resolve().parents[3] / "docs"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_gallery", DOCS / "images/make_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_those_that_the_code_draws() -> None:
    """In the middles of cells, where lines do not reach; letters may differ by the fonts at hand."""
    from matplotlib.image import imread

    pictures = dict(script().pictures())
    assert set(pictures) == {f"gallery/{path.name}" for path in (DOCS / "images" / "gallery").iterdir()}
    for name, figure in pictures.items():
        pixels = (torch.from_numpy(imread(DOCS / "images" / name))[..., :3] * 255).round().long()
        width, height = (round(float(side) * figure.dpi) for side in figure.get_size_inches())
        assert pixels.shape[:2] == (height, width), name
        for axes in figure.axes:
            assert agreement(pixels, axes) > 0.97, name


def agreement(pixels: torch.Tensor, axes) -> float:
    """How many cells of a panel have their colour in the file."""
    (drawn,) = axes.images
    cells = torch.tensor(drawn.get_array().tolist())
    left, right, bottom, top = drawn.get_extent()
    x, y = (
        torch.linspace(first, last, 2 * count + 1)[1::2]
        for first, last, count in ((left, right, cells.shape[1]), (top, bottom, cells.shape[0]))
    )
    box = axes.get_window_extent()
    (x_first, x_last), (y_last, y_first) = axes.get_xlim(), axes.get_ylim()
    across = (box.x0 + (x - x_first) / (x_last - x_first) * box.width).long()
    down = (len(pixels) - box.y1 + (y - y_first) / (y_last - y_first) * box.height).long()
    inside_x, inside_y = (x > x_first) & (x < x_last), (y > y_first) & (y < y_last)
    found = pixels[down[inside_y]][:, across[inside_x]]
    return float((found == cells[inside_y][:, inside_x]).all(-1).double().mean())
