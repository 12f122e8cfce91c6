"""Orders of all tokens or of some: which token is in each slot (place of a reordered tensor), for each head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from ..core import Pattern, require_int

# N tokens, S slots, P pieces, T tables (distinct heads)


@dataclass(frozen=True)
class Pieces:
    """P slot runs that together have every slot once; in each, token positions ascend by `step`.

    Slot run p has lengths[p] slots: starts[p], starts[p] + strides[p] and so on; stride 1 if `strides` is None. For
    heads that use table t, the i-th slot of slot run p holds position firsts[t, p] + step * i. Starts ascend. Slot runs
    of stride n > 1 come in groups of n equally long ones, which start at consecutive slots and interleave without gaps.
    """

    starts: Int64[Tensor, " P"]
    lengths: Int64[Tensor, " P"]
    firsts: Int64[Tensor, "T P"]
    step: int
    strides: Int64[Tensor, " P"] | None = None

    def position(self, table: Int64[Tensor, "..."], slot: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
        """Return the token position in each slot, in the table with the index `table`; the arguments broadcast."""
        piece = torch.searchsorted(self.starts, slot, right=True) - 1
        index = slot - self.starts[piece]
        if self.strides is not None:
            # Past the last start of a group, its runs alternate. Before it, index is 0 and (-1) % stride is stride - 1:
            # piece and index stay as they are.
            stride = self.strides[piece]
            piece, index = piece - (stride - 1) + (index - 1) % stride, (index + stride - 1) // stride
        return self.firsts[table, piece] + self.step * index


class _Order:
    """Base of orders. An order gives the token in each slot of one or more folds.

    The tokens of each fold, such as a segment, are the tokens of fold 0, shifted.
    """

    @property
    def is_natural(self) -> bool:
        """True if slot s is known to hold token s; False is not conclusive."""
        return False

    def pieces(self, origin: int) -> Pieces:
        """Return the slots of fold 0 as slot runs whose positions are progressions; token 0 has position `origin`.

        `firsts` has a row for each head of a `Compact`, else one for all heads.
        """
        raise NotImplementedError  # defined by each order

    def in_pieces(self, rule: Pattern, origin: int) -> tuple[Pattern, Pieces]:
        """Return (rule, self.pieces(origin)): a rule over positions, and the slots as slot runs.

        An order of many short slot runs may instead return an equivalent rule over slot numbers, and all slots as one
        slot run.
        """
        return rule, self.pieces(origin)


class _SharedOrder(_Order):
    """Base of orders that all heads share: slot s of fold 0 holds token positions()[s]. `folds` is 1 by default."""

    folds = 1

    @property
    def num_slots(self) -> int:
        raise NotImplementedError  # defined by each order

    def positions(self, device: torch.device | str | None = None) -> Int64[Tensor, " S"]:
        """Return the index of the token in each slot of fold 0."""
        raise NotImplementedError

    def tokens(self, device: torch.device | str | None = None) -> Int64[Tensor, "1 1 S"]:
        """Return the index of the token in each slot of fold 0, with axes of length 1 for heads and folds."""
        return self.positions(device)[None, None]

    def end(self, filled: int) -> int:
        """Return a number above every token of fold 0, also if the order went on for `filled` more slots."""
        return self.num_slots + filled

    def start_of(self, index: int) -> int:
        """Return the shift, in tokens, of the slots of the head at this index; 0, as all heads share the order."""
        return 0

    def as_compact(self, heads: tuple[int, ...]) -> Compact | None:
        """Return an equal Compact of these query heads, of one progression for each; None unless `is_natural`."""
        return Compact(heads, (0,) * len(heads), 1, self.num_slots, 1, self.num_slots) if self.is_natural else None

    def repeated(self, heads: tuple[int, ...], moves: Int64[Tensor, " n"]) -> Compact | Folded:
        """Return an order of len(moves) copies of this order's folds; those of copy i are shifted by moves[i] tokens.

        heads: query heads of the `Compact` that a natural order becomes; other orders do not use it.
        """
        compact = self.as_compact(heads)
        return Folded(self, FoldStarts(moves)) if compact is None else compact.repeated(heads, moves)


class Permutation(_SharedOrder):
    """Base of orders that hold each token of the sequence once."""

    is_copied = False  # if q, k and v are given in this order; else the cost model counts a copy

    def slots(self, device: torch.device | str | None = None) -> Int64[Tensor, " N"]:
        """Return the slot of each token: the inverse of `positions`."""
        raise NotImplementedError

    def apply(self, x: Shaped[Tensor, "..."], dim: int = -2) -> Shaped[Tensor, "..."]:
        """Return x reordered along `dim` from natural token order into slots; x itself if `is_natural`.

        Raises ValueError unless that dimension has one entry for each token.
        """
        self._check_length(x, dim)
        return x if self.is_natural else x.index_select(dim, self.positions(x.device))

    def invert(self, x: Shaped[Tensor, "..."], dim: int = -2) -> Shaped[Tensor, "..."]:
        """Return x reordered along `dim` from slots back into natural token order; x itself if `is_natural`.

        Raises ValueError unless that dimension has one entry for each token.
        """
        self._check_length(x, dim)
        return x if self.is_natural else x.index_select(dim, self.slots(x.device))

    def _check_length(self, x: Tensor, dim: int) -> None:
        if x.shape[dim] != self.num_slots:
            raise ValueError(
                f"x must have as many tokens as the layout, {self.num_slots}; got {x.shape[dim]} along {dim=}"
            )


@dataclass(frozen=True)
class Layout(Permutation):
    """Residue-major order, shared by all heads: tokens sorted by (index mod rate, index div rate).

    Any number of tokens is permuted without padding; rate 1 is the natural order. The tokens of one residue class,
    modulo `rate` or a divisor of it, are in runs of consecutive slots.

    Construction raises ValueError for numbers outside [1, 2**31), TypeError for values that are not integers.

    >>> masks.Layout(8, 2).apply(torch.arange(8), dim=0)
    tensor([0, 2, 4, 6, 1, 3, 5, 7])
    """

    num_tokens: int
    rate: int = 1

    def __post_init__(self) -> None:
        require_int("num_tokens", self.num_tokens, minimum=1)
        require_int("rate", self.rate, minimum=1)

    @property
    def num_slots(self) -> int:
        return self.num_tokens

    @property
    def is_natural(self) -> bool:
        return self.rate == 1

    def positions(self, device: torch.device | str | None = None) -> Int64[Tensor, " S"]:
        """Return the index of the token in each slot."""
        slot = torch.arange(self.num_tokens, device=device)
        # The first `longer` residue classes have one token more. No data-dependent shape: this is traced.
        each, longer = self.num_tokens // self.rate, self.num_tokens % self.rate
        border = longer * (each + 1)
        residue = torch.where(slot < border, slot // (each + 1), longer + (slot - border) // max(each, 1))
        return residue + self.rate * (slot - residue * each - residue.clamp(max=longer))

    def slots(self, device: torch.device | str | None = None) -> Int64[Tensor, " N"]:
        """Return the slot of each token: the inverse of `positions`."""
        return self.slot_of(torch.arange(self.num_tokens, device=device))

    def slot_of(self, token: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
        residue = token % self.rate
        each, longer = self.num_tokens // self.rate, self.num_tokens % self.rate
        return residue * each + residue.clamp(max=longer) + token // self.rate

    def pieces(self, origin: int) -> Pieces:
        """Return the slots as one slot run for each residue class; token 0 has position `origin`."""
        classes = torch.arange(min(self.rate, self.num_tokens))
        lengths = (self.num_tokens - 1 - classes) // self.rate + 1
        starts = lengths.cumsum(0) - lengths
        return Pieces(starts, lengths, (classes + origin)[None], self.rate)

    def rows(self, origin: int) -> Pieces:
        """Return the slots as slot runs of consecutive tokens: the first token of each class, then the second of each.

        Token 0 has position `origin`. If the rate does not divide the number of tokens, the first classes have one
        token more: their runs come first, then the runs of the other classes.
        """
        each, longer = divmod(self.num_tokens, self.rate)
        groups = [
            (first, number, held)
            for first, number, held in ((0, longer, each + 1), (longer, self.rate - longer, each))
            if number and held
        ]
        starts = torch.cat([first * (each + 1) + torch.arange(held) for first, _, held in groups])
        firsts = torch.cat([first + origin + self.rate * torch.arange(held) for first, _, held in groups])
        numbers, counts = (torch.tensor([group[index] for group in groups]) for index in (1, 2))
        lengths, strides = numbers.repeat_interleave(counts), counts.repeat_interleave(counts)
        return Pieces(starts, lengths, firsts[None], 1, strides)


@dataclass(frozen=True)
class ListedOrder(_SharedOrder):
    """Order of some tokens, equal for all heads: slot s holds the s-th token of the concatenated `runs`.

    runs: ranges of tokens, all with one step. The step is above 1 for tokens sorted by residue.
    """

    runs: tuple[range, ...]

    @property
    def num_slots(self) -> int:
        return sum(map(len, self.runs))

    @property
    def step(self) -> int:
        return self.runs[0].step

    @property
    def is_copied(self) -> bool:
        """True if the step is above 1: the cost model then counts a copy. Runs of step 1 count as views."""
        return self.step > 1

    def end(self, filled: int) -> int:
        """Return the largest `stop` of the runs, above every token; `filled` is not used, as no slots follow."""
        return max(run.stop for run in self.runs)

    def positions(self, device: torch.device | str | None = None) -> Int64[Tensor, " S"]:
        return torch.cat([torch.arange(run.start, run.stop, run.step, device=device) for run in self.runs])

    def pieces(self, origin: int) -> Pieces:
        lengths = torch.tensor([len(run) for run in self.runs])
        firsts = torch.tensor([[run.start for run in self.runs]]) + origin
        return Pieces(lengths.cumsum(0) - lengths, lengths, firsts, self.step)


@dataclass(frozen=True, eq=False)
class FoldStarts:
    """Offset of each fold, in tokens.

    In a `Compact`, offsets are relative to its first fold; in a `Folded`, to the order that its folds repeat. Instances
    compare by identity.
    """

    tokens: Int64[Tensor, " folds"]


@dataclass(frozen=True)
class Compact(_Order):
    """Order of one progression of tokens for each head, such as every n-th token, repeated over folds.

    Slot s of fold f of head heads[i] holds token starts[i] + f * fold_stride + s * step; with `fold_starts`,
    fold_starts.tokens[f] replaces f * fold_stride. All heads have `num_slots` slots in each fold.
    """

    heads: tuple[int, ...]
    starts: tuple[int, ...]
    step: int
    num_slots: int
    folds: int
    fold_stride: int
    fold_starts: FoldStarts | None = None

    @property
    def is_copied(self) -> bool:
        """True if the tokens count as copied; False for evenly spaced folds of step 1, which are views."""
        return self.step > 1 or self.fold_starts is not None

    def end(self, filled: int) -> int:
        return max(self.starts) + (self.num_slots + filled) * self.step

    def fold_tokens(self, device: torch.device | str | None = None) -> Int64[Tensor, " folds"]:
        """Return the token offset of each fold from the first fold."""
        if self.fold_starts is not None:
            return self.fold_starts.tokens.to(device)
        return torch.arange(self.folds, device=device) * self.fold_stride

    def at_folds(self, tokens: Int64[Tensor, " folds"]) -> Compact:
        """Return an order of len(tokens) >= 1 folds: fold i is fold 0 of this order, shifted by tokens[i] tokens."""
        first, even, stride = int(tokens[0]), True, self.num_slots
        if len(tokens) > 1:
            gaps = tokens.diff()
            stride = int(gaps[0])
            even = not bool((gaps != stride).any())
        return replace(
            self,
            starts=tuple(start + first for start in self.starts),
            folds=len(tokens),
            fold_stride=stride if even else 0,
            fold_starts=None if even else FoldStarts(tokens - first),
        )

    def repeated(self, heads: tuple[int, ...], moves: Int64[Tensor, " n"]) -> Compact:
        return self.at_folds((moves[:, None] + self.fold_tokens()).flatten())

    def portion(self, heads: slice, folds: range) -> Compact:
        """Return the order restricted to the heads at these indices of `self.heads`, and to these consecutive folds."""
        some = replace(self, heads=self.heads[heads], starts=self.starts[heads])
        return some.at_folds(self.fold_tokens()[folds.start : folds.stop])

    def alone(self, shift: int) -> Compact:
        """Return an order of one fold: fold 0 of this order, shifted by `shift` tokens."""
        starts = tuple(start + shift for start in self.starts)
        return replace(self, starts=starts, folds=1, fold_stride=0, fold_starts=None)

    def pieces(self, origin: int) -> Pieces:
        firsts = torch.tensor(self.starts)[:, None] + origin
        return Pieces(torch.tensor([0]), torch.tensor([self.num_slots]), firsts, self.step)

    def start_of(self, index: int) -> int:
        return self.starts[index]

    def as_compact(self, heads: tuple[int, ...]) -> Compact:
        return self

    def tokens(self, device: torch.device | str | None = None) -> Int64[Tensor, "heads folds S"]:
        starts = torch.tensor(self.starts, device=device)[:, None, None]
        return starts + self.fold_tokens(device)[:, None] + torch.arange(self.num_slots, device=device) * self.step


@dataclass(frozen=True)
class Folded(_SharedOrder):
    """Shifted copies of an order as folds: slot s of fold f holds token starts.tokens[f] + order.positions()[s].

    order: an order of one fold.
    """

    order: _SharedOrder
    starts: FoldStarts
    is_copied = True

    @property
    def folds(self) -> int:  # type: ignore[override]
        return len(self.starts.tokens)

    @property
    def num_slots(self) -> int:
        return self.order.num_slots

    @property
    def first(self) -> int:
        return int(self.starts.tokens[0])

    def positions(self, device: torch.device | str | None = None) -> Int64[Tensor, " S"]:
        return self.order.positions(device) + self.first

    def tokens(self, device: torch.device | str | None = None) -> Int64[Tensor, "1 folds S"]:
        return (self.starts.tokens.to(device or "cpu")[:, None] + self.order.positions(device))[None]

    def end(self, filled: int) -> int:
        return self.order.end(filled) + self.first

    def repeated(self, heads: tuple[int, ...], moves: Int64[Tensor, " n"]) -> Folded:
        return replace(self, starts=FoldStarts((moves[:, None] + self.starts.tokens).flatten()))

    def pieces(self, origin: int) -> Pieces:
        return self.order.pieces(origin + self.first)

    def in_pieces(self, rule: Pattern, origin: int) -> tuple[Pattern, Pieces]:
        return self.order.in_pieces(rule, origin + self.first)


Order = Permutation | ListedOrder | Compact | Folded


def residue_rate(branch: Pattern, most: int) -> int:
    """Return the rate of the residue-major order for a branch: the least common multiple of some of its dilation rates.

    Rates are taken in ascending order, and one that would raise the multiple above `most` is left out. For each rate
    taken, the tokens of one residue class are in runs of consecutive slots. The result is 1 without dilation.
    """
    common = 1
    for rate in sorted(set(branch.rates())):
        joined = lcm(common, rate)
        common = joined if joined <= most else common
    return common
