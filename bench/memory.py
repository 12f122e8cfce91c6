"""Peak memory: beside dense attention's, as `plan` predicts it, and with gradient checkpointing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from flexdilated import attend, masks
from flexdilated._plan_size import PlanSize
from flexdilated.cli._plan import BUDGETS, budget_data
from flexdilated.memory._memory import attention_memory
from flexdilated.nn import LongNet as Model
from flexdilated.nn._model_memory import ModelSize, attention_size, longnet_around, model_memory, training_step

from ._jobs import (
    WARM_UP_TOKENS,
    Job,
    Problem,
    Size,
    held_bytes,
    interleave,
    peak_bytes,
    say,
    step_bytes,
    tokens_text,
)
from ._measures import Row, at_least, at_most, measure
from ._rules import LONGNET_4, LongNet, Window
from .peers import dense_attention

Point = Mapping[str, Any]


@measure("C13", specs=(LONGNET_4.shrunk(8),), size=Size(4096, num_heads=1))
def training_memory(
    specs: tuple[LongNet | Window, ...] = (LONGNET_4, LONGNET_4.as_causal(), Window("window of 1024, causal", 1023, 0)),
    size: Size = Size(65536, num_heads=2),
) -> Iterator[Row]:
    """Does a training step of sparse attention fit where dense attention's does?

    Peak memory of forward and backward, inputs and gradients included, over dense SDPA's.
    """
    dense = cache(lambda causal: step_bytes("dense SDPA", partial(dense_attention, causal=causal), size))
    for spec in specs:
        theirs, ours = dense(spec.causal), step_bytes("flexdilated", spec.attention, size)
        what = f"{spec.label}, {size}, forward + backward: peak memory over dense SDPA's"
        yield Row(
            what, at_most(1.3, "×"), ours / max(1, theirs), detail={"peak_bytes": ours, "dense_peak_bytes": theirs}
        )


@measure("C28", lengths=(17, 32), size=Size(32, num_heads=1, head_dim=8))
def window_lengths(
    lengths: tuple[int, int] = (17, 917), size: Size = Size(916, num_heads=1, head_dim=8)
) -> Iterator[Row]:
    """What stays in memory after calls of a window at hundreds of lengths, whose tensors take kilobytes each?

    Resident bytes that a fresh process gains, after a first call.
    """
    held = held_bytes(_windows, lengths, size)
    what = f"window of 16, {lengths[1] - lengths[0]} lengths up to {lengths[1] - 1}, head dim {size.head_dim}"
    yield Row(f"{what}: memory that stays", at_most(64, "MiB"), held / 2**20)


def _windows(lengths: tuple[int, int], size: Size) -> Callable[[], object]:
    pattern = masks.local_window(left=15, right=0)

    def call(num_tokens: int) -> None:
        attend(*Problem.draw(replace(size, num_tokens=num_tokens)).qkv, pattern)

    call(lengths[0] - 1)
    return lambda: [call(num_tokens) for num_tokens in range(*lengths)]


_LONGNET_4 = "longnet((2048, 4096, 8192, 16384), (1, 2, 4, 8)) & causal()"
_PATTERNS = (
    ("LongNet-4, causal", _LONGNET_4),
    ("window of 512, causal", "local_window(left=511, right=0)"),
    ("window, global tokens", "local_window(left=256, right=256) | global_tokens(16)"),
)


@measure(patterns=_PATTERNS[:1], dtypes=("float32",), num_tokens=512, embed_dim=32, num_heads=1, budgets=())
def fits(
    patterns: tuple[tuple[str, str], ...] = _PATTERNS,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    num_tokens: int = 65536,
    embed_dim: int = 128,
    depth: int = 2,
    num_heads: int = 2,
    budgets: tuple[int, ...] = BUDGETS,
) -> Iterator[Row]:
    """Does `plan` know how much memory attention and a LongNet's training step take?

    The largest deviation of predicted from measured peaks; all of them as detail, and the longest sequences for the
    `budgets`, in bytes, of the first pattern in float16.
    """
    calls, models = [], []
    for name, text in patterns:
        for dtype in dtypes:
            size = ModelSize(embed_dim, depth, num_heads, getattr(torch, dtype))
            call = attention_memory(masks.parse(text), attention_size(size, num_tokens))
            measured = peak_bytes(_prepared_call, text, size, num_tokens)
            calls.append(_point(name, dtype, None, call.training_peak, measured))
            for checkpoint in (False, True):
                predicted = model_memory(size, num_tokens, call, checkpoint=checkpoint).step_peak
                measured = peak_bytes(prepared_step, text, size, num_tokens, checkpoint)
                models.append(_point(name, dtype, checkpoint, predicted, measured))
    sizes: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "value_dim": 64}
    sizes |= {"layers": 12, "batch": 1}
    sizes |= {"pattern": masks.parse(patterns[0][1]), "num_tokens": num_tokens, "dtype": torch.float16}
    devices = ("cpu", "cuda") if budgets else ()
    longest = {device: budget_data(PlanSize(**sizes, device=device), budgets) for device in devices}
    yield _deviation(f"attend, {tokens_text(num_tokens)}", calls, longest=longest)
    yield _deviation(f"LongNet of {depth} layers, {tokens_text(num_tokens)}", models)


def _deviation(what: str, points: list[Point], **more: Any) -> Row:
    deviations = [100 * abs(point["predicted_bytes"] / max(1, point["measured_bytes"]) - 1) for point in points]
    name = f"{what}, forward + backward: deviation of the predicted peak memory, largest of {len(points)}"
    return Row(name, at_most(10, "%"), max(deviations), detail={"peaks": points, **more})


def _point(name: str, dtype: str, checkpoint: bool | None, predicted: int, measured: int) -> Point:
    kind = "attend" if checkpoint is None else f"LongNet, {checkpoint=}"
    say(f"{kind}, {name}, {dtype}: {predicted / 2**20:.0f} MiB predicted, {measured / 2**20:.0f} MiB measured")
    point = {"pattern": name, "dtype": dtype, "checkpoint": checkpoint}
    return {**point, "predicted_bytes": predicted, "measured_bytes": measured}


def _prepared_call(text: str, size: ModelSize, num_tokens: int) -> Callable[[], object]:
    """An attention call and its inputs, after one at a tiny size."""
    _call(text, size, WARM_UP_TOKENS)
    return lambda: _call(text, size, num_tokens)


def _call(text: str, size: ModelSize, num_tokens: int) -> None:
    shape = size.batch, num_tokens, size.num_heads, size.head_dim
    q, k, v = (torch.randn(shape, dtype=size.dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    out = attend(q, k, v, masks.parse(text))
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def prepared_step(text: str, size: ModelSize, num_tokens: int, checkpoint: bool) -> Callable[[], object]:
    """A training step, model and input included, after one at a tiny size."""
    _model_step(text, replace(size, depth=1), WARM_UP_TOKENS, checkpoint=checkpoint)
    return lambda: _model_step(text, size, num_tokens, checkpoint=checkpoint)


def _model_step(text: str, size: ModelSize, num_tokens: int, *, checkpoint: bool) -> None:
    model = longnet_around(masks.parse(text), size, checkpoint=checkpoint)
    training_step(model, torch.randn(size.batch, num_tokens, size.embed_dim, dtype=size.dtype))


@measure(num_tokens=512, embed_dim=32, depth=2, repeats=1)
def checkpointing(
    name: str = "LongNet-4, causal",
    pattern: str = _LONGNET_4,
    num_tokens: int = 16384,
    embed_dim: int = 128,
    depth: int = 8,
    num_heads: int = 2,
    repeats: int = 3,
) -> Iterator[Row]:
    """What does gradient checkpointing save in memory, and cost in time?

    Peak memory without over with, and time with over without; the gradients are compared at an eighth of the tokens.
    """
    size = ModelSize(embed_dim, depth, num_heads, torch.float32)

    def drawn(tokens: int) -> Tensor:
        return torch.randn(size.batch, tokens, size.embed_dim, generator=torch.Generator().manual_seed(1))

    models: dict[str, Model] = {}
    for way in ("plain", "checkpointed"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            models[way] = longnet_around(masks.parse(pattern), size, checkpoint=way == "checkpointed")
    few = [training_step(model, drawn(num_tokens // 8)) for model in models.values()]
    torch.testing.assert_close(few[1], few[0])
    for plain, checkpointed in zip(*(model.parameters() for model in models.values()), strict=True):
        torch.testing.assert_close(checkpointed.grad, plain.grad)
    peaks = [peak_bytes(prepared_step, pattern, size, num_tokens, checkpoint) for checkpoint in (False, True)]
    call = attention_memory(masks.parse(pattern), attention_size(size, num_tokens))
    predicted = [model_memory(size, num_tokens, call, checkpoint=each).step_peak for each in (False, True)]
    x = drawn(num_tokens)
    jobs = [Job(way, lambda _, model=model: training_step(model, x), model.zero_grad) for way, model in models.items()]
    for job in jobs:
        job.seconds()
    timings = interleave(jobs, repeats=repeats)
    what = f"{name}, {depth} layers, {tokens_text(num_tokens)}, forward + backward"
    detail = {"peak_bytes": peaks[0], "checkpointed_peak_bytes": peaks[1]}
    detail |= {"predicted_bytes": predicted[0], "predicted_checkpointed_bytes": predicted[1]}
    smaller, slower = peaks[0] / max(1, peaks[1]), timings[1].median_s / timings[0].median_s
    yield Row(f"{what}: peak memory over that with checkpointing", at_least(3, "×"), smaller, detail=detail)
    yield Row(f"{what}: time with checkpointing over that without", at_most(1.5, "×"), slower, timings)
