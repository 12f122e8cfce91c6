"""Picking a term's operands and joining the terms' results: ops that autograd and torch.compile follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from ..masks.orders import Compact
from ._gather import Run, Side, Strands, Whole, claim_rows, side_of
from ._merge import WholeRows, part_gradients, sum_dtype
from ._ops import own_op

# B batch, X heads of a tensor, N tokens, F folds, H heads of a term, S slots, D head dim

_WORD = torch.complex128  # 16 bytes: what a device moves at once


def encoded(sides: Sequence[Strands]) -> list[int]:
    """Sides as numbers, which is what an op takes: of each the heads, step, slots, folds, fold stride, and runs."""
    numbers: list[int] = []
    for side in sides:
        layout = side.layout
        numbers += [len(layout.heads), layout.step, layout.num_slots, layout.folds, layout.fold_stride, len(side.runs)]
        for run in side.runs:
            numbers += [run.begin, run.end, run.first, run.step, run.start]
    return numbers


@lru_cache(maxsize=1024)
def _decoded(numbers: tuple[int, ...]) -> tuple[Strands, ...]:
    sides, rest = [], iter(numbers)
    for heads in rest:
        step, slots, folds, stride, count = (next(rest) for _ in range(5))
        runs = tuple(Run(*(next(rest) for _ in range(5))) for _ in range(count))
        starts = [run.start for run in runs for _ in range(run.begin, run.end)]
        sides.append(Strands(Compact(tuple(range(heads)), tuple(starts), step, slots, folds, stride), runs))
    return tuple(sides)


@own_op("flexdilated::take_slots")
def take_slots(x: Tensor, sides: list[int]) -> list[Tensor]:
    """Of x (B, X, N, D) the slots of each side, contiguous: (B * F, H, S, D)."""
    taken = []
    for side in _decoded(tuple(sides)):
        slots = _empty_slots(x, side)
        for run in side.runs:
            _copy(_by_head(slots, len(x))[:, run.begin : run.end], side.view(x, run))
        taken.append(slots)
    return taken


@take_slots.register_fake
def _(x, sides):
    return [_empty_slots(x, side) for side in _decoded(tuple(map(int, sides)))]


@own_op("flexdilated::add_slots")
def add_slots(slots: list[Tensor], sides: list[int], shape: list[int]) -> Tensor:
    """Zeros of `shape`, (B, X, N, D), with the slots of each side added where `take_slots` found them."""
    exact = len(slots) == 1
    dtype = slots[0].dtype if exact else sum_dtype(slots[0])
    total = slots[0].new_zeros(shape, dtype=dtype)
    for part, side in zip(slots, _decoded(tuple(sides)), strict=True):
        side.add(total, _by_head(part, shape[0]))
    return total.to(slots[0].dtype)


@add_slots.register_fake
def _(slots, sides, shape):
    return slots[0].new_empty(shape)


def _remember_input(ctx, inputs, output) -> None:
    x, ctx.sides = inputs
    ctx.shape = list(x.shape)


def _take_backward(ctx, grads):
    return add_slots([grad.contiguous() for grad in grads], ctx.sides, ctx.shape), None


def _remember_slots(ctx, inputs, output) -> None:
    _, ctx.sides, _ = inputs


def _add_backward(ctx, grad):
    return take_slots(grad, ctx.sides), None, None


take_slots.register_autograd(_take_backward, setup_context=_remember_input)
add_slots.register_autograd(_add_backward, setup_context=_remember_slots)


@own_op("flexdilated::join_slots")
def join_slots(
    parts: list[Tensor], lses: list[Tensor], sides: list[int], rows: list[int], keep_wide: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `rows`, (B, X, N), from each side's slots: one softmax over all parts of a row.

    Rows in no side get output 0 and lse -inf. Without lses no row may be in two sides; the lse is then empty.
    Sums are kept in float32 or wider; out comes in the parts' type unless it is to stay wide.
    """
    order = _order(tuple(sides), tuple(rows[1:]))
    dtype = parts[0].dtype
    sums = sum_dtype(parts[0]) if lses else dtype
    out = _room(parts[0], (*rows, parts[0].shape[-1]), sums, None if order.complete else 0.0)
    lse = _room(parts[0], tuple(rows), sums, None if order.complete else -torch.inf) if lses else out.new_empty(0)
    for index, side, fresh in order.steps:
        part = _by_head(parts[index], rows[0])
        if not lses:
            side.put(out, part)
        elif fresh:
            side.put(out, part)
            side.put(lse, _by_head(lses[index], rows[0]))
        else:
            side.merge(out, lse, part, _by_head(lses[index], rows[0]))
    return out if keep_wide else out.to(dtype), lse


@join_slots.register_fake
def _(parts, lses, sides, rows, keep_wide):
    sums = sum_dtype(parts[0]) if lses else parts[0].dtype
    out = parts[0].new_empty((*rows, parts[0].shape[-1]), dtype=sums if keep_wide else parts[0].dtype)
    return out, out.new_empty(rows if lses else 0, dtype=sums)


def _remember_parts(ctx, inputs, output) -> None:
    parts, lses, ctx.sides, *_ = inputs
    ctx.num_parts, ctx.has_lses = len(parts), bool(lses)
    ctx.save_for_backward(*parts, *lses, *output) if lses else ctx.save_for_backward()
    ctx.set_materialize_grads(False)


def _join_backward(ctx, grad_out, grad_lse):
    if not ctx.has_lses:
        grads = [None] * ctx.num_parts if grad_out is None else take_slots(grad_out, ctx.sides)
        return grads, [], None, None, None
    *saved, out, lse = ctx.saved_tensors
    parts, lses = saved[: ctx.num_parts], saved[ctx.num_parts :]
    whole = WholeRows(out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse)
    grads, sums, deltas = (take_slots(x, ctx.sides) for x in (whole.grad_out, lse[..., None], whole.delta()[..., None]))
    grad_parts, grad_lses = [], []
    for part, part_lse, grad, row_lse, row_delta in zip(parts, lses, grads, sums, deltas, strict=True):
        of_part, of_lse = part_gradients(part, part_lse, grad, row_lse[..., 0], row_delta[..., 0])
        grad_parts.append(of_part)
        grad_lses.append(of_lse)
    return grad_parts, grad_lses, None, None, None


join_slots.register_autograd(_join_backward, setup_context=_remember_parts)


@dataclass(frozen=True)
class _Order:
    """Sides to join: (index, side, whether it is the first to reach its rows); `complete`: those reach every row."""

    steps: tuple[tuple[int, Strands, bool], ...]
    complete: bool


@lru_cache(maxsize=1024)
def _order(sides: tuple[int, ...], rows: tuple[int, int]) -> _Order:
    found = sorted(enumerate(_decoded(sides)), key=lambda each: not each[1].every(*rows))
    fresh, complete = claim_rows([side for _, side in found], *rows)
    steps = tuple((index, side, is_fresh) for (index, side), is_fresh in zip(found, fresh, strict=True))
    return _Order(steps, complete)


def _room(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, value: float | None) -> Tensor:
    """A tensor full of a value, or, where all of it will be written, of nothing in particular."""
    return like.new_empty(shape, dtype=dtype) if value is None else like.new_full(shape, value, dtype=dtype)


def _empty_slots(x: Tensor, side: Strands) -> Tensor:
    layout = side.layout
    return x.new_empty(x.shape[0] * layout.folds, len(layout.heads), layout.num_slots, *x.shape[3:])


def _by_head(slots: Tensor, batch: int) -> Tensor:
    """(B * F, H, S, ...) as (B, H, F, S, ...)."""
    return slots.unflatten(0, (batch, -1)).transpose(1, 2)


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy rows of equal shape, on devices in units of 16 bytes where they allow it."""
    if source.device.type != "cpu" and _in_words(source) and _in_words(target):
        target, source = target.view(_WORD), source.view(_WORD)
    target.copy_(source)


def _in_words(x: Tensor) -> bool:
    """Whether the last dim, every row of it, consists of whole and aligned 16-byte words."""
    per_word = _WORD.itemsize // x.element_size()
    begins = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(begin % per_word == 0 for begin in begins)


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


def pick_of(side: Side, num_tokens: int, device: torch.device) -> Pick:
    """How the tokens of one side become a term's; an index counts those of a head as `num_tokens`."""
    if isinstance(side, Strands):
        return PickRows(side, tuple(encoded([side])))
    if isinstance(side, Whole):
        layout, heads = side.layout, side.heads
        every = side_of(Compact(heads, (0,) * len(heads), 1, layout.num_slots, 1, 0), side.given, heads)
        assert isinstance(every, Strands)
        # A term is in the given order, or the given order is the natural one.
        orders = (None, None) if layout == side.given else (layout.positions(device).int(), layout.slots(device).int())
        return PickTokens(tuple(encoded([every])), *orders)
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


def _heads(x: Float[Tensor, "B X N D"], run: Run) -> Float[Tensor, "B H N D"]:
    """The heads of a run, as a view."""
    number = run.end - run.begin
    if run.step == 0:
        return x.narrow(1, run.first, 1).expand(-1, number, -1, -1)
    whole = number == x.shape[1] and run.first == 0
    return x if whole else x[:, run.first : run.first + (number - 1) * run.step + 1 : run.step]
