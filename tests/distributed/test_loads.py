"""Loads of ranks: what is counted is what ranks receive; and the schedule "auto" takes, by bytes and memory."""

import re

import pytest
import torch
import torch.distributed as dist

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.distributed.counts import rank_loads
from flexdilated.distributed.counts._loads import _choose, choose_schedule
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


LONGNET = masks.longnet([32, 64, 128, 256, 512], [1, 2, 4, 8, 16])
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.bfloat16}


CHOICES = {
    "sparse": (LONGNET & masks.causal(), 512, 8, "exchange"),
    "dense": (masks.causal(), 512, 8, "ring"),
    "dense on two ranks": (masks.causal(), 512, 2, "exchange"),  # which holds one shard, as the ring does
    "of one rank": (masks.causal(), 512, 1, "exchange"),
    "apart": (masks.chunked(64), 512, 8, "exchange"),
    "a neighbour's keys": (masks.local_window(left=31, right=0), 512, 8, "exchange"),
    "every other key": (masks.strided(2) & masks.causal(), 256, 16, "ring"),
    "every 16th key": (masks.fixed(16, summary=1) & masks.causal(), 512, 16, "exchange"),
}


@pytest.mark.parametrize(("pattern", "tokens", "ranks", "expected"), CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_sparse_is_exchanged_and_dense_goes_round(pattern, tokens, ranks, expected, order) -> None:
    if (pattern, order) == (masks.chunked(64), "zigzag"):
        ranks //= 2  # a chunk in each half of a shard
    choice = choose_schedule(pattern, Sharding(tokens, ranks, order), **SIZES)
    assert choice.name == expected, choice.reason


@pytest.mark.parametrize(
    ("sizes", "name", "facts"),
    [
        ((0, 0, 0, 0), "exchange", []),
        ((7, 7, 7, 7), "exchange", ["7 MiB", "exchange", "7 MiB", "ring", "7 MiB"]),
        ((3, 9, 3, 4), "exchange", ["3 MiB", "exchange", "9 MiB", "ring", "4 MiB"]),
        ((7, 7, 7, 2), "ring", ["7 MiB", "ring", "2 MiB", "7 MiB", "exchange"]),
        ((3, 9, 3, 2), "exchange", ["3 MiB", "exchange", "3 times", "ring", "1.5 times"]),
        (
            (6, 9, 6, 2),
            "ring",
            ["9 MiB", "ring", "2 MiB", "6 MiB", "exchange"],
        ),  # 1.5 times less for 3 times the memory
        ((4, 8, 4, 2), "exchange", ["4 MiB", "exchange", "2 times", "ring", "2 times"]),  # as much less as more
        ((1, 8, 4, 2), "exchange", ["1 MiB", "exchange", "8 times", "ring", "2 times"]),  # a codec
    ],
)
def test_memory_is_weighed_against_bytes_and_one_sentence_says_why(sizes, name, facts) -> None:
    """What is received, and then what is held, by the schedule that was chosen and by the other."""
    choice = _choose(*(size << 20 for size in sizes))
    assert choice.name == name
    assert re.findall(r"[\d.]+ (?:MiB|times)|exchange|ring", choice.reason) == facts or not sizes[0]
    if not sizes[0]:
        assert choice.reason == "no rank needs a key of another, so nothing is sent"


def test_run_time_values_count() -> None:
    """Documents that end with the shards need nothing from elsewhere; one document all."""
    apart, one = torch.arange(4).repeat_interleave(32), torch.zeros(128, dtype=torch.int64)
    choices = [choose_schedule(masks.documents(ids), Sharding(128, 4), **SIZES) for ids in (apart, one)]
    assert [choice.exchange_bytes for choice in choices] == [0, 3 * 32 * 2 * 2 * 8 * 2]
    with pytest.raises(ValueError, match="documents"):
        choose_schedule(masks.documents("documents"), Sharding(128, 4), **SIZES)
