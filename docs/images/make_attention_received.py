"""Draw attention_received.png beside this file: the attention that the tiles of a small made-up slide received.

Run from a checkout with the extra `plot` installed: python docs/images/make_attention_received.py
"""

from pathlib import Path

import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks

SIDE, TILE = 40, 256  # tiles along a side, pixels along a tile


def slide() -> Tensor:
    """(M, 2): where each tile of an ellipse of tissue with a hole begins, in pixels, row after row."""
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    tissue = ((x - 19.5) / 19) ** 2 + ((y - 19.5) / 15) ** 2 < 1
    hole = (x - 27) ** 2 + (y - 14) ** 2 < 14
    return TILE * torch.stack([x, y], -1)[tissue & ~hole]


def features(coordinates: Tensor, *, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v: noise, and in one round spot keys that queries of the later heads look for more."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, num_heads, len(coordinates), head_dim, generator=generator)
    direction = torch.randn(head_dim, generator=generator)
    spot = ((coordinates / TILE - torch.tensor([12, 23])) ** 2).sum(-1) < 12
    k[:, :, spot] += direction
    q += direction * torch.linspace(0.0, 0.6, num_heads)[:, None, None]
    return q, k, v


if __name__ == "__main__":
    coordinates = slide()
    q, k, v = features(coordinates, num_heads=5, head_dim=32)
    pattern = masks.longnet(segment_lengths=(128, 512, 2048), dilation_rates=(1, 2, 4))
    _, lse = fd.attend(q, k, v, pattern, return_lse=True)
    received = fd.attention_received(q, k, lse, pattern)
    title = f"{len(coordinates)} tiles of a made-up slide, LongNet over segments of 128, 512 and 2048"
    figure = fd.plot_attention_received(received, coordinates=coordinates, title=title)
    figure.savefig(Path(__file__).with_name("attention_received.png"), dpi=90)
