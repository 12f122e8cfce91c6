"""Small transformer models of diffusers, whose image or video has 3 x 4 x 4 tokens and whose text has 7."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.vision import vision

GRID = (3, 4, 4)
TOKENS = 48
TEXT = 7
HEADS = 2


@dataclass(frozen=True)
class Model:
    """name: class in diffusers. sizes: arguments. inputs: of a call. text: "first" or "last" in joint attention, or "".

    replaced: number of modules that attend among the tokens of the image or video.
    """

    name: str
    sizes: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    text: str = ""
    replaced: int = 2


def diffusers() -> Any:
    """The package; skips the test where it is not installed."""
    vision()
    return importlib.import_module("diffusers")


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _video(channels: int, *, frames_first: bool = False) -> Tensor:
    """With 2 x 2 patches."""
    return _randn(2, 3, channels, 8, 8) if frames_first else _randn(2, channels, 3, 8, 8)


def _timestep() -> Tensor:
    return torch.tensor([10, 5])


def _text_mask() -> Tensor:
    return torch.tensor([[1] * TEXT, [1] * 4 + [0] * 3])


def _wan(**more: Any) -> dict[str, Any]:
    sizes = {"attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16}
    sizes |= {"num_attention_heads": HEADS, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32}
    return sizes | more


def _hunyuan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": _video(4),
        "timestep": _timestep(),
        "encoder_hidden_states": _randn(2, TEXT, 16),
        "encoder_attention_mask": _text_mask(),
        "pooled_projections": _randn(2, 8),
        "guidance": torch.tensor([6000, 6000]),
    }


MODELS = {
    "Wan": Model(
        "WanTransformer3DModel",
        _wan(),
        lambda: {
            "hidden_states": _video(4),
            "timestep": _timestep(),
            "encoder_hidden_states": _randn(2, TEXT, 16),
        },
    ),
    "SkyReels": Model(
        "SkyReelsV2Transformer3DModel",
        _wan(),
        lambda: {
            "hidden_states": _video(4),
            "timestep": _timestep(),
            "encoder_hidden_states": _randn(2, TEXT, 16),
        },
    ),
    "HunyuanVideo": Model(
        "HunyuanVideoTransformer3DModel",
        {
            **{"in_channels": 4, "out_channels": 4, "num_attention_heads": HEADS, "attention_head_dim": 10},
            **{"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1},
            **{"text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)},
        },
        _hunyuan_inputs,
        text="last",
    ),
    "LTX": Model(
        "LTXVideoTransformer3DModel",
        {
            **{"in_channels": 4, "out_channels": 4, "num_attention_heads": HEADS, "attention_head_dim": 8},
            **{"cross_attention_dim": 16, "num_layers": 2, "caption_channels": 32},
        },
        lambda: {
            "hidden_states": _randn(2, TOKENS, 4),
            "encoder_hidden_states": _randn(2, TEXT, 32),
            "timestep": _timestep(),
            "encoder_attention_mask": _text_mask(),
            **dict(zip(("num_frames", "height", "width"), GRID, strict=True)),
        },
    ),
    "CogVideoX": Model(
        "CogVideoXTransformer3DModel",
        {
            **{"num_attention_heads": HEADS, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4},
            **{"time_embed_dim": 2, "text_embed_dim": 8, "num_layers": 2, "sample_width": 8, "sample_height": 8},
            **{"sample_frames": 9, "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": TEXT},
        },
        lambda: {
            "hidden_states": _video(4, frames_first=True),
            "encoder_hidden_states": _randn(2, TEXT, 8),
            "timestep": _timestep(),
        },
        text="first",
    ),
    "Flux": Model(
        "FluxTransformer2DModel",
        {
            **{"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16},
            **{"num_attention_heads": HEADS, "joint_attention_dim": 32, "pooled_projection_dim": 32},
            **{"axes_dims_rope": [4, 4, 8]},
        },
        lambda: {
            "hidden_states": _randn(2, TOKENS, 4),
            "encoder_hidden_states": _randn(2, TEXT, 32),
            "pooled_projections": _randn(2, 32),
            "timestep": torch.tensor([1.0, 0.5]),
            "img_ids": _randn(TOKENS, 3),
            "txt_ids": _randn(TEXT, 3),
        },
        text="first",
    ),
    "SD3": Model(
        "SD3Transformer2DModel",
        {
            **{"sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8},
            **{"num_attention_heads": HEADS, "joint_attention_dim": 32, "caption_projection_dim": 16},
            **{"pooled_projection_dim": 64, "out_channels": 4, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
        },
        lambda: {
            "hidden_states": _randn(2, 4, 12, 16),
            "encoder_hidden_states": _randn(2, TEXT, 32),
            "pooled_projections": _randn(2, 64),
            "timestep": _timestep(),
        },
        text="last",
        replaced=3,
    ),
}


def model_of(name: str) -> Any:
    """With random weights, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(diffusers(), MODELS[name].name)(**MODELS[name].sizes)
        for x in model.parameters():  # what begins at 0 would hide what attention does
            nn.init.normal_(x, *((0.5, 0.3) if x.dim() == 1 else (0.0, x[0].numel() ** -0.5)))
        return model.train()


def output(model: nn.Module, name: str) -> Tensor:
    return model(**MODELS[name].inputs(), return_dict=False)[0]


def with_text(times: Tensor, text: str) -> Tensor:
    """Dense counts over the grid (H, TOKENS, TOKENS), with a text's tokens before or behind that see all."""
    if not text:
        return times
    whole = times.new_ones(times.shape[0], TOKENS + TEXT, TOKENS + TEXT)
    grid = slice(TEXT, None) if text == "first" else slice(None, TOKENS)
    whole[:, grid, grid] = times
    return whole
