"""One transformer block of LongNet: attention, optional attention to a memory, and a feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from .._attend import attend
from .._over_ranks import OverRanks
from ..decoding import KVCache
from ..masks import Layout, Mixture, Pattern
from ..selection import SelectedAttention
from ._longnet_config import XPOS_SPAN, LongNetConfig

# B batch, N tokens, M tokens of the memory, E embed dim, H query heads, G key/value heads, D head dim


KeysValues = tuple[Float[Tensor, "B G M D"], Float[Tensor, "B G M D"]]


class Block(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + feed_forward(norm(x)).

    With `memory_dim`, x + attention to a memory of that width comes between the two. With config.deepnorm each sum is
    norm(a * x + f(x)) instead, where f is attention or feed-forward. One projection makes queries, keys and values.

    over_ranks: settings of a model whose tokens are sharded over ranks; None for one device.
    selected: attention that chooses its keys from the data, to use instead of the pattern; None to use the pattern.
    memory_dim: width of the memory; None: no attention to a memory.
    scales: (a, gain of the initial weights of the projections whose results are added to x); None for
        `residual_scales(config)`.
    drop_path: probability, in training, that a sequence skips attention, attention to the memory or feed-forward, drawn
        for each of them.
    """

    def __init__(
        self,
        config: LongNetConfig,
        over_ranks: OverRanks | None = None,
        *,
        selected: SelectedAttention | None = None,
        memory_dim: int | None = None,
        scales: tuple[float, float] | None = None,
        drop_path: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim = config.num_heads, config.kv_heads, config.head_dim
        self.engine, self.over_ranks, self.deepnorm = config.engine, over_ranks, config.deepnorm
        self.residual, self.gain = residual_scales(config) if scales is None else scales
        # Gain of the value projection and of the first feed-forward projection, as in DeepNet and Magneto.
        self.inner_gain = self.gain if config.deepnorm or config.subln else 1.0
        self.dropout, self.attention_dropout = config.dropout, config.attention_dropout
        self.drop_path, self.selected = drop_path, selected
        E, hidden, kv_dim = config.embed_dim, config.hidden_dim, 2 * config.kv_heads * config.head_dim
        factory = {"device": device, "dtype": dtype}
        linear = {"bias": config.bias, **factory}
        self.attention_norm = norm(config, **factory)
        self.qkv = nn.Linear(E, E + kv_dim, **linear)
        self.attention_inner_norm = norm(config, **factory) if config.subln else None
        self.attention_out = nn.Linear(E, E, **linear)
        self.memory_norm = self.memory_q = self.memory_kv = self.memory_inner_norm = self.memory_out = None
        if memory_dim is not None:
            self.memory_norm = norm(config, **factory)
            self.memory_q, self.memory_kv = nn.Linear(E, E, **linear), nn.Linear(memory_dim, kv_dim, **linear)
            self.memory_inner_norm = norm(config, **factory) if config.subln else None
            self.memory_out = nn.Linear(E, E, **linear)
        self.ffn_norm = norm(config, **factory)
        self.ffn_in = nn.Linear(E, hidden, **linear)
        self.ffn_inner_norm = norm(config, hidden, **factory) if config.subln else None
        self.ffn_out = nn.Linear(hidden, E, **linear)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the projections: weights with variance 1 / fan-in and biases with 0.

        The weights of the projections whose results are added to x are multiplied by the gain of `scales`. With
        config.deepnorm or config.subln the weights of the value projection and of the first feed-forward projection are
        multiplied by it, too.
        """
        kv_dim = self.kv_heads * self.head_dim
        for linear, gain in (
            *((self.qkv, 1.0), (self.memory_q, 1.0), (self.memory_kv, 1.0), (self.ffn_in, self.inner_gain)),
            *((each, self.gain) for each in (self.attention_out, self.memory_out, self.ffn_out)),
        ):
            if linear is not None:
                nn.init.normal_(linear.weight, std=gain * linear.in_features**-0.5)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        with torch.no_grad():
            for linear in (self.qkv, self.memory_kv):
                if linear is not None and self.inner_gain != 1.0:
                    linear.weight[-kv_dim:] *= self.inner_gain  # the values

    def forward(
        self,
        x: Float[Tensor, "B N E"],
        rotary: RotaryFactors | None,
        pattern: Pattern | Mixture,
        layout: Layout | None,
        cache: KVCache | None = None,
        memory: KeysValues | None = None,
        memory_pattern: Pattern | Mixture | None = None,
        visible: Pattern | None = None,
    ) -> Float[Tensor, "B N E"]:
        """Return the output of the block for x, whose tokens are in the order of `layout` (None: natural order).

        rotary: rotary factors at the tokens' positions; None for no rotation.
        cache: keys and values of the earlier tokens; the keys and values of x are appended in place. It attends by the
            pattern it was made with, not by `pattern`. None: x has no earlier tokens.
        memory: from `keys_values`; x attends to it by `memory_pattern`. If either is None, that attention is skipped.
        visible: pattern of the keys that are not padding, for `selected` only, because `pattern` already excludes
            padding; None for no padding.

        With over_ranks, x is this rank's tokens.
        """
        x = self._add_sublayer(
            x, self.attention_norm, lambda y: self._attend(y, rotary, pattern, layout, cache, visible)
        )
        if memory is not None and memory_pattern is not None:
            assert self.memory_norm is not None
            x = self._add_sublayer(x, self.memory_norm, lambda y: self._attend_to_memory(memory, y, memory_pattern))
        return self._add_sublayer(x, self.ffn_norm, self._feed_forward)

    def keys_values(self, memory: Float[Tensor, "B M E_memory"]) -> KeysValues:
        """Return (keys, values) of a memory for this block's attention to it, each (B, G, M, D)."""
        assert self.memory_kv is not None
        k, v = self.memory_kv(memory).unflatten(-1, (2 * self.kv_heads, self.head_dim)).transpose(1, 2).chunk(2, dim=1)
        return k, v

    def _add_sublayer(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        y = F.dropout(sublayer(x if self.deepnorm else norm(x)), self.dropout, self.training)
        y = skip_entries(y, self.drop_path if self.training else 0.0)
        return norm(self.residual * x + y) if self.deepnorm else x + y

    def _attend(
        self,
        x: Float[Tensor, "B N E"],
        rotary: RotaryFactors | None,
        pattern: Pattern | Mixture,
        layout: Layout | None,
        cache: KVCache | None,
        visible: Pattern | None,
    ) -> Float[Tensor, "B N E"]:
        H, G = self.num_heads, self.kv_heads
        heads = self.qkv(x).unflatten(-1, (H + 2 * G, self.head_dim))
        qk, v = heads.split((H + G, G), dim=2)
        q, k = qk.split((H, G), dim=2) if rotary is None else rotary.apply(qk, H, G)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if cache is None and self.selected is not None:
            self._check_ranks(self.selected)
            out = self.selected(q, k, v, enable_gqa=H != G, within=visible)
        elif cache is not None:
            out = cache.attend(q, k, v)
        else:
            dropout_p = self.attention_dropout if self.training else 0.0
            options = {"dropout_p": dropout_p, "enable_gqa": H != G, "engine": self.engine}
            if self.over_ranks is None:
                out = attend(q, k, v, pattern, layout=layout, **options)
            else:
                out = self.over_ranks.attend(q, k, v, pattern, **options)
        return self.attention_out(_join_heads(out, self.attention_inner_norm))

    def _check_ranks(self, selected: SelectedAttention) -> None:
        """Raise ValueError unless `selected` has the mesh and the sharding of the block's model."""
        # Mesh and sharding define the positions of this rank's tokens.
        ours, theirs = (
            None if over is None else (over.ranks, over.sharding) for over in (self.over_ranks, selected.over_ranks)
        )
        if ours != theirs:
            raise ValueError(
                "the attention that is assigned to a block must have the mesh and the sharding of its model: give "
                f"SelectedAttention(selector, mesh=..., sharding=...) the same; got {selected.extra_repr()} in a model "
                f"with {self.over_ranks or 'no mesh'}"
            )

    def _attend_to_memory(
        self, memory: KeysValues, x: Float[Tensor, "B N E"], pattern: Pattern | Mixture
    ) -> Float[Tensor, "B N E"]:
        assert self.memory_q is not None
        assert self.memory_out is not None
        q = self.memory_q(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        dropout_p = self.attention_dropout if self.training else 0.0
        options = {"dropout_p": dropout_p, "enable_gqa": self.num_heads != self.kv_heads, "engine": self.engine}
        out = attend(q, *memory, pattern, **options)
        return self.memory_out(_join_heads(out, self.memory_inner_norm))

    def _feed_forward(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B N E"]:
        hidden = F.gelu(self.ffn_in(x), approximate="tanh")
        return self.ffn_out(hidden if self.ffn_inner_norm is None else self.ffn_inner_norm(hidden))


def skip_entries(x: Float[Tensor, "B N E"], probability: float) -> Float[Tensor, "B N E"]:
    """Return x with each batch entry zeroed with this probability, and the other entries divided by 1 - probability.

    Source: stochastic depth, arXiv 1603.09382.
    """
    if probability == 0:
        return x
    kept = torch.empty(len(x), 1, 1, device=x.device, dtype=x.dtype).bernoulli_(1 - probability)
    return x * kept / (1 - probability)


def norm(
    config: LongNetConfig,
    width: int | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Make a LayerNorm or RMSNorm, by config.norm, over a last dim of `width`; width None means config.embed_dim."""
    width = config.embed_dim if width is None else width
    if config.norm == "rms":
        return nn.RMSNorm(width, device=device, dtype=dtype)
    return nn.LayerNorm(width, bias=config.bias, device=device, dtype=dtype)


def residual_scales(
    config: LongNetConfig, *, decoder_depth: int | None = None, encoder_depth: int | None = None
) -> tuple[float, float]:
    """Return (factor of x in the residual sums, gain of initial weights).

    The gain is for the projections whose results are added to x.

    config: configuration of one stack of blocks.
    decoder_depth: for the stack of an encoder, depth of the decoder that reads it; else None.
    encoder_depth: for the stack of a decoder, depth of the encoder that it reads; else None.

    Sources: DeepNet, arXiv 2203.00555, figure 2; Magneto, arXiv 2210.06423, section 2.3.
    """
    depth = config.depth
    if not config.deepnorm and not config.subln:
        # The residual stream's variance grows over the whole model by an amount that does not depend on its depth.
        return 1.0, (2 * depth) ** -0.5
    if decoder_depth is not None:
        size = (depth**4 * decoder_depth) ** (1 / 16)
        gain = (log(3 * decoder_depth) * log(2 * depth) / 3) ** 0.5
        return (0.81 * size, 0.87 / size) if config.deepnorm else (1.0, gain)
    halves = 2 if encoder_depth is None else 3  # per block
    deep = (halves * depth) ** 0.25, (4 * halves * depth) ** -0.25
    return deep if config.deepnorm else (1.0, log(halves * depth) ** 0.5)


def _join_heads(out: Float[Tensor, "B H N D"], inner_norm: nn.Module | None) -> Float[Tensor, "B N E"]:
    x = out.transpose(1, 2).flatten(-2)
    return x if inner_norm is None else inner_norm(x)


RotaryTable = tuple[Float[Tensor, "*batch N D"], Float[Tensor, "*batch N D"]]

_GAMMA = 0.4  # as in xPos


class RotaryFactors(NamedTuple):
    """Rotary table and xPos factors (`decay`; None without xPos), computed once for all layers of a forward pass."""

    table: RotaryTable
    decay: Float[Tensor, "*batch N 1 D"] | None = None

    def apply(
        self, qk: Float[Tensor, "B N HG D"], num_heads: int, kv_heads: int
    ) -> tuple[Float[Tensor, "B N H D"], Float[Tensor, "B N G D"]]:
        """Return (queries, keys), split from `qk` and rotated; with xPos, queries times `decay`, keys divided by it.

        Raises ValueError for float16 with xPos.
        """
        q, k = rotate(qk, self.table).split((num_heads, kv_heads), dim=2)
        if self.decay is None:
            return q, k
        if q.dtype == torch.float16:
            raise ValueError("position='xpos' needs the range of float32 or bfloat16; got float16")
        return (q * self.decay).to(q.dtype), (k / self.decay).to(k.dtype)


def rotary_factors(
    config: LongNetConfig, positions: Int64[Tensor, "*batch N"], dtype: torch.dtype
) -> RotaryFactors | None:
    """Return rotary and xPos factors at these positions; None for a model with neither.

    dtype: of the features.

    xPos multiplies queries by ζ^(n/s - c) and divides keys by it, where ζ < 1 is a factor of each pair of channels, n
    the position, s `xpos_scale`, and c = 63 a shift that cancels in scores and keeps the powers in float32's range.
    Source: xPos, arXiv 2212.10554, section 2.
    """
    if config.position not in ("rotary", "xpos"):
        return None
    table = rotary_table(positions, head_dim=config.head_dim, base=config.rotary_base, dtype=dtype)
    if config.position == "rotary":
        return RotaryFactors(table)
    pairs = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float64) / config.head_dim
    exponents = positions.double() / config.xpos_scale - XPOS_SPAN / 2
    decay = ((pairs + _GAMMA) / (1 + _GAMMA)) ** exponents[..., None, None]
    return RotaryFactors(table, torch.cat((decay, decay), dim=-1).to(table[0].dtype))


def rotary_table(
    positions: Int64[Tensor, "*batch N"], *, head_dim: int, base: float, dtype: torch.dtype
) -> RotaryTable:
    """Return (cosines, signed sines), each (*batch, N, D), by which `rotate` rotates channels i and i + D/2 as a pair.

    The angle of pair i, from 0 to D/2 - 1, is position * base^(-2i/D) radians.

    The table is float64 if `dtype`, that of the features, is float64, else float32.
    Source: RoFormer, arXiv 2104.09864, eq. 34.
    """
    # Angles in float64, because in float32 the error near position 1,000,000 is 0.03 radians.
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions.double()[..., None] * base**-exponents
    cos, sin = (part.to(torch.promote_types(dtype, torch.float32)) for part in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Float[Tensor, "B N H D"], table: RotaryTable) -> Float[Tensor, "B N H D"]:
    """Return x with each head's channels rotated by a table from `rotary_table`, in the dtype of x.

    The rotation is computed in the dtype of the table.
    """
    cos, signed_sin = (part.unsqueeze(-2) for part in table)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin).to(x.dtype)
