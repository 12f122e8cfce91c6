"""Predict the memory of one attention call: aten and portable run on meta tensors; flex's buffers are computed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.nn.functional import pad

from .._torch_private import TorchDispatchMode
from ..engines import (
    GATHERED_BYTES,
    Call,
    Dropout,
    Features,
    FlexProgram,
    FlexStep,
    ListedKeys,
    Portable,
    Program,
    QueryRows,
    ScoreMod,
    SingleKeys,
    WholeRows,
    allowed_on,
    fixed_score_mod,
    in_format_of,
    make_flex_program,
    make_program,
    merge_,
    one_width,
    program_of,
    sum_dtype,
    tensors_in,
)
from ..masks.core import Expression, device_kind, require_int
from ..masks.patterns import as_written, names
from ..masks.planning import (
    ANYTHING,
    Allowed,
    Choice,
    KeyLists,
    OperandSizes,
    Plan,
    TableProblems,
    TableTerm,
    plan,
    plan_with_table,
    reads_table,
    way_of,
)

# B batch, H query heads, G key/value heads, N tokens, S slots, D head dim of queries and keys, E of values

META = torch.device("meta")  # its tensors have sizes and no memory
# Longest call that is run on meta tensors. For more tokens every count is linear in the tokens: whole tensors are, and
# gathers are bounded.
LARGEST_RUN = 1 << 20
_ENDING_PERIOD = 1 << 15  # lengths that differ by a multiple of it have equally long incomplete segments at the end
_STEPS_PER_KIND = 3  # steps of a kind that are run, so that one has neighbours on both sides
_PLAIN_MERGE = 2  # parts up to which Inductor merges without a separate float32 sum


@dataclass(frozen=True)
class KernelBytes:
    """Bytes that an operator allocates inside its kernel; a TorchDispatchMode sees only the operator's results.

    work: peak while the operator runs, including its results but not its inputs.
    kept: bytes beside the results that stay allocated until the last tensor in the operator's return value is freed.
    """

    work: int
    kept: int = 0


class LiveBytes(TorchDispatchMode):
    """Context manager that counts the bytes of the tensors that operations return, until they are freed.

    Each storage counts once, so views cost nothing.

    held: tensors that are counted from the start.
    hidden: bytes that operators allocate inside their kernels, by operator; they are not counted otherwise.

    Attribute `live` has the bytes alive now, `peak` the most alive at once since the start or `restart`. Tensors of
    device "meta", which have sizes and no memory, count by their sizes. An operation may mix such tensors with tensors
    that have values, and then runs on "meta". Results of empty_like with device="meta" are not counted.
    """

    def __init__(self, *held: Tensor, hidden: Mapping[Any, KernelBytes] | None = None) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._hidden = hidden or {}
        self._known: dict[int, weakref.ref[UntypedStorage]] = {}
        for x in held:
            self._track(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        hidden = self._hidden.get(func)
        if hidden is not None:
            self.peak = max(self.peak, self.live + hidden.work)
        if len({x.is_meta for x in tensors_in((*args, *kwargs.values()) if kwargs else args)}) > 1:
            args, kwargs = _on_meta(args), {name: _on_meta(x) for name, x in kwargs.items()}
        results = func(*args, **kwargs)
        if func is torch.ops.aten.empty_like.default and kwargs.get("device") == META:
            return results  # the engine needs only its strides
        for x in (tensors := tensors_in((results,))):
            self._track(x)
        if hidden is not None and hidden.kept:
            self._count(hidden.kept)
            weakref.finalize(tensors[-1].untyped_storage(), self._count, -hidden.kept).atexit = False
        return results

    def restart(self) -> None:
        """Reset the peak to the bytes alive now."""
        self.peak = self.live

    def _track(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = id(storage)  # stays valid while the storage exists
        if key in self._known:
            return
        number = storage.nbytes()

        def freed(_: object) -> None:
            del self._known[key]
            self.live -= number

        self._known[key] = weakref.ref(storage, freed)  # finalize does the same in several times as long
        self._count(number)

    def _count(self, number: int) -> None:
        self.live += number
        self.peak = max(self.peak, self.live)


def _on_meta(x: Any) -> Any:
    """Return an argument of an operation, with its tensors, also in lists and tuples, on the meta device."""
    if isinstance(x, Tensor):
        return x.to(META)
    return type(x)(map(_on_meta, x)) if isinstance(x, list | tuple) else x


def nbytes(*tensors: Tensor) -> int:
    """Return the bytes of all elements of the tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)


@dataclass(frozen=True)
class AttentionSize:
    """Sizes of a self-attention call.

    num_kv_heads: number of key/value heads; None: num_heads.
    tokens_outermost: True if q, k and v are (B, N, H, D) in memory, as a projection returns them; otherwise they are
        (B, H, N, D).
    value_dim: head dim of v and of the output; None: head_dim.
    """

    num_tokens: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    batch: int = 1
    num_kv_heads: int | None = None
    tokens_outermost: bool = False
    value_dim: int | None = None

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims (D of q and k, E of v and the output)."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and its value in one head, over all batch entries, both padded to the wider head dim."""
        return 2 * self.batch * max(self.dims) * self.dtype.itemsize

    @property
    def nbytes(self) -> tuple[int, int, int, int]:
        """Bytes of (q, k, v, out)."""
        token, (D, E) = self.batch * self.num_tokens * self.dtype.itemsize, self.dims
        return (
            self.num_heads * token * D,
            self.kv_heads * token * D,
            self.kv_heads * token * E,
            self.num_heads * token * E,
        )

    def operands(self, engine: str) -> OperandSizes:
        """Return the sizes on which plan costs depend: bytes of an element, head dim, query heads per key/value head.

        The head dim is that of the queries in the engine's kernels: head_dim, or for "aten", which pads q, k and v to
        one head dim, the wider of head_dim and value_dim.
        """
        width = max(self.dims) if engine == "aten" else self.head_dim
        return OperandSizes(self.dtype.itemsize, width, self.num_heads // self.kv_heads)


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of one call; each peak counts everything alive, including the call's inputs.

    queries: q.
    keys: k and v together.
    outputs: out; the gradient of out, which is not counted here, has as many bytes.
    lse: lse of all rows.
    kept: tensors that training keeps from the forward for the backward, including q, k, v, out and lse.
    inference_peak: peak of a forward that keeps nothing.
    forward_peak: peak of a forward in training.
    backward_peak: peak of the backward, which gets the gradient of out and returns dq, dk and dv.
    tables: the plan's block and index tables, which stay in the cache and are not in the peaks; an estimate for engine
        "aten", and 0 there if the plan has a table of chosen keys or blocks.
    """

    queries: int
    keys: int
    outputs: int
    lse: int
    kept: int
    inference_peak: int
    forward_peak: int
    backward_peak: int
    tables: int

    @property
    def inputs(self) -> int:
        """Bytes of q, k and v."""
        return self.queries + self.keys

    @property
    def inputs_and_results(self) -> int:
        """Bytes of q, k, v, out and lse."""
        return self.inputs + self.outputs + self.lse

    @property
    def training_peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    def extrapolate(self, num_tokens: int, other: AttentionMemory, tokens: tuple[int, int]) -> AttentionMemory:
        """Return the memory for num_tokens tokens, by the line through this memory and `other`.

        tokens: (tokens of this memory, tokens of `other`).
        """
        share = (num_tokens - tokens[0]) / (tokens[1] - tokens[0])
        pairs = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return AttentionMemory(*(round(a + share * (b - a)) for a, b in pairs))


def attention_memory(
    pattern: Expression,
    size: AttentionSize,
    *,
    device: str = "cpu",
    engine: str | None = None,
    drops: bool = False,
    score_mod: ScoreMod | None = None,
    planned: Plan | None = None,
) -> AttentionMemory:
    """Predict the memory of `attend` on a kind of device, such as "cpu", without computing attention.

    Up to 1,048,576 tokens it plans the call and counts the bytes that are alive: for aten and portable in a run of the
    engine on meta tensors, for flex by the allocations of its compiled program. For more tokens it extrapolates
    linearly. Allocations inside kernels are not counted; on CPU they are a few MB per thread. No accelerator is needed.

    engine: "aten", "flex" or "portable"; None takes the device's default.
    drops: True with attention dropout, which aten lacks; flex's kernels are counted without it.
    score_mod: as in `attend`; aten takes none, and flex's kernels are counted without it. For portable it is called on
        meta tensors, and gradients of tensors that it captures are not counted.
    planned: the plan of this call, for a caller that has it already.

    Raises ValueError for a pattern that lacks the values of run-time tensors, or does not fit the heads or tokens;
    TypeError or ValueError for an invalid number of tokens.
    """
    missing = names(pattern)
    if missing:
        raise ValueError(
            f"memory needs the values of a pattern's run-time tensors; got one without {', '.join(missing)}"
        )
    require_int("num_tokens", size.num_tokens, minimum=1)
    settings = _CallSettings(device, engine or device_kind(device).engine, drops, score_mod, planned)
    if size.num_tokens <= LARGEST_RUN:
        return _planned_memory(settings, pattern, size)
    ending = size.num_tokens % _ENDING_PERIOD
    tokens = LARGEST_RUN // 2 + ending, LARGEST_RUN + ending
    # Fewer tokens may be planned differently, so the options chosen for the whole length are kept.
    best = settings.plan(pattern, size)
    together = len(best.options) < len(set(pattern.branches()))
    choice = Choice(together, tuple(map(way_of, best.chosen)))
    settings = replace(settings, planned=None, choice=choice)
    smaller, larger = (_planned_memory(settings, pattern, replace(size, num_tokens=n)) for n in tokens)
    return smaller.extrapolate(size.num_tokens, larger, tokens)


@dataclass(frozen=True)
class _CallSettings:
    """Settings of the call whose memory is predicted.

    device: kind of device, such as "cpu".
    drops: True with dropout.
    planned: the plan, if there is one already.
    choice: the plan's options; None for those of lowest predicted cost.
    """

    device: str
    engine: str
    drops: bool
    score_mod: ScoreMod | None
    planned: Plan | None = None
    choice: Choice | None = None

    def plan(self, pattern: Expression, size: AttentionSize) -> Plan:
        if self.planned is not None:
            return self.planned
        allowed, bound = allowed_by(self.engine, self.device), _call_of(pattern, size).bound(pattern)
        how = {"device": self.device, "allowed": allowed, "operands": size.operands(self.engine)}
        if reads_table(bound, self.engine):
            return plan_with_table(bound, engine=self.engine, **how)
        return plan(bound, choice=self.choice, **how)


def allowed_by(engine: str, device: str) -> Allowed:
    """Return the kinds of terms that an engine runs on a kind of device, such as "cpu"."""
    return ANYTHING if engine == "aten" else allowed_on(torch.device(device))


def _call_of(pattern: Expression, size: AttentionSize) -> Call:
    pattern.check_heads(size.num_heads)
    return Call(
        pattern.text,
        num_heads=size.num_heads,
        num_kv_heads=size.kv_heads,
        num_queries=size.num_tokens,
        num_keys=size.num_tokens,
        q_offset=0,
        k_offset=0,
        head_offset=0,
        num_heads_global=size.num_heads,
        rate=1,
        block_size=(),
    )


def _planned_memory(settings: _CallSettings, pattern: Expression, size: AttentionSize) -> AttentionMemory:
    call, (q, k, v, out) = _call_of(pattern, size), size.nbytes
    if settings.engine == "aten":
        if reads_table(call.bound(pattern), "aten"):
            return AttentionMemory(q, k + v, out, *_table_memory(settings.plan(pattern, size), size), 0)
        sizes = size.operands("aten")
        written = as_written(pattern).text
        program = program_of(call, pattern, settings.device, settings.choice, sizes, written=written)
        return AttentionMemory(q, k + v, out, *_aten_memory(program, size), program.nbytes)
    best, cpu = settings.plan(pattern, size), torch.device("cpu")  # its tables need no accelerator
    rest, table = best.beside_table, best.table
    program = make_flex_program(rest, call.layout, num_kv_heads=size.kv_heads, block_size=call.sides, device=cpu)
    if settings.engine == "portable" or not rest.terms:
        found = _portable_memory(program, table, size, settings)
    else:
        found = _flex_memory(program, size)
        if table is not None:  # merged with the other pairs: both results are kept
            found = _memory_of_two_parts(
                found, _portable_memory(replace(program, steps=()), table, size, settings), size
            )
    return AttentionMemory(q, k + v, out, *found, program.nbytes)


class _CallBytes(NamedTuple):
    """Memory of a call, in bytes: lse, what the forward keeps for the backward, and peaks."""

    lse: int
    kept: int
    inference_peak: int
    forward_peak: int
    backward_peak: int


_Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_Backward = Callable[[Tensor, Tensor, Tensor, WholeRows], Sequence[Tensor]]


def _dry_run(size: AttentionSize, forward: _Forward, backward: _Backward, *, pads: bool) -> _CallBytes:
    """Return the memory of a call by an engine, whose functions are run on meta tensors.

    Only the tables whose values these functions read are on the CPU.

    forward: the engine's function (q, k, v) -> (out, lse).
    backward: the engine's function (q, k, v, rows with out, lse and the gradient of out) -> (dq, dk, dv).
    pads: True for an engine whose q, k and v must have one head dim: they are padded to the wider one.
    """
    order, (D, E) = (0, 2, 1, 3) if size.tokens_outermost else (0, 1, 2, 3), size.dims
    shapes = (
        (size.batch, X, size.num_tokens, dim)
        for X, dim in ((size.num_heads, D), (size.kv_heads, D), (size.kv_heads, E))
    )
    q, k, v = (torch.empty_permuted(shape, order, dtype=size.dtype, device=META) for shape in shapes)
    with torch.no_grad(), LiveBytes(q, k, v) as counted:
        operands = one_width(q, k, v) if pads else (q, k, v)
        out, lse = forward(*operands)
        forward_peak, kept = counted.peak, counted.live
        counted.restart()
        grad = grad_out = torch.empty_like(out[..., :E])
        if grad.shape != out.shape:
            grad_out = pad(grad, (0, out.shape[-1] - E))
        grads = backward(*operands, WholeRows(out, lse, grad_out))
    assert len(grads) == 3
    return _CallBytes(nbytes(lse), kept, forward_peak, forward_peak, counted.peak)


def _aten_memory(program: Program, size: AttentionSize) -> _CallBytes:
    """Return the memory of a call by engine aten."""
    program = _with_few_steps(program, size.key_bytes)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = program.forward(q, k, v, 1.0)
        return in_format_of(out, q), lse

    def backward(q: Tensor, k: Tensor, v: Tensor, whole: WholeRows) -> list[Tensor]:
        grads = program.backward(q, k, v, whole, 1.0)
        return [in_format_of(grad, x) for grad, x in zip(grads, (q, k, v), strict=True)]

    return _dry_run(size, forward, backward, pads=True)


def _table_memory(best: Plan, size: AttentionSize) -> _CallBytes:
    """Return the memory of a call by engine aten whose plan has a table."""
    assert best.table is not None
    problems = best.table.problems
    if isinstance(problems, TableProblems):
        problems = problems.of_largest_batch(max(size.dims), size.dtype.itemsize)

    def rows() -> QueryRows | SingleKeys:  # one for each run: real calls keep nothing between forward and backward
        if isinstance(problems, KeyLists):
            return SingleKeys(replace(problems), (0, 0, 0))
        return QueryRows(replace(problems))

    rest = best.beside_table
    others = None
    if rest.terms:
        others = _with_few_steps(make_program(rest, best.layout, num_kv_heads=size.kv_heads), size.key_bytes)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = rows().forward(q, k, v, 1.0)
        if others is not None:
            merge_(out, lse, *others.forward(q, k, v, 1.0))
        return in_format_of(out, q), lse

    def backward(q: Tensor, k: Tensor, v: Tensor, whole: WholeRows) -> list[Tensor]:
        grads = rows().backward(q, k, v, whole, 1.0)
        if others is not None:
            beside = others.backward(q, k, v, whole, 1.0)
            grads = tuple(total.add_(part) for total, part in zip(grads, beside, strict=True))
        return [in_format_of(grad, x) for grad, x in zip(grads, (q, k, v), strict=True)]

    return _dry_run(size, forward, backward, pads=True)


def _portable_memory(
    program: FlexProgram, table: TableTerm | None, size: AttentionSize, settings: _CallSettings
) -> _CallBytes:
    """Return the memory of attention by engine portable over the pairs of a program and of a table.

    program: the pairs that are in no table; without steps for engine flex, for which portable computes only a table.
    table: table of single keys; None if the pattern has none.
    """
    features = Features(1.0)
    if settings.drops:
        features = features.with_dropout(Dropout(0.5, torch.empty(2, dtype=torch.int32, device=META)))
    steps = tuple(_step_on_meta(step) for step in program.steps)
    score_mod = fixed_score_mod(settings.score_mod, sum_dtype(torch.empty(0, dtype=size.dtype)), META)
    run = Portable(replace(program, steps=steps), features._replace(score_mod=score_mod))
    run = run.reading([x.detach().to(META) for x in run.tensors])

    on_triton = (
        device_kind(settings.device).engine == "flex"
        and not (settings.drops or settings.score_mod)
        and size.dtype != torch.float64
    )

    def with_table() -> Portable:  # one for each run: a call without a score_mod keeps no lists for the backward
        if table is None:
            return run
        assert isinstance(table.problems, KeyLists)
        lists = replace(table.problems)
        own = ListedKeys(lists, (0, 0, 0), 0, tuple(range(len(program.steps))), on_triton=on_triton)
        return replace(run, of_table=own)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return with_table().forward(q, k, v)

    def backward(q: Tensor, k: Tensor, v: Tensor, whole: WholeRows) -> tuple[Tensor, ...]:
        return with_table().backward(q, k, v, whole)

    return _dry_run(size, forward, backward, pads=False)


def _memory_of_two_parts(first: _CallBytes, second: _CallBytes, size: AttentionSize) -> _CallBytes:
    """Return the memory of two parts of a call that are computed one after the other and merged eagerly.

    The merge adds both outputs, each times its share, in float32 or wider. If it has to convert the outputs, autograd
    keeps the converted outputs.
    """
    (*given, output), lse = size.nbytes, first.lse
    wide = output // size.dtype.itemsize * max(4, size.dtype.itemsize)
    converted = 2 * wide if wide > output else 0
    kept = first.kept + second.kept - sum(given) + converted + output + lse
    merging = sum(given) + 2 * (output + lse) + converted + 2 * wide
    beside_second = first.kept - sum(given)
    inference = max(first.inference_peak, second.inference_peak + beside_second)
    forward = max(first.forward_peak, second.forward_peak + beside_second)
    backward = kept + output + max(part.backward_peak - part.kept for part in (first, second))
    return _CallBytes(lse, kept, max(inference, merging), max(forward, kept + 2 * wide), backward)


def _step_on_meta(step: FlexStep) -> FlexStep:
    """Return the step with its indices and its mask_mod's arguments on the meta device; no pair is evaluated."""
    mask, mask_mod = copy(step.mask), step.mask.mask_mod
    mask.mask_mod = lambda *places: mask_mod(*(x.to(META) for x in places))
    return replace(step, mask=mask, indices=step.indices.on(META))


def _with_few_steps(program: Program, key_bytes: int) -> Program:
    """Return a shorter program of about equal memory peak: at most three steps of each kind, with fewer problems.

    A step frees its memory before the next one, so more steps of a kind add nothing. A step computes its attention
    problems (query range, key range) in chunks of bounded memory, so a few problems suffice.

    key_bytes: bytes of one key and its value over the batch.
    """
    taken: Counter[object] = Counter()
    steps = []
    for step in program.steps:
        term, calls = step.term, step.calls
        sizes = len(term.heads), term.folds, term.q.num_slots, term.k.num_slots
        kind = term.shape, sizes, term.multiplicity, step.fresh, type(step.queries), id(calls)
        taken[kind] += 1
        if taken[kind] <= _STEPS_PER_KIND:
            if calls is not None:
                most = ((call, 1 + 2 * GATHERED_BYTES // (call.keys.length * key_bytes)) for call in calls.calls)
                calls = replace(calls, calls=tuple(next(call.parts(count), call) for call, count in most))
            steps.append(replace(step, calls=calls))
    return replace(program, steps=tuple(steps))


def _flex_memory(program: FlexProgram, size: AttentionSize) -> _CallBytes:
    """Return the memory of a call that the compiled program computes.

    A step is one kernel call. Its out and float32 lse together are called a part. Parts are merged by lse into the
    output; a single part is itself the output, unless its queries are copies. In the backward a step allocates delta,
    too. Inductor fuses all operations around attention, so a gather or a merge allocates only its result. A step's
    copied operands are freed after those of the next step are gathered.

    Training keeps all operands, the parts and the merged output. With several steps it also keeps, for each step whose
    queries are gathered, its out with each row at its token: a tensor of the output's size. With more than two steps,
    some of them gathered, Inductor makes separate kernels for these tensors: training then also keeps one float32 sum
    of the output's shape, and the backward allocates a float32 tensor of this shape for each gathered step.
    """
    steps, (*whole, output) = [_step_bytes(step, size) for step in program.steps], size.nbytes
    inputs, lse = sum(whole), 4 * size.batch * size.num_heads * size.num_tokens
    is_merged = len(steps) != 1 or steps[0].operands[0][1]
    merged = output + lse if is_merged else 0
    num_gathered = sum(step.queries.slots.kind != "all" for step in program.steps) if len(steps) > 1 else 0
    wide = output // size.dtype.itemsize * 4 if num_gathered and len(steps) > _PLAIN_MERGE else 0
    rows = num_gathered * output + wide
    kept = inputs + sum(step.copied + step.part for step in steps) + merged + rows
    forward = _Balance()
    forward.alloc(inputs + sum(step.copied for step in steps[:1]))
    for index, step in enumerate(steps):
        forward.alloc(sum(later.copied for later in steps[index + 1 : index + 2]))
        forward.alloc(step.part)
        forward.free(step.copied)
    forward.alloc(merged)
    backward = _Balance()
    backward.alloc(kept)
    backward.alloc(output)  # its gradient
    if is_merged:
        backward.alloc(num_gathered * wide + sum(step.out for step in steps))
        backward.free(num_gathered * wide + rows)
    _count_kernel_backwards(backward, steps, whole, is_merged=is_merged)
    return _CallBytes(lse, kept, forward.peak, kept, backward.peak)


@dataclass
class _Balance:
    """Number of bytes that are alive, and the largest number of bytes that were alive at one time."""

    live: int = 0
    peak: int = 0

    def alloc(self, number: int) -> None:
        self.live += number
        self.peak = max(self.peak, self.live)

    def free(self, number: int) -> None:
        self.live -= number


class _StepBytes(NamedTuple):
    """Bytes of one kernel call's tensors.

    operands: (bytes, True if it is a copy) of its q, k and v.
    """

    operands: tuple[tuple[int, bool], ...]
    out: int
    lse: int

    @property
    def copied(self) -> int:
        return sum(count for count, is_copy in self.operands if is_copy)

    @property
    def part(self) -> int:
        return self.out + self.lse


def _count_kernel_backwards(
    balance: _Balance, steps: Sequence[_StepBytes], whole: Sequence[int], *, is_merged: bool
) -> None:
    """Count in `balance` the bytes that the backward allocates and frees in all steps, from the last to the first.

    The steps' gradients of q, k and v are summed. The gradient of an operand that is a copy is scattered first, so it
    is added one step later than that of an operand that is read in place.

    whole: bytes of q, k and v, and so of their gradients.
    is_merged: False if the output is itself the part of a single step. If True, the backward of a step frees the step's
        part and the part's gradient.
    """
    arrived: set[int] = set()

    def add_gradients(step: _StepBytes, *, of_copies: bool) -> None:
        for operand, (count, is_copy) in reversed(list(enumerate(step.operands))):
            if is_copy != of_copies:
                continue
            if is_copy:
                balance.alloc(whole[operand])
                balance.free(count)
            if operand in arrived:
                balance.free(whole[operand])  # added to the sum
            arrived.add(operand)

    for index, step in reversed(list(enumerate(steps))):
        balance.alloc(step.lse + sum(count for count, _ in step.operands))  # delta, and gradients of the operands
        balance.free(step.lse + step.copied + (step.part + step.out if is_merged else 0))
        add_gradients(step, of_copies=False)
        for later in steps[index + 1 : index + 2]:
            add_gradients(later, of_copies=True)
    for first in steps[:1]:
        add_gradients(first, of_copies=True)


def _step_bytes(step: FlexStep, size: AttentionSize) -> _StepBytes:
    """Return the bytes of one kernel call.

    Queries or keys are read without a copy if the kernel reads all tokens in order and none is zeroed.
    """
    by_column, (q_side, k_side) = step.mask.q_num_blocks, step.structure.sides
    assert by_column is not None
    queries = step.queries, size.num_heads, step.mask.kv_num_blocks.shape[2] * q_side, step.hidden.queries
    keys = step.keys, size.kv_heads, by_column.shape[2] * k_side, step.hidden.keys
    found = []
    for (slots, index, _), heads, length, hidden in (queries, keys):
        if slots.kind != "all":
            heads = heads * slots.numbers[0] if index.heads is None else len(index.heads)
        if slots.kind != "segments":
            length = size.num_tokens if index.token_of_slot is None else index.token_of_slot.shape[1]
        found.append((size.batch * heads * length, slots.kind != "all" or hidden is not None))
    (q, q_copied), (k, k_copied) = found
    key, value = (dim * size.dtype.itemsize for dim in size.dims)
    return _StepBytes(((q * key, q_copied), (k * key, k_copied), (k * value, k_copied)), q * value, 4 * q)
