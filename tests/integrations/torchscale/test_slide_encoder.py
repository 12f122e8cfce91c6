"""SlideEncoder: Prov-GigaPath's function, its positions without a table, and its checkpoints."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from flexdilated.integrations.torchscale import LongNetEncoderConfig, SlideEncoder, SlideEncoderConfig, slide_segments
from tests.integrations.torchscale import plain
from tests.support.agreement import TIGHT

BRANCHES = ((8, 20, 50), (1, 3, 4))
LAYERS = LongNetEncoderConfig(24, 2, 3, *BRANCHES, padding="zeros")
SMALL = SlideEncoderConfig(LAYERS, tile_dim=6, grid_size=30)


def slide(config: SlideEncoderConfig, L: int, *, dtype=torch.float64, batch: int = 1, seed: int = 0):
    """Tiles at different places of the grid, each corner somewhere in its tile."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.stack([torch.randperm(config.grid_size**2, generator=generator)[:L] for _ in range(batch)])
    corners = torch.stack((cells // config.grid_size, cells % config.grid_size), -1) * config.tile_size
    within = torch.randint(config.tile_size, corners.shape, generator=generator)
    return torch.randn(batch, L, config.tile_dim, generator=generator, dtype=dtype), (corners + within).float()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("L", [1, 19, 96])
def test_small_slides_are_published(L, pooling) -> None:
    """Each of the states' embeddings; 96 tiles and a token are several segments that their rates do not divide."""
    torch.manual_seed(L)
    model = SlideEncoder(replace(SMALL, pooling=pooling)).double()
    tiles, corners = slide(SMALL, L, batch=2)
    how = {"num_heads": 3, "branches": BRANCHES, "grid": 30, "pooling": pooling}
    *states, last = plain.slide_encoder(model.state_dict(), tiles, corners, **how)
    # Positions are float32, as published.
    assert_close(model(tiles, corners), last, rtol=1e-6, atol=1e-6)
    assert_close(model(tiles, corners, all_layers=True), tuple(states), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_full_width_is_published() -> None:
    """768 channels and 16 heads in two of the twelve layers, random weights: to 1e-5 of the plain one, in float32."""
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in SlideEncoder().parameters()) == 86_330_880
    torch.manual_seed(0)
    config = SlideEncoderConfig(replace(SlideEncoderConfig().encoder, depth=2))
    weights = SlideEncoder(config).state_dict()
    model, exact = (SlideEncoder.from_checkpoint(weights, config, padding=each).eval() for each in ("zeros", None))
    how = {"num_heads": 16, "branches": (slide_segments(), (1, 2, 4, 8, 16)), "grid": 1000}
    tiles, corners = slide(config, 1100, dtype=torch.float32)  # in two segments of the first branch
    with torch.no_grad():
        truth = plain.slide_encoder(weights, tiles, corners, **how)[-1]
        assert (model(tiles, corners) - truth).norm() < 1e-5 * truth.norm()
        assert (exact(tiles, corners) - truth).norm() > 1e-4 * truth.norm()


def test_segments() -> None:
    assert slide_segments() == (1024, 5792, 32768, 185363, 1048576)
    assert SlideEncoderConfig().encoder.segment_lengths == slide_segments()
    assert slide_segments(131072) == (1024, 4096, 16384, 65536, 262144)
    assert slide_segments(262144, 512, 2) == (1024, 262144)
    with pytest.raises(ValueError, match="at least 1024 tiles"):
        slide_segments(256 * 31)


def test_checkpoints() -> None:
    """With or without "model" around it; as published unless told otherwise."""
    torch.manual_seed(0)
    new = SlideEncoder(replace(SMALL, encoder=replace(LAYERS, padding=None)))
    weights = new.state_dict()
    tiles, corners = slide(SMALL, 96, dtype=torch.float32)
    loaded = SlideEncoder.from_checkpoint({"model": weights, "epoch": 3}, new.config)
    assert loaded.config.encoder.padding == "zeros"
    assert (loaded(tiles, corners) - new(tiles, corners)).norm() > 1e-3
    assert torch.equal(
        SlideEncoder.from_checkpoint(weights, new.config, padding=None)(tiles, corners), new(tiles, corners)
    )
    detached = SlideEncoder.from_checkpoint(weights, new.config, merge_grad="detached")
    assert_close(detached(tiles, corners), loaded(tiles, corners), rtol=1e-5, atol=1e-5)
    misfit = {**weights, "mask_token": torch.zeros(1), "norm.weight": torch.zeros(7)}
    del misfit["cls_token"]
    with pytest.raises(ValueError, match=r"1 missing: cls_token; 1 foreign: mask_token; 1 misshapen: norm.weight"):
        SlideEncoder.from_checkpoint(misfit, SMALL)


def test_places() -> None:
    """Only the tile that a corner lies in counts, and its order in the batch does not."""
    torch.manual_seed(0)
    model = SlideEncoder(SMALL).double().eval()
    tiles, corners = slide(SMALL, 20)
    cut = (corners // 256) * 256
    assert_close(model(tiles, cut), model(tiles, corners), **TIGHT)
    assert (model(tiles, corners.flip(-1)) - model(tiles, corners)).norm() > 1e-4
    assert_close(model(tiles, cut.long()), model(tiles, cut), **TIGHT)
    for bad in (cut - 256 * 30, cut + 256 * 30):
        with pytest.raises(ValueError, match="grid of 30 x 30 tiles of 256 pixels"):
            model(tiles, bad)
    with pytest.raises(ValueError, match="two for each tile"):
        model(tiles, corners[:, :3])


@pytest.mark.slow
def test_it_compiles() -> None:
    """Tests of `attend` hold exact weights, and the kernels that inductor makes."""
    torch.manual_seed(0)
    layers = replace(LAYERS, depth=1, segment_lengths=(20, 50), dilation_rates=(3, 4), merge_grad="detached")
    model = SlideEncoder(replace(SMALL, encoder=layers))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tiles, corners = slide(SMALL, 96, dtype=torch.float32)
    assert_close(compiled(tiles, corners), model(tiles, corners), rtol=1e-4, atol=1e-5)


def test_configs_are_checked() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        SlideEncoderConfig(replace(LAYERS, embed_dim=21))
    with pytest.raises(ValueError, match="pooling must be one of"):
        replace(SMALL, pooling="max")
    with pytest.raises(ValueError, match="tile_size must be at least 1"):
        replace(SMALL, tile_size=0)
