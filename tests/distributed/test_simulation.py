"""Simulation: what is planned is what ranks then send; links and steps by hand."""

import torch
import torch.distributed as dist

import flexdilated as fd
from flexdilated import masks
from flexdilated.cli._simulation import Links, simulate, step_seconds
from flexdilated.distributed import Sharding
from flexdilated.memory._memory import AttentionSize, attention_memory
from tests.support import commands
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import line

# B batch, H query heads, G key/value heads, L tokens of a rank, D head dim


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


def bytes_received() -> list[dict[str, int]]:
    """What this rank receives in a forward and a backward of 2 sequences, 4 heads over 2 of 8 numbers."""
    found, traffic = [], fd.distributed.traffic()
    for name, order, schedule, codec in STEPS:
        sharding = sharding_in(order)
        length = sharding.length(dist.get_rank())
        q, k, v = (torch.randn(2, heads, length, 8, requires_grad=True) for heads in (4, 2, 2))
        traffic.reset()
        how = {"mesh": line(), "sharding": sharding, "schedule": schedule, "codec": codec, "enable_gqa": True}
        fd.distributed.attend(q, k, v, PATTERNS[name], **how).sum().backward()
        found.append({role: traffic.received[role] for role in ("keys", "gradients")})
    return found


def test_what_is_planned_is_what_is_sent(monkeypatch) -> None:
    monkeypatch.setattr("flexdilated.cli._simulation.attention_memory", commands.memory_of_call)  # takes seconds
    by_rank = on_ranks(3, bytes_received)
    for place, (name, order, schedule, codec) in enumerate(STEPS):
        size = AttentionSize(200, 4, 8, torch.float32, 2, 2)
        way = simulate(PATTERNS[name], sharding_in(order), size, codec=codec).ways[schedule]
        fetches = 2 if schedule == "ring" else 1  # in the backward once more
        assert [sent[place]["keys"] for sent in by_rank] == (fetches * way.keys.sum(1)).tolist()
        assert [sent[place]["gradients"] for sent in by_rank] == (way.gradient_bytes * way.tokens.sum(0)).tolist()


def test_a_rule_that_takes_no_shard_alone() -> None:
    """Rows of a block list name keys beyond the first shard: its memory is a share of the whole's."""
    pattern = masks.block_list([[0], [0, 3], [0, 2], [1, 3]], block=16)
    size = AttentionSize(64, 2, 16, torch.float32)
    found = simulate(pattern, Sharding(64, 4), size)
    assert found.call.inputs == attention_memory(pattern, size).inputs // 4
    assert found.ways["exchange"].tokens.tolist() == [[0, 0, 0, 0], [32, 0, 0, 32], [32, 0, 0, 0], [0, 32, 0, 0]]


def test_links_take_the_busier_direction_and_the_slower_kind() -> None:
    received = torch.tensor([[0, 10, 40, 0], [30, 0, 0, 0], [0, 0, 0, 0], [0, 0, 20, 0]])
    assert Links(bytes_per_s=10).seconds(received).tolist() == [5, 3, 6, 2]
    near = Links(bytes_per_s=10, between_bytes_per_s=2, ranks_per_node=2, latency_s=100)
    # Messages of each rank: 2 come to rank 0, 1 goes to rank 1 and 1 comes from it, 2 go from rank 2, 1 comes to 3.
    assert near.seconds(received).tolist() == [220, 103, 220, 102]


def test_a_ring_overlaps_and_fetches_twice() -> None:
    computing = torch.tensor([3.0, 1.0], dtype=torch.float64), torch.tensor([6.0, 2.0], dtype=torch.float64)
    keys, gradients = torch.tensor([[0, 0], [20, 0]]), torch.tensor([[0, 0], [70, 0]])
    moved = {"keys": keys, "gradients": gradients}
    exchange = step_seconds(*computing, Links(bytes_per_s=10), **moved, overlapped=False)
    assert exchange == {"keys": 2, "gradients": 7, "computing": 9, "forward": 5, "backward": 13, "step": 18}
    ring = step_seconds(*computing, Links(bytes_per_s=10), **moved, overlapped=True)
    assert (ring["forward"], ring["backward"]) == (3, 9)
