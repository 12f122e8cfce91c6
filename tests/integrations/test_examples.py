"""The scripts of docs/examples/, in small."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from flexdilated.integrations.torchscale import LongNetEncoderConfig, SlideEncoder, SlideEncoderConfig, slide_segments

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def run(name: str, arguments: str) -> Any:
    """What the script's `main` returns."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](arguments.split())


def test_each_script_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.iterdir()} - {"__pycache__"} == {
        "adapt_llama",
        "convert_vit",
        "encode_slide",
        "train_longnet",
    }
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 100 for path in EXAMPLES.glob("*.py"))


@pytest.mark.slow
def test_adapt_llama(capsys: pytest.CaptureFixture[str]) -> None:
    """The pattern is felt at once, training with it helps, and the model writes by it."""
    logging.disable_progress_bar()
    losses = run(
        "adapt_llama", "--tokens 128 --steps 30 --hidden-size 32 --write 12 --pattern local_window(left=3,right=0)"
    )
    first, dense, at_once, trained = losses.values()
    assert dense < first
    assert at_once != dense
    assert trained < at_once
    assert f"{trained:.3f}  after training with it\n" in capsys.readouterr().out


@pytest.mark.slow
def test_convert_vit(capsys: pytest.CaptureFixture[str]) -> None:
    errors = run("convert_vit", "--grid 6 --steps 40 --dim 32 --batch 2 --radius 1")
    assert errors["dense"] < errors["at first"]
    assert errors["converted at once"] != errors["dense"]
    assert errors["after training converted"] < errors["dense"]
    assert "encoder.layers.1.self_attn" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("text", ["library", "file"])
def test_train_longnet(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_bytes(b"She sells sea shells by the sea shore. " * 200)
    given = f"--text {tmp_path / 'text'}" if text == "file" else "--max-bytes 100000"
    sizes = (
        "--tokens 256 --batch 2 --steps 25 --embed-dim 32 --depth 1 --segments 32 256 --rates 1 8 --write 10 --lr 0.01"
    )
    before, after = run("train_longnet", f"{given} {sizes}")
    assert before > 7.5
    assert after < (4 if text == "file" else 6)
    assert f"{after:.2f} after" in capsys.readouterr().out


def test_encode_slide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slide of its own, then features and weights from files, where zero padding tells exact mode apart."""
    sizes = "--embed-dim 16 --depth 2 --heads 2"
    first = run("encode_slide", sizes)
    assert first.shape == (3, 16)
    assert torch.equal(first, run("encode_slide", sizes))
    generator = torch.Generator().manual_seed(1)
    tiles, corners = torch.randn(70, 5, generator=generator), 256 * torch.randint(100, (70, 2), generator=generator)
    torch.save({"tile_embeds": tiles, "coords": corners}, tmp_path / "tiles.pt")
    branches = {"segment_lengths": slide_segments(), "dilation_rates": (1, 2, 4, 8, 16)}
    layers = LongNetEncoderConfig(embed_dim=16, depth=2, num_heads=2, **branches)
    model = SlideEncoder(SlideEncoderConfig(layers, tile_dim=5)).eval()
    torch.save({"model": model.state_dict()}, tmp_path / "weights.pth")
    files = f"{sizes} --features {tmp_path / 'tiles.pt'} --weights {tmp_path / 'weights.pth'}"
    exact = run("encode_slide", f"{files} --exact --out {tmp_path / 'out.pt'}")
    with torch.no_grad():
        torch.testing.assert_close(exact, torch.cat(model(tiles[None], corners[None], all_layers=True)))
    assert torch.equal(torch.load(tmp_path / "out.pt"), exact)
    padded = run("encode_slide", files)
    assert (padded - exact).abs().max() > 1e-5
    assert "70 tiles of 5 features" in capsys.readouterr().out


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"short")
    with pytest.raises(SystemExit, match="must hold two sequences of 257 bytes; it has 5 bytes"):
        run("train_longnet", f"--text {tmp_path / 'text'} --tokens 256")
