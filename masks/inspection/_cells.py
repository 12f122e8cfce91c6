"""count_cells: number of allowed pairs in each cell of a coarse grid over queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from ..blocks import Budget, PairCounts, bounded_pairs, even_places, settle
from ..core import (
    Box,
    Expression,
    Owned,
    Pattern,
    Progression,
    distinct_boxes,
    join,
    require_below,
    require_expression,
    require_int,
)
from ..orders import Layout

# R rows, C columns of cells; P parts of cells

_BUDGET = 1 << 24  # evaluations of single pairs, or work that takes as long
_MOST_CELLS = 1 << 22
_EVERY_PAIR = 1 << 21  # windows up to this number of pairs are evaluated pair by pair
_MOST_BOXES = 1 << 20
_MOST_PARTS = 1 << 28  # pairs of parts that are compared by residue class
_SAMPLES, _LEAST_SAMPLES = 1 << 22, 1 << 6  # sampled pairs if there are too many boxes: in all, and in a cell
_PAIRS_AT_ONCE = 1 << 20
_PARTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Cells:
    """Counts of allowed pairs in the cells of a grid of R rows and C columns.

    Row i has the query slots row_edges[i] to row_edges[i + 1] - 1, column j the key slots column_edges[j] to
    column_edges[j + 1] - 1. In natural order a slot is the position.

    window: (query slots, key slots) of the grid.
    area: number of pairs of each cell.
    low, high: bounds on the allowed pairs of each cell, counted once for each branch that allows them.
    likely: estimate within the bounds; low, high and likely are equal if the count is exact.
    branches: the counts of each branch, in the order of `pattern.branches()`.
    """

    window: tuple[range, range]
    row_edges: Int64[Tensor, " R+1"]
    column_edges: Int64[Tensor, " C+1"]
    area: Int64[Tensor, "R C"]
    low: Int64[Tensor, "R C"]
    high: Int64[Tensor, "R C"]
    likely: Float64[Tensor, "R C"]
    branches: tuple[PairCounts, ...]

    @property
    def exact(self) -> Bool[Tensor, "R C"]:
        """Mask of the cells whose count is exact."""
        return self.low == self.high


def count_cells(
    pattern: Expression,
    num_tokens: int,
    *,
    head: int = 0,
    num_heads: int = 1,
    num_keys: int | None = None,
    batch: int = 0,
    queries: range | None = None,
    keys: range | None = None,
    shape: tuple[int, int] | None = None,
    sides: tuple[int, int] = (1, 1),
    order: Layout | None = None,
) -> Cells:
    """Return the counts of one head's allowed pairs in each cell of a grid over a window of queries and keys.

    num_keys: None for num_tokens, the number of queries.
    queries, keys: the window, in slots of `order`; None for all.
    order: residue-major order, of which only the rate is used; None for natural order, where slots are positions.
    shape: (rows, columns) of the grid; row i begins at slot queries.start + i * len(queries) // rows, columns likewise.
    sides: used if `shape` is None, (queries, keys) of a cell in slots; cells begin at multiples of these, and cells at
        the window's borders are cut.
    batch: index of the batch entry, if run-time tensors differ by entry.

    If an exact count would take too long, a cell gets bounds and an estimate. Raises ValueError or TypeError for
    arguments that do not fit, and ValueError if the pattern is undefined at a position in the window.
    """
    num_keys = num_tokens if num_keys is None else num_keys
    bound = require_expression(pattern).bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_keys)
    require_below("head", head, num_heads, "heads")
    require_below("batch", batch, bound.batch, "batch entries")
    rule = bound.entry(batch).pattern if bound.pattern.num_entries() > 1 else bound.pattern
    if order is not None and not isinstance(order, Layout):
        raise TypeError(f"order must be a Layout, such as masks.layout gives, or None; got {type(order).__name__}")
    windows = window_slots("queries", queries, num_tokens), window_slots("keys", keys, num_keys)
    if shape is not None:
        edges = [_even_edges(*each) for each in zip(("queries", "keys"), windows, shape, strict=True)]
        if shape[0] * shape[1] > _MOST_CELLS:
            raise ValueError(f"a window is cut into at most {_MOST_CELLS} cells; got {shape=}")
    else:
        edges = [_edges_at_multiples(*each) for each in zip(windows, sides, strict=True)]
    q, k = (
        CellAxis(window, each, Layout(size, 1 if order is None else order.rate))
        for window, each, size in zip(windows, edges, (num_tokens, num_keys), strict=True)
    )
    parts = [branch.for_head(head, num_heads) for branch in rule.branches()]
    found = _counts_of_rules(set(parts), q, k)
    branches = tuple(found[part] for part in parts)
    low, high, likely = (torch.stack(each).sum(0) for each in zip(*branches, strict=True))
    return Cells((q.window, k.window), q.edges, k.edges, q.sizes[:, None] * k.sizes, low, high, likely, branches)


def _even_edges(name: str, window: range, cells: int) -> Int64[Tensor, " cells+1"]:
    require_int(f"cells of {name}", cells, minimum=1)
    if cells > len(window):
        raise ValueError(f"a window of {len(window)} {name} has at most {len(window)} cells; got {cells}")
    return window.start + torch.arange(cells + 1) * len(window) // cells


def _edges_at_multiples(window: range, side: int) -> Int64[Tensor, " cells+1"]:
    first, last = window.start // side, -(-window.stop // side)
    return (torch.arange(first, last + 1) * side).clamp(window.start, window.stop)


def _counts_of_rules(rules: set[Pattern], q: CellAxis, k: CellAxis) -> dict[Pattern, PairCounts]:
    """Return a map from each rule to the counts of its allowed pairs in each cell, shape (query cells, key cells).

    rules: patterns of one head.

    Each rule gets an equal share of the budget of work that earlier rules have left.
    """
    found, left = {}, _BUDGET
    for done, rule in enumerate(sorted(rules, key=lambda rule: (-rule.spacing(), rule.text))):
        budget = Budget(left // (len(rules) - done))
        left -= budget.left
        found[rule] = _counts_of_rule(rule, q, k, budget)
        left += max(budget.left, 0)
    return found


def _counts_of_rule(rule: Pattern, q: CellAxis, k: CellAxis, budget: Budget) -> PairCounts:
    """Return the counts of allowed pairs in each cell, shape (query cells, key cells), for the rule of one head.

    Raises ValueError if the rule is undefined for a position.
    """
    few = len(q.window) * len(k.window) <= _EVERY_PAIR
    try:
        found = _count_every_pair(rule, q, k) if few else _count_by_boxes(rule, q, k, budget)
    except IndexError as error:
        asked = f"queries below {q.layout.num_tokens} and keys below {k.layout.num_tokens}"
        raise ValueError(f"{rule!r} must be defined for {asked}: {error}") from error
    return PairCounts(*(each.view(q.num_cells, k.num_cells) for each in found))


def _count_every_pair(rule: Pattern, q: CellAxis, k: CellAxis) -> PairCounts:
    mask_mod, none = rule.mask_mod(num_heads=1, device=torch.device("cpu")), torch.tensor(0)
    queries, keys = (side.positions(torch.arange(side.window.start, side.window.stop)) for side in (q, k))
    row, column = (torch.repeat_interleave(side.sizes) for side in (q, k))
    pairs = torch.zeros(q.num_cells, k.num_cells, dtype=torch.int64)
    for some in torch.arange(len(row)).split(max(1, _PAIRS_AT_ONCE // len(column))):
        allowed = mask_mod(none, none, queries[some, None], keys[None, :]).expand(len(some), -1)
        columns = torch.zeros(len(some), k.num_cells, dtype=torch.int64).index_add_(1, column, allowed.long())
        pairs.index_add_(0, row[some], columns)
    return PairCounts(pairs.flatten(), pairs.flatten(), pairs.flatten().double())


def _count_by_boxes(rule: Pattern, q: CellAxis, k: CellAxis, budget: Budget) -> PairCounts:
    """Return the counts of allowed pairs of all cells, flat: for each cell the sum over boxes of positions in it.

    Where the work would exceed `budget`, counts are bounds and estimates. If there are too many boxes, returns the
    result of `_estimate_by_samples`.
    """
    (row, queries), (column, keys) = q.parts(), k.parts()
    # Positions of a part are congruent modulo its step, query and key of an allowed pair modulo the rule's spacing:
    # only parts that are congruent modulo the gcd of both can have allowed pairs.
    classes = gcd(queries.step, rule.spacing())
    own, theirs = queries.first.remainder(classes), keys.first.remainder(classes)
    boxes = int((torch.bincount(own, minlength=classes) * torch.bincount(theirs, minlength=classes)).sum())
    if boxes > _MOST_BOXES or len(own) * len(theirs) > _MOST_PARTS:
        return _estimate_by_samples(rule, q, k)
    found, undecided = PairCounts.zeros(q.num_cells * k.num_cells), []
    for some in torch.arange(len(own)).split(max(1, _PARTS_AT_ONCE // len(theirs))):
        mine, other = (own[some, None] == theirs).nonzero().unbind(1)
        mine = some[mine]
        owned = Owned(
            row[mine] * k.num_cells + column[other],
            Box(torch.zeros_like(mine), queries.select(mine), keys.select(other)),
        )
        undecided.append(settle(rule, owned, found))
    rest = join(undecided)
    if len(rest):
        period = rule.period()
        alike, box = (torch.arange(len(rest)), rest.box) if period is None else distinct_boxes(rest.box, period)
        found.add(rest.owner, *(each[alike] for each in bounded_pairs(rule, box, budget)))
    return found


def _estimate_by_samples(rule: Pattern, q: CellAxis, k: CellAxis) -> PairCounts:
    """Return the counts of all cells, flat: estimates from sampled pairs, with trivial bounds (0 and all pairs)."""
    mask_mod, none = rule.mask_mod(num_heads=1, device=torch.device("cpu")), torch.tensor(0)
    area = (q.sizes[:, None] * k.sizes).flatten()
    each, allowed_shares = max(_LEAST_SAMPLES, _SAMPLES // len(area)), []
    for some in torch.arange(len(area)).split(max(1, _PAIRS_AT_ONCE // each)):
        row, column = even_places((len(some), each), int(some[0]) * each)
        query, key = q.positions_at(some // k.num_cells, row), k.positions_at(some % k.num_cells, column)
        allowed_shares.append(mask_mod(none, none, query, key).double().mean(1))
    return PairCounts(torch.zeros_like(area), area, torch.cat(allowed_shares) * area)


def window_slots(name: str, window: object, size: int) -> range:
    """Return the window, or range(size) if it is None.

    Raises ValueError unless it is a non-empty range of step 1 within range(size). name: the argument, for errors.
    """
    window = range(size) if window is None else window
    if not isinstance(window, range) or window.step != 1 or not 0 <= window.start < window.stop <= size:
        advice = "" if isinstance(window, range) else ": write range(start, stop)"
        rule = f"{name} must be a range of step 1 within 0 to {size}, and not empty"
        raise ValueError(f"{rule}; got {name}={window!r}{advice}")
    return window


@dataclass(frozen=True)
class CellAxis:
    """Queries or keys of a window, cut into cells: cell i has the slots edges[i] to edges[i + 1] - 1.

    window: all slots of the cells.
    layout: the order of all queries or keys.
    """

    window: range
    edges: Int64[Tensor, " cells+1"]
    layout: Layout

    @property
    def num_cells(self) -> int:
        return len(self.edges) - 1

    @property
    def sizes(self) -> Int64[Tensor, " cells"]:
        return self.edges.diff()

    def positions(self, slots: Tensor) -> Tensor:
        return self.layout.pieces(0).position(torch.zeros_like(slots), slots)

    def positions_at(self, cell: Tensor, share: Tensor) -> Tensor:
        """Return, for all i and j, the position of the token at fraction share[i, j] of the length of cell cell[i].

        cell: indices of n cells, of shape (n,).
        share: fractions from 0 to 1, of shape (n, m).
        """
        size = self.sizes[cell, None]
        return self.positions(self.edges[cell, None] + (size * share).long().minimum(size - 1))

    def parts(self) -> tuple[Int64[Tensor, " P"], Progression]:
        """Cut the cells into P parts whose positions are arithmetic progressions.

        Returns (index of the cell of each part, positions of each part).
        """
        pieces = self.layout.pieces(0)
        inner = pieces.starts[(pieces.starts > self.window.start) & (pieces.starts < self.window.stop)]
        cuts = torch.cat([self.edges, inner]).unique()
        start, cell = cuts[:-1], torch.searchsorted(self.edges, cuts[:-1], right=True) - 1
        return cell, Progression(self.positions(start), pieces.step, cuts.diff())
