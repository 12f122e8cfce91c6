"""The function `attend`: checks its arguments, chooses the engine and runs the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor

from ._engine_choice import check_transforms, choose_engine
from ._torch_private import graph_constant
from ._validate import (
    OTHER_KEYWORDS,
    Place,
    Scale,
    check_kernel_options,
    check_layout,
    check_score_mod,
    check_sinks,
    check_sizes,
    check_tensors,
    check_zero_keys,
    expand_batch,
    offset_as_int,
    require_q_offset,
    run_time_tensors,
    scaled,
)
from .engines import (
    Call,
    Dropout,
    Features,
    ScoreMod,
    fixed_score_mod,
    is_transformed,
    options_text,
    run,
    sum_dtype,
    with_padding_keys,
)
from .masks import Layout, Mixture, Pattern
from .masks.core import advises, require_bool, require_expression, require_probability
from .masks.planning import block_sides
from .tuning import autotune as measure_call

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values


@overload
def attend(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "#B G M D"],
    v: Float[Tensor, "#B G M E"],
    pattern: Pattern | Mixture,
    *,
    dropout_p: float = 0.0,
    scale: Scale = None,
    enable_gqa: bool = False,
    score_mod: ScoreMod | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    bindings: Mapping[str, Tensor] | None = None,
    q_offset: int | Tensor | None = None,
    k_offset: int | Tensor = 0,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    layout: Layout | None = None,
    engine: str | None = None,
    block_size: int | tuple[int, int] | None = None,
    kernel_options: Mapping[str, bool | int | float | str] | None = None,
    autotune: bool = False,
    return_lse: Literal[False] = False,
) -> Float[Tensor, "B H N E"]: ...


@overload
def attend(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "#B G M D"],
    v: Float[Tensor, "#B G M E"],
    pattern: Pattern | Mixture,
    *,
    dropout_p: float = 0.0,
    scale: Scale = None,
    enable_gqa: bool = False,
    score_mod: ScoreMod | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    bindings: Mapping[str, Tensor] | None = None,
    q_offset: int | Tensor | None = None,
    k_offset: int | Tensor = 0,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    layout: Layout | None = None,
    engine: str | None = None,
    block_size: int | tuple[int, int] | None = None,
    kernel_options: Mapping[str, bool | int | float | str] | None = None,
    autotune: bool = False,
    return_lse: Literal[True],
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]: ...


@advises(
    keywords=OTHER_KEYWORDS,
    how="write fd.attend(q, k, v, fd.masks.causal()), or another pattern",
)
def attend(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "#B G M D"],
    v: Float[Tensor, "#B G M E"],
    pattern: Pattern | Mixture,
    *,
    dropout_p: float = 0.0,
    scale: Scale = None,
    enable_gqa: bool = False,
    score_mod: ScoreMod | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    bindings: Mapping[str, Tensor] | None = None,
    q_offset: int | Tensor | None = None,
    k_offset: int | Tensor = 0,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    layout: Layout | None = None,
    engine: str | None = None,
    block_size: int | tuple[int, int] | None = None,
    kernel_options: Mapping[str, bool | int | float | str] | None = None,
    autotune: bool = False,
    return_lse: bool = False,
) -> Float[Tensor, "B H N E"] | tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Attention of q over k and v, restricted to the (query, key) pairs that `pattern` allows: exact, differentiable.

    Returns the output (B, H, N, E) in the dtype of q or, if return_lse is True, (output, lse). The lse (B, H, N) is the
    natural log of each row's softmax denominator, in float32 (float64 for float64 inputs), and differentiable. A row
    is one query of one head; a row without keys has output 0 and lse -inf. In a mixture (a sum of patterns), a pair
    counts once for each branch that allows it. For long sequences no N x M matrix of scores is formed, except by engine
    "reference" and in models exported to ONNX. Under autocast q, k and v are cast as in `scaled_dot_product_attention`.

    If the pattern pads segments with zeros (`masks.longnet(..., padding="zeros")`), each row's softmax includes its
    zero keys; k and v must then be the whole sequence, q tokens of it, from q_offset on, and score_mod None.

    v may have another head dim E than q and k. Engines "aten" and "flash" then pad to the wider one. k and v may have
    batch 1: all batch entries of q then share them.

    dropout_p: probability, at least 0 and below 1, with which each softmax weight is set to 0, independently for each
        branch that allows the pair; kept weights are divided by 1 - dropout_p. Give 0 for inference. Dropout does not
        change the lse. The seed is drawn from torch's default generator of the device. Engines "aten" and "flash" have
        no dropout.
    scale: factor on the scores; 1 / sqrt(D) by default. A tensor of shape (H,), with a number for each head of q, or
        () may be learned.
    enable_gqa: True allows G to be a divisor of H; query head h reads key/value head h // (H / G).
    score_mod: a function (score, b, h, q_idx, k_idx) -> score, applied to each scaled score, as in FlexAttention. h is
        a global head; q_idx and k_idx are positions, with any offsets and layout. Outside torch.compile it is called
        once, here; later changes of the numbers and attributes that it reads have no effect on this call.
    sinks: a logit for each head of q, in float32, bfloat16, float16 or float64: adds exp(sink), with value 0, to the
        softmax denominator of every row. A row without keys then has output 0, and its sink as lse.
    bindings: values of the run-time tensors that the pattern only names, such as {"documents": ids}.
    q_offset: position of query 0, for queries that follow earlier tokens; an integer tensor of shape (B,) has the
        position for each batch entry, as in `pattern.queries_from`. None is 0, but raises ValueError, except under
        torch.compile, if there are fewer queries than keys and the pattern is causal.
    k_offset: position of key 0, for keys that are not the first of their sequence. Either offset may be an integer
        tensor of shape (), which is read on the host at every call; a number needs no such read.
    head_offset, num_heads_global: for heads on several devices: index of head 0 of q among the query heads of all
        devices, and the number of these heads; num_heads_global None is head_offset + H.
    layout: order of the tokens in q, k, v and the output, from `masks.layout`. None: by position.
    engine: "aten" (on CPU any pattern; on CUDA only branches that are dense or causal), "flex" (with Triton; on CPU
        only inference, without lse, sinks, dropout or a mixture), "portable" (any device; eagerly it has second
        derivatives), "flash" (the package flash-attn-4 on NVIDIA's Hopper and Blackwell, in half precision) or
        "reference" (dense, in float64). None takes aten on CPU, flex where Triton serves the device, and portable
        elsewhere and for calls that these cannot serve, such as those with dropout or a score_mod on CPU; while
        torch.onnx.export traces, it takes dense attention in plain operations. A named engine that cannot serve the
        call raises ValueError.
    block_size: tokens of a block of block-sparse masks, or (queries, keys). None: with "aten" chosen for the pattern,
        with "flash" the size that the device's kernels need, and otherwise 128 or more.
    kernel_options: options of flex_attention, such as {"BLOCK_M": 64}, for engines "flex" and "flash": plain values,
        passed on. They may not hold BACKEND, which engine determines, nor options that the block lists and
        lengths of the call determine.
    autotune: True to time the planner's token orders and block sizes, unless that was done for an equal call, and use
        the fastest from then on, also in equal calls without autotune. It needs engine "aten" or "flex", and takes no
        layout and no run-time tensors. Inside torch.compile nothing is timed, and earlier results are used.

    Raises ValueError or TypeError for inputs that do not fit together.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> pattern = masks.local_window(left=31, right=0)
    >>> fd.attend(q, k, v, pattern).shape
    torch.Size([1, 4, 256, 64])
    >>> out, lse = fd.attend(q, k, v, pattern, return_lse=True)
    """
    if isinstance(q, Pattern | Mixture):
        raise TypeError("attend takes (q, k, v, pattern), the pattern last; got a pattern as q")
    require_expression(pattern)
    q, k, v = expand_batch(*autocast(q, k, v))
    check_tensors(q, k, v, enable_gqa=enable_gqa)
    check_sinks(sinks, q)
    check_score_mod(score_mod)
    dropout_p = require_probability("dropout_p", dropout_p)
    require_bool("return_lse", return_lse)
    if q_offset is None:
        require_q_offset(pattern, q.shape[2], k.shape[2])
        q_offset = 0
    if isinstance(q_offset, Tensor) and q_offset.dim() == 1:
        pattern, score_mod = _queries_from(pattern, score_mod, q_offset, q.device)
        q_offset = 0
    first = offset_as_int("q_offset", q_offset), offset_as_int("k_offset", k_offset)
    place = Place(*first, head_offset, num_heads_global, layout, block_size)
    check_zero_keys(pattern, score_mod, q.shape[2], k.shape[2], place)
    q, call, tensors, factor = checked_call(q, k, pattern, place, scale, bindings)
    score_mod = fixed_score_mod(score_mod, torch.float64 if engine == "reference" else sum_dtype(q), q.device)
    features = Features(factor, score_mod, sinks, dropout_p, return_lse=return_lse or pattern.pads)
    chosen = choose_engine(engine, q, k, v, pattern, features, call.block_size)
    if tensors and chosen != "reference" and is_transformed():
        check_transforms(tensors)  # torch does not look for vmapped tensors in optional lists
    given = check_kernel_options(kernel_options, (engine or "flex") if q.is_meta else chosen)
    if require_bool("autotune", autotune) and not torch.compiler.is_compiling() and not q.is_meta:
        measure_call(call, q, k, v, engine=chosen, has_bindings=bool(tensors))
    seed = Dropout.drawn(dropout_p, q.device).seed if features.drops else None
    features = features._replace(seed=seed, kernel_options=options_text(given))
    out, lse = run(chosen, q, k, v, tensors, call, features)
    if pattern.pads and 0 not in q.shape:
        assert lse is not None
        out, lse = _with_zero_keys(out, lse, pattern, call)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def _queries_from(
    pattern: Pattern | Mixture, score_mod: ScoreMod | None, starts: Tensor, device: torch.device
) -> tuple[Pattern | Mixture, ScoreMod | None]:
    """Return (pattern, score_mod) in which query i of batch entry b is at position starts[b] + i.

    starts: integers (B,), or (1,) for all batch entries.
    """
    moved = pattern.queries_from(starts, name="q_offset")
    if score_mod is None:
        return moved, None
    # A copy: the backward needs these positions, also if the caller has moved on.
    first, step = starts.to(device, copy=True), int(len(starts) > 1)
    return moved, lambda score, b, h, q, k: score_mod(score, b, h, q + first[b * step], k)


def checked_call(
    q: Tensor,
    k: Tensor,
    pattern: Pattern | Mixture,
    place: Place,
    scale: Scale,
    bindings: Mapping[str, Tensor] | None,
) -> tuple[Tensor, Call, list[Tensor], float]:
    """Return (q, `Call`, run-time tensors, factor on the scores) for these arguments of `attend`, after checking them.

    The `Call` has the pattern, without zero padding, and the sizes. If scale is a tensor, the returned q is multiplied
    by it, and the factor is 1. The run-time tensors, of the pattern or of `bindings`, are sorted by name; for a q on
    the meta device the list is empty.
    """
    heads = check_sizes(pattern, q, place)
    check_layout(place.layout, q, k)
    tensors = run_time_tensors(pattern, bindings, batch=q.shape[0], has_values=not q.is_meta)
    call = Call.at(
        q,
        k,
        pattern.unpadded.text,
        num_heads_global=heads,
        head_offset=place.head_offset,
        q_offset=place.q_offset,
        k_offset=place.k_offset,
        rate=1 if place.layout is None else place.layout.rate,
        block_size=() if place.block_size is None else block_sides(place.block_size),
    )
    q, factor = scaled(q, scale, q.shape[-1])
    return q, call, tensors, factor


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q, k, v), cast to the dtype of autocast if it is enabled for the device of q.

    Only floating-point tensors are cast, and float64 is not. If one of the three is no tensor, all are returned
    unchanged.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return q, k, v  # later checks refuse other types
    dtype = autocast_dtype(q.device)
    if dtype is None:
        return q, k, v
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast casts on this kind of device; None if autocast is off or unavailable."""
    if not _knows_autocast(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


@graph_constant
def _knows_autocast(kind: str) -> bool:
    # torch.compile runs this function and takes the result as a constant, as torch 2.11 cannot trace it.
    return torch.amp.is_autocast_available(kind)


def _with_zero_keys(out: Tensor, lse: Tensor, pattern: Pattern | Mixture, call: Call) -> tuple[Tensor, Tensor]:
    """Return (out, lse) with the zero keys of the pattern's padding (score 0, value 0) added to each row's softmax."""
    slots = torch.arange(call.num_queries, device=out.device) if call.rate == 1 else call.layout.positions(out.device)
    return with_padding_keys(
        out,
        lse,
        pattern,
        slots + call.q_offset,
        head_offset=call.head_offset,
        num_heads=call.num_heads_global,
        num_tokens=call.num_keys,
    )
