"""Does `plan` know how much memory attention and a LongNet's training step take?"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexdilated import attend, masks
from flexdilated._plan import PlanSize
from flexdilated.cli._plan import BUDGETS, budget_data
from flexdilated.memory._memory import attention_memory
from flexdilated.nn._model_memory import ModelSize, attention_size, longnet_around, model_memory, training_step

from ._memory import peak_bytes
from ._problem import tokens_text
from ._result import Result, Row, at_most
from ._timing import say

Point = Mapping[str, Any]

_WARM_UP_TOKENS = 64
_M_MMAP_THRESHOLD = -3  # of glibc's mallopt


@dataclass(frozen=True)
class Config:
    """Patterns, as expressions by name, in a LongNet of each dtype, with and without gradient checkpointing.

    The `budgets`, in bytes, are those for which the longest sequence is told beside.
    """

    patterns: tuple[tuple[str, str], ...]
    dtypes: tuple[str, ...]
    num_tokens: int
    embed_dim: int
    depth: int
    num_heads: int
    budgets: tuple[int, ...] = BUDGETS

    def size(self, dtype: str) -> ModelSize:
        return ModelSize(self.embed_dim, self.depth, self.num_heads, getattr(torch, dtype))


LONGNET_4 = "longnet((2048, 4096, 8192, 16384), (1, 2, 4, 8)) & causal()"
WINDOW = "local_window(left=511, right=0)"
LONGFORMER = "local_window(left=256, right=256) | global_tokens(16)"
_PATTERNS = (("LongNet-4, causal", LONGNET_4), ("window of 512, causal", WINDOW), ("window, global tokens", LONGFORMER))

FULL = Config(_PATTERNS, ("float32", "bfloat16"), 65536, embed_dim=128, depth=2, num_heads=2)
SMALL = Config(_PATTERNS[:1], ("float32",), 8192, embed_dim=64, depth=2, num_heads=1, budgets=())


def run(config: Config) -> Result:
    """The largest deviation of predicted from measured peaks; all of them as detail."""
    every = [(name, text, dtype) for name, text in config.patterns for dtype in config.dtypes]
    size = tokens_text(config.num_tokens)
    return Result(
        (
            _row(f"attend, {size}", [_attention(config, *each) for each in every], {"longest": _longest(config)}),
            _row(
                f"LongNet of {config.depth} layers, {size}",
                [_model(config, *each, checkpoint) for each in every for checkpoint in (False, True)],
            ),
        )
    )


def _longest(config: Config) -> dict[str, Any]:
    """What `plan --budget` tells of the first pattern in float16, by device."""
    return (
        {device: budget_data(_size(config, device), config.budgets) for device in ("cpu", "cuda")}
        if config.budgets
        else {}
    )


def _size(config: Config, device: str) -> PlanSize:
    heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "layers": 12, "embed_dim": 512}
    return PlanSize(
        pattern=masks.parse(config.patterns[0][1]),
        num_tokens=config.num_tokens,
        **heads,
        dtype=torch.float16,
        device=device,
        batch=1,
    )


def _row(what: str, points: list[Point], more: Mapping[str, Any] | None = None) -> Row:
    deviations = [100 * abs(point["predicted_bytes"] / point["measured_bytes"] - 1) for point in points]
    name = f"{what}, forward + backward: deviation of the predicted peak memory, largest of {len(points)}"
    return Row(name, at_most(10, "%"), max(deviations), detail={"peaks": points, **(more or {})})


def _attention(config: Config, name: str, text: str, dtype: str) -> Point:
    size = attention_size(config.size(dtype), config.num_tokens)
    predicted = attention_memory(masks.parse(text), size).training_peak
    return _point(name, dtype, None, predicted, peak_bytes(_prepared_call, text, config.size(dtype), config.num_tokens))


def _model(config: Config, name: str, text: str, dtype: str, checkpoint: bool) -> Point:
    size, num_tokens = config.size(dtype), config.num_tokens
    call = attention_memory(masks.parse(text), attention_size(size, num_tokens))
    predicted = model_memory(size, num_tokens, call, checkpoint=checkpoint).step_peak
    measured = peak_bytes(prepared_step, text, size, num_tokens, checkpoint)
    return _point(name, dtype, checkpoint, predicted, measured)


def _point(name: str, dtype: str, checkpoint: bool | None, predicted: int, measured: int) -> Point:
    kind = "attend" if checkpoint is None else f"LongNet, {checkpoint=}"
    say(f"{kind}, {name}, {dtype}: {predicted / 2**20:.0f} MiB predicted, {measured / 2**20:.0f} MiB measured")
    sizes = {"predicted_bytes": predicted, "measured_bytes": measured}
    return {"pattern": name, "dtype": dtype, "checkpoint": checkpoint, **sizes}


def _prepared_call(text: str, size: ModelSize, num_tokens: int) -> Callable[[], object]:
    """An attention call from scratch, inputs included, after one at a tiny size."""
    _give_back_what_is_freed()
    _call(text, size, _WARM_UP_TOKENS)
    return lambda: _call(text, size, num_tokens)


def _call(text: str, size: ModelSize, num_tokens: int) -> None:
    shape = size.batch, num_tokens, size.num_heads, size.head_dim
    q, k, v = (torch.randn(shape, dtype=size.dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    out = attend(q, k, v, masks.parse(text))
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def prepared_step(text: str, size: ModelSize, num_tokens: int, checkpoint: bool) -> Callable[[], object]:
    """A step from scratch, model and input included, after one at a tiny size."""
    _give_back_what_is_freed()
    step(text, replace(size, depth=1), _WARM_UP_TOKENS, checkpoint=checkpoint)
    return lambda: step(text, size, num_tokens, checkpoint=checkpoint)


def step(text: str, size: ModelSize, num_tokens: int, *, checkpoint: bool) -> None:
    """Make the model and its input, and run a forward and a backward."""
    model = longnet_around(masks.parse(text), size, checkpoint=checkpoint)
    training_step(model, torch.randn(size.batch, num_tokens, size.embed_dim, dtype=size.dtype))


def _give_back_what_is_freed() -> None:
    """Have glibc return what is freed from 1 MiB on: it would keep pieces of up to 32 MB, which then hold no tensor."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
