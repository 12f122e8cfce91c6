"""The demo's language model: the last few bytes embedded, LongNet, logits of the next byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ..nn import LongNet, LongNetConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# B batch, N tokens, L those of this process, E embed dim
_BYTES = 256
_EMBED_DIM, _DEPTH, _NUM_HEADS = 128, 2, 4
# The bytes that a token's embedding sees: itself and those just before it.
_LOOKBACK = 4
_SHORTEST_SEGMENT, _SEGMENT_RATIO, _RATE_RATIO = 256, 4, 2
# The picture's pattern is the default one, scaled down 32 times.
PICTURE_TOKENS, PICTURE_BLOCK = 512, 8
_PICTURE_SHORTEST_SEGMENT = 8


def model_config(context: int) -> LongNetConfig:
    """A small causal LongNet: segments of 256 at rate 1, then 4 times longer at twice the rate."""
    return _config(context, shortest=_SHORTEST_SEGMENT)


def picture_config() -> LongNetConfig:
    """The same at a size that a picture can show."""
    return _config(PICTURE_TOKENS, shortest=_PICTURE_SHORTEST_SEGMENT)


def _config(context: int, *, shortest: int) -> LongNetConfig:
    segments = [shortest]
    while segments[-1] < context:
        segments.append(segments[-1] * _SEGMENT_RATIO)
    segments[-1] = context
    return LongNetConfig(
        vocab_size=None,
        embed_dim=_EMBED_DIM,
        depth=_DEPTH,
        num_heads=_NUM_HEADS,
        segment_lengths=tuple(segments),
        dilation_rates=tuple(_RATE_RATIO**branch for branch in range(len(segments))),
    )


class ByteModel(nn.Module):
    """Logits of each next byte, from the bytes up to it.

    A byte enters as the sum of an embedding of itself and, from tables of their own, of the bytes just before
    it: what attention would learn first, and slowest, in a short training. With a mesh each process computes its
    own positions of every text, in zigzag order: a causal model's early ones are less work than its late ones.
    """

    def __init__(self, config: LongNetConfig, *, num_tokens: int, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        E = config.embed_dim
        tables = [nn.Embedding(_BYTES, E) for _ in range(_LOOKBACK)]
        self.embeddings = nn.ModuleList(tables)
        self.trunk = LongNet(config, mesh=mesh, sharding=None if mesh is None else _sharding(num_tokens, mesh))
        self.over_ranks = self.trunk.over_ranks
        self.head = nn.Linear(E, _BYTES)
        for table in tables:
            nn.init.normal_(table.weight, std=_LOOKBACK**-0.5)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def lookback(self) -> int:
        """The bytes that an embedding sees."""
        return len(self.embeddings)

    def forward(self, tokens: Int64[Tensor, "B N"]) -> Float[Tensor, "B L 256"]:
        """Of all bytes, the logits that follow those at `positions`."""
        return self.head(self.trunk(self.embed(tokens)))

    def positions(self, num_tokens: int) -> Int64[Tensor, " L"]:
        """Where in a text of so many bytes those stand that are this process's: everywhere, without a mesh."""
        device = self.head.weight.device
        if self.over_ranks is None:
            return torch.arange(num_tokens, device=device)
        return self.over_ranks.sharding_of(num_tokens).positions(self.over_ranks.ranks.rank, device)

    def embed(self, tokens: Int64[Tensor, "B N"]) -> Float[Tensor, "B L E"]:
        """Each of this process's bytes with those just before it."""
        positions = self.positions(tokens.shape[1])
        x = torch.zeros((), device=tokens.device)
        for distance, table in enumerate(self.embeddings):
            before = positions - distance
            x = x + table(tokens[:, before.clamp(min=0)]).masked_fill(before[:, None] < 0, 0.0)
        return x


def build_model(context: int, *, seed: int, mesh: DeviceMesh | None = None) -> ByteModel:
    """The model with parameters drawn from `seed`; the caller's random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ByteModel(model_config(context), num_tokens=context, mesh=mesh)


def _sharding(num_tokens: int, mesh: DeviceMesh):
    from ..distributed import Sharding

    return Sharding(num_tokens, mesh.size(), "zigzag")
