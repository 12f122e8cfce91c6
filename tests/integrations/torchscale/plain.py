"""The published encoders as functions of their state_dicts, dense and plain: what the modules are compared with.

Written from the descriptions of microsoft/torchscale (architecture/encoder.py, component/feedforward_network.py) and
prov-gigapath/prov-gigapath (gigapath/slide_encoder.py, gigapath/pos_embed.py).
"""

from collections.abc import Mapping, Sequence
from math import floor

import torch
from torch import Tensor

from tests.support import published

Weights = Mapping[str, Tensor]


def encoder(
    weights: Weights,
    x: Tensor,
    *,
    num_heads: int,
    branches: tuple[Sequence[int], Sequence[int]],
    detached: bool = False,
) -> list[Tensor]:
    """What goes into the first layer, comes out of each, and of the norm behind the last one."""
    states = [x]
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    for index in range(depth):
        layer = under(weights, f"layers.{index}.")
        x = x + _attention(layer, _norm(layer, "self_attn_layer_norm", x), num_heads, branches, detached)
        hidden = _gelu(_linear(layer, "ffn.fc1", _norm(layer, "final_layer_norm", x)))
        x = x + _linear(layer, "ffn.fc2", _norm(layer, "ffn.ffn_layernorm", hidden))
        states.append(x)
    return [*states, _norm(weights, "layer_norm", x)]


def slide_encoder(
    weights: Weights,
    tiles: Tensor,
    coordinates: Tensor,
    *,
    num_heads: int,
    branches: tuple[Sequence[int], Sequence[int]],
    grid: int,
    pooling: str = "cls",
) -> list[Tensor]:
    """The embeddings from each state of the encoder, the normed one last."""
    x = _linear(weights, "patch_embed.proj", tiles)
    places = [[position(x.shape[-1], grid, *corner) for corner in slide] for slide in coordinates.tolist()]
    x = x + torch.tensor(places, dtype=torch.float64).to(x.dtype)
    x = torch.cat((weights["cls_token"].expand(len(x), 1, -1), x), 1)
    states = encoder(under(weights, "encoder."), x, num_heads=num_heads, branches=branches)
    pooled = [state[:, 0] if pooling == "cls" else state[:, 1:].mean(1) for state in states]
    return [_norm(weights, "norm", each, eps=1e-6) for each in pooled]


def position(dim: int, grid: int, first: float, second: float) -> list[float]:
    """The row of the published table that a tile's corner stands for: sines and cosines of column, then of row."""
    index = floor(first / 256) * grid + floor(second / 256)
    rates = [10000.0 ** -(i / (dim // 4)) for i in range(dim // 4)]
    halves = [
        torch.tensor([place * rate for rate in rates], dtype=torch.float64) for place in (index % grid, index // grid)
    ]
    return torch.cat([part for angles in halves for part in (angles.sin(), angles.cos())]).tolist()


def under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _attention(layer: Weights, x: Tensor, num_heads: int, branches, detached: bool) -> Tensor:
    q, k, v = (
        _linear(layer, f"self_attn.{name}_proj", x).unflatten(-1, (num_heads, -1)).transpose(1, 2) for name in "qkv"
    )
    out, _ = published.dilated_attention(q, k, v, *branches, detached=detached)
    return _linear(layer, "self_attn.out_proj", _norm(layer, "self_attn.inner_attn_ln", out.transpose(1, 2).flatten(2)))


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(weights: Weights, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))
