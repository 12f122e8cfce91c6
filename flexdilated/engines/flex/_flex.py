"""The flex engine: a plan run term by term through compiled FlexAttention, with the plan's own BlockMasks."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from ...masks import Layout
from ...masks.blocks import table_bytes
from ...masks.orders import Placement
from ...masks.patterns import Rows, tables, without_values
from ...masks.planning import Plan, Term, bound_blocks, term_mask
from .._gather import term_sides
from .._merge import nothing, with_sinks
from .._operands import Hidden, hidden_of_blocks, within_reach
from .._ops import own_op
from .._score_mod import Indices, ScoreMod, indices_of, plain_values, with_bias
from .._slots import Pick, join, pick_of, take, take_ahead

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

Call = Callable[..., Any]

# Functions made to compile, by device type.
_made: Counter[str] = Counter()


@lru_cache(maxsize=256)
def compiled_flex(term: Term, block_size: tuple[int, int], device: torch.device) -> Call:
    """flex_attention compiled for a term, under code objects of its own, which outlive the tables in the plan cache.

    torch counts recompilations by code object and, past a limit that all callers of it share, gives up. So each
    term has its own for everything of a call that compiles anew: the dtype, the scale, whether gradients are recorded
    and lses returned, the plain values of a score_mod, a batch of 1; and on CPU each size of its operands, as sizes
    are static there, where dynamic ones can generate C++ that does not build. The latest are kept.
    """

    @lru_cache(maxsize=64)
    def own(kind: Hashable) -> Call:
        return _compiled(device)

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if device.type == "cpu":
            q, k = widened(q), widened(k)
        sizes = (q.shape, k.shape) if device.type == "cpu" else q.shape[0] == 1
        recorded = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), "return_aux" in options
        kind = (sizes, q.dtype, options["scale"], *recorded, *modes, plain_values(options.get("score_mod")))
        return own(kind)(q, k, v, **options)

    return call


def widened(x: Tensor) -> Tensor:
    """For CPU kernels: head dims below 24 are filled up with zeros.

    For fewer, torch 2.13's template multiplies 16 keys at once where a ragged end leaves any multiple of its vectors'
    length: it reads beyond the keys and writes over the maxima of the first queries, whose results become 0 or NaN.
    """
    return pad(x, (0, 24 - x.shape[-1])) if x.shape[-1] < 24 else x


def num_flex_functions() -> int:
    """How many functions have been made to compile so far."""
    return _made.total()


def _compiled(device: torch.device) -> Call:
    _made[device.type] += 1
    code = _call_flex.__code__.replace(co_name=f"flex_attention_on_{device.type}")
    own = FunctionType(code, _call_flex.__globals__, code.co_name)
    return torch.compile(own, fullgraph=True, dynamic=False if device.type == "cpu" else None)


def _call_flex(q, k, v, **options):
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "engine 'flex' needs torch.compile, which is switched off here or gave up (TORCH_COMPILE_DISABLE, "
            "TORCHDYNAMO_DISABLE, set_stance and suppress_errors do that): uncompiled, flex_attention forms all pairs. "
            "On CPU engine='tiles' compiles nothing; engine='reference' is dense, for small inputs"
        )
    return flex_attention(q, k, v, **options)


@dataclass(frozen=True, eq=False)
class FlexStep:
    """One term ready to run: its BlockMask, and how its operands are picked and its rows put back.

    `hidden` are the slots that its kernels read although they take part in no pair. `bias` is added to the scores,
    after a caller's score_mod.
    """

    mask: BlockMask
    hidden: Hidden
    term: Term
    held: tuple[Rows, ...]
    indices: Indices
    queries: Pick
    keys: Pick
    log_multiplicity: float
    bias: Float[Tensor, "H Q K"] | None
    call: Call

    @property
    def nbytes(self) -> int:
        """Bytes of what tells rows, positions and weights."""
        bias = 0 if self.bias is None else self.bias.untyped_storage().nbytes()
        return self.indices.nbytes + self.queries.nbytes + self.keys.nbytes + self.hidden.nbytes + bias


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
    plan: Plan,
    given: Layout,
    *,
    num_kv_heads: int,
    block_size: tuple[int, int],
    device: torch.device,
    placement: Placement | None = None,
) -> FlexProgram:
    """Build each term's BlockMask and the rows it reads. A placed plan comes with its `placement`."""
    groups = plan.bound.num_heads // num_kv_heads
    tokens = plan.bound.num_queries, plan.bound.num_keys
    steps = []
    for term in plan.terms:
        sides = zip(term_sides(term, plan, groups, placement), tokens, strict=True)
        queries, keys = (pick_of(side, number, device) for side, number in sides)
        steps.append(_step(term, plan, (queries, keys), block_size, device))
    if given == plan.layout:
        return FlexProgram(tuple(steps), plan.shares_rows, None, None)
    keys = Layout(plan.bound.num_keys, given.rate)
    enter = (given.slots(device), keys.slots(device))
    return FlexProgram(tuple(steps), plan.shares_rows, enter, given.positions(device))


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
    if program.steps:
        queries, keys = [step.queries for step in program.steps], [step.keys for step in program.steps]
        ahead = zip(take_ahead(q, queries), take_ahead(k, keys), take_ahead(v, keys), strict=True)
        parts, lses = [], []
        for step, (taken_q, taken_k, taken_v) in zip(program.steps, ahead, strict=True):
            step_q, step_k = take(q, step.queries, taken_q), take(k, step.keys, taken_k)
            step_v, call = take(v, step.keys, taken_v), _flex_in_graph if direct else step.call
            part, lse = _attend(step, step_q, step_k, step_v, scale, score_mod, needs_lse, call)
            parts.append(part)
            if lse is not None:
                lses.append(lse)
        out, lse = join(queries, parts, lses, (q.shape[0], q.shape[1], q.shape[2]), keep_wide=sinks is not None)
    else:
        out, lse = nothing(q, k, v, None)
    if sinks is not None:
        assert lse is not None
        out, lse = with_sinks(out, lse, sinks)
    if program.leave is not None:
        out = out.index_select(2, program.leave)
        lse = None if lse is None else lse.index_select(2, program.leave)
    return out.to(dtype), lse


def missing_compiler() -> str | None:
    """What stops inductor from building CPU kernels: no C++ compiler by the names it looks for, or None."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    found = any(shutil.which(name) for name in names)
    return None if found else f"no C++ compiler found (looked for {', '.join(names)})"


def _step(
    term: Term, plan: Plan, picks: tuple[Pick, Pick], block_size: tuple[int, int], device: torch.device
) -> FlexStep:
    mask = term_mask(term, plan.bound, device=device, block_size=block_size)
    return FlexStep(
        mask,
        hidden_of_blocks(term, bound_blocks(term, plan.bound, block_size)).on(device),
        term,
        tuple(table.on(device) for table in tables(term.rule)),
        indices_of(term, device),
        *picks,
        log(term.multiplicity),
        _bias(term, device),
        # New values of run-time tensors are no new program.
        compiled_flex(replace(term, rule=without_values(term.rule)), block_size, device),
    )


def _bias(term: Term, device: torch.device) -> Float[Tensor, "H Q K"] | None:
    """What the weights of a term add to its scores, as a view that any head and slots index."""
    bias = term.bias(torch.float32)
    return None if bias is None else bias.to(device).expand(len(term.heads), term.q.num_slots, term.k.num_slots)


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
    options = {"block_mask": step.mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    inner = None if score_mod is None else step.indices.at_positions(score_mod)
    outer = inner if step.bias is None else with_bias(inner, step.bias)
    if outer is not None:
        options["score_mod"] = outer
    # Their results are cleared as well, so that no gradient of theirs, which may be NaN, enters the kernel.
    hidden = step.hidden
    q, k, v = hidden.clear_queries(q, dim=2), hidden.clear_keys(k, dim=2), hidden.clear_keys(v, dim=2)
    q, k, v = within_reach(q), within_reach(k), within_reach(v)
    if not needs_lse:
        return hidden.clear_queries(call(q, k, v, **options), dim=2), None
    out, aux = call(q, k, v, **options, return_aux=AuxRequest(lse=True))
    lse = hidden.clear_queries(aux.lse + step.log_multiplicity, dim=2, value=-torch.inf)
    return hidden.clear_queries(out, dim=2), lse


def _flex_in_graph(q, k, v, **options):
    if q.device.type != "cpu":
        return flex_attention(q, k, v, **options)
    # The CPU kernel takes whole buffers, and nothing that comes after it may be fused with it.
    return _own_buffer(flex_attention(*(_own_buffer(x) for x in (widened(q), widened(k), v)), **options))


@own_op("flexdilated::own_buffer")
def _own_buffer(x: Tensor) -> Tensor:
    """A copy that inductor cannot see through: its CPU template reads the shape of the buffer behind a view."""
    return x.clone(memory_format=torch.contiguous_format)


@_own_buffer.register_fake
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)
