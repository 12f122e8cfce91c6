"""torchscale's LongNet encoder: pre-norm layers with a norm inside attention and feed-forward (sub-LN)."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, overload

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from ..._attend import attend
from ..._over_ranks import OverRanks, over_ranks
from ...engines import with_padding_keys
from ...masks import Mixture, Pattern, dilated, every, longnet
from ...masks.patterns import on_host
from ...nn import skip_entries, without_padding
from ._config import LongNetEncoderConfig, load

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...distributed import Sharding

# B batch, N tokens, E embed dim, F hidden dim, H heads, D head dim


class Sequences(NamedTuple):
    """Padding and sharding of the sequences of a call, which the attention of every layer needs.

    visible: pattern that allows the keys that are not padding; None without a padding mask.
    lengths: number of real tokens of each sequence, which determines its zero keys; None without a padding mask or
        without zero keys.
    over_ranks, sharding: the mesh, and the assignment of tokens to its ranks; None for one device.
    """

    visible: Pattern | Mixture | None = None
    lengths: tuple[int, ...] | None = None
    over_ranks: OverRanks | None = None
    sharding: Sharding | None = None

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "B N E"],
        config: LongNetEncoderConfig,
        key_padding_mask: Tensor | None,
        over_ranks: OverRanks | None,
        sharding: Sharding | None,
    ) -> Self:
        """Make an instance for embedded tokens x and a padding mask of the whole sequences.

        sharding: for this call; None for that of over_ranks.

        Raises ValueError or TypeError for an invalid mask, and ValueError for a sharding without over_ranks.
        """
        if over_ranks is None and sharding is not None:
            raise ValueError("sharding needs an encoder with mesh=, the ranks that share the work; got one without")
        if over_ranks is not None and sharding is None:
            sharding = over_ranks.sharding_of(x.shape[1])
        if key_padding_mask is None:
            return cls(None, None, over_ranks, sharding)
        shape = (x.shape[0], x.shape[1] if sharding is None else sharding.num_tokens)
        visible = on_host(without_padding(every(), key_padding_mask, shape))
        return cls(visible, None if config.padding is None else _lengths(key_padding_mask), over_ranks, sharding)

    def longest_length(self, q: Float[Tensor, "B H N D"]) -> int:
        """Return the number of real tokens of the longest sequence; without `lengths`, the number of all tokens.

        q: the queries of this device.
        """
        if self.lengths is not None:
            return max(self.lengths, default=0)
        return q.shape[2] if self.sharding is None else self.sharding.num_tokens

    def positions(self, q: Float[Tensor, "B H N D"]) -> Int64[Tensor, " N"]:
        """Return the positions of the queries q in the whole sequence."""
        if self.over_ranks is None or self.sharding is None:
            return torch.arange(q.shape[2], device=q.device)
        return self.sharding.positions(self.over_ranks.ranks.rank, q.device)


WHOLE = Sequences()  # without padding, on one device

QueriesKeysValues = tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N D"], Float[Tensor, "B H N D"]]


def require_batch(name: str, x: object, dims: str, width: int) -> None:
    """Raise TypeError or ValueError unless x is a tensor of 3 dims, the last of size `width`.

    name, dims: names of the tensor and of its first two dims in the error, such as "x" and "batch, tokens".
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}: write torch.as_tensor({name})")
    if x.dim() != 3 or x.shape[2] != width:
        advice = f": {name}[None] adds the first dim" if x.dim() == 2 and x.shape[1] == width else ""
        raise ValueError(f"{name} must have shape ({dims}, {width}); got {tuple(x.shape)}{advice}")


def real_tokens(key_padding_mask: Tensor) -> Tensor:
    """Return booleans, True for real tokens, from a padding mask of booleans, or of floats with -inf for padding."""
    return ~key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask == 0


def _lengths(key_padding_mask: Tensor) -> tuple[int, ...]:
    """Return the number of real tokens of each sequence.

    Raises ValueError if a sequence has no real token, or has padding before one.
    """
    real = real_tokens(key_padding_mask)
    lengths = real.sum(1)
    ended = torch.arange(real.shape[1], device=real.device) < lengths[:, None]
    if not bool((real == ended).all()) or not bool(lengths.all()):
        raise ValueError(
            "with padding='zeros' a key_padding_mask must hide the last tokens of a sequence, and not all, as its zero "
            "keys follow from its length; for any mask take padding=None; got one that hides others"
        )
    return tuple(lengths.tolist())


class LongNetEncoder(nn.Module):
    """Encoder layers over embedded tokens: (B, N, E) -> (B, N, E); parameter names are torchscale's.

    With padding=None in the configuration it is LongNet as defined, for new weights: one exact softmax over all
    branches. With padding="zeros", which `from_torchscale` sets, it reproduces torchscale's encoder. Parameters are
    initialized as in torchscale: by nn.Linear, then those of the value, output and feed-forward projections are
    multiplied by sqrt(log(2 * depth)).

    mesh: the ranks that share every sequence; None for one device. Each rank then passes its tokens and gets their
        features.
    schedule, sharding: as in `BlockSparseAttention`.

    drop_path must be 0 with a mesh. Gradients of parameters are for this rank's tokens; sum them over the ranks.

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
        mesh: DeviceMesh | None = None,
        schedule: str = "auto",
        sharding: Sharding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.over_ranks = over_ranks(mesh, schedule=schedule, sharding=sharding)
        if mesh is not None and config.drop_path:
            raise ValueError(
                "drop_path must be 0 with a mesh, as each rank would skip different sequences; got "
                f"drop_path={config.drop_path}"
            )
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList([EncoderLayer(config, index, **how) for index in range(config.depth)])
        self.layer_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps, **how) if config.final_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self._scale_weights()

    @classmethod
    def from_torchscale(
        cls, config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None, **changes: Any
    ) -> Self:
        """Make the encoder that a torchscale configuration describes, and load a state_dict if one is given.

        config: options of torchscale's EncoderConfig, as in its JSON.
        state_dict: exactly the encoder's parameters; from a checkpoint of a larger model, select them and remove their
            prefix.
        changes: fields of `LongNetEncoderConfig` that override the translation, such as padding=None for exact
            attention, or merge_grad="detached" for torchscale's gradients.

        Raises as `LongNetEncoderConfig.from_torchscale`, and ValueError that names the keys of state_dict that are
        missing, unknown or of another shape, up to 12 of each kind.
        """
        encoder = cls(LongNetEncoderConfig.from_torchscale(config, **changes))
        if state_dict is not None:
            load(encoder, state_dict)
        return encoder

    @overload
    def forward(
        self,
        x: Float[Tensor, "B N E"],
        *,
        all_layers: Literal[False] = False,
        key_padding_mask: Tensor | None = None,
        sharding: Sharding | None = None,
    ) -> Float[Tensor, "B N E"]: ...

    @overload
    def forward(
        self,
        x: Float[Tensor, "B N E"],
        *,
        all_layers: Literal[True],
        key_padding_mask: Tensor | None = None,
        sharding: Sharding | None = None,
    ) -> tuple[Float[Tensor, "B N E"], ...]: ...

    def forward(
        self,
        x: Float[Tensor, "B N E"],
        *,
        all_layers: bool = False,
        key_padding_mask: Tensor | None = None,
        sharding: Sharding | None = None,
    ) -> Float[Tensor, "B N E"] | tuple[Float[Tensor, "B N E"], ...]:
        """Return features (B, N, E) of embedded tokens, after the final layer norm if the configuration has one.

        all_layers: True returns a tuple of depth + 1 tensors instead: the first layer's input and each layer's output,
            all without the final norm.
        key_padding_mask: booleans (B, N), True for padding, to which no token attends, or floats, -inf for padding and
            0 for other tokens; with a mesh for the whole sequence. With padding at the end, the other tokens get the
            same features as without padding. With padding="zeros" in the configuration, padding must be at the end, and
            its length is read on the host, which breaks a graph of torch.compile.
        sharding: the sharding of this call; None for the module's. Only with a mesh.

        Raises ValueError or TypeError for an input or a mask that does not fit. With padding="zeros" and a mask or a
        mesh, raises ValueError for a sequence whose tokens torchscale would shift.
        """
        require_batch("x", x, "batch, tokens", self.config.embed_dim)
        sequences = Sequences.of(x, self.config, key_padding_mask, self.over_ranks, sharding)
        x = self.dropout(x)
        states = [x]
        for layer in self.layers:
            x = layer(x, sequences)
            if all_layers:
                states.append(x)
        if all_layers:
            return tuple(states)
        return x if self.layer_norm is None else self.layer_norm(x)

    def extra_repr(self) -> str:
        return "" if self.over_ranks is None else str(self.over_ranks)

    @torch.no_grad()
    def _scale_weights(self) -> None:
        scale = log(2 * self.config.depth) ** 0.5
        for name, parameter in self.layers.named_parameters():
            if any(part in name for part in ("fc1", "fc2", "out_proj", "v_proj")):
                parameter.mul_(scale)


class EncoderLayer(nn.Module):
    """Layer of the encoder, (B, N, E) -> (B, N, E): x + attention(norm(x)), then x + feed_forward(norm(x)).

    In training, a batch entry skips the attention and, drawn separately, the feed-forward, each with a probability that
    grows linearly from 0 in the first layer to config.drop_path in the last.

    index: number of the layer in the encoder, from 0.

    >>> from flexdilated.integrations.torchscale import EncoderLayer, LongNetEncoderConfig
    >>> sizes = {"embed_dim": 64, "depth": 2, "num_heads": 4}
    >>> layer = EncoderLayer(LongNetEncoderConfig(**sizes, segment_lengths=(64,), dilation_rates=(2,)), 1)
    >>> layer(torch.randn(1, 100, 64)).shape
    torch.Size([1, 100, 64])
    >>> q, k, v = layer.project(torch.randn(1, 100, 64))
    >>> out, lse = fd.attend(q, k, v, layer.pattern, return_lse=True)
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

    def forward(self, x: Float[Tensor, "B N E"], sequences: Sequences = WHOLE) -> Float[Tensor, "B N E"]:
        dropped = self.dropped if self.training else 0.0
        x = x + skip_entries(self.dropout(self.self_attn(self.self_attn_layer_norm(x), sequences)), dropped)
        return x + skip_entries(self.ffn(self.final_layer_norm(x)), dropped)

    @property
    def pattern(self) -> Pattern | Mixture:
        """Pattern of the attention: the configuration's `pattern`."""
        return self.self_attn.pattern

    def project(self, x: Float[Tensor, "B N E"]) -> QueriesKeysValues:
        """Return (queries, keys, values), each (B, H, N, D), of this layer's attention for the layer's input x."""
        return self.self_attn.project(self.self_attn_layer_norm(x))


class _FeedForward(nn.Module):
    """(B, N, E) -> (B, N, E): linear, GELU computed in at least float32, dropout, layer norm, linear, dropout."""

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


class DilatedSelfAttention(nn.Module):
    """Self-attention by the branches of a configuration: (B, N, E) -> (B, N, E).

    Projects to queries, keys and values, attends, applies a layer norm to the joined heads, and projects the result.
    Source: microsoft/torchscale, component/dilated_attention.py and multihead_attention.py.

    >>> from flexdilated.integrations.torchscale import DilatedSelfAttention, LongNetEncoderConfig
    >>> sizes = {"embed_dim": 64, "depth": 1, "num_heads": 4}
    >>> attention = DilatedSelfAttention(LongNetEncoderConfig(**sizes, segment_lengths=(64,), dilation_rates=(2,)))
    >>> attention(torch.randn(1, 100, 64)).shape
    torch.Size([1, 100, 64])
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
        E = config.embed_dim
        self.k_proj = nn.Linear(E, E, device=device, dtype=dtype)
        self.v_proj = nn.Linear(E, E, device=device, dtype=dtype)
        self.q_proj = nn.Linear(E, E, device=device, dtype=dtype)
        self.out_proj = nn.Linear(E, E, device=device, dtype=dtype)
        self.inner_attn_ln = nn.LayerNorm(E, eps=config.norm_eps, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "B N E"], sequences: Sequences = WHOLE) -> Float[Tensor, "B N E"]:
        """Return the attention output of the tokens x, after the output projection.

        sequences: padding and sharding of the sequences.

        Raises ValueError for a padding mask or a mesh where a branch moves outputs to later tokens, as torchscale does
        for some segment lengths with config.padding set: see `_shifts`.
        """
        q, k, v = self.project(x)
        config, N = self.config, sequences.longest_length(q)
        branches = list(zip(config.segment_lengths, config.dilation_rates, strict=True))
        shifting = [(segment, rate) for segment, rate in branches if self._shifts(segment, rate, N)]
        if shifting and sequences != WHOLE:
            raise ValueError(
                f"with padding='zeros' the branches {shifting} shift rows of longer sequences, which needs a call "
                f"without a mask or a mesh: take padding=None; got {N} tokens"
            )
        if config.merge_grad == "exact" and not shifting:
            out = self._attend(q, k, v, config.pattern, sequences, return_lse=False)
        else:
            parts = [self._attend_branch(q, k, v, *each, sequences) for each in branches]
            out = join(parts, detached=config.merge_grad == "detached")
        return self.out_proj(self.inner_attn_ln(out.transpose(1, 2).flatten(2)))

    @property
    def pattern(self) -> Pattern | Mixture:
        """Pattern of the attention: the configuration's `pattern`."""
        return self.config.pattern

    def project(self, x: Float[Tensor, "B N E"]) -> QueriesKeysValues:
        """Return (queries, keys, values) of the tokens, split into heads."""
        q, k, v = (
            each(x).unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def _shifts(self, segment: int, rate: int, num_tokens: int) -> bool:
        """Return True if torchscale shifts the outputs of the branch (segment length, dilation rate) to later tokens.

        It does with padding="zeros", if the rate does not divide the segment length and there are several segments.
        """
        # torchscale pads each segment to a multiple of the rate, but with several segments it removes padding only at
        # the end of the sequence, so outputs after the first segment move to later tokens.
        return self.config.padding is not None and num_tokens > segment and segment % rate != 0

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Mixture, sequences: Sequences, *, return_lse: bool
    ) -> Any:
        """Return the output of attention by `pattern`, or (output, natural lse) if return_lse.

        Queries attend to the keys of all ranks, except padding, and to the zero keys of `pattern`.
        """
        rule = pattern if sequences.visible is None else pattern.unpadded & sequences.visible
        lengths, options = sequences.lengths, self._options()
        options["return_lse"] = return_lse or lengths is not None
        over = sequences.over_ranks
        if over is None:
            found = attend(q, k, v, rule, **options)
        else:
            found = over.attend(q, k, v, rule, sharding=sequences.sharding, **options)
        if lengths is None:
            return found
        # The number of zero keys depends on the length of each sequence.
        positions, rows = sequences.positions(q), {"head_offset": 0, "num_heads": q.shape[1]}
        entries = zip(*(x.split(1) for x in found), lengths, strict=True)
        padded = [with_padding_keys(out, lse, pattern, positions, **rows, num_tokens=n) for out, lse, n in entries]
        outs, lses = zip(*padded, strict=True)
        return (torch.cat(outs), torch.cat(lses)) if return_lse else torch.cat(outs)

    def _attend_branch(
        self, q: Tensor, k: Tensor, v: Tensor, segment: int, rate: int, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Return (output (B, H, N, D), natural log-sum-exp (B, H, N)) of the branch (segment length, dilation rate).

        Both are shifted as in torchscale if `_shifts` is True.
        """
        N, options = q.shape[2], self._options()
        if not self._shifts(segment, rate, sequences.longest_length(q)):
            pattern = longnet((segment,), (rate,), offsets="contiguous", padding=self.config.padding)
            return self._attend(q, k, v, pattern, sequences, return_lse=True)
        # Zeros are inserted as tokens, so all zero keys take part; output row p is row p of the longer sequence.
        longer = segment + -segment % rate
        q, k, v = (_pad_segments(x, segment, longer) for x in (q, k, v))
        out, lse = attend(q, k, v, dilated(longer, rate, "contiguous"), return_lse=True, **options)
        return out[:, :, :N], lse[:, :, :N]

    def _options(self) -> dict[str, Any]:
        return {"dropout_p": self.config.attention_dropout if self.training else 0.0, "engine": self.config.engine}

    def extra_repr(self) -> str:
        return f"{self.config.pattern!r}, merge_grad={self.config.merge_grad!r}"


def join(
    parts: list[tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]], *, detached: bool
) -> Float[Tensor, "B H N D"]:
    """Return the mean of the outputs of several branches, weighted in proportion to exp(lse).

    exp(lse) is a branch's softmax denominator, so the result is one softmax over the keys of all branches. Rows with
    lse -inf in every branch are 0.

    parts: (output, natural lse) of each branch.
    detached: True for no gradient through the weights.
    """
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    lses = lses.detach() if detached else lses
    none = (lses == -torch.inf).all(0)  # rows without keys in any branch: outputs are 0, and weights must not be NaN
    weights = lses.masked_fill(none, 0.0).softmax(0)
    return (weights.unsqueeze(-1).to(outs.dtype) * outs).sum(0)


def _pad_segments(x: Float[Tensor, "B H N D"], segment: int, longer: int) -> Float[Tensor, "B H M D"]:
    """Return x with each segment of `segment` tokens, and a shorter last one, padded with zeros to `longer` tokens."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % segment)).unflatten(2, (-1, segment))
    return F.pad(x, (0, 0, 0, longer - segment)).flatten(2, 3)
