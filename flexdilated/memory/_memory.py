"""Memory of one attention call, counted in runs on meta tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .._torch_private import TorchDispatchMode, tree_map_only
from ..engines import (
    GATHERED_BYTES,
    CallKey,
    Calls,
    Program,
    Step,
    WholeRows,
    allowed_on,
    program_of,
    run_backward,
    run_forward,
    tensors_in,
)
from ..masks.core import Expression, device_kind, require_int
from ..masks.patterns import names
from ..masks.planning import ANYTHING, Choice, Operands, plan, way_of
from ._flex_memory import Attention, flex_attention_of

# B batch, H query heads, G key/value heads, N tokens, D head dim


@dataclass(frozen=True)
class Hidden:
    """Bytes of an operator of which only the results are visible.

    work: alive while it runs, without its inputs. kept: alive as long as its last result.
    """

    work: int
    kept: int = 0


class LiveBytes(TorchDispatchMode):
    """Counts each storage that an operation returns until it is freed; views cost nothing.

    live, peak: in bytes. Allocations inside a kernel are counted only for operators in `hidden`. On tensors of device
    "meta", which have sizes and no memory, the counts equal a run on CPU; tensors with values may be mixed in.
    """

    def __init__(self, *held: Tensor, hidden: Mapping[object, Hidden] | None = None) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._hidden = hidden or {}
        self._known: dict[int, int] = {}
        for x in held:
            self._hold(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        hidden = self._hidden.get(func)
        if hidden is not None:
            self.peak = max(self.peak, self.live + hidden.work)
        kwargs = kwargs or {}
        if len({x.is_meta for x in tensors_in((*args, *kwargs.values()))}) > 1:
            args, kwargs = tree_map_only(Tensor, lambda x: x.to(NOWHERE), (args, kwargs))
        results = func(*args, **kwargs)
        if func is torch.ops.aten.empty_like.default and kwargs.get("device") == NOWHERE:
            return results  # the engine needs only its strides
        tensors = list(tensors_in((results,)))
        for x in tensors:
            self._hold(x)
        if hidden is not None and hidden.kept:
            self._count(hidden.kept)
            weakref.finalize(tensors[-1].untyped_storage(), self._count, -hidden.kept).atexit = False
        return results

    def restart(self) -> None:
        """Reset the peak to the bytes alive now."""
        self.peak = self.live

    def _hold(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = id(storage)  # stays valid while the storage exists
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self._count(storage.nbytes())
            weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self._count(-self._known.pop(key))

    def _count(self, number: int) -> None:
        self.live += number
        self.peak = max(self.peak, self.live)


NOWHERE = torch.device("meta")  # its tensors have sizes and no memory


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the tensors' elements."""
    return sum(x.numel() * x.element_size() for x in tensors)


# For more tokens every count is linear in the tokens: whole tensors are, and gathers are bounded.
LARGEST_RUN = 1 << 20
_SAME_ENDING = 1 << 15  # lengths that differ by a multiple of it have equal cost for a last, shorter segment


@dataclass(frozen=True)
class AttentionSize:
    """Sizes of a self-attention call. tokens_outermost: (B, N, H, D) in memory, as a projection returns them."""

    num_tokens: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    batch: int = 1
    num_kv_heads: int | None = None
    tokens_outermost: bool = False

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def operands(self) -> Operands:
        """The parameters on which the plan of this call depends."""
        return Operands(self.dtype.itemsize, self.head_dim, self.num_heads // self.kv_heads)


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of one call; each peak counts everything alive, including the call's inputs.

    queries: q; out has as many. keys: k and v together. lse: of all rows. kept: what training keeps from the forward
    for the backward, including q, k, v, out and lse. inference_peak: of a forward that keeps nothing. forward_peak: of
    a forward in training. backward_peak: from the gradient of out to dq, dk and dv. tables: the plan's lists, which
    stay in the cache and are not in the peaks.
    """

    queries: int
    keys: int
    lse: int
    kept: int
    inference_peak: int
    forward_peak: int
    backward_peak: int
    tables: int

    @property
    def inputs(self) -> int:
        """q, k and v."""
        return self.queries + self.keys

    @property
    def shown(self) -> int:
        """q, k, v, out and lse."""
        return self.inputs + self.queries + self.lse

    @property
    def training_peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    def at(self, num_tokens: int, other: AttentionMemory, tokens: tuple[int, int]) -> AttentionMemory:
        """Linear interpolation between this and `other`, which are for the two numbers in `tokens`."""
        share = (num_tokens - tokens[0]) / (tokens[1] - tokens[0])
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return AttentionMemory(**{name: round(a + share * (b - a)) for name, (a, b) in pairs.items()})


def attention_memory(pattern: Expression, size: AttentionSize, *, device: str = "cpu") -> AttentionMemory:
    """Memory of `attend` on this kind of device with its default engine: tiles on "cpu", flex elsewhere.

    Up to 1,048,576 tokens it runs the call once on meta tensors and counts what is alive: tiles by the engine's own
    code, flex by the allocations of its compiled program. Beyond, it extrapolates linearly. Allocations inside kernels
    are not counted; on CPU they are a few MB per thread. Nothing is computed, and no accelerator is needed.
    Raises ValueError for a pattern that needs run-time tensors, or does not bind.
    """
    missing = names(pattern)
    if missing:
        raise ValueError(f"a pattern's memory is known with its values; got one that needs {', '.join(missing)}")
    require_int("num_tokens", size.num_tokens, minimum=1)
    if size.num_tokens <= LARGEST_RUN:
        return _dry_run(pattern, size, device)
    ending = size.num_tokens % _SAME_ENDING
    tokens = LARGEST_RUN // 2 + ending, LARGEST_RUN + ending
    choice = _choice(pattern, size, device)  # fewer tokens may be planned differently
    smaller, larger = (_dry_run(pattern, replace(size, num_tokens=number), device, choice) for number in tokens)
    return smaller.at(size.num_tokens, larger, tokens)


def _key(pattern: Expression, size: AttentionSize) -> CallKey:
    pattern.check_heads(size.num_heads)
    heads, tokens = (size.num_heads, size.kv_heads), (size.num_tokens, size.num_tokens)
    return CallKey(pattern.text, *heads, *tokens, 0, 0, 0, size.num_heads, 1, ())


def _choice(pattern: Expression, size: AttentionSize, device: str) -> Choice:
    """The options that the planner chooses for a call of this size."""
    allowed = ANYTHING if device_kind(device).on_host else allowed_on(torch.device(device))
    best = plan(_key(pattern, size).bound(pattern), device=device, allowed=allowed, operands=size.operands)
    together = len(best.options) < len(set(pattern.branches()))
    return Choice(together, tuple(way_of(options[0]) for options in best.options))


def _dry_run(pattern: Expression, size: AttentionSize, device: str, choice: Choice | None = None) -> AttentionMemory:
    key = _key(pattern, size)
    if device_kind(device).on_host:
        key_bytes = 2 * size.batch * size.head_dim * size.dtype.itemsize
        attention, tables = tiles_attention_of(key, pattern, size.operands, key_bytes=key_bytes, choice=choice)
    else:
        attention, tables = flex_attention_of(key, pattern, size.operands, device=device, choice=choice)
    with NOWHERE:  # inputs only: the engine's decisions depend on the values in its tables
        q, k, v = (_empty(heads, size) for heads in (size.num_heads, size.kv_heads, size.kv_heads))
    return _measure(attention, q, k, v, tables)


def _measure(attention: Attention, q: Tensor, k: Tensor, v: Tensor, tables: int) -> AttentionMemory:
    with torch.no_grad(), LiveBytes(q, k, v) as inference:
        out, lse = attention(q, k, v)
    rows = nbytes(lse)
    del out, lse
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with LiveBytes(q, k, v) as training:
        out, _ = attention(*leaves)
        forward_peak, kept = training.peak, training.live
        training.restart()
        torch.autograd.grad(out, leaves, torch.empty_like(out))
    peaks = inference.peak, forward_peak, training.peak
    return AttentionMemory(nbytes(q), nbytes(k, v), rows, kept, *peaks, tables)


def _empty(heads: int, size: AttentionSize) -> Tensor:
    shape = size.batch, heads, size.num_tokens, size.head_dim
    if size.tokens_outermost:
        return torch.empty(shape[0], shape[2], shape[1], shape[3], dtype=size.dtype).transpose(1, 2)
    return torch.empty(shape, dtype=size.dtype)


# Enough to represent repeated steps: three of a kind, so that one has neighbours on both sides, and twice the problems
# that the engine gathers at once.
_STEPS, _GATHERED_BYTES = 3, 2 * GATHERED_BYTES


def tiles_attention_of(
    key: CallKey, rule: Expression, operands: Operands, *, key_bytes: int, choice: Choice | None = None
) -> tuple[Callable[..., tuple[Tensor, Tensor]], int]:
    """(a function (q, k, v) -> (out, lse) by the engine's own steps, without its operator; bytes of its tables).

    key_bytes: of a key and its value over the batch. Of equal steps only a few are run, because each frees its memory
    before the next one starts.
    """
    program = program_of(key, rule, "cpu", choice, operands, written=key.pattern)
    few = _few_of_each_kind(program, key_bytes)
    return lambda q, k, v: _Tiles.apply(q, k, v, few), program.nbytes


class _Tiles(torch.autograd.Function):
    """Saves the tensors that the operator saves."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, program: Program) -> tuple[Tensor, Tensor]:
        out, lse = run_forward(program, q, k, v, 1.0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.program = program
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *run_backward(ctx.program, q, k, v, WholeRows(out, lse, *grad_outputs), 1.0), None


def _few_of_each_kind(program: Program, key_bytes: int) -> Program:
    taken: Counter[object] = Counter()
    steps = []
    for step in program.steps:
        kind = _kind(step)
        taken[kind] += 1
        if taken[kind] <= _STEPS:
            few = None if step.calls is None else _few_problems(step.calls, key_bytes)
            steps.append(replace(step, calls=few))
    return replace(program, steps=tuple(steps))


def _kind(step: Step) -> object:
    """The sizes that determine a step's allocations."""
    term = step.term
    sizes = len(term.heads), term.folds, term.q.num_slots, term.k.num_slots
    return term.shape, sizes, term.multiplicity, step.fresh, type(step.queries), id(step.calls)


def _few_problems(calls: Calls, key_bytes: int) -> Calls:
    few = (next(call.parts(1 + _GATHERED_BYTES // (call.keys.length * key_bytes)), call) for call in calls.calls)
    return replace(calls, calls=tuple(few))
