"""check_pattern: compare a pattern's bounds, block lists, period, for_head and JSON with its mask_mod."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..masks import Layout, Mixture, Pattern, from_json, to_json
from ..masks.blocks import UNKNOWN, Blocks
from ..masks.core import Bound, advises, require_expression, require_int
from ..masks.orders import residue_rate
from ..masks.patterns import names
from ..masks.planning import shared_terms
from ._box_bounds import DenseRule, ask, check_bounds, check_elementwise

_WINDOWS = 24
_SIDE = 48
_SIDES = (1, 2, 3, 4, 5, 8, 13, 16)
_RATES = (1, 1, 2, 3, 5)
_TRIES = 50


@advises()
def check_pattern(
    pattern: Pattern | Mixture, *, num_heads: int = 4, max_tokens: int = 96, examples: int = 100, seed: int = 0
) -> None:
    """Compare a pattern's properties with its `mask_mod`, evaluated densely over positions below `max_tokens`.

    It checks the bounds of `count` (for custom functions: `classify`) over boxes of one cell, of whole blocks and of
    random progressions, as layouts have; block lists for odd sizes, unequal block sides and several layouts;
    `for_head`; `period` and `confined`, also at larger positions; and the round trip through JSON, if the pattern has
    one. About `examples` boxes are drawn for each pair of steps, from `seed`.

    Raises AssertionError with the smallest counterexample found; ValueError if the pattern does not fit `num_heads`,
    has a table that ends before `max_tokens`, or has run-time tensors.

    >>> testing.check_pattern(masks.strided(4) & masks.causal(), examples=5)
    """
    require_expression(pattern)
    require_int("num_heads", num_heads, minimum=1)
    require_int("max_tokens", max_tokens, minimum=1)
    require_int("examples", examples, minimum=1)
    pattern.check_heads(num_heads)
    if needed := names(pattern):
        raise ValueError(
            "check_pattern draws positions of its own, to which a run-time tensor does not fit: check the pattern "
            f"without it; got one with {', '.join(map(repr, needed))}"
        )
    generator = torch.Generator("cpu").manual_seed(seed)
    parts = tuple(dict.fromkeys(pattern.branches()))
    for part in dict.fromkeys((*parts, Mixture.of(*parts).union)):
        dense = DenseRule.of(part, num_heads, max_tokens)
        check_elementwise(dense, examples, generator)
        check_bounds(dense, examples, generator)
        check_for_head(dense, examples, generator)
        check_period(dense, generator)
        check_lists(dense, examples, generator)
    check_text(pattern)


def check_for_head(dense: DenseRule, examples: int, generator: torch.Generator) -> None:
    """`for_head(h)` must be the rule of head h for any head argument, with correct bounds."""
    for head in range(dense.num_heads):
        one = dense.for_head(head)
        if one.pattern == dense.pattern and (dense.table == dense.table[head]).all():
            continue
        found = DenseRule.of(one.pattern, dense.num_heads, dense.num_tokens).table
        wrong = (found != one.table).nonzero().tolist()
        if wrong:
            asked, query, key = wrong[0]
            rule = f"{dense.pattern!r}: for_head({head}) must be the rule of head {head}, for all heads alike"
            got = f"it {'allows' if found[asked, query, key] else 'forbids'} query {query}, key {key}"
            raise AssertionError(f"{rule}; {got} when asked about head {asked}")
        check_bounds(one, examples, generator)


def check_period(dense: DenseRule, generator: torch.Generator) -> None:
    """A shift of query and key by the period must not change the rule, near 0 and anywhere in the first periods.

    No allowed pair of a confined rule may cross a multiple of the period.
    """
    period = dense.pattern.period()
    if period is None:
        return
    for h, q, k in _windows(dense, period, generator):
        here = _answers(dense, h, q, k)
        if here is None:
            continue
        for shift in (period, 2 * period):
            there = _answers(dense, h, q + shift, k + shift)
            if there is not None and (here != there).any():
                head, query, key = (here != there).nonzero()[0].tolist()
                q0, k0 = int(q[query]), int(k[key])
                rule = f"{dense.pattern!r}: the rule must repeat after its {period=}"
                pairs = f"query {q0}, key {k0} and query {q0 + shift}, key {k0 + shift}"
                raise AssertionError(f"{rule}; of {pairs} for head {head} one is allowed, the other is not")
        crossing = here & (q[:, None] // period != k // period)
        if dense.pattern.confined() and crossing.any():
            head, query, key = crossing.nonzero()[0].tolist()
            where = f"head {head}, query {int(q[query])}, key {int(k[key])} is allowed"
            rule = f"{dense.pattern!r}: a confined rule must not cross a multiple of its {period=}"
            raise AssertionError(f"{rule}; {where}")


def check_text(pattern: Pattern | Mixture) -> None:
    """Reading the pattern's JSON must give an equal pattern; to_json may raise TypeError."""
    try:
        text = to_json(pattern)
    except TypeError:
        return
    try:
        again = from_json(text)
    except ValueError as error:
        raise AssertionError(f"{pattern!r}: from_json must read what to_json writes: {error}") from error
    if again != pattern or to_json(again) != text or hash(again) != hash(pattern):
        raise AssertionError(f"{pattern!r}: its JSON must give an equal pattern back; got {again!r} from {text}")


def _windows(dense: DenseRule, period: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(heads, queries, keys): the whole table, then windows at nearby or random positions in three periods."""
    heads, whole, side = torch.arange(dense.num_heads), torch.arange(dense.num_tokens), torch.arange(_SIDE)
    yield heads, whole, whole
    for index in range(_WINDOWS):
        q = int(torch.randint(3 * period, (), generator=generator))
        if index % 3 == 0:  # around a multiple of the period
            q = max(0, period * (1 + index % 2) - _SIDE // 2)
        near = max(0, q + int(torch.randint(-_SIDE, _SIDE, (), generator=generator)))
        k = near if index % 2 == 0 else int(torch.randint(3 * period, (), generator=generator))
        yield heads, q + side, k + side


def _answers(dense: DenseRule, h: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
    """The rule over a window; None if a table of the pattern ends before it."""
    try:
        return ask(dense.pattern, dense.num_heads, h[:, None, None], q[:, None], k)
    except IndexError:
        return None


@dataclass(frozen=True)
class _Case:
    num_queries: int
    num_keys: int
    q_offset: int
    q_block: int
    k_block: int
    rate: int

    def __str__(self) -> str:
        sides = f"blocks of {self.q_block} x {self.k_block}, layout rate {self.rate}"
        return f"{self.num_queries} queries from {self.q_offset} on, {self.num_keys} keys, {sides}"


def check_lists(dense: DenseRule, examples: int, generator: torch.Generator) -> None:
    """Settled lists must have exactly the blocks with pairs and mark full ones; unsettled lists may have more."""
    cases = [_draw(dense, generator) for _ in range(max(8, examples // 5))]
    for case in sorted(cases, key=lambda case: case.num_queries * case.num_keys):
        _check_case(dense, case)


def _draw(dense: DenseRule, generator: torch.Generator) -> _Case:
    """Random sizes that the pattern binds to; all tokens if none of _TRIES fits, as for grids and block tables."""
    for _ in range(_TRIES):
        case = _draw_any(dense, generator)
        with suppress(ValueError):
            _bound(dense, case)
            return case
    whole = {"num_queries": dense.num_tokens, "num_keys": dense.num_tokens, "q_offset": 0}
    return replace(_draw_any(dense, generator), **whole)


def _bound(dense: DenseRule, case: _Case) -> Bound:
    sizes = {"num_queries": case.num_queries, "num_keys": case.num_keys, "q_offset": case.q_offset}
    return dense.pattern.bind(num_heads=dense.num_heads, **sizes)


def _draw_any(dense: DenseRule, generator: torch.Generator) -> _Case:
    def below(size: int) -> int:
        return int(torch.randint(size, (), generator=generator))

    tokens, rates = dense.num_tokens, (*_RATES, residue_rate(dense.pattern, dense.num_tokens))
    keys, queries = 1 + below(tokens), 1 + below(tokens)
    if below(2):  # self-attention
        queries, q_offset = keys, 0
    else:
        q_offset = below(tokens - queries + 1)
    sides = _SIDES[below(len(_SIDES))], _SIDES[below(len(_SIDES))]
    return _Case(queries, keys, q_offset, *sides, rates[below(len(rates))])


def _check_case(dense: DenseRule, case: _Case) -> None:
    (term,) = shared_terms(dense.pattern, 1, _bound(dense, case), case.rate)
    q, k = (Layout(size, case.rate).positions() for size in (case.num_queries, case.num_keys))
    truth = _in_blocks(dense.table[:, q + case.q_offset][:, :, k], case.q_block, case.k_block)
    whole = truth == case.q_block * case.k_block
    for settle in (False, True):
        listed, full, pairs = _as_tables(term.blocks(case.q_block, case.k_block, settle=settle))
        _require(dense, case, (truth > 0) & ~listed, truth, "is not listed")
        _require(dense, case, full & ~whole, truth, "is listed as full")
        _require(dense, case, (pairs != truth) & (pairs != UNKNOWN) & listed, truth, "is listed with another count")
        if settle:
            _require(dense, case, listed & (truth == 0), truth, "is listed")
            _require(dense, case, whole & ~full, truth, "is not listed as full")


def _require(dense: DenseRule, case: _Case, wrong: Tensor, truth: Tensor, what: str) -> None:
    if wrong.any():
        head, row, column = wrong.nonzero()[0].tolist()
        block = f"block ({row}, {column}) of head {head} has {int(truth[head, row, column])} pairs and {what}"
        raise AssertionError(f"{dense.pattern!r}: block lists must be those of mask_mod; for {case}: {block}")


def _in_blocks(allowed: Tensor, q_block: int, k_block: int) -> Tensor:
    """(heads, rows, columns): number of allowed pairs in each block."""
    heads, queries, keys = allowed.shape
    rows, columns = -(-queries // q_block), -(-keys // k_block)
    padded = torch.zeros(heads, rows * q_block, columns * k_block, dtype=torch.int64)
    padded[:, :queries, :keys] = allowed
    return padded.view(heads, rows, q_block, columns, k_block).sum((2, 4))


def _as_tables(blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """(listed, full, pairs) of each head, row and column."""
    shape = (blocks.num_tables, blocks.num_rows, blocks.num_columns)
    listed, full = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    pairs = torch.zeros(shape, dtype=torch.int64)
    where = (blocks.table.long(), blocks.row.long(), blocks.column.long())
    listed[where], full[where], pairs[where] = True, blocks.full, blocks.pairs.long()
    heads = list(blocks.heads)
    return listed[heads], full[heads], pairs[heads]
