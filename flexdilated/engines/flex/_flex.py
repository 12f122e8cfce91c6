"""The flex engine: runs a plan as gathers, FlexAttention with a BlockMask for each term, and one merge by lse."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from math import log
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad

from ..._torch_private import equal_sizes_apart
from ...masks.core import Recorded, device_kind
from .._features import Features
from .._merge import merge, sum_of, without_keys
from .._operands import within_reach
from .._ops import own_op
from .._score_mod import plain_function
from ._kernel_call import Kernel, are_whole_blocks, call_kernel, is_flash
from ._program import FlexProgram, FlexStep, Tables, tables_of, unpack_tables
from ._slots import SideGather
from ._traced import allow_gathers_in_graph

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

# Number of functions passed to torch.compile, by device type.
_num_compiled: Counter[str] = Counter()


def run_flex(
    program: FlexProgram,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    features: Features,
    kernel: Kernel | None = None,
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"] | None]:
    """Return (out, natural lse) of attention by a FlexProgram; the lse is None without `features.return_lse`.

    The program's terms are gathered, computed and merged by a function that is compiled for the program's structure and
    the `compilation_key`. In a traced graph, the function's operations become part of the graph. Pairs that dropout
    drops are left out of the softmax and of the lse; out is not divided by 1 - dropout_p.

    kernel: function to call in place of flex_attention, without compilation; None for flex_attention.

    Raises ValueError if the program has steps for other numbers of heads, and RuntimeError if the function to compile
    runs uncompiled.
    """
    returns_lse, sinks = features.return_lse, features.sinks
    if not program.steps:
        out, lse = without_keys(q, k, v, sinks)
        return out, lse if returns_lse else None
    if kernel is None and not device_kind(q.device).flex_trains:
        q, k = _pad_head_dim(q), _pad_head_dim(k)
    # FlexAttention has no lse on CPU. Elsewhere an unused lse is cheap, while a second compiled function is not.
    needs_lse = returns_lse or program.shares_rows or sinks is not None or device_kind(q.device).flex_trains
    features = features._replace(return_lse=needs_lse)
    if kernel is None and not torch.compiler.is_compiling():
        call = compiled_flex(program.structure, q.device)
        sides = [step.structure.sides for step in program.steps]
        compiled = call(compilation_key(q, k, v, features, sides))
        tables = program.packed, program.sizes
        out, lse = compiled(program.steps, tables, program.enter, q, k, v, *as_arguments(features))
    else:
        found = [tables_of(step) for step in program.steps]
        out, lse = _run_steps(program.steps, found, program.enter, q, k, v, features, kernel or flex_in_graph)
    return out, lse if returns_lse else None


def as_arguments(features: Features) -> tuple[Any, ...]:
    """Return the fields of the features, in their order, as arguments of a compiled function.

    scale and dropout_p become text, so that they are constants of the function's graph; a `Recorded` score_mod becomes
    its plain function.
    """
    score_mod = None if features.score_mod is None else plain_function(features.score_mod)
    return repr(features.scale), score_mod, features.sinks, repr(features.dropout_p), *features[4:]


def from_arguments(scale: str, score_mod: Any, sinks: Any, dropout_p: str, *others: Any) -> Features:
    """Return the Features whose `as_arguments` are these values; their score_mod is a plain function or None."""
    return Features(float(scale), score_mod, sinks, float(dropout_p), *others)


def compilation_key(q: Tensor, k: Tensor, v: Tensor, features: Features, blocks: Sequence[tuple[int, int]]) -> Hashable:
    """Return the key of a compiled function, beside its device and the structure of its program.

    The key has the dtype, the gradient modes, which of q, k and v get a gradient, and the features without their
    tensors. On CPU it also has the shapes of q and k. On accelerators it has instead the numbers of heads, the head
    dim, True for a batch of 1, and for each kernel call True if the numbers of queries and keys are multiples of the
    block's.

    blocks: (queries, keys) of a block, for each kernel call.
    """
    if not device_kind(q.device).flex_trains:  # C++ code for dynamic sizes may fail to compile
        sizes: Hashable = (q.shape, k.shape)
    else:
        whole = [are_whole_blocks((q.shape[2], k.shape[2]), sides) for sides in blocks]
        sizes = (q.shape[0] == 1, q.shape[1], k.shape[1], q.shape[3], *whole)
    scale, score_mod, sinks, dropout_p, _, needs_lse, kernel_options = features
    operations = score_mod.build if isinstance(score_mod, Recorded) else score_mod
    differentiated = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), needs_lse, sinks is None
    return (sizes, q.dtype, scale, dropout_p, kernel_options, *differentiated, *modes, operations)


@lru_cache(maxsize=256)
def compiled_flex(
    structure: Hashable, device: torch.device, function: FunctionType | None = None
) -> Callable[[Hashable], Kernel]:
    """Return a function that maps a `compilation_key` to the compiled function for programs of this structure.

    The returned functions and the compiled functions are kept in LRU caches.

    structure: key of a program, such as `FlexProgram.structure`.
    function: code to compile; None for the code that runs a FlexProgram.
    """

    @lru_cache(maxsize=64)
    def compiled_for(key: Hashable) -> Kernel:
        return _compile(device, _call_program if function is None else function)

    return compiled_for


def _pad_head_dim(x: Tensor) -> Tensor:
    """Return x for CPU kernels: head dims below 24 are padded to 24 with zeros."""
    # For smaller head dims torch's template (2.11 to 2.15) multiplies 16 keys at once even if a partial block ends at a
    # smaller multiple of the vector length, such as 8 floats: it reads beyond the keys and overwrites the maxima of the
    # first queries, whose results become 0 or NaN.
    return pad(x, (0, 24 - x.shape[-1])) if x.shape[-1] < 24 else x


def _compile(device: torch.device, function: FunctionType) -> Kernel:
    allow_gathers_in_graph()
    _num_compiled[device.type] += 1
    # Its own code object: torch counts recompilations per code object, and stops compiling at a limit.
    code = function.__code__.replace(co_name=f"flex_attention_{_num_compiled.total()}_on_{device.type}")
    own = FunctionType(code, function.__globals__, code.co_name)
    if not device_kind(device).flex_trains:
        return torch.compile(own, fullgraph=True, dynamic=False)
    options = {"combo_kernels": True, "guard_filter_fn": _guards_to_check}
    compiled = torch.compile(own, fullgraph=True, dynamic=True, options=options)

    def call(*arguments: Any) -> Any:
        with equal_sizes_apart():
            return compiled(*arguments)

    return call


def _guards_to_check(guards: Sequence[Any]) -> list[bool]:
    """Return, for each guard, whether it is checked: guards on a program's modules are not."""
    # The numbers are part of the key under which the compiled function is cached.
    modules = "L['steps']", "L['enter']", "L['sizes']"
    return [
        not (guard.orig_guard.source.is_unspecialized_nn_module() and guard.name.startswith(modules))
        for guard in guards
    ]


def require_compiling() -> None:
    """Raise RuntimeError if a function meant for torch.compile runs uncompiled."""
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "engine 'flex' needs torch.compile, which is switched off here or gave up (TORCH_COMPILE_DISABLE, "
            "TORCHDYNAMO_DISABLE, set_stance and suppress_errors do that): uncompiled, flex_attention forms all pairs. "
            "On CPU engine='aten' compiles nothing; engine='reference' is dense, for small inputs"
        )


def _call_program(steps, tables, enter, q, k, v, *features):
    require_compiling()
    packed, sizes = tables
    if packed is None:
        found = [tables_of(step) for step in steps]
    else:
        found = unpack_tables(packed, [step.structure.lead for step in steps], sizes)
    return _run_steps(steps, found, enter, q, k, v, from_arguments(*features), flex_in_graph)


def _run_steps(
    steps: Sequence[FlexStep],
    tables: Sequence[Tables],
    enter: tuple[SideGather, SideGather] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    kernel: Kernel,
) -> tuple[Tensor, Tensor | None]:
    """Return (out in q's dtype, natural lse) of a program's steps, of which there is at least one, merged by lse.

    tables: block tables of each step.
    enter: `FlexProgram.enter`; None if q, k and v are in the plan's order of tokens.

    Without `features.return_lse` the lse is None, sinks are ignored, and steps must share no rows: outputs are added.

    Raises ValueError if the steps are for other numbers of heads.
    """
    if (q.shape[1], k.shape[1]) != steps[0].structure.heads:  # the check makes head counts constants of the graph
        raise ValueError(
            f"the program is for {steps[0].structure.heads} query and key/value heads; got {q.shape[1]} and "
            f"{k.shape[1]}: make a program for these numbers"
        )
    tokens, dtype = q.shape[2], q.dtype
    q, k, v = in_plan_order(enter, q, k, v)
    found = [_run_step(step, own, q, k, v, features, kernel) for step, own in zip(steps, tables, strict=True)]

    def whole(x: Tensor, step: FlexStep, empty: float) -> Tensor:
        return step.structure.queries.put(x, step.queries.rows, step.queries.start, tokens, empty)

    # The lses first: in another order the compiler keeps one more tensor of the output's size for the backward.
    lses = [whole(lse, step, -torch.inf) for (_, lse), step in zip(found, steps, strict=True) if lse is not None]
    parts = [whole(part, step, 0.0) for (part, _), step in zip(found, steps, strict=True)]
    if features.return_lse:
        sinks = [] if features.sinks is None else [features.sinks[:, None]]
        out, lse = merge(list(zip(parts, lses, strict=True)), sinks)
    else:
        out, lse = sum_of(parts), None
    if enter is not None:
        slots, rows, _ = enter[0]
        out = slots.put(out, rows, 0, tokens, 0.0)
        lse = None if lse is None else slots.put(lse, rows, 0, tokens, -torch.inf)
    return out.to(dtype), lse


def _run_step(
    step: FlexStep,
    tables: Tables,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    kernel: Kernel,
) -> tuple[Tensor, Tensor | None]:
    structure, hidden = step.structure, step.hidden
    q, k, v = operands_of(step, tables, q, k, v)
    q, k, v = (within_reach(x, is_flash=is_flash(features.kernel_options)) for x in (q, k, v))
    score_mod, dropout = features.score_mod, features.dropout
    if dropout is not None:
        score_mod = dropout.dropping_score_mod(structure.places, score_mod)
    if score_mod is not None:
        score_mod = step.indices.at_positions(score_mod)
    out, lse = call_kernel(
        kernel,
        q,
        k,
        v,
        tables,
        step.mask.mask_mod,
        sides=structure.sides,
        features=features._replace(score_mod=score_mod),
        is_complex=structure.is_complex,
    )
    # Results of hidden slots are cleared too, so that no gradient of them, which may be NaN, reaches the kernel.
    out = hidden.clear_queries(out, dim=2)
    if lse is None:
        return out, None
    lse = lse if structure.multiplicity == 1 else lse + log(structure.multiplicity)
    return out, hidden.clear_queries(lse, dim=2, value=-torch.inf)


def in_plan_order(
    enter: tuple[SideGather, SideGather] | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q, k, v) in the plan's order of tokens, gathered by `FlexProgram.enter`; unchanged if `enter` is None."""
    if enter is None:
        return q, k, v
    queries, keys = enter
    q = queries.slots.take(q, queries.rows, 0, q.shape[2])
    k, v = (keys.slots.take(x, keys.rows, 0, x.shape[2]) for x in (k, v))
    return q, k, v


def operands_of(step: FlexStep, tables: Tables, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a step's (queries, keys, values), gathered from q, k and v; hidden slots are 0.

    tables: the step's block tables, whose shapes give the numbers of slots.
    q, k, v: in the plan's order of tokens.
    """
    structure, hidden = step.structure, step.hidden
    rows, columns = tables["kv_num_blocks"].shape[2], tables["q_num_blocks"].shape[2]
    (queries, q_rows, q_start), (keys, k_rows, k_start) = step.queries, step.keys
    q = hidden.clear_queries(queries.take(q, q_rows, q_start, rows * structure.sides[0]), dim=2)
    k, v = (hidden.clear_keys(keys.take(x, k_rows, k_start, columns * structure.sides[1]), dim=2) for x in (k, v))
    return q, k, v


def flex_in_graph(q, k, v, **options):
    if device_kind(q.device).flex_trains:
        return flex_attention(q, k, v, **options)
    # The CPU kernel needs whole buffers as inputs, and no later operation may be fused with it.
    return _own_buffer(flex_attention(*(_own_buffer(x) for x in (q, k, v)), **options))


@own_op("flexdilated::own_buffer")
def _own_buffer(x: Tensor) -> Tensor:
    # Inductor's CPU template for FlexAttention reads the shape of the buffer behind a view, instead of the view's.
    return x.clone(memory_format=torch.contiguous_format)


@_own_buffer.register_fake
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def missing_compiler() -> str | None:
    """Return a message that no C++ compiler is found, which inductor needs for CPU kernels; None if there is one."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    found = any(shutil.which(name) for name in names)
    return None if found else f"no C++ compiler found (looked for {', '.join(names)})"
