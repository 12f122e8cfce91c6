"""ring: attention over all ranks' tokens, whose keys and values come to a rank shard by shard."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from .._engines import choose_engine
from .._placed_call import placed_engine
from ..masks import Mixture, Pattern
from ._codec_choice import CodecChoice
from ._pools import PoolChoice, name_of
from ._ranks import Ranks
from ._ring_op import ring_op
from ._sharding import Sharding

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim


def ring(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G L D"],
    v: Float[Tensor, "B G L D"],
    pattern: Pattern | Mixture,
    *,
    ranks: Ranks,
    sharding: Sharding,
    scale: float,
    sinks: Float[Tensor, " H"] | None,
    bindings: Sequence[Tensor],
    head_offset: int,
    num_heads_global: int,
    engine: str | None,
    block_size: tuple[int, ...],
    codec: CodecChoice,
    error_bound: float | None,
    pool: PoolChoice,
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"]]:
    """(out, lse) of this rank's queries over the keys of all ranks; every rank takes part, and in the backward too.

    The arguments are checked and alike on all ranks; bindings are the pattern's run-time tensors, of the whole
    sequence, in the order of their names. A shard goes straight from its owner to each rank that needs a key of it,
    while that rank computes with the one before; in the backward it goes again, and its gradients come back. The
    ranks' gradients of sinks add up to the whole.

    Two other ranks' shards are held at most. Sums are kept in float32 or wider, and added in one order. Codec "auto"
    keeps `error_bound`, for one collective of 4 bytes in each pass. Raises ValueError where the engine cannot serve
    the call, and torch.distributed.DistError where another rank fails.
    """
    features = {"score_mod": None, "sinks": None}
    chosen = choose_engine(engine, q, k, v, pattern, first=(head_offset, 0, 0), return_lse=True, **features)
    return ring_op(
        *(q, k, v, sinks, list(bindings), pattern.text, scale, head_offset, num_heads_global),
        *(placed_engine(chosen, q.device), list(block_size), list(sharding.numbers())),
        *(ranks.name, codec, 0.0 if error_bound is None else error_bound, name_of(pool)),
    )
