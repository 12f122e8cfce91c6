"""The LongNet model by its definition, dense, in float64, from the weights of ours."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flexdilated.nn import LongNetConfig
from tests.support import oracle

TINY = LongNetConfig(
    vocab_size=19,
    embed_dim=24,
    depth=2,
    num_heads=4,
    segment_lengths=(4, 16, 64),
    dilation_rates=(1, 2, 6),
    layout="natural",
)

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


def decayed(x: Tensor, scale: float) -> Tensor:
    """xPos's factors at positions 0, 1, ... along dim -2: of queries for a scale above 0, of keys for one below."""
    half = x.shape[-1] // 2
    channels, places = torch.arange(half).double(), torch.arange(x.shape[-2]).double()
    factors = ((channels / half + 0.4) / 1.4) ** (places / scale)[:, None]
    return x * torch.cat((factors, factors), dim=-1)


def longnet(
    config: LongNetConfig,
    weights: Mapping[str, Tensor],
    x: Tensor,
    memory: Tensor | None = None,
    deep: float = 0.0,
    rule: oracle.Rule | None = None,
) -> Tensor:
    """The whole model from its named parameters: logits of tokens, or features of embedded inputs.

    memory: (B, M, E) that each token attends to. deep: factor of x in the sums of a deepnorm model. rule: the rule of
    config.pattern; None for the branches.
    """
    weights = {name: weight.double() for name, weight in weights.items()}
    x = weights["embedding.weight"][x] if "embedding.weight" in weights else x.double()
    if "positions.weight" in weights:
        x = x + weights["positions.weight"][: x.shape[1]]
    for layer in range(config.depth):
        block = _Block(config, weights, f"blocks.{layer}.", rule)
        halves = [("attention_norm", block.attention), ("ffn_norm", block.feed_forward)]
        if memory is not None:
            halves.insert(1, ("memory_norm", lambda y, block=block: block.attention_to(y, memory.double())))
        for name, half in halves:
            x = block.norm(deep * x + half(x), name) if config.deepnorm else x + half(block.norm(x, name))
    if not config.deepnorm:
        x = _Block(config, weights, "").norm(x, "norm")
    if "head.weight" in weights:
        return x @ weights["head.weight"].T
    return x @ weights["embedding.weight"].T if config.tie_embeddings else x


class _Block:
    """The parts of a block, by the names of its parameters."""

    def __init__(
        self, config: LongNetConfig, weights: Mapping[str, Tensor], prefix: str, rule: oracle.Rule | None = None
    ) -> None:
        self.config, self.weights, self.prefix, self.rule = config, weights, prefix, rule
        self.H, self.G = config.num_heads, config.num_kv_heads or config.num_heads
        self.D = config.embed_dim // config.num_heads

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self.weights.get(f"{self.prefix}{name}.{part}") for part in ("weight", "bias"))
        assert (bias is not None) == (self.config.bias and self.config.norm == "layer")
        if self.config.norm == "rms":
            return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        return scaled if bias is None else scaled + bias

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{self.prefix}{name}.bias")
        assert (bias is not None) == self.config.bias
        x = x @ self.weights[f"{self.prefix}{name}.weight"].T
        return x if bias is None else x + bias

    def attention(self, x: Tensor) -> Tensor:
        config, N = self.config, x.shape[1]
        widths = (self.H * self.D, self.G * self.D, self.G * self.D)
        q, k, v = (self._heads(part) for part in self.linear(x, "qkv").split(widths, dim=-1))
        if config.position in ("rotary", "xpos"):
            q, k = turn(q, config.rotary_base), turn(k, config.rotary_base)
        if config.position == "xpos":
            q, k = decayed(q, config.xpos_scale), decayed(k, -config.xpos_scale)
        rule = self.rule
        if rule is None:
            assert config.segment_lengths is not None
            assert config.dilation_rates is not None
            rule = oracle.longnet(config.segment_lengths, config.dilation_rates, config.offsets, config.heads)
        rule = oracle.both(rule, oracle.causal()) if config.causal else rule
        places = torch.arange(N)
        out, _ = oracle.attention(q, k, v, oracle.counts(rule, range(self.H), self.H, places, places))
        return self._projected(out, "attention")

    def attention_to(self, x: Tensor, memory: Tensor) -> Tensor:
        q = self._heads(self.linear(x, "memory_q"))
        k, v = (self._heads(part) for part in self.linear(memory, "memory_kv").chunk(2, dim=-1))
        out, _ = oracle.attention(q, k, v, torch.ones(self.H, x.shape[1], memory.shape[1], dtype=torch.int64))
        return self._projected(out, "memory")

    def feed_forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.linear(x, "ffn_in"), approximate="tanh")
        return self.linear(self.norm(hidden, "ffn_inner_norm") if self.config.subln else hidden, "ffn_out")

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.D)).transpose(1, 2)

    def _projected(self, out: Tensor, kind: str) -> Tensor:
        out = out.transpose(1, 2).flatten(-2)
        return self.linear(self.norm(out, f"{kind}_inner_norm") if self.config.subln else out, f"{kind}_out")
