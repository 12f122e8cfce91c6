"""The LongNet model by its definition, dense, in float64, from the weights of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flexdilated.nn import LongNetConfig
from tests.support import oracle

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


def multiplicity(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    num_heads: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    **rules: str,
) -> Tensor:
    """(H, N, M): how many branches allow each pair; `rules` are the offsets and heads of `oracle.longnet`."""
    rule = oracle.longnet(segment_lengths, dilation_rates, **rules)
    rule = oracle.both(rule, oracle.causal()) if causal else rule
    return oracle.counts(rule, range(num_heads), num_heads, torch.arange(num_queries), torch.arange(num_keys))


def turn(x: Tensor, base: float) -> Tensor:
    """Rotary positions 0, 1, ... along dim -2, as multiplication by complex units."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2]).double()[:, None] * base ** -(torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def longnet(config: LongNetConfig, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The whole model from its named parameters: logits of tokens, or features of embedded inputs."""
    weights = {name: weight.double() for name, weight in weights.items()}
    x = weights["embedding.weight"][x] if "embedding.weight" in weights else x.double()
    for layer in range(config.depth):
        block = {name: weights[f"blocks.{layer}.{name}.weight"] for name in _BLOCK}
        x = x + _attention(config, block, _norm(x, block["attention_norm"]))
        hidden = F.gelu(_norm(x, block["ffn_norm"]) @ block["ffn_in"].T, approximate="tanh")
        x = x + hidden @ block["ffn_out"].T
    x = _norm(x, weights["norm.weight"])
    if config.vocab_size is None:
        return x
    return x @ weights["embedding.weight" if config.tie_embeddings else "head.weight"].T


_BLOCK = ("attention_norm", "qkv", "attention_out", "ffn_norm", "ffn_in", "ffn_out")


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight)


def _attention(config: LongNetConfig, block: Mapping[str, Tensor], x: Tensor) -> Tensor:
    B, N, _ = x.shape
    H, G, D = config.num_heads, config.num_kv_heads or config.num_heads, config.embed_dim // config.num_heads
    q, k, v = (x @ block["qkv"].T).split((H * D, G * D, G * D), dim=-1)
    q, k, v = (y.view(B, N, -1, D).transpose(1, 2) for y in (q, k, v))
    counts = multiplicity(
        config.segment_lengths,
        config.dilation_rates,
        num_heads=H,
        num_queries=N,
        num_keys=N,
        causal=config.causal,
        offsets=config.offsets,
        heads=config.heads,
    )
    out, _ = oracle.attention(turn(q, config.rotary_base), turn(k, config.rotary_base), v, counts)
    return out.transpose(1, 2).reshape(B, N, -1) @ block["attention_out"].T
