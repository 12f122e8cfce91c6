"""exchange: attention over all ranks' tokens, where every rank receives the keys that its queries need at once."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ._exchange_call import ExchangeCall
from ._exchange_op import exchange_op
from ._plain_call import PlainCall

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim


def exchange(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G L D"],
    v: Float[Tensor, "B G L D"],
    sinks: Float[Tensor, " H"] | None,
    bindings: list[Tensor],
    call: PlainCall,
    *,
    return_lse: bool,
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L"] | None]:
    """(out, lse if asked for) of this rank's queries over all ranks' keys; all take part, and in the backward too.

    `bindings` are the pattern's run-time tensors, of the whole sequence, in the order of their names. One all-to-all
    brings each (key/value head, token) that some query of this rank may attend to; the backward sends their gradients
    back in another, and owners add them up in float32 or wider. With tiles all of it is one op; other engines are
    traced, and only the transfer is an op.

    Raises ValueError where the engine cannot serve the call, and torch.distributed.DistError where another rank fails.
    """
    if call.engine != "tiles":
        return ExchangeCall(*call).traced(q, k, v, sinks, bindings, return_lse=return_lse)
    out, lse, _, _ = exchange_op(q, k, v, sinks, bindings, *call)
    return out, lse
