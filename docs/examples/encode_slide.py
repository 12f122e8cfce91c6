"""One embedding for a slide, from the features of its tiles and their places, by Prov-GigaPath's slide encoder.

python docs/examples/encode_slide.py --features tiles.pt --weights slide_encoder.pth --out embedding.pt
python docs/examples/encode_slide.py --embed-dim 64 --depth 2 --heads 4     # a real slide (extra demo), random weights

tiles.pt: a dict of "tile_embeds" (tiles, features) and "coords" (tiles, 2), corners in pixels, written by `torch.save`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

from flexdilated.integrations.torchscale import LongNetEncoderConfig, SlideEncoder, SlideEncoderConfig, slide_segments


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Encode a slide")
    parser.add_argument("--features", type=Path, help="of tiles; without it those of scikit-image's histology slide")
    parser.add_argument("--weights", type=Path, help="a checkpoint of these sizes; without it they are random")
    parser.add_argument("--exact", action="store_true", help="attend to real tiles alone, also with a checkpoint")
    parser.add_argument("--pooling", choices=["cls", "mean"], default="cls")
    parser.add_argument("--tile-size", type=int, default=256, help="pixels along a side of a tile")
    parser.add_argument("--embed-dim", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--out", type=Path, help="where the embedding of each layer goes, (layers + 1, embed dim)")
    return parser.parse_args(arguments)


def tiles_of(given: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """(features (tiles, C), corners (tiles, 2) in pixels)."""
    if given.features is not None:
        found = torch.load(given.features, weights_only=True)
        return found["tile_embeds"].float(), found["coords"]
    from skimage.data import immunohistochemistry

    image = torch.from_numpy(immunohistochemistry()).permute(2, 0, 1).float() / 255
    small = F.avg_pool2d(image, 2).unfold(1, 4, 4).unfold(2, 4, 4)  # tiles of 8 x 8 pixels
    places = torch.cartesian_prod(torch.arange(small.shape[1]), torch.arange(small.shape[2]))
    return small.permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1) - 0.5, given.tile_size * places


def encoder_of(tile_dim: int, given: argparse.Namespace) -> SlideEncoder:
    """The encoder, with its weights or random ones."""
    layers = LongNetEncoderConfig(
        embed_dim=given.embed_dim,
        depth=given.depth,
        num_heads=given.heads,
        segment_lengths=slide_segments(),
        dilation_rates=(1, 2, 4, 8, 16),
    )
    sizes = SlideEncoderConfig(layers, tile_dim=tile_dim, tile_size=given.tile_size, pooling=given.pooling)
    if given.weights is None:
        return SlideEncoder(sizes)
    checkpoint = torch.load(given.weights, weights_only=True)
    return SlideEncoder.from_checkpoint(checkpoint, sizes, padding=None if given.exact else "zeros")


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> Tensor:
    """The embedding of what goes into the encoder and of each layer, (layers + 1, embed dim)."""
    given = options(arguments)
    torch.manual_seed(0)
    tiles, corners = tiles_of(given)
    model = encoder_of(tiles.shape[1], given).eval()
    num_weights = sum(each.numel() for each in model.parameters())
    print(f"{len(tiles):,} tiles of {tiles.shape[1]} features, {num_weights:,} weights")
    began = perf_counter()
    embeddings = torch.cat(model(tiles[None], corners[None], all_layers=True))
    print(f"encoded in {perf_counter() - began:.1f} s: {len(embeddings)} embeddings of {embeddings.shape[1]} numbers")
    if given.out is not None:
        torch.save(embeddings, given.out)
        print(f"written to {given.out}")
    return embeddings


if __name__ == "__main__":
    main()
