"""FlexProgram: a plan made executable on one device, as block tables and gathers for FlexAttention.

Its structure has no lengths, so that programs for different lengths can share a compiled function.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from ..._torch_private import TorchDispatchMode
from ...masks import Layout, cache
from ...masks.blocks import join_blocks, table_bytes, to_block_mask
from ...masks.core import TILE, Every, MaskMod, device_kind
from ...masks.orders import Placement
from ...masks.patterns import HeldRows, tables
from ...masks.planning import Plan, Term, bound_blocks, term_blocks
from .._operands import HiddenSlots, hidden_of_blocks
from .._score_mod import IndexMap, function_key, index_map_of
from ..kernels._portable import ListLengths
from ._flash import HOPPER, capability
from ._slots import SideGather, SlotRule, natural_order_gather, sides_of

# N queries, M keys

Lead = tuple[int, int]
Tables = dict[str, Tensor]

_DEPTH = 64  # most levels of nested functions: patterns of patterns
_MOST_NUMBERS = 1 << 22  # most numbers in the block lists of a term, which could fill gigabytes
_MOST_OPERATIONS = 9  # most operations of a mask for which kernels have enough registers

TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
TABLES += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


class Structure(torch.nn.Module):  # the numbers of modules are constants of compiled graphs
    """Numbers of a term's kernel call, without lengths.

    queries, keys: rules of the gathers.
    sides: (queries, keys) of a block.
    places: indices of the term's branches in the pattern.
    multiplicity: number of times that each pair counts.
    lead: (batch entries, heads) of the block tables.
    heads: (query, key/value) heads of the tensors.
    is_complex: True if the mask has so many operations that kernels need more registers.
    """

    def __init__(
        self,
        queries: SlotRule,
        keys: SlotRule,
        sides: tuple[int, int],
        places: tuple[int, ...],
        multiplicity: int,
        lead: Lead,
        heads: Lead,
        is_complex: bool,
    ) -> None:
        super().__init__()
        self.queries, self.keys, self.sides, self.multiplicity = queries, keys, sides, multiplicity
        self.places, self.lead, self.heads, self.is_complex = places, lead, heads, is_complex

    @property
    def numbers(self) -> Hashable:
        """All values as a hashable key: structures with equal keys are equal."""
        slots = (each for side in (self.queries, self.keys) for each in (side.kind, side.numbers))
        return (*slots, self.sides, self.places, self.multiplicity, self.lead, self.heads, self.is_complex)


@dataclass(frozen=True, eq=False)
class FlexStep:
    """Executable term: its BlockMask and the gathers of its operands.

    hidden: queries and keys that the kernel reads although they are in no allowed pair.
    held: holders of the run-time tables that the mask reads.
    indices: map from kernel indices to heads and positions, for a score_mod.
    structure: numbers of the kernel call, without lengths.
    """

    mask: BlockMask
    hidden: HiddenSlots
    term: Term
    held: tuple[HeldRows, ...]
    indices: IndexMap
    queries: SideGather
    keys: SideGather
    structure: Structure

    @property
    def nbytes(self) -> int:
        """Bytes of gather indices, of positions for a score_mod and of masks of hidden queries and keys."""
        return self.indices.nbytes + self.queries.rows.nbytes + self.keys.rows.nbytes + self.hidden.nbytes

    @cached_property
    def list_lengths(self) -> ListLengths:  # cached: on an accelerator, reading them waits for the device
        """Lengths of the block lists."""
        return ListLengths.of(self.mask)


@dataclass(frozen=True, eq=False)
class FlexProgram:
    """Executable plan on one device: one step, with one kernel call, for each term.

    shares_rows: True if several steps may contribute to one row.
    enter: gathers of queries and keys into the plan's order of tokens; None if the tensors are in that order.
    packed: concatenated block tables of all steps, on accelerators; None on CPU, for a program of `with_tables`, and
        without steps.
    sizes: four numbers for each step, as from `_table_sizes`, all in one tuple; empty without `packed`.
    """

    steps: tuple[FlexStep, ...]
    shares_rows: bool
    enter: tuple[SideGather, SideGather] | None
    packed: Int32[Tensor, " numbers"] | None
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the block tables, of index tensors, and of masks of hidden queries and keys."""
        lists = (table_bytes(step.mask) for step in self.steps) if self.packed is None else (self.packed.nbytes,)
        orders = (side.rows.nbytes for side in self.enter or ())
        return sum(lists) + sum(step.nbytes for step in self.steps) + sum(orders)

    @cached_property
    def structure(self) -> Hashable:
        """Key of the compiled function, equal for programs that differ only in lengths and in tensors that masks read.

        A mask reads its pattern's numbers from tensors, so these numbers are not in the key. The key has the constants
        of the graph: the other values that mask functions capture, and `Structure.numbers` of each step, such as block
        sizes and the step of a gather.
        """
        steps = ((function_key(step.mask.mask_mod, _DEPTH), step.structure.numbers) for step in self.steps)
        return self.enter is None, *steps


NO_STEPS = FlexProgram((), False, None, None, ())


def make_flex_program(
    plan: Plan,
    given: Layout,
    *,
    num_kv_heads: int,
    block_size: tuple[int, int] | None,
    sized_as: Plan | None = None,
    device: torch.device,
    placement: Placement | None = None,
) -> FlexProgram:
    """Return the FlexProgram of a plan: the BlockMask and the gathers of each term, on a device.

    given: order of the tokens in q; those in k and v have the same rate.
    block_size: (queries, keys) of a block; None for those of `sides_that_fit`.
    sized_as: a plan with equally many terms, for which these are the sides; None for `plan` itself.
    placement: the positions for which the plan was made, if it was made for a part of a sequence.
    """
    groups = plan.bound.num_heads // num_kv_heads
    steps = []
    for planned, sized, places in zip(plan.terms, (sized_as or plan).terms, plan.places, strict=True):
        block = block_size or sides_that_fit(sized)
        term = planned.in_blocks_of(*block)
        sides = sides_of(term, plan, groups, placement, device)
        steps.append(_make_step(term, plan, places, sides, (plan.bound.num_heads, num_kv_heads), block, device))
    packed, sizes = None, ()
    if device_kind(device).flex_trains and steps:
        tables = [_widen_lists(tables_of(step)) for step in steps]
        packed = torch.cat([each.flatten() for own in tables for each in own.values()])
        sizes = tuple(size for own in tables for size in _table_sizes(own))
        found = unpack_tables(packed, [step.structure.lead for step in steps], sizes)
        steps = [replace(step, mask=mask_of(step, own)) for step, own in zip(steps, found, strict=True)]
    enter = None
    if given != plan.layout:
        orders = given, Layout(plan.bound.num_keys, given.rate)
        queries, keys = (natural_order_gather(order, device) for order in orders)
        enter = queries, keys
    return FlexProgram(tuple(steps), plan.shares_rows, enter, packed, sizes)


def sides_that_fit(term: Term) -> tuple[int, int]:
    """Return (queries, keys) of small square blocks for a term, of side TILE or more, with short lists if possible.

    Lists are short if they have at most _MOST_NUMBERS numbers in all. The search doubles the side until even full lists
    are short, or until a larger side makes them no shorter. It then halves the side as long as the lists are sure to be
    short: halving at most doubles the length of a list.
    """
    lists = term.rule.num_entries() * (len(term.heads) if len(set(term.tables())) > 1 else 1)

    def full(side: int) -> tuple[int, int]:
        return _columns_and_rows(term.in_blocks_of(side, side), (side, side))

    def are_short(side: int, by_row: int, by_column: int) -> bool:
        columns, rows = full(side)
        numbers = 2 * lists * (rows * min(by_row, columns) + columns * min(by_column, rows))
        return numbers <= _MOST_NUMBERS

    side = TILE
    # Blocks beyond a segment of a padded term make its lists no shorter.
    while not are_short(side, term.k.num_slots, term.q.num_slots) and full(2 * side) != full(side):
        side *= 2
    if side > TILE:
        by_row, by_column = longest_lists(term.in_blocks_of(side, side), (side, side))
        while side > TILE and are_short(side // 2, 2 * by_row, 2 * by_column):
            side, by_row, by_column = side // 2, 2 * by_row, 2 * by_column
    return side, side


def list_width(term: Term, sides: tuple[int, int], device: torch.device) -> tuple[int, int]:
    """Return the widths that a term's block lists need: (lists of key blocks, lists of query blocks).

    On accelerators they are the bounds from `longest_lists`; on CPU, lists have places for all blocks.
    """
    return longest_lists(term, sides) if device_kind(device).flex_trains else _columns_and_rows(term, sides)


def _columns_and_rows(term: Term, sides: tuple[int, int]) -> tuple[int, int]:
    """Return (number of key blocks, number of query blocks) of a term."""
    return -(-term.k.num_slots // sides[1]), -(-term.q.num_slots // sides[0])


def longest_lists(term: Term, sides: tuple[int, int]) -> tuple[int, int]:
    """Return upper bounds of the lengths of a term's block lists, for all values of its run-time tensors.

    They are (key blocks listed for a query block, query blocks listed for a key block), each at least 1.
    """
    columns, rows = _columns_and_rows(term, sides)
    outer = replace(term, rule=term.rule.superset())
    if outer.rule == Every():
        return columns, rows

    def measure() -> tuple[int, int]:
        blocks = term_blocks(outer, sides)
        lines = ((blocks.table.long() * size + line) for size, line in ((rows, blocks.row), (columns, blocks.column)))
        by_row, by_column = (max(1, int(torch.bincount(line).max())) if len(line) else 1 for line in lines)
        return by_row, by_column

    return cache().get(("widths", outer, sides), measure, lambda _: 16, pattern=outer.rule)


def _widen_lists(tables: Tables) -> Tables:
    """Return the tables with block lists of width 2 or more."""
    # torch.compile takes a dim of size 1 for a constant.
    return {
        name: pad(each, (0, 1)) if name.endswith("indices") and each.shape[-1] == 1 else each
        for name, each in tables.items()
    }


def _table_sizes(tables: Tables) -> tuple[int, int, int, int]:
    """Return (query blocks, key blocks, width of the lists of key blocks, width of the lists of query blocks).

    tables: block tables, in which lists of full and of partial blocks have equal widths.
    """
    by_row, by_column = tables["kv_indices"].shape, tables["q_indices"].shape
    return by_row[2], by_column[2], by_row[3], by_column[3]


def unpack_tables(packed: Tensor, leads: Sequence[Lead], sizes: Sequence[int]) -> list[Tables]:
    """Return the block tables of each step, by name: views of a program's `packed` tensor.

    leads: (batch entries, heads) of each step's tables.
    sizes: `FlexProgram.sizes`.
    """
    found, begin = [], 0
    for index, lead in enumerate(leads):
        rows, columns, by_row, by_column = sizes[4 * index : 4 * index + 4]
        tables = {}
        for name in TABLES:
            lines, width = (columns, by_column) if name.removeprefix("full_").startswith("q") else (rows, by_row)
            shape = (*lead, lines) if name.endswith("num_blocks") else (*lead, lines, width)
            end = begin + prod(shape)
            tables[name], begin = packed[begin:end].view(shape), end
        found.append(tables)
    return found


def mask_of(step: FlexStep, tables: Tables) -> BlockMask:
    """Return the step's BlockMask with these block tables instead of its own; traceable by torch.compile."""
    numbers: dict[str, Any] = {"seq_lengths": step.mask.seq_lengths, "BLOCK_SIZE": step.mask.BLOCK_SIZE, **tables}
    return BlockMask(**numbers, mask_mod=step.mask.mask_mod)


def _make_step(
    term: Term,
    plan: Plan,
    places: tuple[int, ...],
    sides: tuple[SideGather, SideGather],
    heads: Lead,
    block_size: tuple[int, int],
    device: torch.device,
) -> FlexStep:
    blocks = bound_blocks(term, plan.bound, block_size)
    mask = to_block_mask(join_blocks(blocks), term.mask_mod(device), device, batch=term.rule.num_entries())
    hidden = hidden_of_blocks(term, blocks).on(device)
    held = tuple(table.on(device) for table in tables(term.rule))
    lead = (mask.kv_num_blocks.shape[0], mask.kv_num_blocks.shape[1])
    is_complex = _is_complex(mask.mask_mod, device)
    slots = sides[0].slots, sides[1].slots
    structure = Structure(*slots, block_size, places, term.multiplicity, lead, heads, is_complex)
    return FlexStep(mask, hidden, term, held, index_map_of(term, device), *sides, structure)


def _is_complex(mask_mod: MaskMod, device: torch.device) -> bool:
    """True if the mask has too many operations for torch's default options: kernels would spill many registers.

    It is False for devices that are not NVIDIA's, and before Hopper.
    """
    if capability(device) < HOPPER:  # tiles have 128 x 128 scores only from Hopper on
        return False
    zero = torch.zeros((), dtype=torch.int32, device=device)
    with _OperationCounter() as counted:
        mask_mod(zero, zero, zero, zero)
    return counted.operations > _MOST_OPERATIONS


class _OperationCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def tables_of(step: FlexStep) -> Tables:
    return {name: getattr(step.mask, name) for name in TABLES}
