"""MultiheadDilatedAttention: `nn.MultiheadAttention` with LongNet's branches, or any pattern, instead of all pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from warnings import warn

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from .._attend import attend, autocast_dtype
from .._engine_choice import check_engine
from .._over_ranks import engine_text, over_ranks, pattern_text, ranks_text
from .._torch_private import DisablesFusedEncoder
from .._validate import require_dense
from ..masks import Mixture, Pattern
from ..masks.core import HEADS, WIDTH, advises, renamed, require_bool, require_int, require_probability
from ..masks.patterns import OF_BRANCHES
from ._attention import pattern_from_arguments
from ._call_masks import require_causal_mask, without_padding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed import Sharding

_LARGE_BATCH = 256  # of short sequences; larger batches suggest that the two dims are swapped

# B batch, H heads, N queries, M keys, E embed dim, K key dim, V value dim, D head dim


class MultiheadProjections(DisablesFusedEncoder):
    """Base class with the parameters of `nn.MultiheadAttention`: projects inputs to heads, and heads to outputs.

    embed_dim, kdim, vdim: widths of query, key and value.
    in_proj_weight: the stacked projections of query, key and value, if the widths are equal; otherwise None, and
        q_proj_weight, k_proj_weight and v_proj_weight are set instead.
    in_proj_bias: None for no biases.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    kdim: int
    vdim: int
    batch_first: bool
    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    out_proj: nn.Linear

    def heads_of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Float[Tensor, "B H N D"], ...]:
        """Return (q, k, v), projected from the inputs, each (B, H, tokens, D), with B = 1 for unbatched inputs.

        Raises ValueError or TypeError for inputs that do not fit the module or each other.
        """
        self._check_inputs(query, key, value)
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        return q, k, v

    def padding_mask_shape(self, key: Tensor) -> tuple[int, ...]:
        """Return the shape of a mask of the M tokens of `key`: (B, M), or (M,) for unbatched keys."""
        return tuple(key.shape[:-1] if self.batch_first or key.dim() == 2 else key.shape[1::-1])

    def output_of(self, out: Float[Tensor, "B H N D"], dims: int) -> Tensor:
        """Return the output projection of `out` with its heads joined.

        dims: number of dims of the result: 2 for (N, E), if B = 1; 3 for (B, N, E) with batch_first, else (N, B, E).
        """
        if dims == 2:
            return self.out_proj(out.squeeze(0).transpose(0, 1).flatten(-2))
        return self.out_proj((out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)).flatten(-2))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and query is key and key is value:
            return F.linear(query, weight, bias).chunk(3, dim=-1)
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = [w for w in separate if w is not None] if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        inputs = (query, key, value)
        return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]

    def _split_heads(self, x: Tensor) -> Float[Tensor, "B H N D"]:
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        tensors = {"query": query, "key": key, "value": value}
        for (name, x), width in zip(tensors.items(), (self.embed_dim, self.kdim, self.vdim), strict=True):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
            require_dense(name, x)
            if x.dim() not in (2, 3) or x.shape[-1] != width:
                raise ValueError(
                    f"{name} must have shape (tokens, {width}), or that with a batch dim; got {tuple(x.shape)}"
                )
            self._check_device_and_dtype(name, x)
        _check_fit(query, key, value, batch_dim=0 if self.batch_first else 1)
        if not self.batch_first and not torch.compiler.is_compiling():
            _warn_of_swapped_dims(query)

    def _check_device_and_dtype(self, name: str, x: Tensor) -> None:
        """Raise ValueError if x is not on the parameters' device or, without autocast, not of their dtype.

        name: name of the input in the error.
        """
        weight = self.out_proj.weight
        if x.device != weight.device:
            raise ValueError(f"{name} must be on the module's device {weight.device}; got {x.device}")
        if x.dtype != weight.dtype and autocast_dtype(x.device) is None:
            raise ValueError(f"{name} must have the module's dtype {weight.dtype}; got {x.dtype}")


def _warn_of_swapped_dims(query: Tensor) -> None:
    if query.dim() == 3 and query.shape[1] > max(_LARGE_BATCH, 32 * query.shape[0]):
        warn(
            f"query has {query.shape[0]} tokens in each of {query.shape[1]} batch entries, in the order (tokens, "
            "batch, width): inputs of (batch, tokens, width) need batch_first=True",
            stacklevel=5,
        )


def refuse_weights(need_weights: bool) -> None:
    """Raise ValueError if a call requests attention weights."""
    if require_bool("need_weights", need_weights):
        raise ValueError(
            "need_weights must be False, as attention weights are never formed: for a small input, read the "
            "allowed pairs from pattern.bind(...).mask_mod(); got need_weights=True"
        )


def _check_fit(query: Tensor, key: Tensor, value: Tensor, *, batch_dim: int) -> None:
    shapes = f"got query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim():
        raise ValueError(f"query, key and value must all be batched, or none of them; {shapes}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must agree in tokens and batch; {shapes}")
    if query.dim() == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
        order = "" if batch_dim == 0 else ": inputs of (batch, tokens, width) need batch_first=True"
        raise ValueError(f"query and key must have one batch size, in dim {batch_dim}; {shapes}{order}")


_INSTEAD = "for another rule call flexdilated.attend with `pattern & other`"
_TOKENS_FIRST = ", and for inputs of (batch, tokens, width) make the module with batch_first=True"


_HOW = (
    "write fd.MultiheadDilatedAttention(512, 8, (2048, 8192), (1, 4), batch_first=True): width, heads, and a segment "
    "length and a dilation rate for each branch"
)


class MultiheadDilatedAttention(MultiheadProjections):
    """`nn.MultiheadAttention` in which attention is restricted to LongNet's branches or to any pattern.

    Its `state_dict` is interchangeable with that of an `nn.MultiheadAttention` with equal sizes, and equal seeds give
    equal parameters. With one branch that spans the sequence (segment_lengths=[N], dilation_rates=[1]) the two modules
    compute the same function, apart from dropout and queries without visible keys.

    embed_dim, num_heads, bias, kdim, vdim, batch_first, device, dtype: as in `nn.MultiheadAttention`.
    segment_lengths, dilation_rates, offsets, heads: the branches, as in `masks.longnet`.
    engine: as in `attend`.
    pattern: a pattern or mixture that replaces segment_lengths, dilation_rates, offsets and heads; values of run-time
        tensors that it names are passed to the call as `bindings`.
    causal: True intersects the branches or the pattern with `masks.causal()`, and allows calls with is_causal=True. The
        attribute `pattern` includes this intersection.
    mesh, schedule, sharding: as in `BlockSparseAttention`. The tokens of query, key and value are then this rank's, and
        key_padding_mask is for the whole sequence. The `state_dict` is that of a module without a mesh.
    dropout: probability of dropping an attention weight, in training.

    add_bias_kv and add_zero_attn must be False, else ValueError. `nn.TransformerEncoderLayer` calls the module in
    inference, too, instead of the layer's own fused kernel.

    >>> layer = fd.MultiheadDilatedAttention(64, 4, (64, 256), (1, 4), batch_first=True)
    >>> x = torch.randn(1, 256, 64)
    >>> layer(x, x, x)[0].shape
    torch.Size([1, 256, 64])
    >>> layer = fd.MultiheadDilatedAttention(64, 4, pattern=masks.local_window(left=31, right=31), batch_first=True)
    >>> layer(x, x, x)[0].shape
    torch.Size([1, 256, 64])
    """

    @advises(
        keywords={
            "is_causal": "write causal=True",
            **renamed(embed_dim=WIDTH, num_heads=HEADS),
            **OF_BRANCHES,
        },
        how=_HOW,
    )
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        pattern: Pattern | Mixture | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        causal: bool = False,
        offsets: str = "interleaved",
        heads: str = "all",
        engine: str | None = None,
        mesh: DeviceMesh | None = None,
        schedule: str = "auto",
        sharding: Sharding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(embed_dim, num_heads)
        _check_unavailable(add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn)
        self.dropout = require_probability("dropout", dropout)
        check_engine(engine)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim = require_int("kdim", embed_dim if kdim is None else kdim, minimum=1)
        self.vdim = require_int("vdim", embed_dim if vdim is None else vdim, minimum=1)
        self.batch_first = require_bool("batch_first", batch_first)
        options = {"causal": causal, "offsets": offsets, "heads": heads}
        self.pattern = pattern_from_arguments(pattern, segment_lengths, dilation_rates, **options, how=_HOW)
        self.pattern.check_heads(num_heads)
        self.causal = causal
        self.engine = engine
        self.over_ranks = over_ranks(mesh, schedule=schedule, sharding=sharding)
        self._add_parameters(require_bool("bias", bias), device, dtype)
        self.reset_parameters()

    def _add_parameters(self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        E = self.embed_dim
        packed = self.kdim == self.vdim == E
        shapes = {
            "in_proj_weight": (3 * E, E) if packed else None,
            "q_proj_weight": None if packed else (E, E),
            "k_proj_weight": None if packed else (E, self.kdim),
            "v_proj_weight": None if packed else (E, self.vdim),
            "in_proj_bias": (3 * E,) if bias else None,
        }
        for name, shape in shapes.items():
            empty = None if shape is None else torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))
        self.out_proj = nn.Linear(E, E, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialize the input projections Xavier-uniformly and all biases with 0, as `nn.MultiheadAttention` does."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    @advises(
        keywords=renamed(
            attn_mask="mask src_mask", key_padding_mask="padding_mask src_key_padding_mask attention_mask"
        ),
        how="write layer(x, x, x)[0]",
    )
    def forward(
        self,
        query: Float[Tensor, "*batch E"],
        key: Float[Tensor, "*batch K"],
        value: Float[Tensor, "*batch V"],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        bindings: Mapping[str, Tensor] | None = None,
    ) -> tuple[Float[Tensor, "*batch E"], None]:
        """Return (output in the shape of query, None in place of attention weights, which are never formed).

        Shapes: query (N, B, E), or (B, N, E) with batch_first, or (N, E) unbatched; key and value likewise, with M
        tokens of width kdim and vdim.

        attn_mask: None or, for a module with causal=True, exactly torch's causal mask, (N, M) booleans or floats, which
            changes nothing; with a mesh for the whole sequence.
        is_causal: True needs a module with causal=True.
        key_padding_mask: booleans (B, M), or (M,) unbatched, True for keys to hide, or floats, -inf for keys to hide
            and 0 for others. A query without visible keys gets attention output 0, where torch has NaN. Positions
            include padding: with padding on the left, segments begin in the padding.
        average_attn_weights: without effect, as no weights are returned.
        bindings: values of the run-time tensors that the pattern names, as in `attend`; with a mesh for the whole
            sequence.

        Raises ValueError for need_weights and for any other attn_mask (RuntimeError at run time in a compiled graph),
        and ValueError or TypeError for inputs that do not fit.
        """
        refuse_weights(need_weights)
        q, k, v = self.heads_of(query, key, value)
        *batch, tokens = self.padding_mask_shape(key)
        if self.over_ranks is not None:
            tokens = self.over_ranks.sharding_of(tokens).num_tokens
        num_queries = q.shape[2] if self.over_ranks is None else tokens
        self._check_causal_call(require_bool("is_causal", is_causal), attn_mask, (num_queries, tokens))
        pattern = without_padding(self.pattern, key_padding_mask, (*batch, tokens), batch_first=self.batch_first)
        dropout_p = self.dropout if self.training else 0.0
        options = {"dropout_p": dropout_p, "bindings": bindings, "engine": self.engine}
        if self.over_ranks is None:
            out = attend(q, k, v, pattern, q_offset=0, **options)
        else:
            out = self.over_ranks.attend(q, k, v, pattern, **options)
        return self.output_of(out, query.dim()), None

    def _check_causal_call(self, is_causal: bool, attn_mask: object, shape: tuple[int, int]) -> None:
        """Check is_causal and attn_mask, of shape (queries, keys) = `shape`, against the module.

        Raises as `require_causal_mask` does, and ValueError for a module with causal=False if is_causal is True or
        attn_mask is not None.
        """
        if attn_mask is not None:
            require_causal_mask(attn_mask, shape, instead=_INSTEAD if self.batch_first else _INSTEAD + _TOKENS_FIRST)
        if not self.causal and (is_causal or attn_mask is not None):
            came = "is_causal=True" if is_causal else "a causal attn_mask"
            raise ValueError(f"a causal call needs a module that is made with causal=True; got {came}")

    def extra_repr(self) -> str:
        sizes = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, kdim={self.kdim}, vdim={self.vdim}"
        way = f"{engine_text(self.engine)}{ranks_text(self.over_ranks)}"
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        return f"{sizes}, batch_first={self.batch_first}{dropout}, {pattern_text(self.pattern)}, {way}"


def _check_sizes(embed_dim: int, num_heads: int) -> None:
    require_int("embed_dim", embed_dim, minimum=1)
    require_int("num_heads", num_heads, minimum=1)
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim must be a multiple of num_heads; got {embed_dim=} and {num_heads=}")


def _check_unavailable(*, add_bias_kv: bool, add_zero_attn: bool) -> None:
    for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
        if require_bool(name, value):
            raise ValueError(
                f"{name} must be False, as a key without a position is in no segment: prepend a learned token to the "
                f"sequence instead; got {name}=True"
            )
