"""The demo's language model: the last few bytes embedded, LongNet, logits of the next; optimisers and samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from ..nn import LongNet, LongNetConfig, Sampling, generate

# B batch, N tokens, E embed dim
_BYTES = 256
_EMBED_DIM, _DEPTH, _NUM_HEADS = 128, 2, 4
_LOOKBACK = 4  # the bytes that a token's embedding sees: itself and those just before it
_SEGMENT_RATIO, _RATE_RATIO = 4, 2
_MATRIX_RATE, _OTHER_RATE = 0.04, 0.015
_TEMPERATURE = 0.7  # below 1: an undertrained model's rare bytes are mostly wrong ones
_SHOWN_OF_PROMPT = 300


def model_config(context: int, *, shortest: int = 256) -> LongNetConfig:
    """A small causal LongNet: segments of `shortest` at rate 1, then 4 times longer at twice the rate."""
    segments = [shortest]
    while segments[-1] < context:
        segments.append(segments[-1] * _SEGMENT_RATIO)
    segments[-1] = context
    rates = tuple(_RATE_RATIO**branch for branch in range(len(segments)))
    sizes = {"vocab_size": None, "embed_dim": _EMBED_DIM, "depth": _DEPTH, "num_heads": _NUM_HEADS}
    return LongNetConfig(**sizes, segment_lengths=tuple(segments), dilation_rates=rates)


class ByteModel(nn.Module):
    """Logits of each next byte, from the bytes up to it.

    A byte enters as the sum of an embedding of itself and, from tables of their own, of the bytes just before it: what
    attention would learn first, and slowest, in a short training. Parameters are drawn from `seed`; the caller's
    random state stays as it is.
    """

    def __init__(self, config: LongNetConfig, *, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embeddings = nn.ModuleList(nn.Embedding(_BYTES, config.embed_dim) for _ in range(_LOOKBACK))
            self.trunk = LongNet(config)
            self.head = nn.Linear(config.embed_dim, _BYTES)
            for table in self.embeddings.parameters():
                nn.init.normal_(table, std=_LOOKBACK**-0.5)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Int64[Tensor, "B N"]) -> Float[Tensor, "B N 256"]:
        return self.head(self.trunk(self.embed(tokens)))

    def embed(self, tokens: Int64[Tensor, "B N"]) -> Float[Tensor, "B N E"]:
        """Each byte with those just before it."""
        length, x = tokens.shape[1], torch.zeros((), device=tokens.device)
        for distance, table in enumerate(self.embeddings):
            x = x + F.pad(table(tokens[:, : max(0, length - distance)]), (0, 0, min(distance, length), 0))
        return x

    def optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """Muon for the blocks' matrices, AdamW for everything else; each group's full rate is its "initial_lr".

        Muon makes every direction of a matrix's update count alike, which in a run of a few hundred steps is worth a
        multiple of them. Source: Keller Jordan, "Muon: an optimizer for hidden layers", 2024.
        """
        matrices = [p for p in self.trunk.parameters() if p.dim() == 2]
        chosen = {id(p) for p in matrices}
        groups = (
            {"params": matrices, "initial_lr": _MATRIX_RATE},
            {"params": [p for p in self.parameters() if id(p) not in chosen], "initial_lr": _OTHER_RATE},
        )
        return (
            torch.optim.Muon([groups[0]], momentum=0.9, weight_decay=0.0),
            torch.optim.AdamW([groups[1]], betas=(0.9, 0.95), weight_decay=0.0),
        )

    def next_logits(self) -> Callable[[Int64[Tensor, "1 N"]], Float[Tensor, "1 256"]]:
        """A function of consecutive bytes that returns the logits of the next: it keeps what earlier ones left."""
        caches = self.trunk.new_caches()
        recent = torch.empty(1, 0, dtype=torch.int64, device=self.head.weight.device)

        def following(tokens: Tensor) -> Tensor:
            nonlocal recent
            window = torch.cat([recent, tokens], dim=1)
            embedded = self.embed(window)[:, recent.shape[1] :]
            recent = window[:, -(_LOOKBACK - 1) :]
            return self.head(self.trunk(embedded, caches=caches)[:, -1])

        return following


@torch.no_grad()
def draw_sample(model: ByteModel, prompt: UInt8[Tensor, " n"], *, num_bytes: int, seed: int) -> bytes:
    """What the model makes of the prompt, byte by byte; the same seed draws the same bytes."""
    device = model.head.weight.device
    sampling = Sampling(temperature=_TEMPERATURE, generator=torch.Generator(device).manual_seed(seed))
    drawn = generate(model.next_logits(), prompt.to(device, torch.int64)[None], sampling, max_new_tokens=num_bytes)
    return bytes(drawn[0].tolist())


def sample_text(prompt: bytes, continuation: bytes) -> str:
    """The end of the prompt and what the model wrote, as text that changes nothing in a terminal."""

    def printable(data: bytes) -> str:
        text = data.decode("utf-8", errors="replace")
        return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)

    return f"{printable(prompt[-_SHOWN_OF_PROMPT:])}\n--- the model goes on ---\n{printable(continuation)}\n"
