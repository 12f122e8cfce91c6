"""LongNet's attention over q, k and v, on one device or over the ranks of a mesh, as modules without parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import masks
from ..masks import Mixture, Pattern
from ..masks.core import require_bool
from ._block_sparse import BlockSparseAttention

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed import Sharding
    from ..distributed.wire import CodecChoice, PoolChoice


def dilated_pattern(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    causal: bool,
    offsets: str,
    heads: str,
) -> Pattern | Mixture:
    """`masks.longnet` of these branches, restricted to keys at or before the query where causal."""
    require_bool("causal", causal)
    pattern = masks.longnet(segment_lengths, dilation_rates, offsets=offsets, heads=heads)
    return pattern & masks.causal() if causal else pattern


class DilatedAttention(BlockSparseAttention):
    """Attention by LongNet's branches (segment length, dilation rate), causal or not: (q, k, v) -> out.

    A query whose head is in no branch at its position gets output 0. offsets, heads: as in `masks.longnet`. The
    rest, and the call, are those of `BlockSparseAttention`.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> layer = fd.DilatedAttention((64, 256), (1, 4), causal=True)
    >>> layer(q, k, v).shape
    torch.Size([1, 4, 256, 64])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        causal: bool = False,
        *,
        offsets: str = "interleaved",
        heads: str = "all",
        scale: float | None = None,
        enable_gqa: bool = False,
        engine: str | None = None,
        autotune: bool = False,
    ) -> None:
        pattern = dilated_pattern(segment_lengths, dilation_rates, causal=causal, offsets=offsets, heads=heads)
        super().__init__(pattern, scale=scale, enable_gqa=enable_gqa, engine=engine, autotune=autotune)


class RingDilatedAttention(BlockSparseAttention):
    """`DilatedAttention` of a sequence that lies on the ranks of a mesh: this rank's q, k and v in, its output out.

    Keys and values come to the queries: each rank gets those that its queries need, at once (schedule="exchange") or
    rank by rank while it computes ("ring"); "auto" takes what the bytes and the memory are in favour of. mesh,
    sharding, codec, error_bound, pool: as in `BlockSparseAttention`; the rest as in `DilatedAttention`.

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
        scale: float | None = None,
        enable_gqa: bool = False,
        engine: str | None = None,
    ) -> None:
        _require(mesh)
        if schedule == "heads":
            raise ValueError("RingDilatedAttention moves keys; for schedule='heads' take HeadParallelDilatedAttention")
        pattern = dilated_pattern(segment_lengths, dilation_rates, causal=causal, offsets=offsets, heads=heads)
        options = {"scale": scale, "enable_gqa": enable_gqa, "engine": engine, "schedule": schedule}
        options |= {"sharding": sharding, "codec": codec, "error_bound": error_bound, "pool": pool}
        super().__init__(pattern, mesh=mesh, **options)


class HeadParallelDilatedAttention(BlockSparseAttention):
    """`DilatedAttention` of a sequence that lies on the ranks of a mesh: each rank computes all of it for some heads.

    One all-to-all brings the tokens together, another takes the output apart. The number of query heads must be a
    multiple of the number of ranks; key/value heads may be fewer, and go to every rank that reads them. Dilation
    offsets are those of the head among all heads, so W ranks give the result of one. mesh, sharding: as in
    `BlockSparseAttention`; the rest as in `DilatedAttention`.

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
        scale: float | None = None,
        enable_gqa: bool = False,
        engine: str | None = None,
    ) -> None:
        _require(mesh)
        pattern = dilated_pattern(segment_lengths, dilation_rates, causal=causal, offsets=offsets, heads=heads)
        options = {"scale": scale, "enable_gqa": enable_gqa, "engine": engine}
        super().__init__(pattern, mesh=mesh, schedule="heads", sharding=sharding, **options)


def _require(mesh: object) -> None:
    if mesh is None:
        raise TypeError("mesh must be a torch.distributed DeviceMesh; got None: one rank takes DilatedAttention")
