"""The tiles engine: a plan run term by term through ATen's flash kernels, merged by lse; exact gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from . import _kernel, _tile_blocks
from ._gather import Side, side
from ._kernel import Operands
from ._sinks import add_sinks
from ._tile_calls import Calls, plan_calls
from .masks import cache
from .masks._layout import Compact, Layout
from .masks._planner import Plan
from .masks._term import Term

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

_SLOTS_AT_ONCE = 1 << 14  # enough for a kernel to share among cores, small beside the inputs


@dataclass(frozen=True)
class Step:
    """One term ready to run: where its operands lie, and its calls if it is a list of blocks."""

    term: Term
    queries: Side
    keys: Side
    calls: Calls | None

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        return Operands(self.queries.take(q), self.keys.take(k), self.keys.take(v))

    def forward(self, x: Operands, scale: float) -> tuple[Tensor, Tensor]:
        if self.calls is not None:
            out, lse = _tile_blocks.forward(x, self.calls, scale=scale)
        else:
            out, lse = _kernel.forward(x, scale=scale, is_causal=self.term.shape == "causal")
        return out, lse + log(self.term.multiplicity) if self.term.multiplicity > 1 else lse

    def backward(self, x: Operands, grad_out: Tensor, out: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, ...]:
        grad_out, out, lse = (self.queries.take(part) for part in (grad_out, out, lse))
        # A pair that counts m times has weight m exp(s - lse) = exp(s - (lse - log m)); a row without keys has none.
        lse = (lse - log(self.term.multiplicity)).masked_fill(lse == -torch.inf, torch.inf)
        if self.calls is not None:
            return _tile_blocks.backward(x, self.calls, grad_out, out, lse, scale=scale)
        return _kernel.backward(x, grad_out, out, lse, scale=scale, is_causal=self.term.shape == "causal")


@dataclass(frozen=True)
class Program:
    """A plan made ready for tensors of some head counts, in the order in which they are given.

    Steps that reach every query come first: they start the sum without a merge.
    """

    given: Layout
    layout: Layout
    steps: tuple[Step, ...]

    @property
    def nbytes(self) -> int:
        return 1000 * len(self.steps) + sum(step.calls.nbytes for step in self.steps if step.calls is not None)


def make_program(plan: Plan, given: Layout, *, num_kv_heads: int, block_size: tuple[int, int]) -> Program:
    """Lay out each term's operands and, where it needs them, its block lists and calls."""
    groups = plan.bound.num_heads // num_kv_heads
    key_layout = Layout(plan.bound.num_keys, plan.layout.rate)
    steps = []
    for term in (part for whole in plan.terms for part in _in_portions(whole)):
        queries = side(term.q, plan.layout, term.heads)
        keys = side(term.k, key_layout, tuple(head // groups for head in term.heads))
        calls = _calls(term, block_size) if term.shape == "blocks" else None
        steps.append(Step(term, queries, keys, calls))
    steps.sort(key=lambda step: not step.queries.every(plan.bound.num_heads, plan.bound.num_queries))
    return Program(given, plan.layout, tuple(steps))


def _calls(term: Term, block_size: tuple[int, int]) -> Calls:
    """The cached calls of a term; terms that lie elsewhere and look alike, such as equal documents, share them."""
    alike = term.at_origin()
    return cache().get(
        ("calls", alike, block_size),
        lambda: plan_calls(alike, alike.blocks(*block_size)),
        lambda calls: calls.nbytes,
    )


def _in_portions(term: Term) -> tuple[Term, ...]:
    """A term whose operands are copies, in smaller terms, so that the copies of all need not exist at once."""
    copied = isinstance(term.q, Compact) and term.q.step > 1
    return term.portions(_SLOTS_AT_ONCE) if copied else (term,)


def run_forward(
    program: Program,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    scale: float,
    sinks: Float[Tensor, " H"] | None = None,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
    """(out in q's dtype and memory format, lse in float32 or wider)."""
    like = q
    q, k, v = (_enter(program, x) for x in (q, k, v))
    out, lse = None, None
    for step in program.steps:
        part, part_lse = step.forward(step.operands(q, k, v), scale)
        if out is None or lse is None:
            out, lse = _start(step.queries, part, q), _start(step.queries, part_lse, q)
            if out is not None and lse is not None:
                continue
            out, lse = _nothing(q)
        step.queries.merge(out, lse, part, part_lse)
    if out is None or lse is None:
        out, lse = _nothing(q)
    if sinks is not None:
        # Whole rows are scaled: the backward, which is fed this out and this lse, needs to know no more of sinks.
        out, lse = add_sinks(out, lse, sinks)
    return _as(_leave(program, out), like), _leave(program, lse).contiguous()


@dataclass(frozen=True)
class Result:
    """What a backward needs of a forward's outcome, and the gradients that came in."""

    out: Float[Tensor, "B H N D"]
    lse: Float[Tensor, "B H N"]
    grad_out: Float[Tensor, "B H N D"]
    grad_lse: Float[Tensor, "B H N"] | None

    def __getitem__(self, rows: slice) -> Result:
        """The same for some batch entries."""
        grad_lse = None if self.grad_lse is None else self.grad_lse[rows]
        return Result(self.out[rows], self.lse[rows], self.grad_out[rows], grad_lse)


def run_backward(
    program: Program,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    result: Result,
    scale: float,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G M D"], Float[Tensor, "B G M D"]]:
    """(dq, dk, dv): each term's own backward, fed the out and lse of the whole."""
    operands = (q, k, v)
    out, grad_out = result.out, result.grad_out
    if result.grad_lse is not None:
        # The kernels subtract delta = sum(grad_out * out) from each row; a gradient of lse belongs there as
        # delta - grad_lse, which one more column with grad_out = 1, out = -grad_lse brings in.
        operands = tuple(pad(x, (0, 1)) for x in operands)
        grad_out = pad(grad_out, (0, 1), value=1.0)
        out = torch.cat([out, -result.grad_lse.unsqueeze(-1).to(out.dtype)], dim=-1)
    operands = tuple(_enter(program, x) for x in operands)
    grad_out, out, lse = (_enter(program, x) for x in (grad_out, out, result.lse))
    totals: list[Tensor | None] = [None, None, None]
    for step in program.steps:
        grads = step.backward(step.operands(*operands), grad_out, out, lse, scale)
        sides = (step.queries, step.keys, step.keys)
        totals = [
            _accumulate(total, grad, side, x)
            for total, grad, side, x in zip(totals, grads, sides, operands, strict=True)
        ]
    dq, dk, dv = (
        _as(_leave(program, _nothing(x)[0] if total is None else total)[..., : q.shape[-1]], like)
        for total, x, like in zip(totals, operands, (q, k, v), strict=True)
    )
    return dq, dk, dv


def _start(side: Side, slots: Tensor, x: Tensor) -> Tensor | None:
    """A sum's first part as the sum itself, if it reaches every token; it is then widened, not copied."""
    tokens = side.all_tokens(slots, x.shape[1], x.shape[2])
    return None if tokens is None else tokens.to(_wide(x))


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    """(zeros, lse -inf): the sum over no part."""
    out = torch.zeros_like(x, dtype=_wide(x))
    return out, torch.full(x.shape[:3], -torch.inf, dtype=out.dtype)


def _accumulate(total: Tensor | None, grad: Tensor, side: Side, x: Tensor) -> Tensor:
    if total is None:
        first = _start(side, grad, x)
        if first is not None:
            return first
        total = _nothing(x)[0]
    side.add(total, grad.to(total.dtype))
    return total


def _enter(program: Program, x: Tensor) -> Tensor:
    """From the order given to the plan's."""
    return x if program.given == program.layout else Layout(x.shape[2], program.given.rate).invert(x, dim=2)


def _leave(program: Program, x: Tensor) -> Tensor:
    return x if program.given == program.layout else Layout(x.shape[2], program.given.rate).apply(x, dim=2)


def _as(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype and memory format of `like`: what the op's shape rule promises."""
    target = torch.empty_like(like)
    return x if x.dtype == like.dtype and x.stride() == target.stride() else target.copy_(x)


def _wide(x: Tensor) -> torch.dtype:
    """Sums over terms are kept in float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)
