"""attend: attention over a sequence whose tokens are distributed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._attend import autocast
from .._engine_choice import choose_engine
from .._torch_private import graph_constant
from .._validate import (
    OTHER_KEYWORDS,
    Place,
    Scale,
    check_score_mod,
    check_sinks,
    check_sizes,
    check_zero_keys,
    expand_batch,
    run_time_tensors,
    scaled,
)
from ..engines import (
    Features,
    ScoreMod,
    fixed_score_mod,
    one_width,
    placed_engine,
    sum_dtype,
    with_padding_keys,
    with_seed,
    without_keys,
)
from ..masks import Mixture, Pattern
from ..masks.core import advises, require_bool, require_choice, require_expression
from ..masks.planning import block_sides
from ..masks.text import read_text
from ._exchange import exchange
from ._ring import ring_op
from .counts import SCHEDULES, RankSchedule, ScheduleName, choose_schedule
from .group import (
    PlainCall,
    Ranks,
    Sharding,
    check_agreement,
    check_shards,
    constant_probability,
    equal_shards,
    resolved_pattern,
    shared_dropout,
    tensor_digests,
)
from .wire import CodecChoice, PoolChoice, check_codec, codec_named, name_of

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim


@overload
def attend(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "#B G L D"],
    v: Float[Tensor, "#B G L D"],
    pattern: Pattern | Mixture,
    *,
    mesh: DeviceMesh,
    sharding: Sharding | None = None,
    schedule: ScheduleName = "auto",
    codec: CodecChoice = None,
    error_bound: float | None = None,
    pool: PoolChoice = None,
    dropout_p: float = 0.0,
    scale: Scale = None,
    enable_gqa: bool = False,
    score_mod: ScoreMod | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    bindings: Mapping[str, Tensor] | None = None,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    engine: str | None = None,
    block_size: int | tuple[int, int] | None = None,
    return_lse: Literal[False] = False,
) -> Float[Tensor, "B H L D"]: ...


@overload
def attend(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "#B G L D"],
    v: Float[Tensor, "#B G L D"],
    pattern: Pattern | Mixture,
    *,
    mesh: DeviceMesh,
    sharding: Sharding | None = None,
    schedule: ScheduleName = "auto",
    codec: CodecChoice = None,
    error_bound: float | None = None,
    pool: PoolChoice = None,
    dropout_p: float = 0.0,
    scale: Scale = None,
    enable_gqa: bool = False,
    score_mod: ScoreMod | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    bindings: Mapping[str, Tensor] | None = None,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    engine: str | None = None,
    block_size: int | tuple[int, int] | None = None,
    return_lse: Literal[True],
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"]]: ...


@advises(keywords=OTHER_KEYWORDS)
def attend(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "#B G L D"],
    v: Float[Tensor, "#B G L D"],
    pattern: Pattern | Mixture,
    *,
    mesh: DeviceMesh,
    sharding: Sharding | None = None,
    schedule: ScheduleName = "auto",
    codec: CodecChoice = None,
    error_bound: float | None = None,
    pool: PoolChoice = None,
    dropout_p: float = 0,  # an int, as torch.compile with dynamic=True recompiles for a float
    scale: Scale = None,
    enable_gqa: bool = False,
    score_mod: ScoreMod | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    bindings: Mapping[str, Tensor] | None = None,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    engine: str | None = None,
    block_size: int | tuple[int, int] | None = None,
    return_lse: bool = False,
) -> Float[Tensor, "B H L D"] | tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"]]:
    """Compute `flexdilated.attend` for a sequence whose tokens are distributed over the ranks of a mesh.

    q, k, v are this rank's shard, of L tokens; v may have another head dim E than q and k. Returns the output
    (B, H, L, E) of this rank's queries over the keys of all ranks or, if return_lse is True, (output, lse (B, H, L)).
    The pattern applies to positions in the whole sequence.

    Every rank of the mesh must make this call, and run its backward. Arguments other than the shards and `pool` must be
    equal on all ranks; the first call with these arguments compares the ones on which messages depend. Gradients are
    those of the sum of all ranks' losses.

    mesh: a DeviceMesh of one dimension, over the ranks that share the sequence; for a mesh of several dimensions, its
        slice along that dimension, such as mesh["sp"].
    sharding: which rank holds which positions; None: contiguous shards of equal length.
    schedule: "exchange" sends each key only to the ranks that need it, in one all-to-all; "ring" sends each contiguous
        range of a shard (up to two in zigzag order) whole to every rank that needs a key of it; a rank holds at most
        two shards of other ranks at once. "auto" chooses by the bytes that the most loaded rank would receive and hold.
    codec: encoding of keys and values in messages: None (their dtype), "bf16", "int8" (one scale per token and head),
        or "auto": the narrowest that surely keeps the relative error of each vector within `error_bound`; to agree on
        it, the ranks make at most one small collective in forward and backward each. Gradients are sent with at least
        16 bits per number.
    pool: source of message buffers: None (torch allocates), a `BufferPool`, or "auto", this device's default pool.
    dropout_p: as in `flexdilated.attend`. Every rank draws a seed from its generator, and all ranks use the seed of
        rank 0, sent by one broadcast of 8 bytes; the dropped pairs are those of one device with that seed.
    bindings: values, for the whole sequence, of the run-time tensors that the pattern only names, such as {"documents":
        ids}.
    score_mod: as in `flexdilated.attend`, with positions in the whole sequence, for schedules "exchange" and "auto",
        which then is "exchange". All ranks must give equal functions, which are not compared. Errors of its operations
        on scores, such as an index out of range, come after keys were sent.
    scale, enable_gqa, sinks, head_offset, num_heads_global, block_size, return_lse: as in `flexdilated.attend`.
    engine: "aten" (on CPU), "flex" or "portable"; None: as in `flexdilated.attend`.

    Gradients of sinks, of a scale and of tensors that score_mod captures are those of this rank's queries only: sum
    them over the ranks. A rank without tokens has no gradient (None) of captured tensors.

    Raises ValueError or TypeError for invalid arguments, and ValueError on all ranks if their arguments differ;
    torch.distributed.DistError, within the process group's timeout, if a rank dies or hangs. (NCCL's waits do not block
    by default; then its watchdog ends the process instead.)

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> fd.distributed.attend(q, k, v, masks.causal(), mesh=mesh).shape  # this rank's tokens
    torch.Size([1, 4, 256, 64])
    """
    require_expression(pattern)
    require_choice("schedule", schedule, SCHEDULES)
    require_bool("enable_gqa", enable_gqa)
    require_bool("return_lse", return_lse)
    dropout_p = constant_probability("dropout_p", dropout_p)
    q, k, v = expand_batch(*autocast(q, k, v))
    ranks = Ranks.of(mesh)
    shards = sharding
    if shards is None:  # any sharding will do for an invalid q: `check_shards` raises
        shards = equal_shards(q.shape[2] if isinstance(q, Tensor) and q.dim() == 4 else 1, ranks)
    check_shards(q, k, v, ranks=ranks, sharding=shards, enable_gqa=enable_gqa)
    check_sinks(sinks, q)
    check_score_mod(score_mod)
    check_zero_keys(pattern, score_mod)
    heads = index(check_sizes(pattern, q, Place(head_offset=head_offset, num_heads_global=num_heads_global)))
    tensors = run_time_tensors(pattern, bindings, batch=q.shape[0])
    check_codec(codec, error_bound, q.dtype)
    chosen = schedule
    if score_mod is not None:
        if schedule == "ring":
            raise ValueError("a ring computes parts of rows without score_mod: write schedule='exchange'")
        chosen = "exchange"
    elif schedule == "auto":
        chosen = _auto_schedule(q, k, pattern.unpadded, tensors, shards, head_offset, heads, codec)
    q, factor = scaled(q, scale, index(q.shape[-1]))  # a constant of a graph
    score_mod = fixed_score_mod(score_mod, sum_dtype(q), q.device)
    needs_lse = return_lse or pattern.pads or chosen == "ring"
    features = Features(factor, score_mod, sinks, dropout_p, return_lse=needs_lse)
    chosen_engine = placed_engine(choose_engine(engine, q, k, v, pattern, features), q.device)
    width = v.shape[-1]
    q, k, v = one_width(q, k, v)  # keys and values travel in messages of one row length
    call = PlainCall(
        pattern=pattern.unpadded.text,
        scale=factor,
        head_offset=head_offset,
        num_heads_global=heads,
        engine=chosen_engine,
        block_size=() if block_size is None else block_sides(block_size),
        sharding=shards.numbers(),
        group=ranks.name,
        codec=codec,
        error_bound=0.0 if error_bound is None else error_bound,
        pool=name_of(pool),  # raises for an invalid pool, before anything is sent
        dropout_p=dropout_p,
    )
    once = None if torch.compiler.is_compiling() else lambda: tensor_digests(pattern, tensors)
    facts = _facts(q, k, v, features, schedule, pattern.text, call)
    _check_facts((ranks.name, ranks.size, ranks.rank, ranks.device_type), call.sharding, facts, once)
    tensors, _ = with_seed(tensors, shared_dropout(dropout_p, ranks, q))
    if 0 in q.shape[:2]:  # on all ranks, so no rank waits
        out, lse = without_keys(q, k, v, sinks)
    elif chosen == "ring":
        out, lse = ring_op(q, k, v, sinks, tensors, call.constants)
    else:
        out, lse = exchange(q, k, v, tensors, call, features)
    out = out[..., :width]
    if pattern.pads and 0 not in q.shape:
        assert lse is not None
        positions, tokens = shards.positions(ranks.rank, q.device), shards.num_tokens
        out, lse = with_padding_keys(
            out, lse, pattern, positions, head_offset=head_offset, num_heads=heads, num_tokens=tokens
        )
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def _facts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    schedule: str,
    pattern: str,
    call: PlainCall,
) -> tuple[tuple[str, object], ...]:
    """Return the (name, value) pairs that the ranks compare besides the sharding and the values of run-time tensors.

    The values are hashable. Of sinks and score_mod only their presence is compared; engine, block_size and return_lse
    are not compared. Under torch.compile the sizes become constants of the graph, because messages have fixed sizes.

    pattern: in JSON, with its padding, which the pattern of `call` does not have.
    """
    inputs = (q, k, v, features.sinks)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return (
        ("schedule", schedule),
        ("pattern", pattern),
        ("batch", index(q.shape[0])),
        ("heads", index(q.shape[1])),
        ("key/value heads", index(k.shape[1])),
        ("head dim", index(q.shape[3])),
        ("dtype", str(q.dtype)),
        ("head_offset", call.head_offset),
        ("num_heads_global", call.num_heads_global),
        ("scale", call.scale),
        ("dropout_p", call.dropout_p),
        ("codec", call.codec),
        ("error_bound", call.error_bound or None),
        ("sinks", features.sinks is not None),
        ("score_mod", features.score_mod is not None),
        ("gradients wanted", wanted),
    )


@graph_constant
def _check_facts(
    place: tuple[str, int, int, str],
    sharding: tuple[int, ...],
    facts: tuple[tuple[str, object], ...],
    once: Callable[[], Mapping[str, object]] | None,
) -> None:
    check_agreement(Ranks(*place), {"sharding": Sharding.of(sharding), **dict(facts)}, once)


def _auto_schedule(
    q: Tensor,
    k: Tensor,
    pattern: Pattern | Mixture,
    bindings: list[Tensor],
    sharding: Sharding,
    head_offset: int,
    num_heads_global: int,
    codec: CodecChoice,
) -> RankSchedule:
    """Return "exchange" or "ring", chosen by the bytes that the most loaded rank would receive and hold.

    Codec "auto" counts as None. Under torch.compile the choice is a constant of the graph.

    bindings: values of the pattern's run-time tensors, sorted by name.

    Raises ValueError under torch.compile if the pattern has run-time tensors, as a trace has no values.
    """
    coded = codec_named(None if codec == "auto" else codec)  # the codec that "auto" will choose is not known yet
    head_dim = index(q.shape[3])
    sizes: dict[str, Any] = {"num_heads": index(q.shape[1]), "num_kv_heads": index(k.shape[1]), "dtype": q.dtype}
    sizes |= {"head_dim": head_dim, "head_offset": head_offset, "num_heads_global": num_heads_global}
    sizes |= {"batch": index(q.shape[0]), "wire_vector_bytes": coded.vector_bytes(head_dim, q.dtype)}
    if not bindings:
        return _schedule_as_constant(pattern.text, sharding.numbers(), tuple(sizes.items()))
    if torch.compiler.is_compiling():
        raise ValueError(
            "schedule='auto' counts with the values of run-time tensors, which a graph being compiled does not have: "
            "name 'exchange' or 'ring'"
        )
    return choose_schedule(resolved_pattern(pattern.text, bindings, sharding.num_tokens), sharding, **sizes).name


@graph_constant
def _schedule_as_constant(pattern: str, sharding: tuple[int, ...], sizes: tuple[tuple[str, Any], ...]) -> RankSchedule:
    return choose_schedule(read_text(pattern), Sharding.of(sharding), **dict(sizes)).name
