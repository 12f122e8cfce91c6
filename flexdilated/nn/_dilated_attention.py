"""DilatedAttention: LongNet's attention over q, k and v, as a module without parameters."""

from __future__ import annotations

from collections.abc import Sequence

from ._block_sparse import BlockSparseAttention
from ._dilated_pattern import dilated_pattern


class DilatedAttention(BlockSparseAttention):
    """Attention by LongNet's branches (segment length, dilation rate), causal or not: (q, k, v) -> out.

    A query whose head is in no branch at its position gets output 0. offsets, heads: as in `masks.longnet`. The
    rest, and the call, are those of `BlockSparseAttention`.
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
