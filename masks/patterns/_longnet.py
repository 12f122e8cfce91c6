"""LongNet's dilated attention: branches of growing segments and rates."""

from collections.abc import Sequence

from ..core._check import require_choice, require_int
from ..core._pattern import Mixture, Pattern
from ..core._per_head import HeadGroups
from ._dilated import OFFSET_RULES, Dilated

HEAD_RULES = ("all", "grouped")


def longnet(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    offsets: str = "interleaved",
    heads: str = "all",
) -> Mixture | Pattern:
    """Dilated branches (segment length, dilation rate), joined as LongNet joins them.

    heads="all": every head runs every branch, a mixture in which a pair counts once a branch (LongNet,
    arXiv 2307.02486, eqs. 9 and 10; torchscale). heads="grouped": consecutive head groups run one branch
    each, a set (the grouping of dilated-attention-pytorch, which starts every head of group i at i mod rate;
    `per_head` gives that). offsets="interleaved": head h starts at
    h mod rate (eq. 13); "contiguous": at floor(h / ceil(H / rate)), which torchscale's checkpoints expect.
    Raises ValueError for lists that are empty or of unequal length, values below 1 and unknown rules.
    """
    for name, value in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(f"{name} must be a sequence of integers; got {name}={value!r}")
        for branch, entry in enumerate(value):
            require_int(f"{name}[{branch}]", entry, minimum=1)
    segments, rates = tuple(segment_lengths), tuple(dilation_rates)
    if not segments or len(segments) != len(rates):
        raise ValueError(
            "segment_lengths and dilation_rates need one entry each a branch, at least one; "
            f"got {segment_lengths=} and {dilation_rates=}"
        )
    require_choice("offsets", offsets, OFFSET_RULES)
    require_choice("heads", heads, HEAD_RULES)
    branches = tuple(Dilated(segment, rate, offsets) for segment, rate in zip(segments, rates, strict=True))
    return HeadGroups(branches) if heads == "grouped" else Mixture.of(*branches)
