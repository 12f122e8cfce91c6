"""What does gradient checkpointing save in memory, and cost in time?"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexdilated import masks
from flexdilated.memory._memory import attention_memory
from flexdilated.nn import LongNet
from flexdilated.nn._model_memory import ModelSize, attention_size, longnet_around, model_memory, training_step

from ._memory import peak_bytes
from ._problem import tokens_text
from ._result import Result, Row, at_least, at_most
from ._timing import Job, interleave, say
from .bench_fits import LONGNET_4, prepared_step


@dataclass(frozen=True)
class Config:
    """A LongNet of one size with one pattern, as an expression, in float32."""

    name: str
    pattern: str
    num_tokens: int
    embed_dim: int
    depth: int
    num_heads: int
    repeats: int

    @property
    def size(self) -> ModelSize:
        return ModelSize(self.embed_dim, self.depth, self.num_heads, torch.float32)


FULL = Config("LongNet-4, causal", LONGNET_4, 16384, embed_dim=128, depth=8, num_heads=2, repeats=3)
SMALL = replace(FULL, num_tokens=1024, embed_dim=32, depth=2, num_heads=2, repeats=1)


def run(config: Config) -> Result:
    """Peak memory without over with, and time with over without; the gradients are the same."""
    _check(config)
    plain, checkpointed = (_peak(config, checkpoint=checkpoint) for checkpoint in (False, True))
    jobs = [Job(name, _step(config, checkpoint=name == "checkpointed")) for name in ("plain", "checkpointed")]
    for job in jobs:
        job.seconds()
    timings = interleave(jobs, repeats=config.repeats)
    what = f"{config.name}, {config.depth} layers, {tokens_text(config.num_tokens)}, forward + backward"
    detail = {
        "peak_bytes": plain,
        "checkpointed_peak_bytes": checkpointed,
        "predicted_bytes": _predicted(config, checkpoint=False),
        "predicted_checkpointed_bytes": _predicted(config, checkpoint=True),
    }
    slower = timings[1].median_s / timings[0].median_s
    smaller = plain / checkpointed
    return Result(
        (
            Row(f"{what}: peak memory over that with checkpointing", at_least(3, "×"), smaller, detail=detail),
            Row(f"{what}: time with checkpointing over that without", at_most(1.5, "×"), slower, timings),
        )
    )


def _peak(config: Config, *, checkpoint: bool) -> int:
    peak = peak_bytes(prepared_step, config.pattern, config.size, config.num_tokens, checkpoint)
    say(f"{checkpoint=}: peak {peak / 2**20:.0f} MiB")
    return peak


def _predicted(config: Config, *, checkpoint: bool) -> int:
    call = attention_memory(masks.parse(config.pattern), attention_size(config.size, config.num_tokens))
    return model_memory(config.size, config.num_tokens, call, checkpoint=checkpoint).step_peak


def _step(config: Config, *, checkpoint: bool) -> Callable[[object], object]:
    model, x = _model(config, checkpoint=checkpoint), _input(config, config.num_tokens)

    def step(_: object) -> None:
        model.zero_grad()
        training_step(model, x)

    return step


def _check(config: Config) -> None:
    """Both ways have the same features and gradients, at an eighth of the tokens."""
    models = [_model(config, checkpoint=checkpoint) for checkpoint in (False, True)]
    features = [training_step(model, _input(config, config.num_tokens // 8)) for model in models]
    torch.testing.assert_close(features[1], features[0])
    for plain, checkpointed in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(checkpointed.grad, plain.grad)


def _model(config: Config, *, checkpoint: bool) -> LongNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return longnet_around(masks.parse(config.pattern), config.size, checkpoint=checkpoint)


def _input(config: Config, num_tokens: int) -> Tensor:
    shape = config.size.batch, num_tokens, config.size.embed_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
