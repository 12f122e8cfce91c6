"""exchange: attention over all ranks' tokens, where every rank receives the keys that its queries need at once."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from ..masks import Mixture, Pattern
from ._codec_choice import CodecChoice
from ._exchange_call import ExchangeCall
from ._exchange_op import exchange_op
from ._pools import PoolChoice, name_of
from ._ranks import Ranks
from ._sharding import Sharding

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim


def exchange(
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
    engine: str,
    block_size: tuple[int, ...],
    codec: CodecChoice,
    error_bound: float | None,
    pool: PoolChoice,
    return_lse: bool,
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"] | None]:
    """(out, lse if asked for) of this rank's queries over all ranks' keys; all take part, and in the backward too.

    The arguments are checked and alike on all ranks; bindings are the pattern's run-time tensors, of the whole
    sequence, in the order of their names. One all-to-all brings each (key/value head, token) that some query of this
    rank may attend to; the backward sends their gradients back in another, and owners add them up in float32 or wider.
    With tiles all of it is one op; other engines are traced, and only the transfer is an op.

    Raises ValueError where the engine cannot serve the call, and torch.distributed.DistError where another rank fails.
    """
    options = (pattern.text, scale, head_offset, num_heads_global, engine)
    sending = (ranks.name, codec, 0.0 if error_bound is None else error_bound, name_of(pool))
    if engine != "tiles":
        call = ExchangeCall(*options, block_size, sharding.numbers(), *sending)
        return call.traced(q, k, v, sinks, list(bindings), return_lse=return_lse)
    numbers = (list(block_size), list(sharding.numbers()))
    out, lse, _, _ = exchange_op(q, k, v, sinks, list(bindings), *options, *numbers, *sending)
    return out, lse
