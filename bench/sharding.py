"""Shards of a sequence: does a rank receive just the keys that its queries need, and do ranks compute alike?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.distributed.counts._loads import token_counts
from flexdilated.distributed.counts._tokens import work_of_ranks
from flexdilated.distributed.group._sharding import Order

from ._jobs import Size, tokens_text
from ._measures import Row, at_most, measure
from ._rank_steps import Step, Taken, errors, take_alone, take_steps
from ._rules import LONGNET_4, LONGNET_5, LongNet, dense, longnet_n

# N tokens

Ranges = Sequence[range]
_EXACT = 1e-5  # relative, float32: ten times what attention in float32 is off by
_MILLION = 1 << 20
_ORDERS: tuple[Order, ...] = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Heads:
    """Query heads, and the key/value heads that equal groups of them share."""

    num_heads: int
    num_kv_heads: int

    def of(self, kv_head: int) -> range:
        """The query heads that read a key/value head."""
        group = self.num_heads // self.num_kv_heads
        return range(kv_head * group, (kv_head + 1) * group)


@measure(
    "D1",
    counted=longnet_n(65536).shrunk(16),
    counted_tokens=4096,
    heads=(Heads(4, 2),),
    run=longnet_n(4096).shrunk(16),
    size=Size(256, 4, head_dim=8),
    ranks=(2,),
)
def exchange_bytes(
    counted: LongNet = longnet_n(_MILLION),
    counted_tokens: int = _MILLION,
    counted_ranks: int = 8,
    heads: tuple[Heads, ...] = (Heads(16, 16), Heads(16, 4)),
    run: LongNet = longnet_n(4096),
    size: Size = Size(4096, num_heads=4),
    ranks: tuple[int, ...] = (2, 4, 8),
) -> Iterator[Row]:
    """Does each rank receive just the keys and values that its queries need?

    Over the marks of the rule in closed form, where nothing runs (`counted`) and where ranks do.
    """
    for spec in (counted, counted.as_causal()):
        yield counted_row(spec, counted_tokens, counted_ranks, heads)
    for num_ranks in ranks:
        yield _sent_row(run, size, num_ranks)


def counted_row(spec: LongNet, num_tokens: int, num_ranks: int, heads: Sequence[Heads]) -> Row:
    """The worst rank of any order and number of key/value heads; beside it what an all-gather receives."""
    cases = {}
    for order, each in product(_ORDERS, heads):
        least = least_received(spec, num_tokens, shard_ranges(num_tokens, num_ranks, order), each)
        sharding = Sharding(num_tokens, num_ranks, order=order)
        sizes = {"num_heads": each.num_heads, "num_kv_heads": each.num_kv_heads}
        counts = token_counts(spec.pattern(), sharding, **sizes)["exchange"]
        all_gather = (num_tokens - num_tokens // num_ranks) * each.num_kv_heads
        cases[f"{order}, {each.num_heads} heads, {each.num_kv_heads} of keys"] = {
            "ratio": _worst(counts.fill_diagonal_(0).sum(1).tolist(), least),
            "tokens_a_kv_head": [number / each.num_kv_heads for number in least],
            "all_gather_tokens_a_kv_head": all_gather / each.num_kv_heads,
            "all_gather_ratio": num_ranks * all_gather / sum(least),
        }
    what = f"{spec.label}, {tokens_text(num_tokens)}, {num_ranks} ranks, counted: K and V received over the least"
    return Row(what, at_most(1.0, "×"), max(case["ratio"] for case in cases.values()), detail=cases)


def _sent_row(run: LongNet, size: Size, num_ranks: int) -> Row:
    """The bytes that ranks count as they receive them; the results are checked first, against one rank's."""
    cases = [
        (spec, Step(masks.to_json(spec.pattern()), size, num_kv_heads, "exchange", order))
        for spec in (run, run.as_causal())
        for order in _ORDERS
        for num_kv_heads in (size.num_heads, size.num_heads // 2)
    ]
    detail = {}
    for (spec, step), found in zip(cases, take_steps(num_ranks, [step for _, step in cases]), strict=True):
        off = errors(found.tensors, take_alone(step))
        assert max(off.values()) <= _EXACT, f"ranks must compute what one rank does; {step} is off by {off}"
        name = f"{'causal' if spec.causal else 'full'}, {step.order}, {step.num_kv_heads} heads of keys"
        detail[name] = _bytes(spec, step, found, num_ranks)
    ratios = [case[which] for case in detail.values() for which in ("ratio", "gradient_ratio")]
    what = f"{run.name}, full and causal, {size}, {num_ranks} ranks, run"
    return Row(
        f"{what}: K and V received, and gradients sent, over the least", at_most(1.0, "×"), max(ratios), detail=detail
    )


def _bytes(spec: LongNet, step: Step, found: Taken, num_ranks: int) -> dict[str, Any]:
    """K, V and their gradients are rows of the head dim, in the dtype of the step."""
    size = step.size
    shards = shard_ranges(size.num_tokens, num_ranks, step.order)
    least = least_received(spec, size.num_tokens, shards, Heads(size.num_heads, step.num_kv_heads))
    row = 2 * size.head_dim * getattr(torch, step.dtype).itemsize
    # Keys are received; what comes back to their owners is sent.
    received = [counts["keys"] / row for counts in found.received]
    returned = [counts["gradients"] / row for counts in found.sent]
    return {
        "ratio": _worst(received, least),
        "gradient_ratio": _worst(returned, least),
        "tokens_a_kv_head": [number / step.num_kv_heads for number in least],
        "received_bytes": [counts["keys"] for counts in found.received],
        "least_bytes": [row * number for number in least],
    }


def _worst(received: Sequence[float], least: Sequence[int]) -> float:
    """The largest ratio of any rank; a rank that needs nothing must receive nothing."""
    assert all(got == 0 for got, needed in zip(received, least, strict=True) if needed == 0)
    return max((got / needed for got, needed in zip(received, least, strict=True) if needed), default=1.0)


@measure("D4", specs=(LONGNET_5.shrunk(64).as_causal(),), tokens=(4096,), num_heads=4, ranks=(4,))
def work_balance(
    specs: tuple[LongNet, ...] = (LONGNET_4.as_causal(), LONGNET_5.as_causal()),
    tokens: tuple[int, ...] = (1 << 17, 1 << 20),
    num_heads: int = 16,
    ranks: tuple[int, ...] = (8, 64),
) -> Iterator[Row]:
    """Do ranks that hold early and late tokens of a causal sequence compute alike?

    Load imbalance, the most over the mean useful pairs of a rank, in zigzag; beside it in contiguous shards.
    """
    for num_tokens in tokens:
        for spec in (*specs, dense(num_tokens, causal=True)):
            keys = keys_of_queries(spec, num_tokens, num_heads)
            for num_ranks in ranks:
                balance = {}
                for order in ("zigzag", "contiguous"):
                    shards = shard_ranges(num_tokens, num_ranks, order)
                    counted = [sum(int(keys[each.start : each.stop].sum()) for each in shard) for shard in shards]
                    sharding = Sharding(num_tokens, num_ranks, order=order)
                    found = work_of_ranks(spec.pattern(), sharding, num_heads=num_heads).tolist()
                    text = f"the library's count must be that of the rule; got {found} for {counted}"
                    assert found == counted, text
                    imbalance = max(counted) * num_ranks / sum(counted)
                    balance[order] = {"max_over_mean": imbalance, "pairs_of_each_rank": counted}
                name = f"{spec.label}, {tokens_text(num_tokens)}, {num_ranks} ranks, zigzag"
                worst = balance["zigzag"]["max_over_mean"]
                yield Row(f"{name}: most over mean pairs of a rank", at_most(1.05, "×"), worst, detail=balance)


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


# The keys that a rank needs and does not hold, marked token by token: the least that an exchange can send. Written
# from LongNet's rule a second time, without the library's plans: slices of a row of marks.


def shard_ranges(num_tokens: int, num_ranks: int, order: Order) -> list[Ranges]:
    """The tokens of each rank: one piece of equal length, or in zigzag the r-th of 2W pieces and the r-th from the end.

    `num_tokens` is a multiple of the pieces.
    """
    num_pieces = num_ranks * (2 if order == "zigzag" else 1)
    size, rest = divmod(num_tokens, num_pieces)
    assert not rest, f"shards must be equal; got {num_tokens} tokens in {num_pieces} pieces"
    pieces = [range(first, first + size) for first in range(0, num_tokens, size)]
    if order == "zigzag":
        return [(pieces[rank], pieces[-1 - rank]) for rank in range(num_ranks)]
    return [(piece,) for piece in pieces]


def least_received(spec: LongNet, num_tokens: int, shards: Sequence[Ranges], heads: Heads) -> list[int]:
    """For each rank, (token, key/value head) pairs outside its shard that its queries may attend to."""
    return [
        sum(
            int(_outside(needed(spec, num_tokens, heads.of(kv_head), shard), shard).sum())
            for kv_head in range(heads.num_kv_heads)
        )
        for shard in shards
    ]


def needed(spec: LongNet, num_tokens: int, heads: range, queries: Ranges) -> Bool[Tensor, " N"]:
    """Whether one of the queries, in one of the heads and branches, may attend to the token."""
    marks = torch.zeros(num_tokens, dtype=torch.bool)
    for length, rate in spec.branches:
        for offset in {head % rate for head in heads}:
            for piece in queries:
                _mark(marks, piece, length, rate, offset, causal=spec.causal)
    return marks


def _mark(marks: Bool[Tensor, " N"], queries: range, length: int, rate: int, offset: int, *, causal: bool) -> None:
    """The active tokens of each segment in which one of the queries is active; if causal, up to the last such query."""
    num_tokens = len(marks)
    for start in range(queries.start // length * length, queries.stop, length):
        end = min(start + length, num_tokens)
        active = range(start + offset, end, rate)
        first = -(-(max(queries.start, start) - active.start) // rate)
        among = active[max(0, first) : max(0, -(-(min(queries.stop, end) - active.start) // rate))]
        if among:
            marks[active.start : among[-1] + 1 if causal else end : rate] = True


def _outside(marks: Bool[Tensor, " N"], shard: Ranges) -> Bool[Tensor, " N"]:
    for piece in shard:
        marks[piece.start : piece.stop] = False
    return marks
