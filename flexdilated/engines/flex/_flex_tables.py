"""Block tables of run-time tensors inside a compiled graph: an op that builds them when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from ...masks.core import own_modes
from ...masks.patterns import tables
from .._call_key import CallKey
from .._flat_op import flat_op
from .._operands import Hidden
from ._flex import FlexProgram, FlexStep
from ._flex_program import blank_program, list_width, run_time_program

# B batch entries, H mask heads, R rows, C columns, W blocks in a row at most

_FIELDS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_FIELDS += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


@flat_op("flexdilated::flex_tables")
def flex_tables(q: Tensor, bindings: list[Tensor], key: CallKey) -> list[Tensor]:
    """For each step of the program its block tables, as in BlockMask, run-time tables' rows, what it hides."""
    found: list[Tensor] = []
    for step in run_time_program(key, q.device, bindings, len(q)).steps:
        for name, width in _widths(step, key).items():
            table = getattr(step.mask, name)
            found.append(table.clone() if width is None else pad(table, (0, width - table.shape[-1])))
        found += [table.rows.to(q.device, copy=True) for table in tables(step.term.rule)]
        found += [side.clone() for side in _hidden_sides(step)]
    return found


@flex_tables.register_fake
def _(q, bindings, *key):
    found = CallKey.of(*key)
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
    with own_modes():
        for step in blank_program(found, q.device, bindings, int(q.shape[0])).steps:
            for name, width in _widths(step, found).items():
                table = getattr(step.mask, name)
                shapes.append((tuple(table.shape) if width is None else (*table.shape[:-1], width), table.dtype))
            rows = [table.rows for table in tables(step.term.rule)]
            shapes += [(tuple(each.shape), each.dtype) for each in (*rows, *_hidden_sides(step))]
    return [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]


def _widths(step: FlexStep, key: CallKey) -> dict[str, int | None]:
    """How long the lists of each table of a BlockMask are in a graph; None for tables that hold no lists."""
    by_row, by_column = list_width(step.term, key.flex_sides, step.mask.kv_num_blocks.device)
    return {name: by_row if "kv" in name else by_column for name in _FIELDS} | {
        name: None for name in _FIELDS if name.endswith("num_blocks")
    }


def with_tables(program: FlexProgram, found: Sequence[Tensor]) -> FlexProgram:
    """The program with other tables, as `flex_tables` returned them; traced by torch.compile."""
    steps, following = [], iter(found)
    for step in program.steps:
        named = {name: next(following) for name in _FIELDS}
        for held in step.held:
            held.rows = next(following)
        hidden = Hidden(*(next(following) for _ in _hidden_sides(step))) if step.held else step.hidden
        steps.append(_with_mask(step, named, hidden))
    return FlexProgram(tuple(steps), program.shares_rows, program.enter, program.leave)


def _hidden_sides(step: FlexStep) -> tuple[Tensor, ...]:
    """The hidden slots of a step whose rule has run-time tables, of queries and of keys: one shape for all values."""
    lead, device = step.mask.kv_num_blocks.shape[:2], step.mask.kv_num_blocks.device
    sides = ((step.hidden.queries, step.term.q.num_slots), (step.hidden.keys, step.term.k.num_slots))
    return tuple(
        torch.zeros(*lead, slots, dtype=torch.bool, device=device) if side is None else side.expand(*lead, -1)
        for side, slots in (sides if step.held else ())
    )


def _with_mask(step: FlexStep, named: dict[str, Tensor], hidden: Hidden) -> FlexStep:
    sizes: dict[str, Any] = {"seq_lengths": step.mask.seq_lengths, "BLOCK_SIZE": step.mask.BLOCK_SIZE}
    sizes.update(named)
    mask = BlockMask(**sizes, mask_mod=step.mask.mask_mod)
    picks, weights = (step.queries, step.keys), (step.log_multiplicity, step.bias)
    return FlexStep(mask, hidden, step.term, step.held, step.indices, *picks, *weights, step.call)
