"""A sample: what the trained model makes of the beginning of a held-out text, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from ..nn._generate import Sampling, generate
from ._model import ByteModel
from ._out import replace

FILE_NAME = "sample.txt"
_TEMPERATURE = 0.7  # below 1: an undertrained model's rare bytes are mostly wrong ones
_SHOWN_OF_PROMPT = 300
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Sample:
    """A prompt and its continuation, and how fast that came."""

    prompt: bytes
    continuation: bytes
    seconds: float

    def summary(self) -> str:
        """One line of figures."""
        rate = len(self.continuation) / self.seconds
        return (
            f"sample    {len(self.continuation):,} bytes after {len(self.prompt):,} of a held-out text: "
            f"{rate:,.0f} bytes a second, the prompt included"
        )

    def text(self) -> str:
        """The end of the prompt and what the model wrote, as printable text."""
        shown = _printable(self.prompt[-_SHOWN_OF_PROMPT:])
        return f"{shown}\n--- the model goes on ---\n{_printable(self.continuation)}\n"


@torch.no_grad()
def draw_sample(model: ByteModel, prompt: UInt8[Tensor, " n"], *, num_bytes: int, seed: int) -> Sample:
    """Continue the prompt; the same seed draws the same bytes."""
    device = model.head.weight.device
    sampling = Sampling(temperature=_TEMPERATURE, generator=torch.Generator(device).manual_seed(seed))
    tokens = prompt.to(device, torch.int64)[None]
    began = perf_counter()
    drawn = generate(next_logits(model), tokens, sampling, max_new_tokens=num_bytes)
    continuation = bytes(drawn[0].tolist())  # waits for the device
    return Sample(bytes(prompt.tolist()), continuation, perf_counter() - began)


def next_logits(model: ByteModel) -> Callable[[Int64[Tensor, "1 N"]], Float[Tensor, "1 256"]]:
    """A function of consecutive bytes that returns the logits of the next: it keeps what earlier ones left."""
    caches = model.trunk.new_caches()
    recent = torch.empty(1, 0, dtype=torch.int64, device=model.head.weight.device)

    def following(tokens: Tensor) -> Tensor:
        nonlocal recent
        window = torch.cat([recent, tokens], dim=1)
        embedded = model.embed(window)[:, recent.shape[1] :]
        recent = window[:, -(model.lookback - 1) :]
        return model.head(model.trunk(embedded, caches=caches)[:, -1])

    return following


def save_sample(folder: Path, sample: Sample) -> None:
    """Write the text in place of an earlier one."""
    replace(folder / FILE_NAME, lambda path: path.write_text(sample.text(), encoding="utf-8"))


def _printable(data: bytes) -> str:
    """Text that changes nothing in a terminal: what is not UTF-8, and control characters, are replaced."""
    text = data.decode("utf-8", errors="replace")
    return "".join(character if character.isprintable() or character in "\n\t" else _REPLACEMENT for character in text)
