"""The flex engine: a plan run term by term through compiled FlexAttention, with the plan's own BlockMasks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ._pick import Pick, make_pick
from ._score_mod import Indices, ScoreMod, indices_of
from ._sinks import with_sinks
from .masks import Layout
from .masks._block_mask import term_mask
from .masks._planner import Plan
from .masks._run_time import Rows, tables, without_values
from .masks._tables import table_bytes
from .masks._term import Term

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

Call = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class FlexStep:
    """One term ready to run: its BlockMask, and how its operands are picked and its rows put back."""

    mask: BlockMask
    term: Term
    held: tuple[Rows, ...]
    indices: Indices
    queries: Pick
    keys: Pick
    log_multiplicity: float
    call: Call

    @property
    def nbytes(self) -> int:
        """Bytes of what tells rows and positions."""
        return self.indices.nbytes + self.queries.nbytes + self.keys.nbytes


@dataclass(frozen=True, eq=False)
class FlexProgram:
    """A plan made ready for one device.

    `enter` and `leave` reorder tokens where the plan's order is not the input's.
    """

    steps: tuple[FlexStep, ...]
    shares_rows: bool
    enter: tuple[Int64[Tensor, " N"], Int64[Tensor, " M"]] | None
    leave: Int64[Tensor, " N"] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the BlockMasks and of the row indices."""
        return sum(table_bytes(step.mask) + step.nbytes for step in self.steps)


def make_flex_program(
    plan: Plan, given: Layout, *, num_kv_heads: int, block_size: tuple[int, int], device: torch.device
) -> FlexProgram:
    """Build each term's BlockMask and the rows it reads."""
    groups = plan.bound.num_heads // num_kv_heads
    steps = tuple(_step(term, plan, groups, block_size, device) for term in plan.terms)
    if given == plan.layout:
        return FlexProgram(steps, plan.shares_rows, None, None)
    keys = Layout(plan.bound.num_keys, given.rate)
    enter = (given.slots(device), keys.slots(device))
    return FlexProgram(steps, plan.shares_rows, enter, given.positions(device))


def run_flex(
    program: FlexProgram,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    *,
    scale: float,
    return_lse: bool,
    direct: bool,
    score_mod: ScoreMod | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"] | None]:
    """(out, lse if asked for). `direct` calls flex_attention itself: for graphs that compile it with the rest."""
    dtype, needs_lse = q.dtype, return_lse or program.shares_rows or sinks is not None
    if program.enter is not None:
        q_order, k_order = program.enter
        q, k, v = q.index_select(2, q_order), k.index_select(2, k_order), v.index_select(2, k_order)
    out, lse = None, None
    call = _flex_in_graph if direct else None
    for step in program.steps:
        part, part_lse = _attend(step, q, k, v, scale, score_mod, needs_lse, call or step.call)
        out, lse = step.queries.join(q, out, lse, part, part_lse)
    if out is None:
        out, lse = _nothing(q, k, v)
    if sinks is not None:
        assert lse is not None
        out, lse = with_sinks(out, lse, sinks)
    if program.leave is not None:
        out = out.index_select(2, program.leave)
        lse = None if lse is None else lse.index_select(2, program.leave)
    return out.to(dtype), lse


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(zeros, lse -inf) where no pair is allowed, as functions of q, k and v: gradients exist, and are 0."""
    everywhere = torch.ones((), dtype=torch.bool, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    zero = sum(x.masked_fill(everywhere, 0.0).sum() for x in (k, v))
    return q.masked_fill(everywhere, 0.0) + zero, q[..., 0].to(wide).masked_fill(everywhere, -torch.inf)


def missing_compiler() -> str | None:
    """What stops inductor from building CPU kernels: no C++ compiler by the names it looks for, or None."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    found = any(shutil.which(name) for name in names)
    return None if found else f"no C++ compiler found (looked for {', '.join(names)})"


def _step(term: Term, plan: Plan, groups: int, block_size: tuple[int, int], device: torch.device) -> FlexStep:
    mask = term_mask(term, plan.bound, device=device, block_size=block_size)
    kv_heads = tuple(head // groups for head in term.heads)
    keys_given = Layout(plan.bound.num_keys, plan.layout.rate)
    return FlexStep(
        mask,
        term,
        tuple(table.on(device) for table in tables(term.rule)),
        indices_of(term, device),
        make_pick(term.q, term.heads, plan.layout, device),
        make_pick(term.k, kv_heads, keys_given, device),
        log(term.multiplicity),
        # New values of run-time tensors are no new program.
        _compiled(replace(term, rule=without_values(term.rule)), block_size, device),
    )


def _attend(
    step: FlexStep,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    score_mod: ScoreMod | None,
    needs_lse: bool,
    call: Call,
) -> tuple[Tensor, Tensor | None]:
    q, k, v = step.queries.take(q), step.keys.take(k), step.keys.take(v)
    options = {"block_mask": step.mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if score_mod is not None:
        options["score_mod"] = step.indices.at_positions(score_mod)
    if not needs_lse:
        return call(q, k, v, **options), None
    out, aux = call(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return out, aux.lse + step.log_multiplicity


@lru_cache(maxsize=256)
def _compiled(term: Term, block_size: tuple[int, int], device: torch.device) -> Call:
    """flex_attention compiled under a code object of its own, which outlives the tables in the plan cache.

    torch counts recompilations by code object and, past a limit shared by all its callers, would give up.
    Sizes are static on CPU, where dynamic ones can generate C++ that does not build.
    """
    code = _call_flex.__code__.replace(co_name=f"flex_attention_on_{device.type}")
    own = FunctionType(code, _call_flex.__globals__, code.co_name)
    return torch.compile(own, fullgraph=True, dynamic=False if device.type == "cpu" else None)


def _flex_in_graph(q, k, v, **options):
    if q.device.type != "cpu":
        return flex_attention(q, k, v, **options)
    # The CPU kernel takes whole buffers, and nothing that comes after it may be fused with it.
    return _own_buffer(flex_attention(*(_own_buffer(x) for x in (q, k, v)), **options))


@torch.library.custom_op("flexdilated::own_buffer", mutates_args=())
def _own_buffer(x: Tensor) -> Tensor:
    """A copy that inductor cannot see through: its CPU template reads the shape of the buffer behind a view."""
    return x.clone(memory_format=torch.contiguous_format)


@_own_buffer.register_fake
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _call_flex(q, k, v, **options):
    return flex_attention(q, k, v, **options)
