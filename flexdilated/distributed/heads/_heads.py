"""Head parallelism: each rank receives the whole sequence of some heads, attends, and returns the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..._attend import attend, autocast
from ..._engines import choose_engine
from ..._validate import check_sinks, check_sizes, check_zero_keys, resolve_scale, run_time_tensors
from ...engines import CallKey, ScoreMod, nothing, padded_rows, tiles
from ...masks import Mixture, Pattern
from ...masks.core import require_expression
from ...masks.planning import block_sides
from ..group import Ranks, Sharding, check_shards
from ._op import encoded, heads_to_tokens, tokens_to_heads

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim


@dataclass(frozen=True)
class HeadSplit:
    """Heads of each rank: H / W query heads, and the key/value heads that they read.

    With fewer key/value heads than ranks, several ranks share one. Raises ValueError unless W divides H.
    """

    num_heads: int
    num_kv_heads: int
    num_ranks: int

    def __post_init__(self) -> None:
        H, W = self.num_heads, self.num_ranks
        if H % W:
            fitting = [str(number) for number in range(1, H + 1) if H % number == 0]
            raise ValueError(
                f"head parallelism needs a number of query heads that is a multiple of the number of ranks; got {H} "
                f"heads and {W} ranks: {H} heads go on {' or '.join(fitting)} ranks, and schedule='exchange' or 'ring' "
                "takes any number"
            )

    @property
    def queries(self) -> tuple[range, ...]:
        """Query heads of each rank."""
        share = self.num_heads // self.num_ranks
        return tuple(range(rank * share, (rank + 1) * share) for rank in range(self.num_ranks))

    @property
    def keys(self) -> tuple[range, ...]:
        """Key/value heads of each rank."""
        group = self.num_heads // self.num_kv_heads
        return tuple(range(heads[0] // group, heads[-1] // group + 1) for heads in self.queries)

    def read_by(self, rank: int) -> list[int]:
        """For each query head of a rank, the index of its key/value head within `keys[rank]`."""
        group, first = self.num_heads // self.num_kv_heads, self.keys[rank].start
        return [head // group - first for head in self.queries[rank]]


def attend_heads(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G L D"],
    v: Float[Tensor, "B G L D"],
    pattern: Pattern | Mixture,
    *,
    ranks: Ranks,
    sharding: Sharding,
    scale: float | None = None,
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
    """`attend` over a sequence distributed as `sharding` says; takes this rank's tokens and returns their rows.

    Uses two all-to-alls, and two in the backward. A rank computes H / W heads over the whole sequence, so any pattern
    and engine serve; the load is balanced if the rules of the heads have equal work. Bindings and padding are for the
    whole sequence, sinks for all heads of q; head_offset counts heads of other devices, as in `attend`. The gradients
    of sinks must be summed over the ranks. Raises ValueError unless W divides H.
    """
    padded = require_expression(pattern)
    pattern, needs_lse = pattern.unpadded, return_lse or pattern.pads
    q, k, v = autocast(q, k, v)
    check_shards(q, k, v, ranks=ranks, sharding=sharding, enable_gqa=enable_gqa)
    check_sinks(sinks, q)
    check_zero_keys(padded, score_mod)
    heads = check_sizes(pattern, q, q_offset=0, k_offset=0, head_offset=head_offset, num_heads_global=num_heads_global)
    tensors = run_time_tensors(pattern, bindings)
    if 0 in q.shape[:2]:  # on all ranks, so no rank waits
        out, lse = nothing(q, k, v, sinks)
        return (out, lse) if return_lse else out
    split = HeadSplit(q.shape[1], k.shape[1], ranks.size)
    mine, numbers = split.queries[ranks.rank], list(sharding.numbers())
    options = {"score_mod": score_mod, "sinks": None if sinks is None else sinks[mine.start : mine.stop]}
    first = (head_offset + mine.start, 0, 0)
    chosen = choose_engine(engine, q, k, v, pattern, first=first, return_lse=needs_lse, **options)
    taken = encoded([split.queries, split.keys, split.keys])
    q, k, v = tokens_to_heads([q, k, v], taken, numbers, ranks.name, pattern.text, chosen == "tiles")
    k, v = (_as_read(x, split.read_by(ranks.rank)) for x in (k, v))
    lse: Tensor | None = None
    if chosen == "tiles":  # as in `attend`, but keys and values may be float32, so that their gradients are
        sides = () if block_size is None else block_sides(block_size)
        sizes = (q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        call = CallKey(pattern.text, *sizes, 0, 0, first[0], heads, 1, sides)
        out, lse = tiles(q, k, v, options["sinks"], tensors, *call, resolve_scale(scale, q.shape[-1]))
    else:
        options |= {"scale": scale, "block_size": block_size, "head_offset": first[0], "num_heads_global": heads}
        options |= {"engine": chosen, "enable_gqa": True, "bindings": bindings, "return_lse": needs_lse}
        found = attend(q, k, v, pattern, **options)
        out, lse = found if needs_lse else (found, None)
    back = (encoded([split.queries]), [split.num_heads], numbers, ranks.name)
    (out,) = heads_to_tokens([out], *back)
    if not needs_lse or lse is None:
        return out
    (column,) = heads_to_tokens([lse.unsqueeze(-1)], *back)
    row_lse = column.squeeze(-1)
    if padded.pads:
        rows = {"head_offset": head_offset, "num_heads": heads, "num_tokens": sharding.num_tokens}
        out, row_lse = padded_rows(out, row_lse, padded, sharding.positions(ranks.rank, q.device), **rows)
    return (out, row_lse) if return_lse else out


def _as_read(x: Tensor, read: list[int]) -> Tensor:
    """Key/value heads for `attend`: unchanged if each serves equally many query heads, else one copy a query head."""
    if len({read.count(head) for head in read}) == 1:
        return x
    return torch.stack([x[:, head] for head in read], dim=1)
