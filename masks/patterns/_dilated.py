"""Dilated segments, in which every rate-th token attends within its segment, and LongNet's combinations of them."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..core import (
    OF_PATTERNS,
    Bounds,
    Box,
    Counts,
    HeadGroups,
    MaskMod,
    Mixture,
    Pair,
    Pattern,
    Phrase,
    Progression,
    Ranges,
    Reason,
    advises,
    among,
    at_least,
    call,
    clip,
    constructor,
    count_residue,
    count_runs,
    parameters,
    pattern_kind,
    renamed,
    require_choice,
    require_int,
    require_ints,
)

_Heads = TypeVar("_Heads", int, Tensor)

OFFSET_RULES = ("interleaved", "contiguous")
HEAD_RULES = ("all", "grouped")
PADDINGS = ("zeros",)


@pattern_kind("dilated", positional=2)
class Dilated(Pattern):
    """Pattern that allows a pair iff both positions are in one segment and both are active.

    Position t is active iff (t mod segment) mod rate == offset. `offset` is a number, or a rule that gives one to each
    global head h of H heads: "interleaved" is h mod rate (LongNet, arXiv 2307.02486, eq. 13), "contiguous" is
    floor(h / ceil(H / rate)) (torchscale).
    """

    segment: int = at_least(1)
    rate: int = at_least(1)
    offset: int | str = 0
    padding: ClassVar[str | None] = None

    def check(self) -> None:
        if isinstance(self.offset, str):
            require_choice("offset", self.offset, OFFSET_RULES)
        elif require_int("offset", self.offset, minimum=0) >= self.rate:
            raise ValueError(f"offset must be below the rate; got offset={self.offset}, rate={self.rate}")

    def origin(self) -> Hashable:
        return self.offset if isinstance(self.offset, str) else None

    def joint_phrase(self, branches: Sequence[Any], *, grouped: bool = False) -> Phrase | None:
        if not isinstance(self.offset, str):
            return None
        named = {} if self.offset == OFFSET_RULES[0] else {"offsets": self.offset}
        named |= {"heads": HEAD_RULES[1]} if grouped else {}
        named |= {} if self.padding is None else {"padding": self.padding}
        return call("longnet", tuple(each.segment for each in branches), tuple(each.rate for each in branches), **named)

    def offset_of(self, head: _Heads, num_heads: int) -> _Heads | int:
        """Return the offset of a global head, or of each global head in a tensor; always an int if `offset` is one."""
        if isinstance(self.offset, int):
            return self.offset
        if self.offset == "interleaved":
            return head % self.rate
        return head // -(-num_heads // self.rate)

    def for_head(self, head: int, num_heads: int) -> Pattern:
        return Dilated(self.segment, self.rate, self.offset_of(head, num_heads))

    def snapped(self, q_side: int, k_side: int) -> Pattern | None:
        """Return the pattern with its segment rounded up to a multiple of rate * lcm(q_side, k_side).

        Each residue class of a segment then fills whole blocks. None if the rate does not divide the segment, because
        the residue classes then differ in length.
        """
        whole = lcm(q_side, k_side) * self.rate
        return None if self.segment % self.rate else replace(self, segment=-(-self.segment // whole) * whole)

    def period(self) -> int:
        return self.segment

    def confined(self) -> bool:
        return True

    def rates(self) -> tuple[int, ...]:
        return (self.rate,)

    def row(self, query: int, keys: range) -> Ranges:
        assert isinstance(self.offset, int), "a rule for one head has its offset resolved"
        place = query % self.segment
        if place % self.rate != self.offset:
            return ()
        start = query - place
        return among([range(start + self.offset, start + self.segment, self.rate)], keys)

    def spacing(self) -> int:
        return self.rate

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        segment, rate = parameters(device, self.segment, self.rate)
        if self.rate == 1:
            return _same_segment(segment)
        offsets = self._offsets(torch.arange(num_heads), num_heads).to(device, rate.dtype)

        def active_in_segment(b, h, q, k):
            offset = offsets[h]
            queries = (q % segment) % rate == offset
            keys = (k % segment) % rate == offset
            return (q // segment == k // segment) & queries & keys

        return active_in_segment

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        (q_first, q_last), (k_first, k_last) = self._end_segments(box.q), self._end_segments(box.k)
        start = torch.maximum(q_first, k_first)
        spanned = (torch.minimum(q_last, k_last) + 1 - start).clamp(min=0)
        offsets = self._offsets(box.head, num_heads)
        if torch.equal(q_first, q_last) and torch.equal(k_first, k_last):
            # The common case deep in the quadtree: no box crosses a segment border.
            begin = start * self.segment + offsets
            pairs = torch.where(spanned > 0, self._count_active(box.q, begin) * self._count_active(box.k, begin), 0)
            return Bounds(pairs, pairs)

        def pairs_in(index: int) -> Counts:
            begin = (start + index) * self.segment
            q, k = (clip(side, begin, begin + self.segment) for side in (box.q, box.k))
            return self._count_active(q, begin + offsets) * self._count_active(k, begin + offsets)

        return count_runs(spanned, box.area, pairs_in)

    def reason(self, pair: Pair) -> Reason:
        of_query, of_key = pair.query // self.segment, pair.key // self.segment
        where = pair.in_runs("segment", of_query, of_key, lambda at: (at * self.segment, (at + 1) * self.segment))
        if of_query != of_key or self.rate == 1:
            return Reason(self, of_query == of_key, where)
        offset = self.offset_of(pair.head, pair.num_heads)
        query, key = (position % self.segment % self.rate for position in (pair.query, pair.key))
        active = f"where head {pair.head} takes the places of residue {offset} modulo {self.rate}"
        found = f"{pair.the_query} has residue {query}, {pair.the_key} residue {key}"
        return Reason(self, query == key == offset, f"{where}, {active}: {found}")

    def _count_active(self, progression: Progression, begin: Counts) -> Counts:
        """Return the number of active positions in each progression, which must be within one segment.

        begin: first active position of each progression's segment.
        """
        return progression.count if self.rate == 1 else count_residue(progression, self.rate, begin)

    def _end_segments(self, progression: Progression) -> tuple[Counts, Counts]:
        return progression.first // self.segment, progression.last // self.segment

    def _offsets(self, heads: Tensor, num_heads: int) -> Tensor:
        return torch.zeros_like(heads) + self.offset_of(heads, num_heads)


@pattern_kind("zero_padded", positional=2)
class ZeroPadded(Dilated):
    """Dilated branch with the zero padding of torchscale's encoder; the allowed pairs are those of `Dilated`.

    For N tokens a segment has w = min(segment, N) tokens. The sequence is padded with zeros to a multiple of w, then
    each segment to a multiple of the rate, so that each head has ceil(w / rate) active places in a segment. Active
    places without a token act as keys of score 0 and value 0 for all active queries of the segment.
    """

    pads = True
    padding = PADDINGS[0]

    def check(self) -> None:
        require_choice("offset", self.offset, OFFSET_RULES)

    def snapped(self, q_side: int, k_side: int) -> None:
        return None  # another segment would have other zeros

    @property
    def unpadded(self) -> Dilated:
        return Dilated(self.segment, self.rate, self.offset)

    @property
    def union(self) -> Pattern:
        return self.unpadded

    def zero_keys(self, head: Tensor, query: Tensor, *, num_heads: int, num_tokens: int) -> Tensor:
        segment = min(self.segment, num_tokens)
        offset, place = self.offset_of(head, num_heads), query % segment
        tokens = (num_tokens - query + place).clamp(max=segment)  # in the query's segment
        held = ((tokens - offset + self.rate - 1) // self.rate).clamp(min=0)
        slots = (segment + self.rate - 1) // self.rate
        return torch.where(place % self.rate == offset, slots - held, 0)

    def origin(self) -> Hashable:
        return self.padding, self.offset

    def phrase(self) -> Phrase:
        return self.joint_phrase([self]) or super().phrase()


# Other libraries' names of the parameters of `longnet`.
OF_BRANCHES = {
    **dict.fromkeys(("segment_length", "segments", "segment_sizes", "lengths"), "write segment_lengths=(2048, 4096)"),
    **dict.fromkeys(("dilated_ratio", "dilation_rate", "dilations", "rates"), "write dilation_rates=(1, 2)"),
}


@constructor
@advises(
    keywords=OF_PATTERNS
    | renamed(segment="segment_length segment_len window", rate="dilation dilation_rate dilated_ratio")
)
def dilated(segment: int, rate: int, offset: int | str = 0) -> Pattern:
    """Pattern in which every `rate`-th token of a segment, from `offset` on, sees all such tokens of its segment.

    These tokens are active; all others see no key, and no query sees them.

    segment: tokens of a segment; the rate need not divide it.
    offset: place of the first active token in each segment, or one of `longnet`'s rules, "interleaved" or "contiguous",
        which give each head an offset.

    Raises ValueError for segment or rate below 1, for an offset outside [0, rate) and for an unknown rule.

    >>> masks.explain(masks.dilated(8, 2), query=0, key=6).allowed  # both in segment 0, both multiples of 2
    True
    """
    return Dilated(segment, rate, offset)


@constructor
def chunked(size: int) -> Pattern:
    """Pattern in which each token sees all tokens of its chunk of `size` tokens: a block-diagonal mask.

    Equals `dilated(size, 1)`. The last chunk may be shorter.
    Raises ValueError for a size below 1.

    >>> masks.describe(masks.chunked(4), 8).useful_pairs  # 2 chunks of 4 x 4
    32
    """
    return dilated(require_int("size", size, minimum=1), 1)


@constructor
@advises(
    keywords=OF_PATTERNS | OF_BRANCHES,
    how="write masks.longnet((2048, 8192), (1, 4)), a segment length and a dilation rate for each branch",
)
def longnet(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    offsets: str = "interleaved",
    heads: str = "all",
    padding: str | None = None,
) -> Mixture | Pattern:
    """LongNet's combination of `dilated` patterns (branches): one for each segment length and its dilation rate.

    segment_lengths, dilation_rates: segment length, in tokens, and dilation rate of each branch.
    heads: "all" returns a mixture in which every head has every branch, and a pair counts once for each branch that
        allows it (LongNet, arXiv 2307.02486, eqs. 9 and 10; torchscale); a single branch is returned as a set pattern.
        "grouped" returns a set pattern in which each of the consecutive groups of heads has one branch. This is the
        grouping of dilated-attention-pytorch, except that there every head of group i starts at offset i mod rate;
        write `per_head` for these offsets.
    offsets: "interleaved" gives head h of H heads the offset h mod rate (eq. 13); "contiguous" gives it floor(h /
        ceil(H / rate)), which torchscale's checkpoints expect.
    padding: None, or "zeros" for the padding of torchscale's encoder: zeros fill up the last segment, and then each
        segment to a multiple of the rate. They are keys of score 0 and value 0. They are not in the pattern's pairs;
        `attend` adds them to the softmax. A padded pattern can be combined by `+`, and by `& causal()`, which hides the
        zeros and so drops the padding.

    Raises ValueError for lists that are empty or of unequal length, values below 1, unknown rules, and padding with
    heads="grouped".

    >>> print(masks.describe(masks.longnet((2048, 8192), (1, 4)), 1 << 20, num_heads=8).density)
    0.00244140625
    """
    segments = require_ints("segment_lengths", segment_lengths, minimum=1)
    rates = require_ints("dilation_rates", dilation_rates, minimum=1)
    if not segments or len(segments) != len(rates):
        raise ValueError(
            "segment_lengths and dilation_rates must have one entry for each branch, and at least one branch; "
            f"got {segment_lengths=} and {dilation_rates=}"
        )
    require_choice("offsets", offsets, OFFSET_RULES)
    require_choice("heads", heads, HEAD_RULES)
    if padding is not None:
        require_choice("padding", padding, PADDINGS)
        if heads != HEAD_RULES[0]:
            raise ValueError(f"padding='zeros' needs heads='all', as torchscale has no groups; got {heads=}")
    branch = Dilated if padding is None else ZeroPadded
    branches = tuple(branch(segment, rate, offsets) for segment, rate in zip(segments, rates, strict=True))
    return HeadGroups(branches) if heads == "grouped" else Mixture.of(*branches)


def _same_segment(segment: Tensor) -> MaskMod:
    def same_segment(b, h, q, k):
        start = q - q % segment
        return (start <= k) & (k < start + segment)

    return same_segment
