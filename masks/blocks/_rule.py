"""Rule: a pattern over slots, evaluated on boxes or pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from ..core import Box, Pattern, Progression, numbered
from ..orders import Pieces


@dataclass(frozen=True)
class SlotRun:
    """n slot runs; run i has count[i] slots from slot start[i] on. Fields are tensors of shape (n,).

    piece: index of the slot run of a `Pieces` that contains run i; -1, only from `_runs_of_blocks`, if there is none.
    stride: distance of consecutive slots of each run; None stands for 1 in all.
    """

    piece: Tensor
    start: Tensor
    count: Tensor
    stride: Tensor | None = None

    @classmethod
    def of(cls, pieces: Pieces) -> SlotRun:
        return cls(torch.arange(len(pieces.starts)), pieces.starts, pieces.lengths, pieces.strides)

    def select(self, index: Tensor) -> SlotRun:
        stride = None if self.stride is None else self.stride[index]
        return SlotRun(self.piece[index], self.start[index], self.count[index], stride)

    @property
    def last(self) -> Tensor:
        """Return the last slot of each run; no run may be empty."""
        return self.start + (self.count - 1 if self.stride is None else (self.count - 1) * self.stride)

    def num_blocks(self, block: int) -> Tensor:
        """Return the number of blocks that each run spans, from the block of its first slot to that of its last.

        block: slots per block.

        The number includes blocks in which a run has no slot because its stride skips them.
        """
        return self.last // block - self.start // block + 1

    def split(self, slot: Tensor) -> tuple[SlotRun, SlotRun]:
        """Return (slots before slot[i], slots from slot[i] on) of each run i; either may be empty."""
        ahead, stride = slot - self.start, self.stride
        number = ahead if stride is None else (ahead + stride - 1) // stride
        number = number.clamp(min=0).minimum(self.count)
        begin = self.start + (number if stride is None else number * stride)
        return SlotRun(self.piece, self.start, number, stride), SlotRun(self.piece, begin, self.count - number, stride)

    def within(self, first: Tensor, last: Tensor) -> SlotRun:
        """Return the part of each run i in slots first[i] to last[i] - 1; it may be empty."""
        return self.split(last)[0].split(first)[1]


@dataclass(frozen=True)
class Nodes:
    """n pairs of a query run and a key run, such as the nodes of a search; table[i]: index of the table of pair i."""

    table: Tensor
    q: SlotRun
    k: SlotRun

    def __len__(self) -> int:
        return len(self.table)

    def select(self, index: Tensor) -> Nodes:
        return Nodes(self.table[index], self.q.select(index), self.k.select(index))


@dataclass(frozen=True)
class Rule:
    """A pattern over slots of queries and keys.

    num_heads: number of heads over all devices.
    heads: one global head for each table.
    q, k: slots of queries and of keys; the `firsts` of both have a row for each table.
    rows: the same rule with runs of neighbouring tokens instead of residue classes; None unless both orders are a
        `Layout`, and the queries have many classes.
    """

    pattern: Pattern
    num_heads: int
    heads: tuple[int, ...]
    q: Pieces
    k: Pieces
    rows: Rule | None = None

    @cached_property
    def num_slots(self) -> tuple[int, int]:
        """Return (number of query slots, number of key slots)."""
        return int(self.q.lengths.sum()), int(self.k.lengths.sum())

    def in_blocks(self, q_block: int, k_block: int) -> tuple[int, int]:
        """Return (number of blocks along queries, number of blocks along keys)."""
        num_q, num_k = self.num_slots
        return -(-num_q // q_block), -(-num_k // k_block)

    def boxes(self, nodes: Nodes) -> Box:
        heads = torch.tensor(self.heads)
        return Box(
            heads[nodes.table],
            positions_of_runs(self.q, nodes.table, nodes.q),
            positions_of_runs(self.k, nodes.table, nodes.k),
        )

    def allowed(self, table: Tensor, q_slot: Tensor, k_slot: Tensor) -> Tensor:
        """Return a bool tensor, True where the pair is allowed in batch entry 0.

        table, q_slot, k_slot: indices of tables, query slots and key slots; they broadcast to the shape of the result.

        Raises ValueError if a tensor in the pattern is too short.
        """
        heads = torch.tensor(self.heads)[table]
        q, k = self.q.position(table, q_slot), self.k.position(table, k_slot)
        return allowed_pairs(self.pattern, self.num_heads, heads, q, k)


def allowed_pairs(pattern: Pattern, num_heads: int, heads: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return a bool tensor, True where the pair is allowed in batch entry 0.

    num_heads: number of heads over all devices.
    heads, q, k: global heads, query positions and key positions; they broadcast to the shape of the result.

    Raises ValueError if a tensor in the pattern is too short.
    """
    mod = pattern.mask_mod(num_heads=num_heads, device=torch.device("cpu"))
    try:
        return mod(torch.zeros_like(heads), heads, q, k)
    except IndexError as error:
        sides = zip(("heads", "queries", "keys"), (heads, q, k), strict=True)
        given = ", ".join(f"{name} {int(x.min())} to {int(x.max())}" for name, x in sides)
        raise ValueError(f"{pattern!r} must be defined for {given}: {error}") from error


def positions_of_runs(pieces: Pieces, table: Tensor, run: SlotRun) -> Progression:
    """Return the positions of each run's slots, as progressions; table[i]: index of the table of run i."""
    index = run.start - pieces.starts[run.piece]
    index = index if run.stride is None else index // run.stride
    return Progression(pieces.firsts[table, run.piece] + pieces.step * index, pieces.step, run.count)


class BlockPlaces(NamedTuple):
    """Coordinates of n blocks: table, row (index of the query block) and column (index of the key block)."""

    table: Shaped[Tensor, " n"]
    row: Shaped[Tensor, " n"]
    column: Shaped[Tensor, " n"]


def mask_classes(rule: Rule, places: BlockPlaces, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Return (class of each block, index of one block of each class); blocks of a class have equal masks.

    A block is alone in its class if its queries or its keys are in several slot runs, or in a slot run with a stride.

    shape: (number of query slots, number of key slots, queries of a block, keys of a block).
    """
    num_q, num_k, q_block, k_block = shape
    table, row, column = (each.long() for each in places)
    q, k = (
        _runs_of_blocks(rule.q, row * q_block, num_q, q_block),
        _runs_of_blocks(rule.k, column * k_block, num_k, k_block),
    )
    alone = torch.ones_like(table) if q is None or k is None else ((q.piece < 0) | (k.piece < 0)).long()
    together = (alone == 0).nonzero().squeeze(1)
    columns = [table, torch.cumsum(alone, 0) * alone]
    if q is not None and k is not None and len(together):
        box = rule.boxes(Nodes(table, q, k).select(together))
        numbers = (box.q.count, box.k.count, *rule.pattern.likeness(box, num_heads=rule.num_heads))
        columns += [torch.zeros_like(table).index_copy_(0, together, number) for number in numbers]
    return numbered(*columns)


def _runs_of_blocks(pieces: Pieces, start: Tensor, slots: int, side: int) -> SlotRun | None:
    """Return the slots of each block as a run, whose `piece` is -1 if the slots are in several slot runs of `pieces`.

    Returns None if `pieces` have strides.

    start: first slot of each block.
    slots: number of existing slots.
    side: slots per block.
    """
    if pieces.strides is not None:
        return None
    count = (slots - start).clamp(max=side)
    first, last = (torch.searchsorted(pieces.starts, slot, right=True) - 1 for slot in (start, start + count - 1))
    return SlotRun(torch.where(first == last, first, -1), start, count)


def owners_and_places(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return (owner, place): `owner` repeats each index i counts[i] times, `place` numbers the repetitions from 0.

    For example counts (2, 3) give owners (0, 0, 1, 1, 1) and places (0, 1, 0, 1, 2).
    """
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
