"""LongNet's dilated attention: branches of growing segments and rates."""

from collections.abc import Sequence

from ._check import require_choice
from ._dilated import OFFSET_RULES, Dilated
from ._pattern import Expression, Mixture
from ._per_head import HeadGroups

HEAD_RULES = ("all", "grouped")


def longnet(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    offsets: str = "interleaved",
    heads: str = "all",
) -> Expression:
    """Dilated branches (segment length, dilation rate), joined as LongNet joins them.

    heads="all": every head runs every branch, a mixture in which a pair counts once a branch (LongNet,
    arXiv 2307.02486, eqs. 9 and 10; torchscale). heads="grouped": consecutive head groups run one branch
    each, a set (the rule of dilated-attention-pytorch). offsets="interleaved": head h starts at
    h mod rate (eq. 13); "contiguous": at floor(h / ceil(H / rate)), which torchscale's checkpoints expect.
    Raises ValueError for lists that are empty or of unequal length, values below 1 and unknown rules.
    """
    segments, rates = tuple(segment_lengths), tuple(dilation_rates)
    if not segments or len(segments) != len(rates):
        raise ValueError(
            "segment_lengths and dilation_rates need one entry each a branch, at least one; "
            f"got {segment_lengths=} and {dilation_rates=}"
        )
    require_choice("offsets", offsets, OFFSET_RULES)
    require_choice("heads", heads, HEAD_RULES)
    branches = tuple(Dilated(segment, rate, offsets) for segment, rate in zip(segments, rates, strict=True))
    return HeadGroups(branches) if heads == "grouped" else Mixture(branches)
