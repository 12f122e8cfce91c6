"""Patterns beside their dense rules: the constructors and operators of `masks`, of both at once.

The names are those of `Words` in `flexdilated.testing`, so that its strategies draw twins as they draw patterns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from torch import Tensor

from flexdilated import masks
from flexdilated.testing._drawn_patterns import WORDS
from flexdilated.testing._inputs import edges_of
from tests.support import custom_rules, oracle


@dataclass(frozen=True)
class Twin:
    """A pattern or mixture of the library, and the same rule written independently.

    `special` are lengths at which the rule changes and that cannot be read off the pattern.
    """

    pattern: masks.Pattern | masks.Mixture
    rule: oracle.Rule
    special: tuple[int, ...] = ()

    @property
    def edges(self) -> tuple[int, ...]:
        """Drawn token numbers lie around multiples of these."""
        return (*edges_of(self.pattern), *self.special)

    def __repr__(self) -> str:
        return repr(self.pattern)

    def __and__(self, other: object) -> Twin:
        return self._joined(other, operator.and_, oracle.both)

    def __or__(self, other: object) -> Twin:
        return self._joined(other, operator.or_, oracle.either)

    def __add__(self, other: object) -> Twin:
        return self._joined(other, operator.add, oracle.total)

    def __invert__(self) -> Twin:
        return Twin(~self.pattern, oracle.neither(self.rule), self.special)

    def after(self, start: int) -> Twin:
        return Twin(self.pattern.after(start), oracle.after(self.rule, start), (*self.special, *[start] * (start > 0)))

    def before(self, stop: int) -> Twin:
        return Twin(self.pattern.before(stop), oracle.before(self.rule, stop), (*self.special, stop))

    def per_document(self, spans: Any) -> Any:
        """By ids (batch or 1, positions) that `spans` holds beside its pattern: a rule for each batch entry."""
        rules = tuple(oracle.per_document(self.rule, row) for row in spans.ids)
        return type(spans)(self.pattern.per_document(spans.pattern), rules)

    def queries_from(self, starts: Tensor) -> Any:
        return BatchTwin(
            self.pattern.queries_from(starts), tuple(oracle.queries_from(self.rule, int(start)) for start in starts)
        )

    def _joined(self, other: object, join: Callable, join_rules: Callable[..., oracle.Rule]) -> Twin:
        if not isinstance(other, Twin):
            return NotImplemented
        rule = join_rules(self.rule, other.rule)
        return Twin(join(self.pattern, other.pattern), rule, self.special + other.special)


@dataclass(frozen=True)
class BatchTwin:
    """A pattern with run-time tensors, and its dense rule for each batch entry, or one for all of them."""

    pattern: Any
    rules: tuple[oracle.Rule, ...]
    ids: Tensor | None = None  # (batch or 1, positions), the document ids; None for other patterns

    def __invert__(self) -> BatchTwin:
        return BatchTwin(~self.pattern, tuple(map(oracle.neither, self.rules)))

    def __and__(self, other: BatchTwin) -> BatchTwin:
        return BatchTwin(self.pattern & other.pattern, self._with(other, oracle.both))

    def __rand__(self, twin: Twin) -> BatchTwin:
        return BatchTwin(twin.pattern & self.pattern, tuple(oracle.both(twin.rule, rule) for rule in self.rules))

    def __ror__(self, twin: Twin) -> BatchTwin:
        return BatchTwin(twin.pattern | self.pattern, tuple(oracle.either(twin.rule, rule) for rule in self.rules))

    def _with(self, other: BatchTwin, join: Callable[..., oracle.Rule]) -> tuple[oracle.Rule, ...]:
        entries = max(len(self.rules), len(other.rules))
        pairs: Iterator = zip(range(entries), cycle(self.rules), cycle(other.rules), strict=False)
        return tuple(join(one, another) for _, one, another in pairs)


def causal() -> Twin:
    return Twin(masks.causal(), oracle.causal())


def every() -> Twin:
    return Twin(masks.every(), oracle.every())


def full() -> Twin:
    return Twin(masks.full(), oracle.every())


def local_window(*, left: int, right: int) -> Twin:
    return Twin(masks.local_window(left=left, right=right), oracle.local_window(left, right))


def dilated_window(*, left: int, right: int, rate: int) -> Twin:
    return Twin(masks.dilated_window(left=left, right=right, rate=rate), oracle.dilated_window(left, right, rate))


def dilated(segment: int, rate: int, offset: int) -> Twin:
    return Twin(masks.dilated(segment, rate, offset), oracle.dilated(segment, rate, offset))


def strided(stride: int) -> Twin:
    return Twin(masks.strided(stride), oracle.strided(stride))


def fixed(stride: int, *, summary: int) -> Twin:
    return Twin(masks.fixed(stride, summary=summary), oracle.fixed(stride, summary))


def chunked(chunk: int) -> Twin:
    return Twin(masks.chunked(chunk), oracle.dilated(chunk, 1, 0))


def global_tokens(tokens: int, *, rows: bool, columns: bool) -> Twin:
    return Twin(masks.global_tokens(tokens, rows=rows, columns=columns), oracle.global_tokens(tokens, rows, columns))


def first_tokens(tokens: int) -> Twin:
    return Twin(masks.first_tokens(tokens), oracle.global_tokens(tokens, False, True))


def prefix_lm(prefix: int) -> Twin:
    rule = oracle.either(oracle.causal(), oracle.global_tokens(prefix, False, True))
    return Twin(masks.prefix_lm(prefix), rule)


def landmark_tokens(stride: int, *, rows: bool, columns: bool) -> Twin:
    pattern = masks.landmark_tokens(stride, rows=rows, columns=columns)
    return Twin(pattern, oracle.landmark_tokens(stride, rows, columns))


def random_blocks(num_tokens: int, *, block: int, count: int, seed: int) -> Twin:
    pattern = masks.random_blocks(num_tokens, block=block, count=count, seed=seed)
    return Twin(pattern, oracle.random_blocks(num_tokens, block, count, seed))


def block_list(rows: Sequence[Sequence[int]], *, block: int) -> Twin:
    return Twin(masks.block_list(rows, block=block), oracle.block_list([rows], block))


def grid_window(grid: tuple[int, ...], windows: list[tuple[int, ...]]) -> Twin:
    return Twin(masks.grid_window(grid, windows), oracle.grid_window(grid, windows))


def neighborhood(
    grid: Sequence[int],
    *,
    kernel_size: Sequence[int],
    rate: Sequence[int],
    stride: Sequence[int],
    causal: Sequence[bool],
    wrap: Sequence[bool],
) -> Twin:
    choices = {"kernel_size": kernel_size, "rate": rate, "stride": stride, "causal": causal, "wrap": wrap}
    axes = list(zip(grid, *choices.values(), strict=True))
    return Twin(masks.neighborhood(grid, **choices), oracle.neighborhood(axes))


def longnet(
    segments: Sequence[int],
    rates: Sequence[int],
    *,
    offsets: str = "interleaved",
    heads: str = "all",
    padding: str | None = None,
) -> Twin:
    """The rule is that of the pairs; `tests.support.published` has the zero keys of padding."""
    rules = {"offsets": offsets, "heads": heads}
    return Twin(masks.longnet(segments, rates, **rules, padding=padding), oracle.longnet(segments, rates, **rules))


def blockwise(part: Twin, block: int) -> Twin:
    special = (*part.special, *(block * edge for edge in part.special))
    return Twin(masks.blockwise(part.pattern, block), oracle.blockwise(part.rule, block), special)


def per_head(parts: Sequence[Twin]) -> Twin:
    return _by_head(masks.per_head, oracle.per_head, parts)


def head_groups(parts: Sequence[Twin]) -> Twin:
    return _by_head(masks.head_groups, oracle.grouped, parts)


def _by_head(choose, choose_rule, parts: Sequence[Twin]) -> Twin:
    special = tuple(edge for part in parts for edge in part.special)
    return Twin(choose([part.pattern for part in parts]), choose_rule(*(part.rule for part in parts)), special)


def custom_lattice(a: int, b: int, modulus: int) -> Twin:
    return Twin(WORDS.custom_lattice(a, b, modulus), custom_rules.lattice_rule(a, b, modulus), (modulus,))


def custom_windows(widths: Sequence[int], *, classified: bool) -> Twin:
    pattern = WORDS.custom_windows(widths, classified=classified)
    return Twin(pattern, custom_rules.window_rule(widths), tuple(widths))


def custom_kinds(kinds: Sequence[int]) -> Twin:
    return Twin(WORDS.custom_kinds(kinds), custom_rules.kind_rule(kinds))
