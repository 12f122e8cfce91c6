"""Attention modules (q, k, v) -> out with any pattern or LongNet's, on one device or over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from .. import masks
from .._attend import attend, autocast
from .._engine_choice import check_engine
from .._over_ranks import engine_text, over_ranks, pattern_text, ranks_text
from .._validate import OTHER_KEYWORDS, check_tensors, expand_batch, resolve_scale
from ..engines import ScoreMod
from ..masks import Mixture, Pattern
from ..masks.core import HEADS, WIDTH, advises, require_bool, require_expression, require_int, require_probability
from ..masks.patterns import OF_BRANCHES
from ..masks.planning import block_sides
from ._call_masks import without_padding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed import Sharding
    from ..distributed.wire import CodecChoice, PoolChoice

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


_KEYWORD_ADVICE = {
    **OTHER_KEYWORDS,
    **dict.fromkeys(
        f"{WIDTH} embed_dim num_heads {HEADS}".split(),
        "it has no projections; for a module with projections write "
        "fd.MultiheadDilatedAttention(embed_dim, num_heads, segment_lengths, dilation_rates), or pattern= instead of "
        "the last two",
    ),
    "dropout_p": "write dropout=, which is applied in training",
}
_DILATED_KEYWORD_ADVICE = {
    **_KEYWORD_ADVICE,
    **OF_BRANCHES,
    "is_causal": "write causal=True",
    "pattern": "write fd.BlockSparseAttention(pattern)",
}
_DILATED_HOW = (
    "write fd.DilatedAttention((2048, 8192), (1, 4)), a segment length and a dilation rate for each branch; "
    "fd.BlockSparseAttention(pattern) takes any pattern"
)


class BlockSparseAttention(nn.Module):
    """Attention over the pairs that `pattern` allows: (q, k, v) -> out.

    The module stores its pattern and nothing computed from it for given sizes, so it takes inputs of any length that
    the pattern allows, except with a `sharding`. The attribute `pattern` may be read.

    pattern: a pattern or mixture; run-time tensors that it only names are passed to the call as `bindings`.
    dropout: probability of dropping an attention weight, in training.
    sinks: True adds a parameter of that name: a logit for each of num_heads heads of q, initially 0, which adds a term
        exp(sink) to the head's softmax denominators.
    num_heads: number of query heads; required with sinks=True, else None.
    scale: factor on the scores, a number; None: 1 / sqrt(D).
    enable_gqa, engine, block_size, autotune: as in `attend`; autotune must be False with a mesh.
    mesh: the ranks that share the sequence, a DeviceMesh of one dimension; None for one device. With a mesh, q, k, v
        and the output are this rank's tokens, at the positions that `sharding` assigns to it (None: contiguous shards
        of equal length); a padding mask and bindings are for the whole sequence.
    schedule: "exchange", "ring", "auto" to choose between these two, or "heads": each rank attends over the whole
        sequence for some heads.
    codec, error_bound, pool: as in `distributed.attend`.

    With a mesh, sum the gradients of `sinks` over the ranks. Invalid values raise ValueError or TypeError.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> layer = fd.BlockSparseAttention(masks.local_window(left=31, right=0))
    >>> layer(q, k, v).shape
    torch.Size([1, 4, 256, 64])
    """

    sinks: nn.Parameter | None

    @advises(
        keywords=_KEYWORD_ADVICE | {"segment_lengths": "write fd.DilatedAttention(segment_lengths, dilation_rates)"},
        how="write fd.BlockSparseAttention(pattern); fd.DilatedAttention takes segment lengths and dilation rates",
    )
    def __init__(
        self,
        pattern: Pattern | Mixture,
        *,
        mesh: DeviceMesh | None = None,
        schedule: str = "auto",
        sharding: Sharding | None = None,
        codec: CodecChoice = None,
        error_bound: float | None = None,
        pool: PoolChoice = None,
        dropout: float = 0.0,
        sinks: bool = False,
        num_heads: int | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        engine: str | None = None,
        block_size: int | tuple[int, int] | None = None,
        autotune: bool = False,
    ) -> None:
        super().__init__()
        check_engine(engine)
        require_expression(pattern)
        self.pattern = pattern
        self.scale = None if scale is None else resolve_scale(scale, head_dim=1)
        self.enable_gqa = require_bool("enable_gqa", enable_gqa)
        self.engine = engine
        self.autotune = require_bool("autotune", autotune)
        self.dropout = require_probability("dropout", dropout)
        self.block_size = None if block_size is None else block_sides(block_size)
        sent = {"codec": codec, "error_bound": error_bound, "pool": pool}
        self.over_ranks = over_ranks(mesh, schedule=schedule, sharding=sharding, **sent)
        if autotune and mesh is not None:
            raise ValueError(
                "autotune must be False with a mesh, as it measures calls of one device; got autotune=True"
            )
        self.register_parameter("sinks", _sink_logits(pattern, require_bool("sinks", sinks), num_heads))

    @advises(keywords=OTHER_KEYWORDS, how="write layer(q, k, v)")
    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "#B G M D"],
        v: Float[Tensor, "#B G M D"],
        *,
        score_mod: ScoreMod | None = None,
        bindings: Mapping[str, Tensor] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        q_offset: int | Tensor | None = None,
        k_offset: int = 0,
        head_offset: int = 0,
        num_heads_global: int | None = None,
    ) -> Float[Tensor, "B H N D"]:
        """Return the attention output; it is 0 for a query that may attend to no key.

        Query i has position q_offset + i, key j position k_offset + j; q_offset None: as in `attend`. With a mesh
        the sharding determines positions, and an offset other than None or 0 raises ValueError.

        score_mod, bindings, head_offset, num_heads_global: as in `attend`.
        key_padding_mask: True for keys to hide; None to hide none.
        """
        pattern = self.pattern
        if key_padding_mask is not None:
            q, k, v = expand_batch(q, k, v)
            if self.over_ranks is None:
                check_tensors(*autocast(q, k, v), enable_gqa=self.enable_gqa)
            tokens = k.shape[2] if self.over_ranks is None else self.over_ranks.sharding_of(k.shape[2]).num_tokens
            pattern = without_padding(pattern, key_padding_mask, (k.shape[0], tokens), k_offset=k_offset)
        options = {"score_mod": score_mod, "bindings": bindings, "sinks": self.sinks, "scale": self.scale}
        options |= {"head_offset": head_offset, "num_heads_global": num_heads_global, "enable_gqa": self.enable_gqa}
        options |= {"engine": self.engine, "block_size": self.block_size}
        options["dropout_p"] = self.dropout if self.training else 0.0
        offsets = {"q_offset": q_offset, "k_offset": k_offset}
        if self.over_ranks is None:
            return attend(q, k, v, pattern, autotune=self.autotune, **offsets, **options)
        if any(isinstance(offset, Tensor) or offset for offset in offsets.values()):
            raise ValueError(
                f"q_offset and k_offset must be 0 with a mesh, as the sharding determines positions; got {offsets}"
            )
        return self.over_ranks.attend(q, k, v, pattern, **options)

    def extra_repr(self) -> str:
        sinks = "" if self.sinks is None else f", sinks=True, num_heads={len(self.sinks)}"
        chosen = {"dropout": self.dropout or None, "block_size": self.block_size, "autotune": self.autotune or None}
        rest = "".join(f", {name}={value}" for name, value in chosen.items() if value is not None)
        own = f"{pattern_text(self.pattern)}, scale={self.scale}, enable_gqa={self.enable_gqa}"
        return f"{own}, {engine_text(self.engine)}{sinks}{rest}{ranks_text(self.over_ranks)}"


def _sink_logits(pattern: Pattern | Mixture, wanted: bool, num_heads: int | None) -> nn.Parameter | None:
    if wanted != (num_heads is not None):
        raise ValueError(
            f"sinks=True needs num_heads, the number of sinks, and num_heads needs sinks=True; got sinks={wanted}, "
            f"{num_heads=}"
        )
    if num_heads is None:
        return None
    pattern.check_heads(require_int("num_heads", num_heads, minimum=1))
    return nn.Parameter(torch.zeros(num_heads))


def dilated_pattern(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    causal: bool,
    offsets: str,
    heads: str,
) -> Pattern | Mixture:
    """Return `masks.longnet` with these branches, intersected with causal order if `causal`.

    Raises ValueError if every rate exceeds its segment length, as no token would attend to another.
    """
    require_bool("causal", causal)
    pattern = masks.longnet(segment_lengths, dilation_rates, offsets=offsets, heads=heads)
    if all(rate > segment for segment, rate in zip(segment_lengths, dilation_rates, strict=True)):
        raise ValueError(
            "dilation rates must be at most the segment lengths, or no token sees another; the segment lengths come "
            f"first; got segment_lengths={tuple(segment_lengths)} and dilation_rates={tuple(dilation_rates)}"
        )
    return pattern & masks.causal() if causal else pattern


def pattern_from_arguments(
    pattern: Pattern | Mixture | None,
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    *,
    causal: bool,
    offsets: str,
    heads: str,
    how: str,
) -> Pattern | Mixture:
    """Return `pattern`, intersected with causal order if `causal`; for None the `dilated_pattern` of the branches.

    how: a correct call, as text for the TypeError.

    Raises TypeError without a pattern if segment_lengths or dilation_rates is None, and ValueError for a pattern with
    any of the two, or with offsets or heads other than the defaults.
    """
    if pattern is None:
        if segment_lengths is None or dilation_rates is None:
            raise TypeError(f"attention needs segment_lengths and dilation_rates, or pattern=: {how}")
        return dilated_pattern(segment_lengths, dilation_rates, causal=causal, offsets=offsets, heads=heads)
    require_expression(pattern)
    defaults = {"segment_lengths": None, "dilation_rates": None, "offsets": "interleaved", "heads": "all"}
    branches = zip(defaults.items(), (segment_lengths, dilation_rates, offsets, heads), strict=True)
    if given := [f"{name}={value!r}" for (name, default), value in branches if value != default]:
        raise ValueError(
            "a pattern replaces segment_lengths, dilation_rates, offsets and heads: give one or the other; got "
            f"pattern={pattern_text(pattern)} and {', '.join(given)}"
        )
    return pattern & masks.causal() if require_bool("causal", causal) else pattern


class DilatedAttention(BlockSparseAttention):
    """Attention by LongNet's branches (segment length, dilation rate), causal or not: (q, k, v) -> out.

    A query gets output 0 for a head in which no branch selects its position.

    segment_lengths, dilation_rates, offsets, heads: as in `masks.longnet`.
    causal: True intersects the branches with `masks.causal()`.

    Other arguments, and the arguments of a call: as in `BlockSparseAttention`.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> layer = fd.DilatedAttention((64, 256), (1, 4), causal=True)
    >>> layer(q, k, v).shape
    torch.Size([1, 4, 256, 64])
    """

    @advises(keywords=_DILATED_KEYWORD_ADVICE, how=_DILATED_HOW)
    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        causal: bool = False,
        *,
        offsets: str = "interleaved",
        heads: str = "all",
        dropout: float = 0.0,
        scale: float | None = None,
        enable_gqa: bool = False,
        engine: str | None = None,
        autotune: bool = False,
    ) -> None:
        pattern = dilated_pattern(segment_lengths, dilation_rates, causal=causal, offsets=offsets, heads=heads)
        options = {"dropout": dropout, "scale": scale, "enable_gqa": enable_gqa, "engine": engine}
        super().__init__(pattern, autotune=autotune, **options)


@advises()
class RingDilatedAttention(BlockSparseAttention):
    """`DilatedAttention` over a sequence that is distributed over the ranks of a mesh; keys are sent to the queries.

    Takes this rank's q, k and v, and returns its output. Each rank receives the keys and values that its queries need,
    in one all-to-all (schedule="exchange"), or whole ranges of positions that contain them, rank by rank while it
    computes ("ring"); "auto" chooses by counted bytes and memory.

    mesh, sharding, codec, error_bound, pool: as in `BlockSparseAttention`; other arguments as in `DilatedAttention`.

    Raises TypeError without a mesh, and ValueError for schedule="heads".

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> fd.RingDilatedAttention((64, 256), (1, 4), mesh=mesh)(q, k, v).shape  # this rank's tokens
    torch.Size([1, 4, 256, 64])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        causal: bool = False,
        *,
        mesh: DeviceMesh,
        schedule: str = "auto",
        sharding: Sharding | None = None,
        codec: CodecChoice = None,
        error_bound: float | None = None,
        pool: PoolChoice = None,
        offsets: str = "interleaved",
        heads: str = "all",
        dropout: float = 0.0,
        scale: float | None = None,
        enable_gqa: bool = False,
        engine: str | None = None,
    ) -> None:
        _require_mesh(mesh)
        if schedule == "heads":
            raise ValueError("RingDilatedAttention moves keys; for schedule='heads' take HeadParallelDilatedAttention")
        pattern = dilated_pattern(segment_lengths, dilation_rates, causal=causal, offsets=offsets, heads=heads)
        options = {"dropout": dropout, "scale": scale, "enable_gqa": enable_gqa, "engine": engine}
        options |= {"sharding": sharding, "codec": codec, "error_bound": error_bound, "pool": pool}
        super().__init__(pattern, mesh=mesh, schedule=schedule, **options)


@advises()
class HeadParallelDilatedAttention(BlockSparseAttention):
    """`DilatedAttention` over a sequence that is distributed over the ranks of a mesh; heads are divided over ranks.

    An all-to-all before attention gives each rank all tokens of some heads; one after it returns the outputs, so that
    each rank has all heads of its own tokens. The number of query heads must be a multiple of the number of ranks;
    there may be fewer key/value heads, which are sent to every rank that reads them. Dilation offsets depend on the
    global head, not on the number of ranks.

    mesh, sharding: as in `BlockSparseAttention`; other arguments as in `DilatedAttention`.

    Raises TypeError without a mesh.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> fd.HeadParallelDilatedAttention((64, 256), (1, 4), mesh=mesh)(q, k, v).shape  # this rank's tokens
    torch.Size([1, 4, 256, 64])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        causal: bool = False,
        *,
        mesh: DeviceMesh,
        sharding: Sharding | None = None,
        offsets: str = "interleaved",
        heads: str = "all",
        dropout: float = 0.0,
        scale: float | None = None,
        enable_gqa: bool = False,
        engine: str | None = None,
    ) -> None:
        _require_mesh(mesh)
        pattern = dilated_pattern(segment_lengths, dilation_rates, causal=causal, offsets=offsets, heads=heads)
        options = {"dropout": dropout, "scale": scale, "enable_gqa": enable_gqa, "engine": engine}
        super().__init__(pattern, mesh=mesh, schedule="heads", sharding=sharding, **options)


def _require_mesh(mesh: object) -> None:
    if mesh is None:
        raise TypeError("mesh must be a torch.distributed DeviceMesh; got None: for one rank write DilatedAttention")
