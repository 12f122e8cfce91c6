"""Marked tokens: patterns in which some positions see every token, are seen by every token, or both."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import (
    Bounds,
    Box,
    Counts,
    MaskMod,
    Pair,
    Pattern,
    Phrase,
    Progression,
    Ranges,
    Reason,
    among,
    as_ranges,
    at_least,
    call,
    constructor,
    count_residue,
    count_within,
    parameters,
    pattern_kind,
    require_bool,
    require_int,
    span,
)
from ._band import causal

_MarkTest = Callable[[Any], Any]


class MarkedTokens(Pattern):
    """Base of patterns that allow a pair iff its query (with `rows`) or its key (with `columns`) is marked.

    Position t is marked iff first <= t mod period < stop, with the numbers that `marks` returns; if the period is None,
    iff t < stop.
    """

    rows: bool
    columns: bool

    def check(self) -> None:
        if not (require_bool("rows", self.rows) | require_bool("columns", self.columns)):
            raise ValueError(
                f"rows or columns must be True: {self.kind.replace('_', ' ')} see all tokens (rows), are seen by all "
                f"tokens (columns), or both; got rows={self.rows} and columns={self.columns}"
            )

    def marks(self) -> tuple[int | None, int, int]:
        """Return (period, first, stop): position t is marked iff first <= t mod period < stop.

        Either first is 0 or stop equals the period. With period None, t itself is compared, and first is 0.
        """
        raise NotImplementedError  # defined by each kind

    def described(self, position: int) -> str:
        """Return the end of "position t is ...", such as "one of the first 4" or, unmarked, "not among the first 4"."""
        raise NotImplementedError

    def mark_test(self, device: torch.device) -> _MarkTest:
        """Return a function from a tensor of positions on `device` to a bool tensor, True where marked."""
        period, first, stop = self.marks()
        edge, every = parameters(device, first or stop, period or 1)
        if period is None:
            return lambda t: t < edge
        return (lambda t: t % every >= edge) if first else lambda t: t % every < edge

    def count_marked(self, progression: Progression) -> Counts:
        period, first, stop = self.marks()
        if period is None:
            return count_within(progression, 0, stop)
        if stop - first == 1:
            return count_residue(progression, period, torch.full_like(progression.first, first))
        # floor((t - first) / period) is one more than floor((t - stop) / period) where t is marked.
        before, behind = (
            sum_of_quotients(progression.count, progression.step, progression.first + period - end, period)
            for end in (first, stop)
        )
        return before - behind

    def marked(self, positions: range) -> Ranges:
        period, first, stop = self.marks()
        if period is None:
            return as_ranges(range(positions.start, min(stop, positions.stop)))
        blocks = range(positions.start // period * period, positions.stop, period)
        if stop - first <= len(blocks):  # as few ranges as possible
            ranges = [range(blocks.start + place, positions.stop, period) for place in range(first, stop)]
        else:
            ranges = [range(block + first, block + stop) for block in blocks]
        return among(ranges, positions)

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        marked = self.mark_test(device)
        if self.rows and self.columns:
            return lambda b, h, q, k: marked(q) | marked(k)
        if self.rows:
            return lambda b, h, q, k: marked(q) & (k == k)
        return lambda b, h, q, k: marked(k) & (q == q)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        # A pair is forbidden iff neither its query, with `rows`, nor its key, with `columns`, is marked.
        queries = box.q.count - self.count_marked(box.q) if self.rows else box.q.count
        keys = box.k.count - self.count_marked(box.k) if self.columns else box.k.count
        pairs = box.area - queries * keys
        return Bounds(pairs, pairs)

    def likeness(self, box: Box, *, num_heads: int) -> tuple[Counts, ...]:
        sides = [box.q] * self.rows + [box.k] * self.columns
        period = self.period()
        # Without a period, marked positions come first.
        return tuple(self.count_marked(side) if period is None else side.first % period for side in sides)

    def reason(self, pair: Pair) -> Reason:
        sides = [(pair.the_query, pair.query)] * self.rows + [(pair.the_key, pair.key)] * self.columns
        marked = self.mark_test(torch.device("cpu"))
        allowed = any(bool(marked(position)) for _, position in sides)
        return Reason(self, allowed, " and ".join(f"{name} is {self.described(position)}" for name, position in sides))

    def period(self) -> int | None:
        return self.marks()[0]

    def rates(self) -> tuple[int, ...]:
        # In residue-major order of this rate all tokens at one place of their periods are adjacent.
        period, _, _ = self.marks()
        return () if period is None else (period,)

    def row(self, query: int, keys: range) -> Ranges:
        if self.rows and self.marked(range(query, query + 1)):
            return as_ranges(keys)
        return self.marked(keys) if self.columns else ()


@pattern_kind("global_tokens")
class GlobalTokens(MarkedTokens):
    """Pattern in which the first `tokens` tokens are global.

    With `rows` they see every token as queries; with `columns` every query sees them as keys.
    """

    tokens: int = at_least(1)
    rows: bool
    columns: bool

    def phrase(self) -> Phrase:
        if not self.rows:
            return call("first_tokens", self.tokens)
        return call("global_tokens", self.tokens, **({} if self.columns else {"columns": False}))

    def marks(self) -> tuple[None, int, int]:
        return None, 0, self.tokens

    def described(self, position: int) -> str:
        return f"{'one of' if position < self.tokens else 'not among'} the first {self.tokens}"


@pattern_kind("landmark_tokens")
class LandmarkTokens(MarkedTokens):
    """Pattern in which the tokens at multiples of `stride` are global.

    With `rows` they see every token as queries; with `columns` every query sees them as keys.
    """

    stride: int = at_least(1)
    rows: bool = True
    columns: bool = True

    def marks(self) -> tuple[int, int, int]:
        return self.stride, 0, 1

    def described(self, position: int) -> str:
        past = position % self.stride
        return f"{f'{past} past ' if past else ''}a multiple of {self.stride}"


@pattern_kind("fixed")
class Fixed(MarkedTokens):
    """Pattern in which every query sees the last `summary` keys of each block of `stride` tokens.

    A pair is allowed iff key mod stride >= stride - summary.
    """

    stride: int = at_least(1)
    summary: int = at_least(1, default=1)
    rows = False
    columns = True

    def check(self) -> None:
        if self.summary > self.stride:
            raise ValueError(f"summary must not exceed the stride; got summary={self.summary}, stride={self.stride}")

    def marks(self) -> tuple[int, int, int]:
        return self.stride, self.stride - self.summary, self.stride

    def described(self, position: int) -> str:
        stop = position - position % self.stride + self.stride
        summary = f"the summary of its block of {self.stride} is {span(stop - self.summary, stop)}"
        return f"{'in' if position >= stop - self.summary else 'not in'} a summary: {summary}"


@constructor
def global_tokens(count: int, *, rows: bool = True, columns: bool = True) -> Pattern:
    """Pattern in which the first `count` tokens see every token (`rows`) and are seen by every token (`columns`).

    Other pairs are not allowed.
    Raises ValueError if both `rows` and `columns` are False and for a count below 1; TypeError for a sequence or tensor
    of positions. Source: Longformer (arXiv 2004.05150) and BigBird (arXiv 2007.14062), whose global tokens have both.

    >>> masks.describe(masks.global_tokens(1), 8).useful_pairs  # row 0 and column 0
    15
    """
    if isinstance(count, Sequence | Tensor):
        raise TypeError(
            "count must be an integer, as the first count tokens are global: for other tokens write "
            "masks.visible_keys(is_global) | masks.mask(is_global[:, None]) with a bool tensor is_global; "
            f"got count={count!r:.80}"
        )
    return GlobalTokens(require_int("count", count, minimum=1), rows, columns)


@constructor
def first_tokens(count: int) -> Pattern:
    """Pattern in which every query sees the first `count` tokens, such as attention sinks, and no others.

    Source: StreamingLLM, arXiv 2309.17453. Raises ValueError for a count below 1.

    >>> masks.describe(masks.first_tokens(2), 8).useful_pairs  # 8 queries, 2 keys
    16
    """
    return global_tokens(count, rows=False)


@constructor
def prefix_lm(prefix: int) -> Pattern:
    """Pattern in which every query sees the first `prefix` tokens, and the keys at its own position and before.

    Equals `causal() | first_tokens(prefix)`. Source: T5, arXiv 1910.10683, section 3.2.1. Raises
    ValueError for a prefix below 1.

    >>> masks.describe(masks.prefix_lm(2), 4).useful_pairs
    11
    """
    return causal() | first_tokens(require_int("prefix", prefix, minimum=1))


@constructor
def landmark_tokens(stride: int, *, rows: bool = True, columns: bool = True) -> Pattern:
    """Pattern in which tokens 0, `stride`, 2 * `stride`, ... see every token (`rows`) and are seen by all (`columns`).

    Raises ValueError if both `rows` and `columns` are False, and for a stride below 1.

    >>> masks.describe(masks.landmark_tokens(4, rows=False), 8).useful_pairs  # 8 queries, keys 0 and 4
    16
    """
    return LandmarkTokens(stride, rows, columns)


@constructor
def fixed(stride: int, *, summary: int = 1) -> Pattern:
    """Pattern in which each query sees the last `summary` keys of every block of `stride` tokens, earlier and later.

    With the query's own block this is the fixed form of the Sparse Transformer (arXiv 1904.10509):
    `(chunked(stride) | fixed(stride)) & causal()`. Raises ValueError for values below 1 and for a summary
    longer than the stride.

    >>> masks.describe(masks.fixed(4) & masks.causal(), 8).useful_pairs
    6
    """
    return Fixed(stride, summary)


def sum_of_quotients(number: Counts, step: int, first: Counts, modulus: int) -> Counts:
    """Return the sum of floor((first + step * i) / modulus) over all i with 0 <= i < number, by Euclid's algorithm.

    There is one sum for each element of the tensors `number` and `first`, which must not be negative.
    """
    total = torch.zeros_like(first)
    while True:
        total += number * (number - 1) // 2 * (step // modulus) + number * (first // modulus)
        step, first = step % modulus, first % modulus
        if step == 0:
            return total
        # Count these lattice points along the other axis, which has fewer.
        top = first + step * number
        number, first, step, modulus = top // modulus, top % modulus, modulus, step
