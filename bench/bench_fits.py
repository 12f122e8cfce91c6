"""Does `plan` know how much memory a LongNet's training step takes?"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexdilated import masks
from flexdilated._memory import attention_memory
from flexdilated.nn._model_memory import (
    ModelSize, attention_size, longnet_around, model_memory, training_step,
)  # fmt: skip

from ._memory import peak_bytes
from ._problem import tokens_text
from ._result import Result, Row, at_most
from ._timing import say

_WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Config:
    """Patterns, as expressions by name, in a LongNet of each dtype, with and without gradient checkpointing."""

    patterns: tuple[tuple[str, str], ...]
    dtypes: tuple[str, ...]
    num_tokens: int
    embed_dim: int
    depth: int
    num_heads: int


LONGNET_4 = "longnet((2048, 4096, 8192, 16384), (1, 2, 4, 8)) & causal()"
WINDOW = "causal() & local_window(left=511, right=0)"
LONGFORMER = "local_window(left=256, right=256) | global_tokens(16)"
_PATTERNS = (("LongNet-4, causal", LONGNET_4), ("window of 512, causal", WINDOW), ("window, global tokens", LONGFORMER))

FULL = Config(_PATTERNS, ("float32", "float16"), 65536, embed_dim=128, depth=3, num_heads=2)
SMALL = Config(_PATTERNS[:1], ("float32",), 8192, embed_dim=64, depth=2, num_heads=1)


def run(config: Config) -> Result:
    """The largest relative error of the predicted peaks; all of them as detail."""
    points = [
        _point(config, name, text, dtype, checkpoint)
        for name, text in config.patterns
        for dtype in config.dtypes
        for checkpoint in (False, True)
    ]
    worst = max(points, key=lambda point: abs(point["error"]))
    row = Row(
        f"LongNet of {config.depth} layers, {tokens_text(config.num_tokens)}, forward + backward: "
        f"predicted over measured peak, largest deviation of {len(points)}",
        at_most(10, "%"),
        100 * abs(worst["error"]),
        detail={"peaks": points},
    )
    return Result((row,))


def _point(config: Config, name: str, text: str, dtype: str, checkpoint: bool) -> dict[str, object]:
    size = ModelSize(config.embed_dim, config.depth, config.num_heads, getattr(torch, dtype))
    call = attention_memory(masks.parse(text), attention_size(size, config.num_tokens))
    predicted = model_memory(size, config.num_tokens, call, checkpoint=checkpoint).step_peak
    measured = peak_bytes(prepared, text, size, config.num_tokens, checkpoint)
    error = predicted / measured - 1
    say(f"{name}, {dtype}, {checkpoint=}: {predicted / 2**20:.0f} of {measured / 2**20:.0f} MiB, {error:+.1%}")
    return {
        "pattern": name, "dtype": dtype, "checkpoint": checkpoint,
        "predicted_bytes": predicted, "measured_bytes": measured, "error": error,
    }  # fmt: skip


def prepared(text: str, size: ModelSize, num_tokens: int, checkpoint: bool) -> Callable[[], object]:
    """A step from scratch, model and input included, after one at a tiny size."""
    step(text, size, _WARM_UP_TOKENS, checkpoint)
    return lambda: step(text, size, num_tokens, checkpoint)


def step(text: str, size: ModelSize, num_tokens: int, checkpoint: bool) -> None:
    """Make the model and its input, and run a forward and a backward."""
    model = longnet_around(masks.parse(text), size, checkpoint=checkpoint)
    training_step(model, torch.randn(size.batch, num_tokens, size.embed_dim, dtype=size.dtype))
