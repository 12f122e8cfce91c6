"""Flex programs from the cache, planned once for all values of a pattern's run-time tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...masks import cache
from ...masks.core import Every, Expression
from ...masks.orders import Placement
from ...masks.planning import Allowed, Choice, Plan, Term, machine_of, term_blocks
from .._call_key import CallKey
from ._flex import FlexProgram, make_flex_program


def static_program(key: CallKey, device: torch.device, choice: Choice | None = None) -> FlexProgram:
    """The program of a pattern without run-time tensors, as a measurement chose it or as the planner does."""
    allowed = replace(allowed_on(device), residues=not key.placement)  # queries at stated positions stay in order

    def planned() -> Plan:
        return key.plan(device=device, allowed=allowed, choice=choice)

    return _cached(key, key.pattern, device, planned, choice)


def allowed_on(device: torch.device) -> Allowed:
    """What terms the engine runs: those that share rows are merged by their lse, which there is none of on CPU."""
    return Allowed(shared_rows=device.type != "cpu", windows=False, key_weights=False)


def run_time_program(key: CallKey, device: torch.device, bindings: Sequence[Tensor], batch: int) -> FlexProgram:
    """The program for these values of the run-time tensors, with the steps of `blank_program`."""
    rule = key.rules(bindings)
    rule.require_entries(batch)

    def planned() -> Plan:
        blank = key.blank(bindings)
        real = dict(zip(blank.branches(), rule.branches(), strict=True))
        best = _blank_plan(key, device, blank)
        terms = tuple(replace(term, rule=real.get(term.rule, term.rule)) for term in best.terms)
        return replace(best, bound=replace(best.bound, pattern=rule, batch=rule.num_entries()), terms=terms)

    return _cached(key, rule.text, device, planned)


def blank_program(key: CallKey, device: torch.device, bindings: Sequence[Tensor], batch: int) -> FlexProgram:
    """The program that all values of tensors of these shapes share, but for its tables."""
    blank = key.blank(bindings)
    blank.require_entries(batch)
    return _cached(key, blank.text, device, lambda: _blank_plan(key, device, blank))


def list_width(term: Term, block_size: tuple[int, int], device: torch.device) -> tuple[int, int]:
    """(longest list of a row, of a column) that a term's tables may need, whatever the run-time values."""
    columns, rows = -(-term.k.num_slots // block_size[1]), -(-term.q.num_slots // block_size[0])
    outer = replace(term, rule=term.rule.superset())
    if device.type == "cpu" or outer.rule == Every():
        return columns, rows

    def measure() -> tuple[int, int]:
        blocks = term_blocks(outer, block_size)
        lines = ((blocks.table.long() * size + line) for size, line in ((rows, blocks.row), (columns, blocks.column)))
        by_row, by_column = (max(1, int(torch.bincount(line).max())) if len(line) else 1 for line in lines)
        return by_row, by_column

    return cache().get(("widths", outer, block_size), measure, lambda _: 16, pattern=outer.rule)


def _blank_plan(key: CallKey, device: torch.device, blank: Expression) -> Plan:
    allowed = Allowed(shared_rows=False, windows=False, residues=not key.placement)
    return key.plan(blank, device=device, allowed=allowed)


def _cached(
    key: CallKey, rule: str, device: torch.device, planned: Callable[[], Plan], choice: Choice | None = None
) -> FlexProgram:
    """The program of a rule, kept under its text and forgotten with the pattern as it was written."""

    def build() -> FlexProgram:
        sides = key.flex_sides
        placement = Placement.read(key.placement) if key.placement else None
        options = {"num_kv_heads": key.num_kv_heads, "block_size": sides, "device": device}
        return make_flex_program(planned(), key.layout, placement=placement, **options)

    name = ("flex", key._replace(pattern=rule), device, machine_of(device.type).text, choice)
    return cache().get(name, build, _program_bytes, pattern=key.pattern, device=device)


def _program_bytes(program: FlexProgram) -> int:
    return program.nbytes
