"""Inputs of small models of diffusers, whose image or video has 48 tokens and whose text has 7."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GRID = (3, 4, 4)  # of videos, in patches of 1 x 2 x 2
IMAGE = (6, 8)  # of images, in patches of 2 x 2
TOKENS = 48
TEXT = 7
HEADS = 2
WIDTH = 16  # channels of a text
CHANNELS = 4

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """name: class in diffusers. sizes: arguments. inputs: of a call. text: "first" or "last" in joint attention, or "".

    replaced: number of modules that attend among the tokens of the image or video.
    layout: axes of hidden_states: B batch, C channels, F frames, H rows, W columns, N tokens.
    """

    name: str
    sizes: dict[str, Any]
    inputs: Callable[[], Inputs]
    text: str = ""
    replaced: int = 2
    layout: str = ""

    @property
    def axes(self) -> list[str]:
        dims = self.inputs()["hidden_states"].dim()
        return (self.layout or {3: "B N C", 4: "B C H W", 5: "B C F H W"}[dims]).split()


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def text_mask() -> Tensor:
    """Of a batch whose second text has three tokens of padding."""
    return torch.tensor([[1] * TEXT, [1] * 4 + [0] * 3])


def call(hidden_states: Tensor, text_width: int = WIDTH, **more: Any) -> Inputs:
    """A model's inputs, with a text of `text_width` channels."""
    own = {"hidden_states": hidden_states, "timestep": torch.tensor([10, 5])}
    return {**own, "encoder_hidden_states": randn(2, TEXT, text_width), **more}


def video(channels: int = CHANNELS, text_width: int = WIDTH, **more: Any) -> Inputs:
    frames, *sides = GRID
    return call(randn(2, channels, frames, *(2 * side for side in sides)), text_width, **more)


def image(channels: int = CHANNELS, text_width: int = WIDTH, **more: Any) -> Inputs:
    return call(randn(2, channels, *(2 * side for side in IMAGE)), text_width, **more)


def tokens(channels: int = CHANNELS, text_width: int = WIDTH, **more: Any) -> Inputs:
    """Of an image or video whose patches are tokens already."""
    return call(randn(2, TOKENS, channels), text_width, **more)


def ids(axes: int = 3) -> Inputs:
    """Positions of the tokens of an image and a text, not one after another."""
    return {"img_ids": randn(TOKENS, axes), "txt_ids": randn(TEXT, axes)}


def fraction() -> Inputs:
    """A time step between 0 and 1."""
    return {"timestep": torch.tensor([1.0, 0.5])}


def sizes(heads: str = "num_attention_heads", width: str = "attention_head_dim", dim: int = 8, **more: Any) -> Inputs:
    """Arguments of a model of two heads and two layers, by the names that it gives them."""
    return {heads: HEADS, width: dim, "num_layers": 2} | more
