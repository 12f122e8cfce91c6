"""The pattern that the modules of this package share: LongNet's branches, causal or not."""

from __future__ import annotations

from collections.abc import Sequence

from .. import masks
from ..masks import Mixture, Pattern
from ..masks.core import require_bool


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
