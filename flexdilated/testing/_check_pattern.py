"""check_pattern: compare a pattern's bounds, block lists, period, for_head and JSON with its mask_mod."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..masks import Bound, Layout, Mixture, Pattern, from_json, to_json
from ..masks.blocks import UNKNOWN
from ..masks.core import Box, Progression, advises, require_expression, require_int
from ..masks.core import span as span_text
from ..masks.orders import residue_rate
from ..masks.patterns import names, tables
from ..masks.planning import shared_terms

_CPU = torch.device("cpu")
_NUM_SINGLE_PAIRS = 100
_SHRINK_TRIES = 500
_NUM_WINDOWS, _WINDOW_SIDE = 24, 48  # number of tested windows of a periodic rule, and their sides
# (step of queries, step of keys): natural order, layouts of one rate, and two rates
_STEPS = ((1, 1), (2, 2), (3, 3), (4, 4), (7, 7), (1, 2), (3, 1), (2, 5))
# For block lists: block sizes, layout rates, and the number of tries to draw sizes that the pattern accepts.
_BLOCK_SIDES, _RATES, _SIZE_TRIES = (1, 2, 3, 4, 5, 8, 13, 16), (1, 1, 2, 3, 5), 50


@advises()
def check_pattern(
    pattern: Pattern | Mixture, *, num_heads: int = 4, max_tokens: int = 96, examples: int = 100, seed: int = 0
) -> None:
    """Compare a pattern's methods with its `mask_mod`, evaluated for all pairs of positions below `max_tokens`.

    Each of these is checked:

    * `mask_mod` of single pairs and of vectors of pairs, which must agree with the evaluation of all pairs;
    * `count` (in custom patterns, `classify`): its bounds on the number of allowed pairs in boxes, which are products
      of two arithmetic progressions of positions: single pairs, whole blocks and random boxes;
    * block lists, for odd sizes, unequal block sizes and several layouts (orders of tokens);
    * `for_head`, the rule of one head;
    * `period` and `confined`, also at larger positions;
    * the round trip through JSON, except for custom functions and tables of run-time tensors, which have no JSON.

    For each of eight combinations of query step and key step, `examples` random boxes are drawn from `seed`.

    Raises AssertionError with a counterexample, the smallest found for bounds and block lists; TypeError or ValueError
    for arguments that do not fit, such as a pattern with run-time tensors or a table that ends before `max_tokens`.

    >>> testing.check_pattern(masks.strided(4) & masks.causal(), examples=5)
    """
    require_expression(pattern)
    require_int("num_heads", num_heads, minimum=1)
    require_int("max_tokens", max_tokens, minimum=1)
    require_int("examples", examples, minimum=1)
    pattern.check_heads(num_heads)
    if needed := names(pattern):
        raise ValueError(
            "check_pattern draws positions, so the pattern must have no run-time tensors: check it without them; got "
            f"one with {', '.join(map(repr, needed))}"
        )
    generator = torch.Generator("cpu").manual_seed(seed)
    parts = tuple(dict.fromkeys(pattern.branches()))
    for part in dict.fromkeys((*parts, Mixture.of(*parts).union)):
        dense = DenseRule.of(part, num_heads, max_tokens)
        _check_elementwise(dense, examples, generator)
        _check_bounds(dense, examples, generator)
        _check_for_head(dense, examples, generator)
        _check_period(dense, generator)
        _check_block_lists(dense, examples, generator)
    _check_json(pattern)


@dataclass(frozen=True, eq=False)
class DenseRule:
    """A pattern for `num_heads` heads, and its bool table (heads, queries, keys): True for allowed pairs."""

    pattern: Pattern
    num_heads: int
    table: Tensor

    @classmethod
    def of(cls, pattern: Pattern, num_heads: int, max_tokens: int) -> DenseRule:
        heads, tokens = torch.arange(num_heads, device=_CPU), torch.arange(max_tokens, device=_CPU)
        rule = cls(pattern, num_heads, torch.empty(0))
        try:
            return replace(rule, table=rule.evaluate(heads[:, None, None], tokens[:, None], tokens))
        except IndexError as error:
            must = f"{pattern!r} must be defined for {num_heads} heads and positions below {max_tokens=}"
            raise ValueError(f"{must}: {error}") from error

    @property
    def num_tokens(self) -> int:
        return self.table.shape[1]

    def evaluate(self, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the pattern's mask_mod of heads h, queries q and keys k, in the broadcast shape of the three."""
        mod = self.pattern.mask_mod(num_heads=self.num_heads, device=_CPU)
        shape = torch.broadcast_shapes(h.shape, q.shape, k.shape)
        return mod(torch.zeros((), dtype=torch.int64, device=_CPU), h, q, k).expand(shape)


def _check_elementwise(dense: DenseRule, examples: int, generator: torch.Generator) -> None:
    """Raise AssertionError unless mask_mod of a vector of pairs, and of single pairs, equals the dense table."""
    number = max(examples, _NUM_SINGLE_PAIRS)
    h = torch.randint(dense.num_heads, (number,), generator=generator, device=_CPU)
    q, k = torch.randint(dense.num_tokens, (2, number), generator=generator, device=_CPU)
    for cell in (slice(None), *range(_NUM_SINGLE_PAIRS)):
        found = dense.evaluate(h[cell], q[cell], k[cell])
        wrong = (found != dense.table[h, q, k][cell]).flatten().nonzero().flatten().tolist()
        if wrong:
            head, query, key = (int(side[cell].flatten()[wrong[0]]) for side in (h, q, k))
            rule = f"{dense.pattern!r}: mask_mod must look at each pair by itself"
            raise AssertionError(f"{rule}; for head {head}, query {query}, key {key} it depends on other pairs")


def _check_for_head(dense: DenseRule, examples: int, generator: torch.Generator) -> None:
    """Raise AssertionError unless the pattern `for_head(h)` allows, in every head, the pairs of head h.

    The bounds that its `count` gives are checked, too.
    """
    for head in range(dense.num_heads):
        pattern = dense.pattern.for_head(head, dense.num_heads)
        if pattern == dense.pattern and (dense.table == dense.table[head]).all():
            continue
        one = replace(dense, pattern=pattern, table=dense.table[head].expand_as(dense.table))
        found = DenseRule.of(pattern, dense.num_heads, dense.num_tokens).table
        wrong = (found != one.table).nonzero().tolist()
        if wrong:
            asked, query, key = wrong[0]
            rule = f"{dense.pattern!r}: for_head({head}) must be the rule of head {head}, for all heads alike"
            got = f"it {'allows' if found[asked, query, key] else 'forbids'} query {query}, key {key}"
            raise AssertionError(f"{rule}; {got} when asked about head {asked}")
        _check_bounds(one, examples, generator)


def _check_period(dense: DenseRule, generator: torch.Generator) -> None:
    """Raise AssertionError if a shift of query and key by one or two periods changes the rule.

    If the pattern is `confined`, no allowed pair may cross a multiple of the period. Only the pairs of `_windows` are
    tested; a pattern without a period passes.
    """
    period = dense.pattern.period()
    if period is None:
        return
    for h, q, k in _windows(dense, period, generator):
        tables = []
        with suppress(IndexError):  # a table of the pattern may end before these positions
            for shift in (0, period, 2 * period):
                tables.append(dense.evaluate(h[:, None, None], (q + shift)[:, None], k + shift))
        for shift, there in zip((period, 2 * period), tables[1:], strict=False):
            if (tables[0] != there).any():
                head, query, key = (tables[0] != there).nonzero()[0].tolist()
                q0, k0 = int(q[query]), int(k[key])
                rule = f"{dense.pattern!r}: the rule must repeat after its {period=}"
                pairs = f"query {q0}, key {k0} and query {q0 + shift}, key {k0 + shift}"
                raise AssertionError(f"{rule}; of {pairs} for head {head} one is allowed, the other is not")
        if tables and dense.pattern.confined():
            crossing = (tables[0] & (q[:, None] // period != k // period)).nonzero().tolist()
            if crossing:
                head, query, key = crossing[0]
                where = f"head {head}, query {int(q[query])}, key {int(k[key])} is allowed"
                rule = f"{dense.pattern!r}: a confined rule must not cross a multiple of its {period=}"
                raise AssertionError(f"{rule}; {where}")


def _windows(dense: DenseRule, period: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (heads, queries, keys), each 1D: first those of the whole table, then those of _NUM_WINDOWS windows.

    A window has _WINDOW_SIDE consecutive queries and as many keys. Its first query is in the first three periods; in
    half of the windows the keys are near the queries.
    """
    heads, whole, side = torch.arange(dense.num_heads), torch.arange(dense.num_tokens), torch.arange(_WINDOW_SIDE)
    yield heads, whole, whole
    for index in range(_NUM_WINDOWS):
        q = int(torch.randint(3 * period, (), generator=generator))
        if index % 3 == 0:  # around a multiple of the period
            q = max(0, period * (1 + index % 2) - _WINDOW_SIDE // 2)
        near = max(0, q + int(torch.randint(-_WINDOW_SIDE, _WINDOW_SIDE, (), generator=generator)))
        k = near if index % 2 == 0 else int(torch.randint(3 * period, (), generator=generator))
        yield heads, q + side, k + side


def _check_json(pattern: Pattern | Mixture) -> None:
    """Raise AssertionError unless the pattern's JSON reads back as an equal pattern; one without JSON passes."""
    if tables(pattern):
        return
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


@dataclass(frozen=True)
class BoxRanges:
    """Box of pairs in one head: each query position in the range q with each key position in the range k."""

    head: int
    q: range
    k: range

    @classmethod
    def of(cls, box: Box, index: int) -> BoxRanges:
        sides = [(int(side.first[index]), int(side.count[index]), side.step) for side in (box.q, box.k)]
        q, k = (range(first, first + step * (count - 1) + 1, step) for first, count, step in sides)
        return cls(int(box.head[index]), q, k)

    def box(self) -> Box:
        q, k = (
            Progression(torch.tensor([side.start]), side.step, torch.tensor([len(side)])) for side in (self.q, self.k)
        )
        return Box(torch.tensor([self.head]), q, k)

    def num_allowed(self, dense: DenseRule) -> int:
        q, k = (slice(side.start, side.stop, side.step) for side in (self.q, self.k))
        return int(dense.table[self.head, q, k].sum())

    def simpler_boxes(self) -> Iterator[BoxRanges]:
        """Yield simpler boxes, each with one change: a shorter range, step 1, a start nearer to 0, or head 0."""
        for name, side in (("q", self.q), ("k", self.k)):
            number, first, step = len(side), side.start, side.step
            shorter = [n for n in dict.fromkeys((1, number // 2, number - 1)) if 0 < n < number]
            sides = [part for n in shorter for part in (side[:n], side[number - n :])]
            sides += [range(first, first + number)] if step > 1 else []
            nearer = [start for start in dict.fromkeys((0, first // 2, first - 1)) if 0 <= start < first]
            sides += [range(start, start + step * number, step) for start in nearer]
            yield from (replace(self, **{name: each}) for each in sides)
        if self.head:
            yield replace(self, head=0)

    def __str__(self) -> str:
        q, k = (
            span_text(side.start, side[-1] + 1) + (f" in steps of {side.step}" if side.step > 1 else "")
            for side in (self.q, self.k)
        )
        return f"head {self.head}, queries {q}, keys {k}"


def _check_bounds(dense: DenseRule, examples: int, generator: torch.Generator) -> None:
    """Raise AssertionError unless `count` gives 0 <= low <= allowed pairs <= high <= area for all boxes of `_boxes`.

    The message shows the smallest failing box that was found.
    """
    failing = []  # the first of each kind
    for box, truth in _boxes(dense, examples, generator):
        if wrong := _wrongly_bounded_boxes(dense, box, truth):
            failing.append(_shrunk_box(dense, BoxRanges.of(box, wrong[0])))
    if failing:
        place = min(failing, key=lambda each: (each.q.step + each.k.step, len(each.q) * len(each.k)))
        box = place.box()
        bounds, area = dense.pattern.count(box, num_heads=dense.num_heads), int(box.area)
        low, high = int(bounds.low), int(bounds.high)
        verdict = " (FULL)" if low == area else " (EMPTY)" if high == 0 else ""
        raise AssertionError(
            f"{dense.pattern!r}: count must bound the allowed pairs of each box; {place}: {place.num_allowed(dense)} "
            f"of {area} pairs are allowed, count says {low} to {high}{verdict}"
        )


def _wrongly_bounded_boxes(dense: DenseRule, box: Box, truth: Tensor) -> list[int]:
    bounds = dense.pattern.count(box, num_heads=dense.num_heads)
    wrong = (bounds.low < 0) | (bounds.low > truth) | (truth > bounds.high) | (bounds.high > box.area)
    return wrong.nonzero().flatten().tolist()


def _shrunk_box(dense: DenseRule, place: BoxRanges) -> BoxRanges:
    """Shrink the failing box `place` in up to _SHRINK_TRIES tries; return the last failing box, at worst `place`."""
    tries, ahead = _SHRINK_TRIES, place.simpler_boxes()
    while tries and (other := next(ahead, None)):
        tries -= 1
        is_inside = max(other.q[-1], other.k[-1]) < dense.num_tokens
        if is_inside and _wrongly_bounded_boxes(dense, other.box(), torch.tensor([other.num_allowed(dense)])):
            place, ahead = other, other.simpler_boxes()
    return place


def _boxes(dense: DenseRule, examples: int, generator: torch.Generator) -> Iterator[tuple[Box, Tensor]]:
    """Yield (boxes, number of allowed pairs of each): all square blocks of sizes 1, 2, 4, ..., then random boxes.

    For each pair of steps in _STEPS there are `examples` random boxes. About a quarter of their progressions start at
    position 0, and about a quarter extend as far as their step allows.
    """
    tokens, heads, side = dense.num_tokens, dense.num_heads, 1
    while side <= tokens:
        truth = _pairs_by_block(dense.table, side, side)
        number = truth.shape[1]
        indices = torch.cartesian_prod(*(torch.arange(size) for size in (heads, number, number)))
        head, row, column = indices.view(-1, 3).T
        lengths = (tokens - torch.arange(number) * side).clamp(max=side)
        q, k = (Progression(index * side, 1, lengths[index]) for index in (row, column))
        yield Box(head, q, k), truth.flatten()
        side *= 2

    def draw(step: int) -> Progression:
        first, length = torch.rand(2, examples, generator=generator)
        first = (first * tokens).long()
        first[::4] = 0
        room = (tokens - 1 - first) // step + 1
        count = 1 + (length**2 * room).long().clamp(max=room - 1)
        count[1::4] = room[1::4]
        return Progression(first, step, count)

    for q_step, k_step in _STEPS:
        head = torch.randint(heads, (examples,), generator=generator)
        box = Box(head, draw(q_step), draw(k_step))
        yield box, torch.tensor([BoxRanges.of(box, index).num_allowed(dense) for index in range(examples)])


def _check_block_lists(dense: DenseRule, examples: int, generator: torch.Generator) -> None:
    """Raise AssertionError unless block lists hold all blocks with allowed pairs, and mark only full blocks as full.

    With settle=True, which evaluates undecided blocks, they must hold no other block, and mark all full ones. Numbers
    of pairs in the lists must be right or UNKNOWN.
    """
    drawn = [_draw_list_sizes(dense, generator) for _ in range(max(8, examples // 5))]
    for bound, (q_block, k_block), rate in sorted(drawn, key=lambda each: each[0].num_queries * each[0].num_keys):
        (term,) = shared_terms(dense.pattern, 1, bound, rate)
        q, k = (Layout(size, rate).positions() for size in (bound.num_queries, bound.num_keys))
        truth = _pairs_by_block(dense.table[:, q + bound.q_offset][:, :, k], q_block, k_block)
        whole = truth == q_block * k_block
        for settle in (False, True):
            blocks = term.blocks(q_block, k_block, settle=settle)
            sizes = (blocks.num_tables, *truth.shape[1:])
            listed, full, pairs = (torch.zeros(sizes, dtype=torch.int64) for _ in range(3))
            where = (blocks.table.long(), blocks.row.long(), blocks.column.long())
            listed[where], full[where], pairs[where] = 1, blocks.full.long(), blocks.pairs.long()
            heads = list(blocks.heads)
            listed, full, pairs = listed[heads] > 0, full[heads] > 0, pairs[heads]
            claims = {
                "is not listed": (truth > 0) & ~listed,
                "is listed as full": full & ~whole,
                "is listed with another count": (pairs != truth) & (pairs != UNKNOWN) & listed,
            }
            if settle:
                claims |= {"is listed": listed & (truth == 0), "is not listed as full": whole & ~full}
            for what, wrong in claims.items():
                if wrong.any():
                    head, row, column = wrong.nonzero()[0].tolist()
                    raise AssertionError(
                        f"{dense.pattern!r}: block lists must agree with mask_mod; for {bound.num_queries} queries "
                        f"from {bound.q_offset} on, {bound.num_keys} keys, blocks of {q_block} x {k_block}, layout "
                        f"rate {rate}: block ({row}, {column}) of head {head} has {int(truth[head, row, column])} "
                        f"pairs and {what}"
                    )


def _draw_list_sizes(dense: DenseRule, generator: torch.Generator) -> tuple[Bound, tuple[int, int], int]:
    """Return, at random, (pattern bound to numbers of queries and keys, (query, key) block sizes, rate of a layout).

    A pattern that accepts none of _SIZE_TRIES sizes is bound to all tokens.
    """

    def one_of(values: Sequence[int]) -> int:
        return values[int(torch.randint(len(values), (), generator=generator))]

    def blocks_and_rate() -> tuple[tuple[int, int], int]:
        return (one_of(_BLOCK_SIDES), one_of(_BLOCK_SIDES)), one_of(rates)

    tokens, rates = dense.num_tokens, (*_RATES, residue_rate(dense.pattern, dense.num_tokens))
    for _ in range(_SIZE_TRIES):
        keys, queries, is_self = 1 + one_of(range(tokens)), 1 + one_of(range(tokens)), one_of((0, 1))
        queries, offset = (keys, 0) if is_self else (queries, one_of(range(tokens - queries + 1)))
        blocks, rate = blocks_and_rate()
        with suppress(ValueError):
            bound = dense.pattern.bind(num_heads=dense.num_heads, num_queries=queries, num_keys=keys, q_offset=offset)
            return bound, blocks, rate
    return dense.pattern.bind(num_heads=dense.num_heads, num_queries=tokens, num_keys=tokens), *blocks_and_rate()


def _pairs_by_block(allowed: Tensor, q_block: int, k_block: int) -> Tensor:
    """Return the number of allowed pairs of each block, (heads, block rows, block columns).

    The last blocks may be shorter.
    """
    heads, queries, keys = allowed.shape
    rows, columns = -(-queries // q_block), -(-keys // k_block)
    padded = torch.zeros(heads, rows * q_block, columns * k_block, dtype=torch.int64)
    padded[:, :queries, :keys] = allowed
    return padded.view(heads, rows, q_block, columns, k_block).sum((2, 4))
