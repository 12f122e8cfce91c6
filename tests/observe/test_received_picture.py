"""The picture of attention received: each token's colour stands where the token does."""

import sys

import matplotlib
import pytest
import torch

import flexdilated as fd

GREY, NOWHERE = (0.85, 0.85, 0.85, 1.0), 0.0


@pytest.fixture(autouse=True)
def no_display(monkeypatch):
    """Figures are drawn to memory, whatever the machine shows."""
    monkeypatch.setitem(matplotlib.rcParams, "backend", "agg")


def shades_of(figure):
    """The colours of values, as the bar beside the picture has them."""
    (bar,) = [axes for axes in figure.axes if axes.get_ylabel() == "attention received" and not axes.lines]
    mappable = bar._colorbar.mappable
    return lambda values: torch.from_numpy(mappable.to_rgba(values.numpy()))


def slide(step_x=256, step_y=128):
    """Tiles of a 5 x 4 grid, of which three are missing, in an order of their own."""
    y, x = torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij")
    cells = torch.stack([x, y], -1).flatten(0, 1)
    kept = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:17]
    return cells[kept], cells[kept] * torch.tensor([step_x, step_y]) + torch.tensor([1000, 64])


def test_tiles_stand_at_their_coordinates():
    cells, coordinates = slide()
    received = torch.rand(2, 3, 17, dtype=torch.float64) + 0.1
    received[1, 2, 5] = 0.0
    figure = fd.plot_attention_received(received, coordinates=coordinates, batch=1, title="aten")
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in maps] == ["mean of 3 heads", "head 0", "head 1", "head 2"]
    shades = shades_of(figure)
    for axes, values in zip(maps, [received[1].mean(0), *received[1]], strict=True):
        picture = torch.from_numpy(axes.images[0].get_array().data)
        expected = torch.zeros(4, 5, 4, dtype=torch.float64)
        expected[cells[:, 1], cells[:, 0]] = shades(values.clamp(min=1e-30))
        if values.min() == 0:
            expected[cells[5, 1], cells[5, 0]] = torch.tensor(GREY, dtype=torch.float64)
        torch.testing.assert_close(picture, expected)
        assert (picture[..., 3] == NOWHERE).sum() == 3
        # Pixel (x, y) of the slide is the corner of its tile: extents lie half a tile around.
        assert axes.images[0].get_extent() == [1000 - 128, 1000 + 4.5 * 256, 64 + 3.5 * 128, 64 - 64]


def test_places_off_any_grid_are_points():
    _, coordinates = slide()
    received = torch.rand(1, 12, 17) + 0.1
    moved = coordinates + torch.rand(17, 2, generator=torch.Generator().manual_seed(2)) * 40
    twice = fd.plot_attention_received(torch.ones(1, 1, 3), coordinates=torch.tensor([[0, 0], [0, 0], [1, 1]]))
    assert any(axes.get_title() and axes.collections for axes in twice.axes), "two tokens at one place are points"
    figure = fd.plot_attention_received(received, coordinates=moved)
    (axes,) = [axes for axes in figure.axes if axes.collections and axes.get_title()]
    assert axes.get_title() == "mean of 12 heads"
    torch.testing.assert_close(torch.from_numpy(axes.collections[0].get_offsets().data), moved.double())
    colours = torch.from_numpy(axes.collections[0].get_facecolors())
    torch.testing.assert_close(colours, shades_of(figure)(received[0].double().mean(0)))
    assert axes.yaxis_inverted()


def test_a_strip_a_head_over_the_sequence():
    received = torch.rand(1, 3, 40, dtype=torch.float64) + 0.1
    figure = fd.plot_attention_received(received)
    strip, curves = figure.axes[:2]
    torch.testing.assert_close(torch.from_numpy(strip.images[0].get_array().data), shades_of(figure)(received[0]))
    drawn = {line.get_label(): torch.from_numpy(line.get_ydata()) for line in curves.lines}
    torch.testing.assert_close(drawn["head 1"], received[0, 1])
    torch.testing.assert_close(drawn["mean of 3 heads"], received[0].mean(0))
    assert list(curves.lines[0].get_xdata()) == [token + 0.5 for token in range(40)]


def test_many_tokens_and_heads_share_columns_and_a_curve():
    received = torch.rand(1, 9, 4096, dtype=torch.float64) + 0.1
    strip, curves = fd.plot_attention_received(received).axes[:2]
    assert strip.images[0].get_array().shape == (9, 1024, 4)
    (line,) = curves.lines
    torch.testing.assert_close(torch.from_numpy(line.get_ydata()), received[0].mean(0).view(1024, 4).mean(1))
    assert curves.get_xlabel() == "token, means over 4.0 neighbours"


def test_the_sequence_begins_at_the_offset_of_its_keys():
    figure = fd.plot_attention_received(torch.rand(1, 2, 1024) + 0.1, k_offset=3072)
    strip, curves = figure.axes[:2]
    assert strip.images[0].get_extent()[:2] == list(curves.get_xlim()) == [3072, 4096]
    places = torch.as_tensor(curves.lines[0].get_xdata())
    assert places[[0, -1]].tolist() == [3072.5, 4095.5]
    assert curves.xaxis.get_major_formatter()(4096) == "4,096"


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'needs matplotlib: pip install "flexdilated\[plot\]"'):
        fd.plot_attention_received(torch.ones(1, 1, 3))


def test_nothing_received_is_drawn_too(tmp_path):
    figure = fd.plot_attention_received(torch.zeros(1, 2, 10))
    figure.savefig(tmp_path / "nothing.svg")
    assert (tmp_path / "nothing.svg").stat().st_size > 1000
