"""Picking a term's operands and joining the terms' results, as expressions that autograd and torch.compile follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from ..masks import Layout
from ..masks.orders import Compact, Permutation
from ._gather import Picked, Run, Strands, side
from ._slots_op import encoded, join_slots, take_slots

# B batch, X heads of a tensor, N tokens, F folds, H heads of a term, S slots, D head dim


@dataclass(frozen=True, eq=False)
class PickRows:
    """A compact term's slots: tokens of some heads, in (fold, head, slot) order. `numbers` are these as an op's."""

    side: Strands
    numbers: tuple[int, ...]
    nbytes = 0

    @property
    def is_view(self) -> bool:
        """Whether the slots of all folds are consecutive tokens, the same of every head."""
        layout = self.side.layout
        together = layout.folds == 1 or layout.fold_stride == layout.num_slots
        return layout.step == 1 and together and len(self.side.runs) == 1

    def view(self, x: Float[Tensor, "B X N D"]) -> Float[Tensor, "B*F H S D"]:
        """The slots, copied only where folds and batch entries do not make one dim."""
        (run,), layout = self.side.runs, self.side.layout
        length = layout.folds * layout.num_slots
        x = _heads(x, run)
        x = x if length == x.shape[2] else x.narrow(2, run.start, length)
        return x.unflatten(2, (layout.folds, layout.num_slots)).transpose(1, 2).flatten(0, 1)

    def restore(self, slots: Tensor) -> Tensor:
        return slots


@dataclass(frozen=True, eq=False)
class PickTokens:
    """A shared term's slots: every token of every head, reordered where `slots` and `positions` say so."""

    numbers: tuple[int, ...]
    positions: Int32[Tensor, " N"] | None
    slots: Int32[Tensor, " N"] | None
    is_view = True

    @property
    def nbytes(self) -> int:
        return sum(order.nbytes for order in (self.positions, self.slots) if order is not None)

    def view(self, x: Float[Tensor, "B X N D"]) -> Float[Tensor, "B X N D"]:
        return x if self.positions is None else x.index_select(2, self.positions)

    def restore(self, slots: Shaped[Tensor, "B X S ..."]) -> Shaped[Tensor, "B X N ..."]:
        """Slots, or numbers about them, in the order of the tokens."""
        return slots if self.slots is None else slots.index_select(2, self.slots)


@dataclass(frozen=True, eq=False)
class PickIndex:
    """A term's slots by index into the tokens of all heads, in (fold, head, slot) order; keys and values only."""

    shape: tuple[int, int, int]
    rows: Int64[Tensor, " FHS"]
    numbers = ()
    is_view = True  # there is nothing to gain from taking it with others

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def view(self, x: Float[Tensor, "B X N D"]) -> Float[Tensor, "B*F H S D"]:
        """The slots, copied."""
        return x.flatten(1, 2).index_select(1, self.rows).unflatten(1, self.shape).flatten(0, 1)

    def restore(self, slots: Tensor) -> Tensor:
        raise AssertionError("results are put back by the queries' pick")


Pick = PickRows | PickTokens | PickIndex


def make_pick(layout: Compact | Permutation, heads: tuple[int, ...], given: Layout, device: torch.device) -> Pick:
    """How a tensor's tokens, ordered as `given`, become a term's; `heads` are the tensor's heads it uses."""
    if isinstance(layout, Permutation):
        # A term is in the given order, or the given order is the natural one.
        orders = (None, None) if layout == given else (layout.positions(device).int(), layout.slots(device).int())
        every = Compact(heads, (0,) * len(heads), 1, layout.num_slots, 1, 0)
        return PickTokens(_numbers(every, given, heads), *orders)
    found = side(layout, given, heads)
    assert isinstance(found, Strands)
    return pick_of(found, 0, device)


def pick_of(side: Strands | Picked, num_tokens: int, device: torch.device) -> PickRows | PickIndex:
    """How the tokens of one side become a term's; an index counts those of a head as `num_tokens`."""
    if isinstance(side, Strands):
        return PickRows(side, tuple(encoded([side])))
    heads, folds, slots = side.index.shape
    first = torch.tensor(side.heads)[:, None, None] * num_tokens
    rows = (first + side.index).transpose(0, 1).flatten()
    return PickIndex((folds, heads, slots), rows.to(device))


def take_ahead(x: Float[Tensor, "B X N D"], picks: Sequence[Pick]) -> list[Tensor | None]:
    """The slots of the picks that have to be copied, all at once: their gradients are then summed in one tensor.

    None for the others, and for all where no gradient is wanted: then `take` copies one after the other.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return [None] * len(picks)
    numbers = [number for pick in picks if not pick.is_view for number in pick.numbers]
    copies = take_slots(x, numbers) if numbers else []
    found, following = [], 0
    for pick in picks:
        found.append(None if pick.is_view else copies[following])
        following += not pick.is_view
    return found


def take(x: Float[Tensor, "B X N D"], pick: Pick, taken: Tensor | None) -> Float[Tensor, "B*F H S D"]:
    """A pick's slots of x, which `take_ahead` may have copied."""
    if taken is not None:
        return taken
    return pick.view(x) if pick.is_view else take_slots(x, list(pick.numbers))[0]


def join(
    picks: Sequence[Pick],
    parts: Sequence[Tensor],
    lses: Sequence[Tensor],
    rows: tuple[int, int, int],
    *,
    keep_wide: bool = False,
) -> tuple[Float[Tensor, "B X N D"], Float[Tensor, "B X N"] | None]:
    """(out, lse) of all rows, (B, X, N), from the slots of each pick; without lses the parts must share no row.

    out has the parts' type, or, where more is to be done with it, that of the sums.
    """
    parts = [pick.restore(part) for pick, part in zip(picks, parts, strict=True)]
    lses = [pick.restore(lse) for pick, lse in zip(picks, lses, strict=True)] if lses else []
    if len(parts) == 1 and isinstance(picks[0], PickTokens):
        return parts[0], lses[0] if lses else None
    numbers = [number for pick in picks for number in pick.numbers]
    out, lse = join_slots(parts, lses, numbers, list(rows), keep_wide)
    return out, lse if lses else None


def _numbers(layout: Compact, given: Layout, heads: tuple[int, ...]) -> tuple[int, ...]:
    found = side(layout, given, heads)
    assert isinstance(found, Strands)
    return tuple(encoded([found]))


def _heads(x: Float[Tensor, "B X N D"], run: Run) -> Float[Tensor, "B H N D"]:
    """The heads of a run, as a view."""
    number = run.end - run.begin
    if run.step == 0:
        return x.narrow(1, run.first, 1).expand(-1, number, -1, -1)
    whole = number == x.shape[1] and run.first == 0
    return x if whole else x[:, run.first : run.first + (number - 1) * run.step + 1 : run.step]
