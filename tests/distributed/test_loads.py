"""Loads of ranks: what is counted is what ranks then receive, in both schedules, with codecs and ragged shards."""

import torch
import torch.distributed as dist

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.distributed.counts import rank_loads
from flexdilated.memory import AttentionSize
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import line

PATTERNS = {
    "longnet": masks.longnet((32, 128), (1, 4)) & masks.causal(),
    "window": masks.local_window(left=40, right=7),
    "causal": masks.causal(),
}
STEPS = [  # pattern, order, schedule, codec
    *(("longnet", "contiguous", "exchange", None), ("longnet", "zigzag", "exchange", "int8")),
    *(("longnet", "zigzag", "ring", None), ("window", "zigzag", "exchange", None)),
    *(("window", "contiguous", "ring", "bf16"), ("causal", "contiguous", "exchange", "int8")),
    *(("causal", "contiguous", "ring", None), ("causal", "zigzag", "ring", "bf16")),
]


def sharding_in(order: str) -> Sharding:
    return Sharding(200, 3, order, (56, 80, 64))


def bytes_received() -> list[tuple[int, int]]:
    """What this rank receives in the forward and the backward of 2 sequences, 4 heads over 2, keys of 8, values 12."""
    found, traffic = [], fd.distributed.traffic()
    for name, order, schedule, codec in STEPS:
        sharding = sharding_in(order)
        length = sharding.length(dist.get_rank())
        sizes = ((4, 8), (2, 8), (2, 12))
        q, k, v = (torch.randn(2, heads, length, dim, requires_grad=True) for heads, dim in sizes)
        how = {"mesh": line(), "sharding": sharding, "schedule": schedule, "codec": codec, "enable_gqa": True}
        traffic.reset()
        out = fd.distributed.attend(q, k, v, PATTERNS[name], **how)
        forward = traffic.received["keys"]
        out.sum().backward()
        found.append((forward, traffic.received["keys"] - forward + traffic.received["gradients"]))
    return found


def test_what_is_counted_is_what_is_received() -> None:
    by_rank = on_ranks(3, bytes_received)
    for place, (name, order, schedule, codec) in enumerate(STEPS):
        size = AttentionSize(200, 4, 8, torch.float32, 2, 2, value_dim=12)
        loads = rank_loads(PATTERNS[name], sharding_in(order), size, schedule=schedule, codec=codec)
        counted = list(zip(loads.received_forward, loads.received_backward, strict=True))
        assert [received[place] for received in by_rank] == counted
