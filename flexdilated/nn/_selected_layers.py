"""SelectedLayers: which layers of a LongNet choose their keys from the data, and how; plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import masks
from .._over_ranks import OverRanks
from ..masks import Pattern
from ..masks.core import require_int
from ..selection import BlockSelector, SelectedAttention, TopK


@dataclass(frozen=True, kw_only=True)
class SelectedLayers:
    """Layers of a LongNet that read the blocks which score best, in place of its branches.

    block, scorer, share, query_block: as in `BlockSelector`, whose `within` is the model's causal order or its lack;
        rows of a causal model choose by their first query. scorer: the name of one. most: as in `TopK`.
    always: what a query reads in any case, as `masks.parse` reads it; None for the block it stands in.
    gradient: "none" or "bias", as in `SelectedAttention`.
    layers: numbers of the layers, from 0; None for all.

    Raises ValueError or TypeError for other values.

    >>> config = fd.LongNetConfig(
    ...     vocab_size=256, embed_dim=64, depth=2, num_heads=4, segment_lengths=(64, 256), dilation_rates=(1, 4),
    ...     selection=fd.SelectedLayers(block=32, most=4, layers=(1,)),
    ... )
    >>> fd.LongNet(config).blocks[1].selected.gradient
    'none'
    """

    block: int
    most: int
    scorer: str = "mean"
    share: str = "head"
    query_block: int = 1
    always: str | None = None
    gradient: str = "none"
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.layers is not None:
            if not isinstance(self.layers, Sequence):
                raise TypeError(f"layers must be a sequence of integers, or None for all; got {self.layers!r}")
            object.__setattr__(self, "layers", tuple(require_int("layers", each, minimum=0) for each in self.layers))
        if not isinstance(self.scorer, str):
            raise TypeError(
                "scorer must be the name of one, as a configuration is plain data: for a module, assign "
                f"model.blocks[i].selected = fd.SelectedAttention(selector); got {type(self.scorer).__name__}"
            )
        self.attention(causal=True)

    def attention(
        self, *, causal: bool, engine: str | None = None, over_ranks: OverRanks | None = None
    ) -> SelectedAttention:
        """The attention of one of these layers, over the ranks of the model."""
        always = masks.chunked(self.block) if self.always is None else masks.parse(self.always)
        if not isinstance(always, Pattern):
            raise TypeError(f"always must be the text of a set pattern; got {self.always!r}")
        selector = BlockSelector(
            block=self.block,
            query_block=self.query_block,
            scorer=self.scorer,
            choose=TopK(self.most),
            within=masks.causal() if causal else masks.every(),
            always=always,
            share=self.share,
            query_summary="first" if causal else "mean",
        )
        where = {} if over_ranks is None else {"mesh": over_ranks.mesh, "sharding": over_ranks.sharding}
        return SelectedAttention(selector, self.gradient, engine=engine, **where)
