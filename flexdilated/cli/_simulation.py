"""What attention on many ranks sends, computes, holds and takes, from the plan alone, on no rank at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import get_args

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ..distributed.counts import ScheduleChoice, choice_of, held_in_ring, ring_tokens, tokens_by_chunk, work_of_ranks
from ..distributed.group import Order, Sharding
from ..distributed.wire import CodecName, codec_named, gradient_codec
from ..masks.core import Expression
from ..masks.planning import plan
from ..masks.planning.machine import machine_of
from ..memory import AttentionMemory, AttentionSize, attention_memory

# W ranks, R groups of them

ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True)
class Links:
    """What a rank sends, and at the same time receives, a second; and what each message costs besides.

    Ranks of one node, `ranks_per_node` consecutive ones, have links of `bytes_per_s`, and of `between_bytes_per_s` to
    ranks of other nodes. Without `ranks_per_node` all ranks are on one node.
    """

    bytes_per_s: float
    between_bytes_per_s: float | None = None
    ranks_per_node: int | None = None
    latency_s: float = 0.0

    def seconds(self, received: Int64[Tensor, "W W"]) -> Float64[Tensor, " W"]:
        """For each rank, at least: the busier of its two directions, on the slower of its two kinds of links.

        received[i, j]: bytes that rank i gets from rank j. Each rank that a rank gets something from costs it one
        latency, and so does each that it sends something to, in the busier direction.
        """
        rank = torch.arange(len(received))
        node = rank if self.ranks_per_node is None else rank // self.ranks_per_node
        is_near = (node[:, None] == node) | (self.ranks_per_node is None)
        near, far = torch.where(is_near, received, 0), torch.where(is_near, 0, received)
        far_speed = self.bytes_per_s if self.between_bytes_per_s is None else self.between_bytes_per_s
        busy = torch.maximum(_busier(near) / self.bytes_per_s, _busier(far) / far_speed)
        return busy + self.latency_s * _busier((received > 0).long())


def _busier(received: Int64[Tensor, "W W"]) -> Float64[Tensor, " W"]:
    """What a rank receives, or what it sends, whichever is more."""
    return torch.maximum(received.sum(1), received.sum(0)).double()


@dataclass(frozen=True)
class Way:
    """One way to bring keys and values to the ranks that need them.

    tokens[i, j]: those that rank i gets from rank j, once a KV head; their key and value take `key_bytes` on the wire,
    and the gradients of these, which go back, `gradient_bytes`. held: bytes of others' keys and values that each rank
    holds at one time; held_gradients: of their gradients, in float32 or wider. seconds: those of `step_seconds`, or
    None without links.
    """

    tokens: Int64[Tensor, "W W"]
    key_bytes: int
    gradient_bytes: int
    held: Int64[Tensor, " W"]
    held_gradients: Int64[Tensor, " W"]
    seconds: Mapping[str, float] | None

    @property
    def keys(self) -> Int64[Tensor, "W W"]:
        """Bytes of keys and values that rank i gets from rank j."""
        return self.key_bytes * self.tokens


@dataclass(frozen=True)
class Simulation:
    """What is known of a call before it runs, for every rank.

    work: pairs of each rank's queries, once a branch. balance: the most over the mean, in either order of the same
    number of tokens. call: memory of attention over the largest shard alone, without other ranks' keys.
    """

    sharding: Sharding
    choice: ScheduleChoice
    ways: Mapping[str, Way]
    work: Int64[Tensor, " W"]
    balance: Mapping[str, float]
    call: AttentionMemory

    def inference_peak(self, way: str) -> int:
        """Bytes of the rank that holds most: the call on its shard, and others' keys and values."""
        return self.call.inference_peak + self._copied(way) + int(self.ways[way].held.max())

    def training_peak(self, way: str) -> int:
        """The same with all gradients."""
        held = self.ways[way].held + self.ways[way].held_gradients
        return self.call.training_peak + self._copied(way) + int(held.max())

    def _copied(self, way: str) -> int:
        """Bytes of a rank's own keys and values, which it copies to lie beside others' where one kernel takes all."""
        return 0 if way == "ring" or not int(self.ways[way].held.max()) else self.call.keys


def simulate(
    pattern: Expression,
    sharding: Sharding,
    size: AttentionSize,
    *,
    device: str = "cpu",
    codec: CodecName | None = None,
    links: Links | None = None,
) -> Simulation:
    """Everything at once. `size` is that of the call on one device: its tokens are those of the sharding.

    The codec writes what an exchange and a ring send; an all-gather, which nothing does, sends rows as they are.
    Raises ValueError where the pattern does not bind to these sizes, and where the codec does not write the dtype.
    """
    codec_named(codec).check(size.dtype)
    work = work_of_ranks(pattern, sharding, num_heads=size.num_heads)
    computing = _computing_seconds(pattern, size, work, device=device)
    needed, chunks = tokens_by_chunk(pattern, sharding, num_heads=size.num_heads, num_kv_heads=size.kv_heads)
    tokens = {
        "exchange": chunks.by_source(needed),
        "ring": ring_tokens(needed, chunks, num_kv_heads=size.kv_heads),
        "all-gather": all_gather_tokens(torch.tensor(sharding.lengths), num_kv_heads=size.kv_heads),
    }
    ways = {name: _way(name, each, size, codec, computing, links) for name, each in tokens.items()}
    sent, held = ways["exchange"].key_bytes, ways["all-gather"].key_bytes
    choice = choice_of(tokens["exchange"], tokens["ring"], held_bytes=held, sent_bytes=sent)
    call = _call_on(max(sharding.lengths), pattern, size, device)
    return Simulation(sharding, choice, ways, work, _balances(pattern, sharding, size, work), call)


def _way(
    name: str,
    tokens: Int64[Tensor, "W W"],
    size: AttentionSize,
    codec: CodecName | None,
    computing: tuple[Float64[Tensor, " W"], Float64[Tensor, " W"]],
    links: Links | None,
) -> Way:
    writes = codec_named(None if name == "all-gather" else codec)
    codecs = writes, gradient_codec(writes, size.dtype)
    key_bytes, gradient_bytes = (2 * size.batch * each.row_bytes(size.head_dim, size.dtype) for each in codecs)
    numbers = 2 * size.batch * size.head_dim * (held_in_ring(tokens) if name == "ring" else tokens.sum(1))
    wide = torch.promote_types(size.dtype, torch.float32)
    seconds = None
    if links is not None:
        moved = {"keys": key_bytes * tokens, "gradients": gradient_bytes * tokens}
        seconds = step_seconds(*computing, links, **moved, overlapped=name == "ring")
    return Way(tokens, key_bytes, gradient_bytes, size.dtype.itemsize * numbers, wide.itemsize * numbers, seconds)


def _balances(pattern: Expression, sharding: Sharding, size: AttentionSize, work: Tensor) -> dict[str, float]:
    """The most work over the mean, for contiguous and for zigzag shards of these lengths; 1 where there is no work."""
    found = {}
    for order in ORDERS:
        here = work
        if order != sharding.order:
            other = replace(sharding, order=order)
            here = work_of_ranks(pattern, other, num_heads=size.num_heads)
        found[order] = float(here.max() / here.double().mean()) if int(here.sum()) else 1.0
    return found


def _call_on(num_tokens: int, pattern: Expression, size: AttentionSize, device: str) -> AttentionMemory:
    """Attention over one shard as if it were the sequence; or its share of the whole, where that is no pattern."""
    try:
        pattern.check_tokens(range(num_tokens), range(num_tokens))
    except ValueError:  # such as a list of blocks that names keys beyond the shard
        whole = attention_memory(pattern, size, device=device)
        return AttentionMemory(
            **{each.name: getattr(whole, each.name) * num_tokens // size.num_tokens for each in fields(whole)}
        )
    return attention_memory(pattern, replace(size, num_tokens=num_tokens), device=device)


def _computing_seconds(
    pattern: Expression, size: AttentionSize, work: Int64[Tensor, " W"], *, device: str
) -> tuple[Float64[Tensor, " W"], Float64[Tensor, " W"]]:
    """(forward, backward): what the cost model predicts for one device with all tokens, by the pairs of each rank."""
    tokens = size.num_tokens
    bound = pattern.bind(num_heads=size.num_heads, num_queries=tokens, num_keys=tokens)
    seconds = size.batch * plan(bound, device=device, operands=size.operands).cost.seconds
    forward = seconds * work.double() / work.sum().clamp(min=1)
    return forward, machine_of(device).backward_ratio * forward


def step_seconds(
    forward: Float64[Tensor, " W"],
    backward: Float64[Tensor, " W"],
    links: Links,
    *,
    keys: Int64[Tensor, "W W"],
    gradients: Int64[Tensor, "W W"],
    overlapped: bool,
) -> dict[str, float]:
    """A step in which rank i computes so long, receives keys[i, j] bytes from rank j and sends gradients[i, j] back.

    Each number is of the rank that takes longest in it: keys and gradients on their way, computing in both directions,
    forward and backward with what is sent in them, and the step of both. overlapped: communication goes on while a rank
    computes, and the keys come again in the backward, as in a ring; otherwise one follows the other.
    """
    fetch, give_back = links.seconds(keys), links.seconds(gradients.T)
    parts = {"keys": fetch, "gradients": give_back, "computing": forward + backward}
    if overlapped:
        parts |= {"forward": torch.maximum(fetch, forward), "backward": torch.maximum(fetch + give_back, backward)}
    else:
        parts |= {"forward": fetch + forward, "backward": backward + give_back}
    found = {name: float(each.max()) for name, each in parts.items()}
    return found | {"step": found["forward"] + found["backward"]}


def all_gather_tokens(lengths: Int64[Tensor, " W"], *, num_kv_heads: int) -> Int64[Tensor, "W W"]:
    """All shards."""
    return (num_kv_heads * lengths).repeat(len(lengths), 1).fill_diagonal_(0)


def in_groups(matrix: Int64[Tensor, "W W"], most: int) -> tuple[int, Int64[Tensor, "R R"]]:
    """(ranks of a group, sums over pairs of groups) of at most so many groups of consecutive ranks."""
    each = -(-len(matrix) // most)
    if each == 1:
        return 1, matrix
    group = torch.arange(len(matrix)) // each
    rows = matrix.new_zeros(int(group[-1]) + 1, len(matrix)).index_add_(0, group, matrix)
    return each, matrix.new_zeros(len(rows), len(rows)).index_add_(1, group, rows)
