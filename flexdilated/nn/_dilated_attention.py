"""DilatedAttention: LongNet's attention over q, k and v, as a module without parameters."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from .._attend import attend
from .._engines import check_engine
from .._validate import resolve_scale
from ._dilated_pattern import dilated_pattern, require_bool

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


class DilatedAttention(nn.Module):
    """Attention by LongNet's branches (segment length, dilation rate), causal or not.

    The module holds its pattern, a value free of sizes, and no plan: it works at any number of heads and
    tokens, and pickles, copies and moves like any module. `pattern` may be read, and used with `attend`.

    offsets, heads: as in `masks.longnet`. scale: of the scores; None means 1 / sqrt(D). enable_gqa: allow
    fewer key/value heads than query heads. engine: as in `attend`. Bad values raise ValueError or TypeError.
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
    ) -> None:
        super().__init__()
        check_engine(engine)
        self.pattern = dilated_pattern(segment_lengths, dilation_rates, causal=causal, offsets=offsets, heads=heads)
        self.scale = None if scale is None else resolve_scale(scale, head_dim=1)
        self.enable_gqa = require_bool("enable_gqa", enable_gqa)
        self.engine = engine

    def forward(
        self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"], v: Float[Tensor, "B G M D"]
    ) -> Float[Tensor, "B H N D"]:
        """Query i and key i share position i. A query whose head is in no branch there gets output 0."""
        return attend(q, k, v, self.pattern, scale=self.scale, enable_gqa=self.enable_gqa, engine=self.engine)

    def extra_repr(self) -> str:
        return f"{self.pattern!r}, scale={self.scale}, enable_gqa={self.enable_gqa}, engine={self.engine!r}"
