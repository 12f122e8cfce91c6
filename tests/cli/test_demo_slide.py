"""demo slide: end to end on the real slide with few steps, and its parts against plain ones."""

import sys
from pathlib import Path

import pytest
import torch

from flexdilated.cli import _demo_slide, main
from flexdilated.cli._demo_slide import PICTURE, cut, looked_at, train
from flexdilated.integrations.torchscale import LongNetEncoderConfig, SlideEncoder, SlideEncoderConfig

PNG = b"\x89PNG\r\n\x1a\n"


def small(depth: int = 2) -> tuple[SlideEncoder, torch.Tensor, torch.Tensor]:
    """A slide of 6 x 9 tiles whose colours change slowly, and a model of it."""
    torch.manual_seed(0)
    y, x = torch.meshgrid(torch.arange(48.0), torch.arange(72.0), indexing="ij")
    image = torch.stack((torch.sin(x / 15), torch.cos(y / 12), torch.sin((x + y) / 20)))
    tiles, corners = cut(image)
    layers = LongNetEncoderConfig(16, depth, 2, (16, 64), (1, 2))
    return SlideEncoder(SlideEncoderConfig(layers, tile_dim=tiles.shape[1], grid_size=9, tile_size=8)), tiles, corners


@pytest.mark.pictures
@pytest.mark.slow
def test_end_to_end(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(_demo_slide, "_STEPS", 2)
    assert main(["demo", "slide", "--out", str(tmp_path), "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == [
        *("slide", "model", "trained", "error", "looked", "written")
    ]
    assert "4,096 tiles of 8 x 8 pixels" in printed
    assert [path.name for path in tmp_path.iterdir()] == [PICTURE]
    assert (tmp_path / PICTURE).read_bytes().startswith(PNG)


def test_tiles_are_those_of_the_slide() -> None:
    """Mean colours of 2 x 2 pixels, in rows, with their corners; each feature of mean 0 and variance 1."""
    image = torch.rand(3, 16, 24)
    tiles, corners = cut(image)
    assert tiles.shape == (6, 48)
    assert corners.tolist() == [[0, 0], [0, 8], [0, 16], [8, 0], [8, 8], [8, 16]]
    plain = torch.tensor([
        [
            float(image[color, y + dy : y + dy + 2, x + dx : x + dx + 2].mean())
            for color in range(3)
            for dy in range(0, 8, 2)
            for dx in range(0, 8, 2)
        ]
        for y, x in corners.tolist()
    ])  # fmt: skip
    torch.testing.assert_close(tiles, (plain - plain.mean(0)) / plain.std(0), rtol=1e-4, atol=1e-5)


def test_it_learns_what_is_hidden() -> None:
    model, tiles, corners = small()
    before, after = train(model, tiles, corners, steps=80)
    assert before > 0.8
    assert after < 0.5 * before


def test_looks_are_shares_of_attention() -> None:
    """Those of the dense weights, counted once a branch; what the token in front got is left out."""
    model, tiles, corners = small()
    found = looked_at(model, tiles, corners)
    assert found.shape == (2, 54)
    x = model.embed(tiles[None], corners[None])
    for layer, received in zip(model.encoder.layers, found, strict=True):
        q, k, _ = layer.self_attn.project(layer.self_attn_layer_norm(x))
        head, token = torch.arange(2)[:, None, None], torch.arange(55)
        branches = model.config.encoder.pattern.branches()
        mods = [branch.mask_mod(num_heads=2, device=q.device) for branch in branches]
        times = sum(mod(torch.tensor(0), head, token[:, None], token).double() for mod in mods)
        scores = (q @ k.mT)[0].double() / 8**0.5 + times.log()
        assert torch.allclose(scores.softmax(-1).sum(1).mean(0)[1:], received.double(), rtol=1e-4, atol=1e-5)
        x = layer(x)


@pytest.mark.parametrize("package", ["skimage", "matplotlib"])
def test_a_missing_package_is_named(package, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo", "slide", "--out", str(tmp_path / "out")]) == 1
    assert f"{package} is not installed" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_options_of_the_text_are_refused(capsys) -> None:
    assert main(["demo", "slide", "--steps", "3"]) == 2
    assert "slide has no effect with --steps" in capsys.readouterr().err
    assert main(["demo", "slides"]) == 2
    assert "demo takes the word slide, or none; got 'slides'" in capsys.readouterr().err
