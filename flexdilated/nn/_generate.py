"""Generation: tokens drawn one at a time from a model's logits of the next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..masks.core import require_finite, require_int

# B batch, N tokens, V vocabulary

NextLogits = Callable[[Int64[Tensor, "B N"]], Float[Tensor, "B V"]]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from its logits, as in `LongNet.generate`; validated on construction."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if require_finite("temperature", self.temperature) < 0:
            raise ValueError(f"temperature must be at least 0; got temperature={self.temperature}")
        if self.top_k is not None:
            require_int("top_k", self.top_k, minimum=1)
        if self.top_p is not None and not 0 < require_finite("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; got top_p={self.top_p}")

    def draw(self, logits: Float[Tensor, "B V"]) -> Int64[Tensor, " B"]:
        """Draw one token per sequence."""
        if self.temperature == 0:
            return logits.argmax(-1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        likely, tokens = wide.sort(dim=-1, descending=True)
        # Subtracting the largest logit avoids overflow at any temperature.
        temperature = max(self.temperature, torch.finfo(wide.dtype).tiny)
        probabilities = ((likely - likely[:, :1]) / temperature).softmax(-1)
        if self.top_k is not None:
            probabilities[:, self.top_k :] = 0
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities
            beyond = before >= self.top_p * probabilities.sum(-1, keepdim=True)
            probabilities[:, 1:][beyond[:, 1:]] = 0
        drawn = torch.multinomial(probabilities, 1, generator=self.generator)
        return tokens.gather(-1, drawn).squeeze(-1)


def generate(
    next_logits: NextLogits,
    tokens: Int64[Tensor, "B N"],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    stop: int | None = None,
    prefill_chunk: int = 8192,
) -> Int64[Tensor, "B new"]:
    """Draw the following tokens, at most `max_new_tokens`; fewer if every sequence has drawn `stop` before.

    next_logits: called with consecutive tokens, first with the prompt in chunks; returns the logits of the token after
    them, and keeps earlier tokens in its own state. After its first `stop` a sequence contains only `stop`.
    """
    require_int("prefill_chunk", prefill_chunk, minimum=1)
    if stop is not None:
        require_int("stop", stop, minimum=0)
    new = tokens.new_empty(tokens.shape[0], 0)
    if max_new_tokens == 0:
        return new
    *earlier, ahead = tokens.split(prefill_chunk, dim=1)
    for chunk in earlier:
        next_logits(chunk)
    stopped = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    while True:
        token = sampling.draw(next_logits(ahead))
        if stop is not None:
            token = token.masked_fill(stopped, stop)
            stopped = stopped | (token == stop)
        ahead = token.unsqueeze(1)
        new = torch.cat([new, ahead], dim=1)
        if new.shape[1] == max_new_tokens or (stop is not None and bool(stopped.all())):
            return new
