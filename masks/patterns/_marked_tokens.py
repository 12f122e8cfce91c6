"""Marked tokens: some positions see every token, are seen by every token, or both."""

from collections.abc import Callable
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
    call,
    clip,
    constructor,
    count_residue,
    pattern_kind,
    require_bool,
    require_int,
    span,
)
from ._band import causal

_Test = Callable[[Any], Any]


class MarkedTokens(Pattern):
    """Allowed iff the query (`rows`) or the key (`columns`) is marked."""

    rows: bool
    columns: bool

    def is_marked(self, device: torch.device) -> _Test:
        """Whether each of some positions is marked."""
        raise NotImplementedError  # every kind marks its own

    def count_marked(self, progression: Progression) -> Counts:
        """Marked positions of each progression."""
        raise NotImplementedError

    def marked(self, positions: range) -> Ranges:
        """Those of a run of positions that are marked."""
        raise NotImplementedError

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        test = self.is_marked(device)
        return (_either if self.columns else _query)(test) if self.rows else _key(test)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        # Pairs outside are those of a query and a key that both count for nothing.
        queries = box.q.count - self.count_marked(box.q) if self.rows else box.q.count
        keys = box.k.count - self.count_marked(box.k) if self.columns else box.k.count
        pairs = box.area - queries * keys
        return Bounds(pairs, pairs)

    def row(self, query: int, keys: range) -> Ranges:
        if self.rows and self.marked(range(query, query + 1)):
            return as_ranges(keys)
        return self.marked(keys) if self.columns else ()


@pattern_kind("global_tokens")
class GlobalTokens(MarkedTokens):
    """The first `tokens` tokens are marked."""

    tokens: int
    rows: bool
    columns: bool

    def __post_init__(self) -> None:
        require_int("tokens", self.tokens, minimum=1)
        _check_sides("global tokens", rows=self.rows, columns=self.columns)
        super().__post_init__()

    def phrase(self) -> Phrase:
        if not self.rows:
            return call("first_tokens", self.tokens)
        return call("global_tokens", self.tokens, **({} if self.columns else {"columns": False}))

    def is_marked(self, device: torch.device) -> _Test:
        return _below(torch.tensor(self.tokens, device=device))

    def count_marked(self, progression: Progression) -> Counts:
        begin = torch.zeros_like(progression.first)
        return clip(progression, begin, begin + self.tokens).count

    def marked(self, positions: range) -> Ranges:
        return as_ranges(range(positions.start, min(self.tokens, positions.stop)))

    def reason(self, pair: Pair) -> Reason:
        sees, is_seen = self.rows and pair.query < self.tokens, self.columns and pair.key < self.tokens
        first = f"the first {self.tokens}"
        if sees or is_seen:
            chosen = [(sees, pair.the_query, "which see every key"), (is_seen, pair.the_key, "which every query sees")]
            text = "; ".join(f"{name} is one of {first}, {what}" for holds, name, what in chosen if holds)
        else:
            names = [name for asked, name in ((self.rows, pair.the_query), (self.columns, pair.the_key)) if asked]
            text = f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} not among {first}"
        return Reason(self, sees or is_seen, text)


@pattern_kind("landmark_tokens")
class LandmarkTokens(MarkedTokens):
    """The tokens at multiples of the stride are marked."""

    stride: int
    rows: bool = True
    columns: bool = True

    def __post_init__(self) -> None:
        require_int("stride", self.stride, minimum=1)
        _check_sides("landmark tokens", rows=self.rows, columns=self.columns)
        super().__post_init__()

    def period(self) -> int:
        return self.stride

    def rates(self) -> tuple[int, ...]:
        # In residue-major order of this rate all landmarks stand side by side.
        return (self.stride,)

    def is_marked(self, device: torch.device) -> _Test:
        return _at_multiple(torch.tensor(self.stride, device=device))

    def count_marked(self, progression: Progression) -> Counts:
        return count_residue(progression, self.stride, torch.zeros_like(progression.first))

    def marked(self, positions: range) -> Ranges:
        return among([range(0, positions.stop, self.stride)], positions)

    def reason(self, pair: Pair) -> Reason:
        asked = [(self.rows, pair.the_query, pair.query), (self.columns, pair.the_key, pair.key)]
        places = [(name, position % self.stride) for counts, name, position in asked if counts]
        where = [f"{name} is {f'{past} past ' if past else ''}a multiple of {self.stride}" for name, past in places]
        return Reason(self, any(past == 0 for _, past in places), " and ".join(where))


@pattern_kind("fixed")
class Fixed(MarkedTokens):
    """The last `summary` tokens of each block are marked, as keys: key mod stride >= stride - summary."""

    stride: int
    summary: int = 1
    rows = False
    columns = True

    def __post_init__(self) -> None:
        require_int("stride", self.stride, minimum=1)
        if require_int("summary", self.summary, minimum=1) > self.stride:
            raise ValueError(f"summary must not exceed the stride; got summary={self.summary}, stride={self.stride}")
        super().__post_init__()

    def period(self) -> int:
        return self.stride

    def rates(self) -> tuple[int, ...]:
        # In residue-major order of this rate the summaries of all blocks stand side by side.
        return (self.stride,)

    def is_marked(self, device: torch.device) -> _Test:
        first = torch.tensor(self.stride - self.summary, device=device)
        return _ends_block(torch.tensor(self.stride, device=device), first)

    def count_marked(self, progression: Progression) -> Counts:
        # A key is of a summary where `summary` steps further lead into the next block.
        step, number, first = progression.step, progression.count, progression.first
        blocks = sum_of_quotients(number, step, first, self.stride)
        return sum_of_quotients(number, step, first + self.summary, self.stride) - blocks

    def marked(self, positions: range) -> Ranges:
        first, stop = self.stride - self.summary, positions.stop
        blocks = range(positions.start // self.stride * self.stride, stop, self.stride)
        if self.summary <= len(blocks):  # as few ranges as there may be
            ranges = [range(blocks.start + at, stop, self.stride) for at in range(first, self.stride)]
        else:
            ranges = [range(block + first, block + self.stride) for block in blocks]
        return among(ranges, positions)

    def reason(self, pair: Pair) -> Reason:
        stop = pair.key - pair.key % self.stride + self.stride
        summary = f"the summary of its block of {self.stride} is {span(stop - self.summary, stop)}"
        allowed = pair.key >= stop - self.summary
        return Reason(self, allowed, f"{pair.the_key} is {'in' if allowed else 'not in'} a summary: {summary}")


@constructor
def global_tokens(count: int, *, rows: bool = True, columns: bool = True) -> Pattern:
    """The first `count` tokens see every token (`rows`) and are seen by every token (`columns`).

    Either alone is allowed; neither is a ValueError, as is a count below 1. Source: Longformer (arXiv
    2004.05150) and BigBird (arXiv 2007.14062), whose global tokens do both.
    """
    return GlobalTokens(require_int("count", count, minimum=1), rows, columns)


@constructor
def first_tokens(count: int) -> Pattern:
    """Every query sees the first `count` tokens: keys that are always visible, such as attention sinks.

    Source: StreamingLLM, arXiv 2309.17453. Raises ValueError for a count below 1.
    """
    return global_tokens(count, rows=False)


@constructor
def prefix_lm(prefix: int) -> Pattern:
    """The first `prefix` tokens see each other both ways; later ones see the keys at their position and before.

    The same as `causal() | first_tokens(prefix)`. Source: T5, arXiv 1910.10683, section 3.2.1. Raises
    ValueError for a prefix below 1.
    """
    return causal() | first_tokens(require_int("prefix", prefix, minimum=1))


@constructor
def landmark_tokens(stride: int, *, rows: bool = True, columns: bool = True) -> Pattern:
    """The tokens at positions 0, `stride`, 2 * `stride`, ... see every token (`rows`) and are seen by all (`columns`).

    Either alone is allowed; neither is a ValueError, as is a stride below 1.
    """
    return LandmarkTokens(stride, rows, columns)


@constructor
def fixed(stride: int, *, summary: int = 1) -> Pattern:
    """Each query sees the last `summary` keys of every block of `stride` tokens, before it and after.

    With the query's own block this is the fixed form of the Sparse Transformer (arXiv 1904.10509):
    `(chunked(stride) | fixed(stride)) & causal()`. Raises ValueError for values below 1 and for a summary
    longer than the stride.
    """
    return Fixed(stride, summary)


def sum_of_quotients(number: Counts, step: int, first: Counts, modulus: int) -> Counts:
    """The sum of floor((first + step * i) / modulus) over i < number, for first >= 0; by Euclid's steps."""
    total = torch.zeros_like(first)
    while True:
        total += number * (number - 1) // 2 * (step // modulus) + number * (first // modulus)
        step, first = step % modulus, first % modulus
        if step == 0:
            return total
        # Count the same lattice points along the other axis, where fewer are left.
        top = first + step * number
        number, first, step, modulus = top // modulus, top % modulus, modulus, step


def _check_sides(tokens: str, *, rows: object, columns: object) -> None:
    """At least one of two booleans must be True: tokens that neither see nor are seen are no rule."""
    if not (require_bool("rows", rows) | require_bool("columns", columns)):
        raise ValueError(
            f"{tokens} see everyone (rows), are seen by everyone (columns), or both; got {rows=} and {columns=}"
        )


def _below(tokens: Tensor) -> _Test:
    return lambda positions: positions < tokens


def _at_multiple(stride: Tensor) -> _Test:
    return lambda positions: positions % stride == 0


def _ends_block(stride: Tensor, first: Tensor) -> _Test:
    return lambda positions: positions % stride >= first


def _either(marked: _Test) -> MaskMod:
    def mask_mod(b, h, q, k):
        return marked(q) | marked(k)

    return mask_mod


def _query(marked: _Test) -> MaskMod:
    def mask_mod(b, h, q, k):
        return marked(q) & (k == k)

    return mask_mod


def _key(marked: _Test) -> MaskMod:
    def mask_mod(b, h, q, k):
        return marked(k) & (q == q)

    return mask_mod
