"""Triton kernels of attention over lists of single keys; they copy no keys.

A program computes one query, for some query heads that share its list and a key/value head. It loads a few of the
listed keys and values at a time, from k and v themselves.
"""

# Triton comes with PyTorch only where it serves a device; functions that it compiles bind names in some branches only.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from ._key_lists import ListedPart

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LOG2_E = tl.constexpr(1.4426950408889634)


def attend_part(
    part: ListedPart,
    scale: float,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M E"],
    out: Float[Tensor, "B H N E"],
    lse: Float[Tensor, "B H N"],
) -> None:
    """Write the output and natural lse of the part's queries to out and lse; 0 and -inf for queries without keys.

    The last dims of q, k, v and out must be contiguous.
    """
    sizes = _Sizes.of(part, q, k, v, backward=False)
    with torch.get_device_module(q.device).device(q.device.index):
        _forward[sizes.grid](
            *(q, k, v, out, lse, part.keys, part.begins, part.counts, scale),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()),
            *sizes.numbers,
            **sizes.constants,
        )


def add_gradients_of_part(
    part: ListedPart,
    scale: float,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M E"],
    grad_out: Float[Tensor, "B H N E"],
    lse: Float[Tensor, "B H N"],
    delta: Float[Tensor, "B H N"],
    dq: Float[Tensor, "B H N D"],
    dk: Float[Tensor, "B G M D"],
    dv: Float[Tensor, "B G M E"],
) -> None:
    """Write the gradients of the part's queries to dq; add the gradients of its keys and values to float32 dk and dv.

    The additions are atomic, in no fixed order. The last dims of all 4-dimensional tensors must be contiguous.

    lse, delta (see `WholeRows`): of the queries over all their keys; lse is inf for queries without keys.
    """
    sizes = _Sizes.of(part, q, k, v, backward=True)
    rows = lse.contiguous(), delta.contiguous()
    with torch.get_device_module(q.device).device(q.device.index):
        _backward[sizes.grid](
            *(q, k, v, grad_out, *rows, dq, dk, dv, part.keys, part.begins, part.counts, scale),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad_out.stride()[:3], *rows[0].stride()),
            *(*dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3]),
            *sizes.numbers,
            **sizes.constants,
        )


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a launch.

    grid: number of programs, as a tuple of one.
    numbers: arguments of the kernels, in the order of `_NUMBERS`.
    constants: compile-time arguments by name: head dims and their parts, heads and keys at a time, warps and stages.
    """

    grid: tuple[int]
    numbers: tuple[int, ...]
    constants: dict[str, int]

    @classmethod
    def of(cls, part: ListedPart, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> _Sizes:
        (batch, heads, _, dim), (_, groups, keys, _), v_dim = q.shape, k.shape, v.shape[3]
        entries, tables, queries = part.shape
        sets = lcm(tables, groups)
        of_set = heads // sets
        average = len(part.keys) // max(1, len(part.counts))
        blocks = _program_sizes(q.dtype, (dim, v_dim), _shared_bytes(q.device.index), backward=backward)
        assert blocks is not None, "see `serves`"
        at_once = min(blocks[0], max(16, triton.next_power_of_2(of_set)))
        programs = -(-of_set // at_once)
        numbers = (part.first, queries, keys, sets, sets // tables, sets // groups, programs, of_set)
        (main, rest), (v_main, v_rest) = _split_head_dim(dim), _split_head_dim(v_dim)
        constants = {"DIM": dim, "MAIN": main, "REST": rest, "V_DIM": v_dim, "V_MAIN": v_main, "V_REST": v_rest}
        constants |= {"HEADS": at_once, "KEYS": min(blocks[1], max(16, triton.next_power_of_2(average)))}
        constants |= {"num_warps": blocks[2], "num_stages": blocks[3]}
        return cls((batch * sets * queries * programs,), (*numbers, tables if entries > 1 else 0), constants)


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if the kernels support the dtypes and the head dims of these tensors on their device."""
    dims = q.shape[3], v.shape[3]
    return (
        q.dtype in _DTYPES
        and q.dtype == k.dtype == v.dtype
        and _program_sizes(q.dtype, dims, _shared_bytes(q.device.index), backward=True) is not None
    )


def _program_sizes(
    dtype: torch.dtype, dims: tuple[int, int], shared_bytes: int, *, backward: bool
) -> tuple[int, int, int, int] | None:
    """Return (heads, keys at a time, warps, stages) of a program with these head dims; None if none fits shared_bytes.

    heads and keys start from sizes for the dtype and head dims, and are halved until the program fits, down to 16.

    dims: head dims of (queries and keys, values).
    """
    # Sizes for which ptxas spills few registers on compute capability 9.0.
    size, (dim, v_dim), width = dtype.itemsize, dims, max(dims)
    if size == 2:
        heads, (keys, warps, stages) = 32 if backward else 64, (64, 4, 2) if width <= 128 else (32, 8, 1)
    elif width <= 64:
        heads, warps, (keys, stages) = 16, 4, (32, 1) if backward else (64, 2)
    else:
        heads, keys, warps, stages = 16, 16 if backward or width > 256 else 32, 8, 1
    while True:
        numbers = heads * dim + keys * stages * (dim + v_dim) + heads * keys
        if backward:
            numbers += heads * (v_dim + keys) + keys * width
        if size * numbers <= shared_bytes:
            return heads, keys, warps, stages
        if heads == keys == 16:
            return None
        heads, keys = (heads // 2, keys) if heads >= keys and heads > 16 else (heads, keys // 2)


@lru_cache
def _shared_bytes(device: int) -> int:
    """Return the bytes of shared memory that a program can have."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def _split_head_dim(dim: int) -> tuple[int, int]:
    """Return (a, b) with a + b >= dim: a is a power of two of at least 16, as tl.dot needs, and b is one too or 0."""
    main = max(16, 1 << dim.bit_length() - 1)
    return main, max(16, triton.next_power_of_2(dim - main)) if dim > main else 0


# first: index of the first query. keys_of_call: number of keys. sets: number of head sets, each of `of_set` heads that
# share a list and a key/value head; sets_a_table, sets_a_group: head sets of each table, of each key/value head.
# programs: number for each query of a head set. tables: number of tables, or 0 if all batch entries share lists.
_NUMBERS = ["first", "queries", "keys_of_call", "sets", "sets_a_table", "sets_a_group", "programs", "of_set", "tables"]


@triton.jit
def _place(first, queries, sets, sets_a_table, sets_a_group, programs, of_set, tables, HEADS: tl.constexpr):
    """Return (batch entry, query, query heads, mask of existing heads, key/value head, index of list) of a program."""
    at = tl.program_id(0)
    program, query, user = at % programs, at // programs % queries, at // programs // queries
    entry, head_set = user // sets, user % sets
    in_set = program * HEADS + tl.arange(0, HEADS)
    own = (entry * tables + head_set // sets_a_table) * queries + query
    return entry.to(tl.int64), first + query, head_set * of_set + in_set, in_set < of_set, head_set // sets_a_group, own


@triton.jit
def _load_key_indices(keys, place, count, keys_of_call):
    """Return (keys at these places of a list, mask of keys that exist in the call and do not repeat the key before).

    Places after the end of the list have key -1.
    """
    key = tl.load(keys + place, place < count, other=-1).to(tl.int64)
    before = tl.load(keys + place - 1, (place > 0) & (place < count), other=-1).to(tl.int64)
    return key, (key >= 0) & (key < keys_of_call) & (key != before)


@triton.jit
def _load(x, offset, there, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Return channels FIRST to FIRST + WIDTH - 1 of the vectors of x at `offset`.

    The result is 0 in channels from DIM on, and where `there` is False.
    """
    channel = FIRST + tl.arange(0, WIDTH)
    return tl.load(x + offset[:, None] + channel[None], there[:, None] & (channel < DIM)[None], other=0.0)


@triton.jit
def _store(x, offset, there, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    channel = FIRST + tl.arange(0, WIDTH)
    at = x + offset[:, None] + channel[None]
    tl.store(at, values.to(x.dtype.element_ty), there[:, None] & (channel < DIM)[None])


@triton.jit
def _add(x, offset, there, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    channel = FIRST + tl.arange(0, WIDTH)
    at = x + offset[:, None] + channel[None]
    tl.atomic_add(at, values, there[:, None] & (channel < DIM)[None], sem="relaxed")


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")  # float32 is not rounded


@triton.jit(do_not_specialize=_NUMBERS)
def _forward(
    q, k, v, out, lse, keys, begins, counts, scale,
    q_b, q_h, q_n, k_b, k_g, k_m, v_b, v_g, v_m, out_b, out_h, out_n, lse_b, lse_h, lse_n,
    first, queries, keys_of_call, sets, sets_a_table, sets_a_group, programs, of_set, tables,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    V_DIM: tl.constexpr, V_MAIN: tl.constexpr, V_REST: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    b, n, h, exists, g, own = _place(first, queries, sets, sets_a_table, sets_a_group, programs, of_set, tables, HEADS)
    begin, count = tl.load(begins + own), tl.load(counts + own)
    row = b * q_b + h.to(tl.int64) * q_h + n.to(tl.int64) * q_n
    main = _load(q, row, exists, 0, MAIN, DIM)
    if REST:
        rest = _load(q, row, exists, MAIN, REST, DIM)
    k += b * k_b + g.to(tl.int64) * k_g
    v += b * v_b + g.to(tl.int64) * v_g
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, V_MAIN], tl.float32)
    if V_REST:
        rest_sums = tl.zeros([HEADS, V_REST], tl.float32)
    for start in range(0, count, KEYS):
        key, there = _load_key_indices(keys + begin, start + tl.arange(0, KEYS), count, keys_of_call)
        scores = _dot(main, tl.trans(_load(k, key * k_m, there, 0, MAIN, DIM)))
        if REST:
            scores += _dot(rest, tl.trans(_load(k, key * k_m, there, MAIN, REST, DIM)))
        scores = tl.where(there[None], scores * (scale * _LOG2_E), float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        weights, kept = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        total = total * kept + tl.sum(weights, 1)
        weights = weights.to(v.dtype.element_ty)
        sums = sums * kept[:, None] + _dot(weights, _load(v, key * v_m, there, 0, V_MAIN, V_DIM))
        if V_REST:
            rest_sums = rest_sums * kept[:, None] + _dot(weights, _load(v, key * v_m, there, V_MAIN, V_REST, V_DIM))
        top = new
    some = tl.where(total == 0, 1.0, total)
    row = b * out_b + h.to(tl.int64) * out_h + n.to(tl.int64) * out_n
    _store(out, row, exists, sums / some[:, None], 0, V_MAIN, V_DIM)
    if V_REST:
        _store(out, row, exists, rest_sums / some[:, None], V_MAIN, V_REST, V_DIM)
    natural = tl.where(total == 0, float("-inf"), (top + tl.log2(some)) / _LOG2_E)
    tl.store(lse + b * lse_b + h.to(tl.int64) * lse_h + n.to(tl.int64) * lse_n, natural, exists)


@triton.jit(do_not_specialize=_NUMBERS)
def _backward(
    q, k, v, grad_out, lse, delta, dq, dk, dv, keys, begins, counts, scale,
    q_b, q_h, q_n, k_b, k_g, k_m, v_b, v_g, v_m, grad_b, grad_h, grad_n, lse_b, lse_h, lse_n,
    dq_b, dq_h, dq_n, dk_b, dk_g, dk_m, dv_b, dv_g, dv_m,
    first, queries, keys_of_call, sets, sets_a_table, sets_a_group, programs, of_set, tables,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    V_DIM: tl.constexpr, V_MAIN: tl.constexpr, V_REST: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    b, n, h, exists, g, own = _place(first, queries, sets, sets_a_table, sets_a_group, programs, of_set, tables, HEADS)
    begin, count = tl.load(begins + own), tl.load(counts + own)
    h, n, g = h.to(tl.int64), n.to(tl.int64), g.to(tl.int64)
    row, grad_row = b * q_b + h * q_h + n * q_n, b * grad_b + h * grad_h + n * grad_n
    main, grad = _load(q, row, exists, 0, MAIN, DIM), _load(grad_out, grad_row, exists, 0, V_MAIN, V_DIM)
    if REST:
        rest = _load(q, row, exists, MAIN, REST, DIM)
        dq_rest = tl.zeros([HEADS, REST], tl.float32)
    if V_REST:
        grad_rest = _load(grad_out, grad_row, exists, V_MAIN, V_REST, V_DIM)
    of_row = b * lse_b + h * lse_h + n * lse_n
    base = tl.load(lse + of_row, exists, other=float("inf")) * _LOG2_E
    less = tl.load(delta + of_row, exists, other=0.0)
    k += b * k_b + g * k_g
    v += b * v_b + g * v_g
    dk += b * dk_b + g * dk_g
    dv += b * dv_b + g * dv_g
    dq_main = tl.zeros([HEADS, MAIN], tl.float32)
    for start in range(0, count, KEYS):
        key, there = _load_key_indices(keys + begin, start + tl.arange(0, KEYS), count, keys_of_call)
        k_main = _load(k, key * k_m, there, 0, MAIN, DIM)
        scores = _dot(main, tl.trans(k_main))
        of_weights = _dot(grad, tl.trans(_load(v, key * v_m, there, 0, V_MAIN, V_DIM)))
        if REST:
            k_rest = _load(k, key * k_m, there, MAIN, REST, DIM)
            scores += _dot(rest, tl.trans(k_rest))
        if V_REST:
            of_weights += _dot(grad_rest, tl.trans(_load(v, key * v_m, there, V_MAIN, V_REST, V_DIM)))
        scores = tl.where(there[None], scores * (scale * _LOG2_E), float("-inf"))
        weights = tl.exp2(scores - base[:, None])
        of_scores = (weights * (of_weights - less[:, None]) * scale).to(k.dtype.element_ty)
        weights = tl.trans(weights.to(grad.dtype))
        _add(dv, key * dv_m, there, _dot(weights, grad), 0, V_MAIN, V_DIM)
        _add(dk, key * dk_m, there, _dot(tl.trans(of_scores), main), 0, MAIN, DIM)
        dq_main += _dot(of_scores, k_main)
        if V_REST:
            _add(dv, key * dv_m, there, _dot(weights, grad_rest), V_MAIN, V_REST, V_DIM)
        if REST:
            _add(dk, key * dk_m, there, _dot(tl.trans(of_scores), rest), MAIN, REST, DIM)
            dq_rest += _dot(of_scores, k_rest)
    row = b * dq_b + h * dq_h + n * dq_n
    _store(dq, row, exists, dq_main, 0, MAIN, DIM)
    if REST:
        _store(dq, row, exists, dq_rest, MAIN, REST, DIM)
