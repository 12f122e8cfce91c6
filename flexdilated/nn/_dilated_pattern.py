"""The pattern that the modules of this package share: LongNet's branches, causal or not."""

from __future__ import annotations

from collections.abc import Sequence

from .. import masks
from ..masks import Mixture, Pattern


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


def require_bool(name: str, value: object) -> bool:
    """The value itself, if it is True or False; TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {name}={value!r}")
    return value
