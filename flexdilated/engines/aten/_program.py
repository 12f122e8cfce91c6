"""Execution of an attention plan by ATen's attention kernels, with exact gradients.

A program runs the terms in turn and merges their outputs by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import log

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ...masks import cache
from ...masks.core import Bound
from ...masks.orders import Compact, Layout, Placement
from ...masks.planning import SLOTS_AT_ONCE, CountedPairs, Plan, Term
from .._gather import PickedSide, TokenGather, WholeSide, claim_rows, term_sides
from .._merge import WholeRows, sum_dtype
from .._operands import HiddenSlots, hidden_of_term, readable
from ..kernels import _kernel
from ..kernels._kernel import KernelTensors
from . import _tile_blocks
from ._tile_calls import KernelCalls, plan_calls

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim; b some of the batch entries


@dataclass(frozen=True, eq=False)
class Step:
    """Executable form of one term of a plan.

    queries, keys: gather and scatter of the term's tokens.
    calls: kernel calls of its block list; None for a term without one, such as a causal term.
    hidden: queries without a key and keys without a query in the term.
    fresh: True if no earlier step writes to any of its rows of the output.
    """

    term: Term
    queries: TokenGather
    keys: TokenGather
    calls: KernelCalls | None
    hidden: HiddenSlots
    fresh: bool

    def forward(self, x: KernelTensors, scale: float) -> tuple[Tensor, Tensor]:
        x = self._clear_hidden(x)
        if self.calls is not None:
            out, lse = _tile_blocks.forward(x, self.calls, scale=scale)
        else:
            out, lse = _kernel.forward(x, scale=scale, is_causal=self._is_causal, bias=self._bias(x))
        lse = self.hidden.clear_queries(lse, dim=3, value=-torch.inf)
        return out, lse + log(self.term.multiplicity) if self.term.multiplicity > 1 else lse

    def backward(
        self, x: KernelTensors, grad_out: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        grad_out, out, lse = (self.queries.take(part) for part in (grad_out, out, lse))
        # A pair that counts m times has weight m exp(s - lse) = exp(s - (lse - log m)); a row without keys has none.
        lse = (lse - log(self.term.multiplicity)).masked_fill(lse == -torch.inf, torch.inf)
        lse = self.hidden.clear_queries(lse, dim=3, value=torch.inf)
        x, (grad_out, out) = self._clear_hidden(x), (self.hidden.clear_queries(part, dim=3) for part in (grad_out, out))
        if self.calls is not None:
            dq, dk, dv = _tile_blocks.backward(x, self.calls, grad_out, out, lse, scale=scale)
        else:
            dq, dk, dv = _kernel.backward(
                x, grad_out, out, lse, scale=scale, is_causal=self._is_causal, bias=self._bias(x)
            )
        return dq, self.hidden.clear_keys(dk, dim=3), self.hidden.clear_keys(dv, dim=3)

    def _clear_hidden(self, x: KernelTensors) -> KernelTensors:
        """Return x with 0 at hidden queries and keys: kernels compute whole blocks and would spread a NaN."""
        k, v = (self.hidden.clear_keys(part, dim=3) for part in (x.k, x.v))
        return KernelTensors(self.hidden.clear_queries(x.q, dim=3), k, v, x.visible)

    @property
    def _is_causal(self) -> bool:
        """True if the kernel has to run in causal mode: a bias of -inf cannot hide a later key of infinite score."""
        weights = self.term.weights
        return self.term.shape == "causal" or (isinstance(weights, CountedPairs) and weights.is_causal)

    def _bias(self, x: KernelTensors) -> Tensor | None:
        return self.term.bias(sum_dtype(x.q))


@dataclass(frozen=True)
class Program:
    """Executable form of an attention plan: the steps whose merged outputs are attention under the mask.

    given: token order of q, k and v.
    layout: token order of the plan.
    steps: one for each term, or for each portion of a term that was split.
    complete: True if the steps that are `fresh` (first to write their rows) write every row of the output.
    visible: False for keys that are hidden in addition to the plan's mask, in the order `given`; None if none are.
    """

    given: Layout
    layout: Layout
    steps: tuple[Step, ...]
    complete: bool
    visible: Bool[Tensor, "#B M"] | None = None

    @property
    def nbytes(self) -> int:
        """Estimated size in bytes: block lists with their masks, gather indices, and 1000 for each step."""
        sides = (side for step in self.steps for side in (step.queries, step.keys) if isinstance(side, PickedSide))
        lists = sum(step.calls.nbytes for step in self.steps if step.calls is not None)
        return 1000 * len(self.steps) + lists + sum(side.nbytes for side in sides)

    def forward(
        self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"], v: Float[Tensor, "B G M D"], scale: float
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
        """Return (out, natural lse) in float32 or wider; a query without keys has output 0 and lse -inf."""
        q, k, v = (self._to_plan_order(readable(x)) for x in (q, self._clear_keys(k), self._clear_keys(v)))
        sums: tuple[Tensor, Tensor] | None = None
        for step, operands in self._steps_with_operands(q, k, v):
            part = step.forward(operands, scale)
            if sums is None:
                out, lse = (_result_by_token(step.queries, each, q) for each in part)
                if out is not None and lse is not None:
                    sums = out, lse
                    continue
                sums = _uninitialised_rows(q) if self.complete else _rows_without_keys(q)
            if step.fresh:
                assert not isinstance(step.queries, WholeSide)  # a fresh one comes first, and its result becomes `sums`
                step.queries.put(sums[0], part[0])
                step.queries.put(sums[1], part[1])
            else:
                step.queries.merge(*sums, *part)
        out, lse = _rows_without_keys(q) if sums is None else sums
        return self._to_given_order(out), self._to_given_order(lse).contiguous()

    def backward(
        self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"], v: Float[Tensor, "B G M D"], whole: WholeRows,
        scale: float,
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G M D"], Float[Tensor, "B G M D"]]:  # fmt: skip
        """Return (dq, dk, dv) in float32 or wider, the sums over all steps.

        whole: out, lse and their gradients, of rows that may have more keys than the program.
        """
        operands, grad_out, out = whole.with_lse_channel(q, self._clear_keys(k), self._clear_keys(v))
        operands = tuple(self._to_plan_order(readable(x)) for x in operands)
        grad_out, out, lse = (self._to_plan_order(x) for x in (readable(grad_out), readable(out), whole.lse))
        totals: list[Tensor | None] = [None, None, None]
        for step, x in self._steps_with_operands(*operands):
            grads = step.backward(x, grad_out, out, lse, scale)
            sides = (step.queries, step.keys, step.keys)
            totals = [
                _accumulate(total, grad, side, x)
                for total, grad, side, x in zip(totals, grads, sides, operands, strict=True)
            ]
        dq, dk, dv = (
            self._to_given_order(_rows_without_keys(x)[0] if total is None else total)[..., : q.shape[-1]]
            for total, x in zip(totals, operands, strict=True)
        )
        return dq, self._clear_keys(dk), self._clear_keys(dv)

    def _steps_with_operands(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Step, KernelTensors]]:
        """Yield each step with its gathered q, k and v; consecutive steps with equal `keys` get the same k and v."""
        visible = None
        if self.visible is not None:
            visible = self._to_plan_order(self.visible[:, None].expand(len(k), k.shape[1], -1))
        side, keys = None, None
        for step in self.steps:
            if keys is None or step.keys != side:
                side, keys = step.keys, None  # frees the previous copy before the next one is made
                keys = step.keys.take(k), step.keys.take(v), None if visible is None else step.keys.take(visible)
            yield step, KernelTensors(step.queries.take(q), *keys)

    def _clear_keys(self, x: Tensor) -> Tensor:
        """Return x (B, G, M, D) with 0 at keys that `visible` hides: in a kernel, a weight of 0 times NaN is NaN."""
        return x if self.visible is None else x.masked_fill(~self.visible[:, None, :, None], 0)

    def _to_plan_order(self, x: Tensor) -> Tensor:
        return x if self.given == self.layout else Layout(x.shape[2], self.given.rate).invert(x, dim=2)

    def _to_given_order(self, x: Tensor) -> Tensor:
        return x if self.given == self.layout else Layout(x.shape[2], self.given.rate).apply(x, dim=2)


def make_program(
    plan: Plan,
    given: Layout,
    *,
    num_kv_heads: int,
    block_size: tuple[int, ...] = (),
    slots_at_once: int = SLOTS_AT_ONCE,
    placement: Placement | None = None,
) -> Program:
    """Return the program that runs a plan: for each term, the gather of its tokens and its kernel calls.

    given: token order of q, k and v.
    block_size: (queries, keys) of blocks in tokens; empty for the default of each term.
    slots_at_once: most query slots, and most key slots, in all heads and folds of a term whose queries are copied;
        larger terms are split, down to one head and fold.
    placement: positions of the tokens if the plan is for tokens at arbitrary positions; None if they are consecutive.
    """
    groups = plan.bound.num_heads // num_kv_heads
    terms = [part for whole in plan.terms for part in _portions_of(whole, slots_at_once)]
    laid_out = _sort_terms([(*term_sides(term, plan, groups, placement), term) for term in terms], plan.bound)
    fresh, complete = claim_rows([queries for queries, _, _ in laid_out], plan.bound.num_heads, plan.bound.num_queries)
    steps = tuple(
        _step(term, queries, keys, block_size, is_fresh)
        for (queries, keys, term), is_fresh in zip(laid_out, fresh, strict=True)
    )
    return Program(given, plan.layout, steps, complete)


def _step(term: Term, queries: TokenGather, keys: TokenGather, block_size: tuple[int, ...], fresh: bool) -> Step:
    calls = _kernel_calls(term, block_size) if term.shape == "blocks" else None
    hidden = hidden_of_term(term) if calls is None else calls.hidden
    return Step(term, queries, keys, calls, hidden, fresh)


def _sort_terms(
    laid_out: list[tuple[TokenGather, TokenGather, Term]], bound: Bound
) -> list[tuple[TokenGather, TokenGather, Term]]:
    """Return the (queries, keys, term) of a program in the order in which its terms are computed.

    Terms whose query side has `has_all_tokens` come first, as the sum over terms can start from the result of such a
    term. Among these, and among the remaining terms, terms with equal key sides are adjacent.
    """
    seen: dict[TokenGather, int] = {}
    places = [seen.setdefault(keys, len(seen)) for _, keys, _ in laid_out]

    def sort_key(index: int) -> tuple[bool, int]:
        return not laid_out[index][0].has_all_tokens(bound.num_heads, bound.num_queries), places[index]

    return [laid_out[index] for index in sorted(range(len(laid_out)), key=sort_key)]


def _kernel_calls(term: Term, block_size: tuple[int, ...]) -> KernelCalls:
    """Return the kernel calls of a term with a block list.

    block_size: (queries, keys) of a block; empty for the term's `block_side`.

    Terms with equal `at_origin` and block sizes have one cache entry.
    """
    alike = term.at_origin()
    q_block, k_block = block_size or (term.block_side, term.block_side)
    return cache().get(
        ("calls", alike, q_block, k_block),
        lambda: plan_calls(alike, alike.blocks(q_block, k_block)),
        lambda calls: calls.nbytes,
    )


def _portions_of(term: Term, most_slots: int) -> tuple[Term, ...]:
    """Return the smaller terms into which a term is split; (term,) if it is small, or its queries are not copied.

    Each has at most `most_slots` query slots, and at most as many key slots, in its heads and folds together, unless it
    has only one head and one fold.
    """
    copied = isinstance(term.q, Compact) and term.q.is_copied
    return term.portions(most_slots) if copied else (term,)


@dataclass(frozen=True)
class EntryRange:
    """Consecutive batch entries that one program computes: `entries` is their slice of the batch dim."""

    entries: slice

    def rows_of(self, table: Shaped[Tensor, "#B L"]) -> Shaped[Tensor, "#b L"]:
        """Return table[entries], or `table` itself if it has a single item for all batch entries."""
        return table if len(table) == 1 else table[self.entries]

    def of(self, x: Shaped[Tensor, "B H N ..."]) -> Shaped[Tensor, "b H N ..."]:
        return x[self.entries]

    def put(self, x: Shaped[Tensor, "B H N ..."], part: Shaped[Tensor, "b H N ..."]) -> None:
        """Copy `part` to these batch entries of x, in place."""
        x[self.entries] = part


@dataclass(frozen=True)
class Packed:
    """All batch entries as one sequence of n = B * N tokens: each head's tokens are concatenated in batch order."""

    def of(self, x: Shaped[Tensor, "B H N ..."]) -> Shaped[Tensor, "1 H n ..."]:
        return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def put(self, x: Shaped[Tensor, "B H N ..."], part: Shaped[Tensor, "1 H n ..."]) -> None:
        """Copy `part`, split into batch entries, to x, in place."""
        x.copy_(part.squeeze(0).unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1))


Entries = EntryRange | Packed


def _result_by_token(side: TokenGather, slots: Tensor, x: Tensor) -> Tensor | None:
    """Return an output, lse or gradient of a step in the token order of x (B, X, N, D), in float32 or wider.

    The result is (B, X, N, ...). It is None unless the side has every token of every head, as a `WholeSide` or as one
    view in the order of x.

    slots: the output, lse or gradient, in the side's slots.
    """
    # A sum over steps can start from it, without a scatter into zeros.
    tokens = side.all_tokens(slots, x.shape[1], x.shape[2])
    return None if tokens is None else tokens.to(sum_dtype(x))


def _uninitialised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised (out, lse) for queries x (B, H, N, D), in float32 or wider."""
    wide = sum_dtype(x)
    return torch.empty_like(x, dtype=wide), x.new_empty(x.shape[:3], dtype=wide)


def _rows_without_keys(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of queries x (B, H, N, D) without any keys: 0 and -inf, in float32 or wider."""
    out = torch.zeros_like(x, dtype=sum_dtype(x))
    return out, out.new_full(x.shape[:3], -torch.inf)


def _accumulate(total: Tensor | None, grad: Tensor, side: TokenGather, x: Tensor) -> Tensor:
    if total is None:
        first = _result_by_token(side, grad, x)
        if first is not None:
            return first
        total = _rows_without_keys(x)[0]
    side.add(total, grad.to(total.dtype))
    return total


def in_format_of(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the dtype and memory format of `like`, as the op's fake implementation declares; copy if needed."""
    strides = _strides_of_empty_like(like)
    # A kernel may return any stride for a dim of size 1.
    has_format = all(size == 1 or has == wants for size, has, wants in zip(x.shape, x.stride(), strides, strict=True))
    return x.as_strided(x.shape, strides) if has_format and x.dtype == like.dtype else torch.empty_like(like).copy_(x)


def _strides_of_empty_like(x: Tensor) -> tuple[int, ...]:
    in_order = tuple(accumulate(reversed(x.shape[1:]), lambda stride, size: stride * max(size, 1), initial=1))[::-1]
    if x.stride() == in_order:  # the usual case: on the meta device it takes a tenth of a millisecond to ask torch
        return in_order
    return torch.empty_like(x, device="meta").stride()
