"""Small transformer models of diffusers with random weights, and their outputs."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from bench._vision import vision

from ._images import IMAGES
from ._inputs import GRID, HEADS, TOKENS, Inputs
from ._videos import VIDEOS

__all__ = ["GRID", "HEADS", "MODELS", "TOKENS", "Inputs", "diffusers", "model_of", "output", "times_with_text"]

MODELS = VIDEOS | IMAGES


def diffusers() -> Any:
    """The package; ImportError says where it is looked for."""
    vision()
    return importlib.import_module("diffusers")


def model_of(name: str, **more: Any) -> Any:
    """With random weights, in training mode; more: arguments beside those of its sizes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(diffusers(), MODELS[name].name)(**MODELS[name].sizes | more)
        for x in model.parameters():  # what begins at 0 would hide what attention does
            nn.init.normal_(x, *((0.5, 0.3) if x.dim() == 1 else (0.0, x[0].numel() ** -0.5)))
        return model.train()


def output(model: nn.Module, name: str) -> Tensor:
    return model(**MODELS[name].inputs())[0]


def times_with_text(times: Tensor, text: str, num_queries: int, num_keys: int) -> Tensor | None:
    """Dense counts of a call among the TOKENS of the grid, or those and a text before or behind that sees all.

    times: counts over the grid, (H, TOKENS, TOKENS).
    text: "first" or "last" in joint attention, or "".

    Returns None for other calls.
    """
    num_text = num_queries - TOKENS
    if num_queries != num_keys or num_text < 0:
        return None
    whole = times.new_ones(times.shape[0], num_queries, num_keys)
    grid = slice(num_text, None) if text == "first" else slice(None, TOKENS)
    whole[:, grid, grid] = times
    return whole
