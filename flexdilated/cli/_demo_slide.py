"""demo slide: an encoder of slides learns on a real one to see hidden tiles, and shows where its layers look."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from time import perf_counter

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from .._attend import attend
from ..integrations.torchscale import EncoderLayer, LongNetEncoderConfig, SlideEncoder, SlideEncoderConfig
from ..observe import attention_received, plain_numbers, scale_ticks
from ._machine import find, missing_line
from ._output import prepare, replace

# L tiles, C features of a tile, Y x X tiles, S layers

PICTURE = "slide.png"
_TILE, _CELL = 8, 2  # sides in pixels: of a tile, and of the squares whose mean colours are its features
_STEPS, _HIDDEN = 120, 0.5
_SEGMENTS, _RATES = (256, 1024, 4096), (1, 2, 4)


def demo_slide(options: argparse.Namespace) -> int:
    """Train, look, draw. 1 where a package is missing."""
    missing = [package for package in ("skimage", "matplotlib") if find(package) is None]
    if missing:
        print("\n".join(map(missing_line, missing)))
        return 1
    prepare(options.out)
    torch.manual_seed(options.seed)
    image = torch.from_numpy(import_module("skimage.data").immunohistochemistry()).permute(2, 0, 1).float() / 255
    tiles, corners = cut(image)
    layers = LongNetEncoderConfig(embed_dim=64, depth=3, num_heads=4, segment_lengths=_SEGMENTS, dilation_rates=_RATES)
    sizes = SlideEncoderConfig(layers, tile_dim=tiles.shape[1], grid_size=max(image.shape) // _TILE, tile_size=_TILE)
    model = SlideEncoder(sizes)
    print(f"slide     scikit-image's immunohistochemistry, {len(tiles):,} tiles of {_TILE} x {_TILE} pixels")
    print(f"model     SlideEncoder, {sum(each.numel() for each in model.parameters()):,} parameters, {layers.pattern}")
    began = perf_counter()
    first, last = train(model, tiles, corners, steps=_STEPS)
    print(f"trained   {_STEPS} steps in {perf_counter() - began:.0f} s, to tell hidden tiles from the others")
    print(f"error     of their colours {first:.2f} before and {last:.2f} after; 1.00 is what a guess of the mean has")
    began = perf_counter()
    received = looked_at(model, tiles, corners)
    print(f"looked    attention received by each tile in {len(received)} layers, in {perf_counter() - began:.1f} s")
    replace(options.out / PICTURE, lambda path: draw(path, image, received))
    print(f"written   {options.out / PICTURE}")
    return 0


def cut(image: Float[Tensor, "3 Y X"]) -> tuple[Float[Tensor, "L C"], Int64[Tensor, "L 2"]]:
    """(features of the tiles, row by row, of mean 0 and variance 1; the corner (y, x) of each, in pixels)."""
    small, side = F.avg_pool2d(image, _CELL), _TILE // _CELL
    rows, columns = (size // _TILE for size in image.shape[1:])
    tiles = small.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4).reshape(rows * columns, -1)
    corners = _TILE * torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return (tiles - tiles.mean(0)) / tiles.std(0), corners


def train(model: SlideEncoder, tiles: Tensor, corners: Tensor, *, steps: int) -> tuple[float, float]:
    """Tell the features of hidden tiles, other ones at each step; (mean squared error before, and after)."""
    told = nn.Linear(model.config.encoder.embed_dim, tiles.shape[1])
    parameters = [*model.parameters(), *told.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=max(1, steps))

    def error() -> Tensor:
        hidden = torch.rand(len(tiles)) < _HIDDEN
        seen = model.encoder(model.embed((tiles * ~hidden[:, None])[None], corners[None]))
        return F.mse_loss(told(seen[0, 1:][hidden]), tiles[hidden])

    with torch.no_grad():
        before = float(error())
    for _ in range(steps):
        optimizer.zero_grad()
        error().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return before, float(error())


@torch.no_grad()
def looked_at(model: SlideEncoder, tiles: Tensor, corners: Tensor) -> Float[Tensor, "S L"]:
    """The attention that each tile received in each layer, on average over the heads; 1 is a tile's equal share."""
    received, pattern = [], model.config.encoder.pattern
    states = model.encoder(model.embed(tiles[None], corners[None]), all_layers=True)
    for layer, state in zip(model.encoder.layers, states[:-1], strict=True):
        assert isinstance(layer, EncoderLayer)
        q, k, v = layer.self_attn.project(layer.self_attn_layer_norm(state))
        _, lse = attend(q, k, v, pattern, return_lse=True)
        received.append(attention_received(q, k, lse, pattern)[0, :, 1:].mean(0))
    return torch.stack(received)


def draw(path: Path, image: Float[Tensor, "3 Y X"], received: Float[Tensor, "S L"]) -> None:
    """The slide, and over it in grey where each layer looked."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows, columns = (size // _TILE for size in image.shape[1:])
    least, most = received.quantile(torch.tensor([0.02, 0.99])).tolist()
    most = max(most, 1.01 * least)
    shades = ScalarMappable(LogNorm(least, most, clip=True), "magma")
    figure = Figure(figsize=(3.4 * (1 + len(received)) + 0.8, 3.75), layout="constrained", dpi=140)
    axes = figure.subplots(1, 1 + len(received))
    axes[0].imshow(image.permute(1, 2, 0).numpy())
    axes[0].set_title("slide", fontsize="medium")
    for number, (panel, layer) in enumerate(zip(axes[1:], received, strict=True), start=1):
        panel.imshow(image.mean(0).numpy(), cmap="gray", vmin=-0.5, vmax=1)
        over = {"alpha": 0.65, "extent": (0, image.shape[2], image.shape[1], 0), "interpolation": "bilinear"}
        panel.imshow(layer.view(rows, columns).numpy(), cmap=shades.cmap, norm=shades.norm, **over)
        panel.set_title(f"layer {number}", fontsize="medium")
    for panel in axes:
        panel.set_axis_off()
    bar = {"label": "attention received", "ticks": scale_ticks(least, most), "format": plain_numbers()}
    figure.colorbar(shades, ax=list(axes), shrink=0.9, aspect=30, pad=0.01, **bar).minorticks_off()
    figure.savefig(path, format="png")
