"""Do ranks that hold early and late tokens of a causal sequence compute alike?"""

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from flexdilated.distributed import Sharding
from flexdilated.distributed.counts._tokens import work_of_ranks
from flexdilated.distributed.group._sharding import Order

from ._longnets import LONGNET_4, LONGNET_5, LongNet, dense
from ._problem import tokens_text
from ._remote_keys import Ranges, shard_ranges
from ._result import Result, Row, at_most

# N tokens

_ORDERS: tuple[Order, ...] = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Config:
    """Causal LongNets at each length, and dense causal attention, on so many ranks."""

    specs: tuple[LongNet, ...]
    tokens: tuple[int, ...]
    num_heads: int
    ranks: tuple[int, ...]


FULL = Config((LONGNET_4.as_causal(), LONGNET_5.as_causal()), (1 << 17, 1 << 20), 16, (8, 64))
SMALL = Config((LONGNET_5.shrunk(64).as_causal(),), (4096,), 4, (4,))


def run(config: Config) -> Result:
    """D4: most over mean useful pairs of any rank, in zigzag; beside it in contiguous shards."""
    rows = []
    for num_tokens in config.tokens:
        for spec in (*config.specs, dense(num_tokens, causal=True)):
            rows += [_row(config, spec, num_tokens, num_ranks) for num_ranks in config.ranks]
    return Result(tuple(rows))


def _row(config: Config, spec: LongNet, num_tokens: int, num_ranks: int) -> Row:
    keys = keys_of_queries(spec, num_tokens, config.num_heads)
    balance = {}
    for order in _ORDERS:
        counted = [_pairs(keys, shard) for shard in shard_ranges(num_tokens, num_ranks, order)]
        sharding = Sharding(num_tokens, num_ranks, order=order)
        found = work_of_ranks(spec.pattern(), sharding, num_heads=config.num_heads).tolist()
        assert found == counted, f"the library's count must be that of the rule; got {found} for {counted}"
        balance[order] = {"max_over_mean": max(counted) * num_ranks / sum(counted), "pairs_of_each_rank": counted}
    measure = f"{spec.label}, {tokens_text(num_tokens)}, {num_ranks} ranks, zigzag: most over mean pairs of a rank"
    return Row(measure, at_most(1.05, "×"), balance["zigzag"]["max_over_mean"], detail=balance)


def keys_of_queries(spec: LongNet, num_tokens: int, num_heads: int) -> Int64[Tensor, " N"]:
    """The keys of each query of a causal spec, over all heads and branches, from the rule."""
    keys = torch.zeros(num_tokens, dtype=torch.int64)
    for length, rate in spec.branches:
        for head in range(num_heads):
            for start in range(0, num_tokens, length):
                # An active token has the active tokens of its segment before it, and itself.
                active = keys[start + head % rate : min(start + length, num_tokens) : rate]
                active += torch.arange(1, len(active) + 1)
    return keys


def _pairs(keys: Int64[Tensor, " N"], shard: Ranges) -> int:
    return sum(int(keys[piece.start : piece.stop].sum()) for piece in shard)
