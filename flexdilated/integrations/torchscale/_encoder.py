"""torchscale's LongNet encoder: pre-norm layers with a norm inside attention and feed-forward (sub-LN)."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any, Literal, Self, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ._attention import DilatedSelfAttention
from ._config import LongNetEncoderConfig, load

# B batch, N tokens, E embed dim, F hidden dim


class LongNetEncoder(nn.Module):
    """Encoder layers over embedded tokens (B, N, E); parameter names are torchscale's.

    Without `config.padding` it is LongNet as defined, for new weights: one exact softmax over all branches. With
    padding="zeros", which `from_torchscale` sets, it reproduces torchscale's encoder. Weights are initialized as there:
    nn.Linear's initialization, with value, output and feed-forward projections scaled by sqrt(log(2 * depth)).
    Source: microsoft/torchscale, architecture/encoder.py; MAGNETO (sub-LN), arXiv 2210.06423.

    >>> from flexdilated.integrations.torchscale import LongNetEncoder
    >>> config = {"encoder_embed_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 4}
    >>> config |= {"segment_length": "[64, 256]", "dilated_ratio": "[1, 4]"}
    >>> encoder = LongNetEncoder.from_torchscale(config)
    >>> encoder(torch.randn(1, 300, 64)).shape
    torch.Size([1, 300, 64])
    """

    def __init__(
        self,
        config: LongNetEncoderConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList([EncoderLayer(config, index, **how) for index in range(config.depth)])
        self.layer_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps, **how) if config.final_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self._scale_weights()

    @classmethod
    def from_torchscale(
        cls, config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None, **changes: Any
    ) -> Self:
        """Encoder of a torchscale config, with weights if given.

        config: options of its EncoderConfig, as in its JSON. state_dict: exactly the encoder's parameters; from a
        checkpoint of a larger model, select them and remove their prefix. changes: fields of `LongNetEncoderConfig`,
        such as padding=None for exact attention, or merge_grad="detached" for torchscale's gradients.

        Raises ValueError that names all unsupported options, or all keys that do not fit.
        """
        encoder = cls(LongNetEncoderConfig.from_torchscale(config, **changes))
        if state_dict is not None:
            load(encoder, state_dict)
        return encoder

    @overload
    def forward(self, x: Float[Tensor, "B N E"], *, all_layers: Literal[False] = False) -> Float[Tensor, "B N E"]: ...

    @overload
    def forward(
        self, x: Float[Tensor, "B N E"], *, all_layers: Literal[True]
    ) -> tuple[Float[Tensor, "B N E"], ...]: ...

    def forward(
        self, x: Float[Tensor, "B N E"], *, all_layers: bool = False
    ) -> Float[Tensor, "B N E"] | tuple[Float[Tensor, "B N E"], ...]:
        """Features of the tokens. all_layers: return the first layer's input and each layer's output, unnormed."""
        x = self.dropout(x)
        states = [x]
        for layer in self.layers:
            x = layer(x)
            if all_layers:
                states.append(x)
        if all_layers:
            return tuple(states)
        return x if self.layer_norm is None else self.layer_norm(x)

    @torch.no_grad()
    def _scale_weights(self) -> None:
        scale = log(2 * self.config.depth) ** 0.5
        for name, parameter in self.layers.named_parameters():
            if any(part in name for part in ("fc1", "fc2", "out_proj", "v_proj")):
                parameter.mul_(scale)


class EncoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); in training, a batch entry may skip either (`drop_path`).

    index: number of the layer in the encoder, from 0.

    >>> from flexdilated.integrations.torchscale import EncoderLayer, LongNetEncoderConfig
    >>> sizes = {"embed_dim": 64, "depth": 2, "num_heads": 4}
    >>> layer = EncoderLayer(LongNetEncoderConfig(**sizes, segment_lengths=(64,), dilation_rates=(2,)), 1)
    >>> layer(torch.randn(1, 100, 64)).shape
    torch.Size([1, 100, 64])
    """

    def __init__(
        self,
        config: LongNetEncoderConfig,
        index: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        self.self_attn = DilatedSelfAttention(config, **how)
        self.self_attn_layer_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps, **how)
        self.ffn = _FeedForward(config, **how)
        self.final_layer_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps, **how)
        self.dropout = nn.Dropout(config.dropout)
        self.dropped = config.drop_path * index / max(1, config.depth - 1)

    def forward(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B N E"]:
        x = x + self._some_rows(self.dropout(self.self_attn(self.self_attn_layer_norm(x))))
        return x + self._some_rows(self.ffn(self.final_layer_norm(x)))

    def _some_rows(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B N E"]:
        """Stochastic depth: zero random batch entries, and divide kept ones by their probability. arXiv 1603.09382."""
        if not self.training or self.dropped == 0:
            return x
        kept = torch.empty(x.shape[0], 1, 1, device=x.device, dtype=x.dtype).bernoulli_(1 - self.dropped)
        return x * kept / (1 - self.dropped)


class _FeedForward(nn.Module):
    """Two projections with a GELU, computed in float32, and a norm between them."""

    def __init__(self, config: LongNetEncoderConfig, **how: Any) -> None:
        super().__init__()
        assert config.ffn_dim is not None
        self.fc1 = nn.Linear(config.embed_dim, config.ffn_dim, **how)
        self.fc2 = nn.Linear(config.ffn_dim, config.embed_dim, **how)
        self.ffn_layernorm = nn.LayerNorm(config.ffn_dim, eps=config.norm_eps, **how)
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B N E"]:
        x = self.fc1(x)
        x = F.gelu(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
        return self.dropout(self.fc2(self.ffn_layernorm(self.activation_dropout(x))))
