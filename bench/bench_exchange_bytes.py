"""Does each rank receive just the keys and values that its queries need?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.distributed.counts._tokens import token_counts
from flexdilated.distributed.group._sharding import Order

from ._longnets import LongNet, longnet_n
from ._problem import Size, tokens_text
from ._rank_step import Step, Taken, errors, take_alone, take_steps
from ._remote_keys import Heads, Ranges, least_received, shard_ranges
from ._result import Result, Row, at_most

_TARGET = at_most(1.0, "×")
_EXACT = 1e-5  # relative, float32: ten times what attention in float32 is off by
_ORDERS: tuple[Order, ...] = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Config:
    """A LongNet whose keys are counted, without processes, and one that runs, on so many ranks."""

    counted: LongNet
    counted_tokens: int
    counted_ranks: int
    heads: tuple[Heads, ...]
    run: LongNet
    size: Size
    ranks: tuple[int, ...]


_MILLION = 1 << 20
_MHA_AND_GQA = (Heads(16, 16), Heads(16, 4))
FULL = Config(longnet_n(_MILLION), _MILLION, 8, _MHA_AND_GQA, longnet_n(4096), Size(4096, num_heads=4), (2, 4, 8))
SMALL = Config(
    longnet_n(65536).shrunk(16), 4096, 8, (Heads(4, 2),), longnet_n(4096).shrunk(16), Size(256, 4, head_dim=8), (2,)
)


def run(config: Config) -> Result:
    """D1: over the marks of the rule in closed form where nothing runs, over the dense rule where ranks do."""
    counted = [_count(config, spec) for spec in (config.counted, config.counted.as_causal())]
    sent = [_run(config, num_ranks) for num_ranks in config.ranks]
    return Result((*counted, *sent))


def _count(config: Config, spec: LongNet) -> Row:
    """The worst rank of any order and number of key/value heads; beside it what an all-gather receives."""
    num_tokens, num_ranks = config.counted_tokens, config.counted_ranks
    cases = {}
    for order in _ORDERS:
        for heads in config.heads:
            least = least_received(spec, num_tokens, shard_ranges(num_tokens, num_ranks, order), heads)
            planned = _planned(spec, num_tokens, num_ranks, order, heads)
            all_gather = (num_tokens - num_tokens // num_ranks) * heads.num_kv_heads
            cases[f"{order}, {heads.num_heads} heads, {heads.num_kv_heads} of keys"] = {
                "ratio": _worst(planned, least),
                "tokens_a_kv_head": [number / heads.num_kv_heads for number in least],
                "all_gather_tokens_a_kv_head": all_gather / heads.num_kv_heads,
                "all_gather_ratio": num_ranks * all_gather / sum(least),
            }
    measure = f"{spec.label}, {tokens_text(num_tokens)}, {num_ranks} ranks, counted: K and V received over the least"
    return Row(measure, _TARGET, max(case["ratio"] for case in cases.values()), detail=cases)


def _planned(spec: LongNet, num_tokens: int, num_ranks: int, order: Order, heads: Heads) -> list[int]:
    """The library's plan: (token, key/value head) pairs that each rank receives."""
    sharding = Sharding(num_tokens, num_ranks, order=order)
    counts = token_counts(spec.pattern(), sharding, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads)
    return counts.fill_diagonal_(0).sum(1).tolist()


def _run(config: Config, num_ranks: int) -> Row:
    """The bytes that ranks count as they receive them; the results are checked first."""
    size, cases = config.size, []
    for spec in (config.run, config.run.as_causal()):
        for order in _ORDERS:
            for num_kv_heads in (size.num_heads, size.num_heads // 2):
                step = Step(masks.to_json(spec.pattern()), size, num_kv_heads, "exchange", order)
                cases.append((spec, step))
    taken = take_steps(num_ranks, [step for _, step in cases])
    detail = {}
    for (spec, step), found in zip(cases, taken, strict=True):
        _check(step, found)
        name = f"{'causal' if spec.causal else 'full'}, {step.order}, {step.num_kv_heads} heads of keys"
        detail[name] = _bytes(spec, step, found, num_ranks)
    ratios = [case[which] for case in detail.values() for which in ("ratio", "gradient_ratio")]
    measure = (
        f"{config.run.name}, full and causal, {size}, {num_ranks} ranks, run: K and V received, and gradients sent, "
        "over the least"
    )
    return Row(measure, _TARGET, max(ratios), detail=detail)


def _bytes(spec: LongNet, step: Step, found: Taken, num_ranks: int) -> dict[str, object]:
    """K, V and their gradients are rows of the head dim, in the dtype of the step."""
    size = step.size
    shards = shard_ranges(size.num_tokens, num_ranks, step.order)
    least = _least_by_dense_rule(spec, size, step.num_kv_heads, shards)
    row = 2 * size.head_dim * getattr(torch, step.dtype).itemsize
    received, returned = ([counts[role] / row for counts in side] for role, side in _sides(found))
    return {
        "ratio": _worst(received, least),
        "gradient_ratio": _worst(returned, least),
        "tokens_a_kv_head": [number / step.num_kv_heads for number in least],
        "received_bytes": [counts["keys"] for counts in found.received],
        "least_bytes": [row * number for number in least],
    }


def _sides(found: Taken):
    """Keys are received; what comes back to their owners is sent."""
    return ("keys", found.received), ("gradients", found.sent)


def _least_by_dense_rule(spec: LongNet, size: Size, num_kv_heads: int, shards: Sequence[Ranges]) -> list[int]:
    """Every pair looked at: the keys outside of the shard that a query of it may attend to, by key/value head."""
    least = []
    for shard in shards:
        rows = torch.cat([torch.arange(piece.start, piece.stop) for piece in shard])
        branches = spec.masks(rows, num_tokens=size.num_tokens, num_heads=size.num_heads)
        seen = torch.stack([branch.any(1) for branch in branches]).any(0)
        by_kv_head = seen.unflatten(0, (num_kv_heads, -1)).any(1)
        by_kv_head[:, rows] = False
        least.append(int(by_kv_head.sum()))
    return least


def _worst(received: Sequence[float], least: Sequence[int]) -> float:
    """The largest ratio of any rank; a rank that needs nothing must receive nothing."""
    assert all(got == 0 for got, needed in zip(received, least, strict=True) if needed == 0)
    return max((got / needed for got, needed in zip(received, least, strict=True) if needed), default=1.0)


def _check(step: Step, found: Taken) -> None:
    """Against one rank, which other questions hold against the definition."""
    off = errors(found.tensors, take_alone(step))
    assert max(off.values()) <= _EXACT, f"ranks must compute what one rank does; {step} is off by {off}"
