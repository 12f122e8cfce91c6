"""The scripts of docs/examples/, in small."""

import json
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flexdilated import masks
from flexdilated.integrations.torchscale import LongNetEncoderConfig, SlideEncoder, SlideEncoderConfig, slide_segments
from tests.support.ranks import on_ranks
from tests.support.vision import vision

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def run(name: str, arguments: str) -> Any:
    """What the script's `main` returns."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](arguments.split())


def test_each_script_is_run_here() -> None:
    tested = ("adapt_llama", "convert_vit", "encode_slide", "inspect_pattern", "many_ranks", "pack_documents")
    tested += ("sparse_video",)
    assert {path.stem for path in EXAMPLES.iterdir()} - {"__pycache__"} == {*tested, "train_longnet"}


@pytest.mark.slow
def test_adapt_llama(capsys: pytest.CaptureFixture[str]) -> None:
    """The pattern is felt at once, training with it helps, and the model writes by it."""
    from transformers.utils import logging  # not on the ranks of another test, which need none of it

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


@pytest.mark.pictures
@pytest.mark.slow
def test_sparse_video(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    vision()  # has diffusers, too
    drawn = tmp_path / "read.png"
    errors = run("sparse_video", f"--grid 5 6 6 --steps 24 --batch 2 --head-dim 12 --picture {drawn}")
    assert errors["dense"] < errors["at first"]
    assert errors["converted at once"] != errors["dense"]
    assert errors["after training converted"] < errors["converted at once"]
    assert errors["after training dense"] < errors["dense"]
    assert drawn.stat().st_size > 0


@pytest.mark.pictures
@pytest.mark.slow
def test_train_longnet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both models learn from the same parameters on; what is printed, returned and written agrees."""
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    out = tmp_path / "new" / "out"
    results = run("train_longnet", f"--steps 12 --tokens 128 --out {out}")
    printed = capsys.readouterr().out
    assert json.loads((out / "results.json").read_text(encoding="utf-8")) == results
    assert sorted(path.name for path in out.iterdir()) == ["loss.png", "mask.png", "results.json"]
    for name, each in results.items():
        assert each["before"] == pytest.approx(8.0, abs=0.1)
        assert each["after"] < each["before"] - 2
        assert len(each["losses"]) == 12
        row = f"{each['density']:.1%} {each['before']:.2f} {each['after']:.2f} {each['seconds']:.3f}"
        assert f"{name} {row}" in " ".join(printed.split())
    assert results["LongNet"]["losses"][0] == pytest.approx(results["dense"]["losses"][0], abs=0.05)
    assert results["LongNet"]["density"] < results["dense"]["density"] == pytest.approx(129 / 256)


def test_encode_slide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slide of its own, then features and weights from files, where zero padding tells exact mode apart."""
    sizes = "--embed-dim 16 --depth 2 --heads 2"
    first = run("encode_slide", sizes)
    assert first.shape == (3, 16)
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
    assert (run("encode_slide", files) - exact).abs().max() > 1e-5
    assert "70 tiles of 5 features" in capsys.readouterr().out


def test_pack_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A document gets in a packed sequence what it gets alone."""
    texts = [b"abc" * size for size in (60, 17, 4, 31, 2, 90)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    before, after = run("pack_documents", f"--documents {tmp_path}/*.txt --tokens 200 --steps 30 --embed-dim 16")
    assert before > 7
    assert after < 4
    assert "6 documents in 3 sequences, 9.7% padding" in capsys.readouterr().out
    example = runpy.run_path(str(EXAMPLES / "pack_documents.py"))
    rows, numbers = example["packed"](texts, 200)
    x, layer = torch.randn(*rows.shape, 16), example["Layer"](16)
    packed = layer(x, numbers)
    part = numbers[-1] == 1
    alone = layer(x[-1:, part], torch.zeros(1, int(part.sum()), dtype=torch.long))
    torch.testing.assert_close(packed[-1:, part], alone)


def bits_over_ranks() -> list[float]:
    kept = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with kept, mock.patch.object(torch.cuda, "is_available", return_value=False):
        return run("many_ranks", "--tokens 300 --steps 4 --embed-dim 32 --segments 50 300 --rates 1 3")


@pytest.mark.slow
def test_many_ranks_train_as_one() -> None:
    """Two shards of different lengths."""
    (alone,), ranks = on_ranks(1, bits_over_ranks), on_ranks(2, bits_over_ranks)
    for bits in ranks:
        assert bits == pytest.approx(alone, abs=1e-3)
    assert alone[-1] < alone[0]


def test_inspect_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    """The notebook's cells, in their order."""
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    notebook = json.loads((EXAMPLES / "inspect_pattern.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec("".join(cell["source"]), names)
    pattern, size = names["pattern"], {"num_heads": names["heads"]}
    printed = capsys.readouterr().out
    shown = masks.show(pattern, names["tokens"], head=1, **size)
    for text in (shown, str(names["description"]), "\n\nMemory\n\n"):
        assert str(text) in printed
    assert "query 1505, key 17, head 1 of 4: allowed" in printed
