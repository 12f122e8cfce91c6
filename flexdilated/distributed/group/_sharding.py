"""Sharding: assignment of the positions of a sequence to ranks; functions that shard, gather and check tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import index
from typing import Literal, get_args

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..._validate import check_tensors
from ...engines import own_op, sum_dtype
from ...masks.core import Ranges, advises, require_choice, require_int
from ._call import check_agreement
from ._messages import Message, post
from ._ranks import Ranks, check_device, group_of

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim

ShardOrder = Literal["contiguous", "zigzag"]
ORDERS: tuple[ShardOrder, ...] = get_args(ShardOrder)


@advises()
@dataclass(frozen=True)
class Sharding:
    """Assigns each of the positions 0 ... num_tokens - 1 to one of num_ranks ranks.

    A rank's tokens are in ascending order of position: its local token i is at the i-th position of `ranges(rank)`.

    order: "contiguous" gives each rank one contiguous range, in the order of the ranks. "zigzag" cuts the sequence into
        2 * num_ranks chunks, and rank r holds the chunks r and 2 * num_ranks - 1 - r. With equal shards that balances
        the work of a causal pattern: a rank with an early chunk, whose queries have few keys, also has a late one.

    shard_lengths: number of tokens of each rank; may be 0. None: as equal as possible; the first ranges (or chunks)
        have one token more. In zigzag order a rank's two chunks are halves of its shard; if its length is odd, the
        first chunk has one token more. After construction the field holds the lengths, so two shardings are equal
        if they have the same order and assign the same positions to each rank.

    Raises TypeError or ValueError for other values.

    >>> fd.distributed.Sharding(10, 4, 'zigzag')
    Sharding(num_tokens=10, num_ranks=4, order='zigzag', shard_lengths=(3, 3, 2, 2))
    """

    num_tokens: int
    num_ranks: int
    order: ShardOrder = "contiguous"
    shard_lengths: Sequence[int] | None = None
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_int("num_tokens", self.num_tokens, minimum=1)
        require_int("num_ranks", self.num_ranks, minimum=1)
        require_choice("order", self.order, ORDERS)
        lengths = self._default_lengths() if self.shard_lengths is None else self._checked_lengths(self.shard_lengths)
        object.__setattr__(self, "shard_lengths", lengths)
        object.__setattr__(self, "_starts", tuple(accumulate(self._chunk_lengths(), initial=0)))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Sharding:
        """Return the sharding whose method `numbers` returns these integers."""
        num_tokens, order, *lengths = map(int, numbers)
        return cls(num_tokens, len(lengths), ORDERS[order], lengths)

    def numbers(self) -> tuple[int, ...]:
        """Return (num_tokens, index of the order in ORDERS, *lengths), an argument of custom ops, which `of` reads."""
        return (index(self.num_tokens), ORDERS.index(self.order), *[index(length) for length in self.lengths])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        assert isinstance(self.shard_lengths, tuple)
        return self.shard_lengths

    def length(self, rank: int) -> int:
        """Return the number of tokens of rank `rank`; raises TypeError or ValueError unless 0 <= rank < num_ranks."""
        return self.lengths[self._checked_rank(rank)]

    def ranges(self, rank: int) -> Ranges:
        """Return the positions of rank `rank`: one or two ascending `range`s, or () for no tokens.

        Raises TypeError or ValueError unless 0 <= rank < num_ranks.
        """
        chunks = [self._chunk(self._checked_rank(rank))]
        if self.order == "zigzag":
            chunks.append(self._chunk(2 * self.num_ranks - 1 - rank))
            if chunks[0].stop == chunks[1].start:
                chunks = [range(chunks[0].start, chunks[1].stop)]
        return tuple(chunk for chunk in chunks if chunk)

    def positions(self, rank: int, device: torch.device | str | None = None) -> Int64[Tensor, " L"]:
        """Return the position in the whole sequence of each token of rank `rank`, as rotary embeddings need it.

        device: of the result; None for torch's default device.

        Raises TypeError or ValueError unless 0 <= rank < num_ranks.
        """
        runs = [torch.arange(run.start, run.stop, device=device) for run in self.ranges(rank)]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)

    def _chunk(self, index: int) -> range:
        return range(self._starts[index], self._starts[index + 1])

    def _chunk_lengths(self) -> tuple[int, ...]:
        if self.order == "contiguous":
            return self.lengths
        return (*((length + 1) // 2 for length in self.lengths), *(length // 2 for length in reversed(self.lengths)))

    def _default_lengths(self) -> tuple[int, ...]:
        ranks = range(self.num_ranks)
        if self.order == "contiguous":
            each, longer = divmod(self.num_tokens, self.num_ranks)
            return tuple(each + (rank < longer) for rank in ranks)
        each, longer = divmod(self.num_tokens, 2 * self.num_ranks)
        return tuple(2 * each + (rank < longer) + (2 * self.num_ranks - 1 - rank < longer) for rank in ranks)

    def _checked_lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        if isinstance(lengths, str) or not isinstance(lengths, Sequence):
            raise TypeError(f"shard_lengths must be a sequence of integers or None; got {type(lengths).__name__}")
        if len(lengths) != self.num_ranks:
            raise ValueError(
                f"shard_lengths must have one entry for each rank; got {len(lengths)} entries and "
                f"num_ranks={self.num_ranks}"
            )
        held = tuple(require_int(f"shard_lengths[{rank}]", length, minimum=0) for rank, length in enumerate(lengths))
        if sum(held) != self.num_tokens:
            raise ValueError(
                f"shard_lengths must add up to the tokens of the sequence; got a sum of {sum(held)} "
                f"and num_tokens={self.num_tokens}"
            )
        return held

    def _checked_rank(self, rank: int) -> int:
        return require_int("rank", rank, minimum=0, maximum=self.num_ranks - 1)


@advises()
def shard(x: Tensor, mesh: DeviceMesh, sharding: Sharding | None = None, *, dim: int = 2) -> Tensor:
    """Return a copy of this rank's tokens of x, a tensor with all N tokens along dim. Sends nothing.

    x must be equal on all ranks; that is not checked.

    mesh: a DeviceMesh of one dimension.
    dim: dimension of the tokens; the default is that of (B, H, N, D).
    sharding: None means `Sharding(N, W)` over the W ranks of the mesh.

    Each rank's x is a separate variable, and gradients are those of the sum of all ranks' losses. So x.grad is 0 except
    at this rank's tokens, and its sum over the ranks is the gradient of the shared x. Gradients of parameters from
    which x is computed must be summed over the ranks too: DDP does so (and divides by W).

    Raises TypeError or ValueError for other arguments, such as an x with another number of tokens than the sharding.

    >>> x = fd.distributed.shard(torch.randn(1, 4, 256, 64), mesh)
    """
    ranks = Ranks.of(mesh)
    dim = _checked_dim(x, dim)
    split = Sharding(x.shape[dim], ranks.size) if sharding is None else check_sharding(sharding, ranks)
    if x.shape[dim] != split.num_tokens:
        raise ValueError(f"x must hold all {split.num_tokens} tokens of the sharding; got {x.shape[dim]} along {dim=}")
    runs = split.ranges(ranks.rank) or (range(0),)
    return torch.cat([x.narrow(dim, run.start, len(run)) for run in runs], dim)


@advises()
def unshard(x: Tensor, mesh: DeviceMesh, sharding: Sharding | None = None, *, dim: int = 2) -> Tensor:
    """Return all N tokens in the order of their positions, on every rank; x is this rank's shard, L tokens along dim.

    mesh: a DeviceMesh of one dimension.
    dim: dimension of the tokens; the default is that of (B, H, L, D).
    sharding: None means equal shards, `Sharding(W * L, W)`, and L above 0. With a sharding, L may be 0.

    All ranks must have one dtype, and one shape except along dim.

    Gradients are those of the sum of all ranks' losses, as in `shard`: x.grad is the sum, over all ranks, of the
    gradients that each rank computes for this rank's tokens. It is summed in float32 or wider, in the order of the
    ranks. So every rank must run the backward. If all W ranks compute the same loss from the whole, x.grad is W times
    the gradient of that loss: divide by W, or let DDP do it.

    Raises TypeError or ValueError for other arguments, and ValueError or torch.distributed.DistError if the ranks make
    different calls or one of them fails.

    >>> fd.distributed.unshard(torch.randn(1, 4, 256, 64), mesh).shape
    torch.Size([1, 4, 256, 64])
    """
    ranks = Ranks.of(mesh)
    dim = _checked_dim(x, dim)
    check_device(ranks, x)
    split = equal_shards(x.shape[dim], ranks) if sharding is None else check_sharding(sharding, ranks)
    length = split.length(ranks.rank)
    if x.shape[dim] != length:
        raise ValueError(
            f"x must be this rank's shard, {length} of {split.num_tokens} tokens for rank {ranks.rank} of "
            f"{ranks.size}; got {x.shape[dim]} along {dim=}"
        )
    return all_tokens(x, dim, list(split.numbers()), ranks.name)


def _checked_dim(x: object, dim: int) -> int:
    """Return `dim` as a nonnegative index; raises TypeError or ValueError unless x is a tensor that has this dim."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor; got {type(x).__name__}")
    if x.dim() == 0:
        raise ValueError("x must have a dimension of tokens; got a tensor of shape ()")
    return require_int("dim", dim, minimum=-x.dim(), maximum=x.dim() - 1) % x.dim()


@own_op("flexdilated::all_tokens")
def all_tokens(x: Tensor, dim: int, sharding: list[int], group: str) -> Tensor:
    """All-gather: return all ranks' tokens along dim, in the order of their positions; x is this rank's shard.

    sharding: `Sharding.numbers()`.
    group: name of the process group.
    """
    split, ranks = Sharding.of(sharding), Ranks.named(group, x.device.type)
    _check_same_call(ranks, "unshard", x, dim, split)
    own = x.movedim(dim, 0).contiguous()
    whole = own.new_empty(split.num_tokens, *own.shape[1:])
    runs = split.ranges(ranks.rank)
    for run, tokens in zip(runs, _tokens_of_runs(own, runs), strict=True):
        whole[run.start : run.stop] = tokens
    _send_and_receive(
        ranks,
        send=[(tokens, peer) for peer in ranks.others for tokens in _tokens_of_runs(own, runs)],
        receive=[(whole[run.start : run.stop], peer) for peer in ranks.others for run in split.ranges(peer)],
    )
    return whole.movedim(0, dim).contiguous()


@own_op("flexdilated::own_tokens_sum")
def own_tokens_sum(whole: Tensor, dim: int, sharding: list[int], group: str) -> Tensor:
    """Reduce-scatter: return this rank's tokens, along dim, of the sum of all ranks' `whole`.

    The sum is computed in float32 or wider, in the order of the ranks, and returned in the dtype of `whole`.

    sharding: `Sharding.numbers()`.
    group: name of the process group.
    """
    split, ranks = Sharding.of(sharding), Ranks.named(group, whole.device.type)
    _check_same_call(ranks, "the gradient of unshard", whole, dim, split)
    rows = whole.movedim(dim, 0).contiguous()
    runs = split.ranges(ranks.rank)
    own = torch.cat([rows[:0], *(rows[run.start : run.stop] for run in runs)])
    parts = [own if peer == ranks.rank else torch.empty_like(own) for peer in range(ranks.size)]
    _send_and_receive(
        ranks,
        send=[(rows[run.start : run.stop], peer) for peer in ranks.others for run in split.ranges(peer)],
        receive=[(part, peer) for peer in ranks.others for part in _tokens_of_runs(parts[peer], runs)],
    )
    total = torch.zeros_like(own, dtype=sum_dtype(own))
    for part in parts:
        total += part
    return total.to(own.dtype).movedim(0, dim).contiguous()


@all_tokens.register_fake
def _(x, dim, sharding, group):
    return x.new_empty(*x.shape[:dim], Sharding.of(sharding).num_tokens, *x.shape[dim + 1 :])


@own_tokens_sum.register_fake
def _(whole, dim, sharding, group):
    length = Sharding.of(sharding).length(group_of(group).rank())
    return whole.new_empty(*whole.shape[:dim], length, *whole.shape[dim + 1 :])


def _remember(ctx, inputs, output) -> None:
    _, *ctx.options = inputs


all_tokens.register_autograd(
    lambda ctx, grad: (own_tokens_sum(grad, *ctx.options), None, None, None), setup_context=_remember
)
own_tokens_sum.register_autograd(
    lambda ctx, grad: (all_tokens(grad, *ctx.options), None, None, None), setup_context=_remember
)


def _check_same_call(ranks: Ranks, call: str, x: Tensor, dim: int, split: Sharding) -> None:
    """Raise ValueError unless all ranks agree in call, dim and split, and in the dtype and other dims of x.

    call: name of the operation.

    Raises DistError if some rank does not make the check within the group's timeout.
    """
    others = (*x.shape[:dim], *x.shape[dim + 1 :])
    check_agreement(ranks, {"call": call, "sharding": split, "dim": dim, "other dims": others, "dtype": x.dtype})


def _tokens_of_runs(tokens: Tensor, runs: Ranges) -> tuple[Tensor, ...]:
    """Return a view of a rank's tokens, along dim 0, for each of the rank's runs; each view is one message."""
    return tokens.split([len(run) for run in runs])


def _send_and_receive(ranks: Ranks, *, send: list[Message], receive: list[Message]) -> None:
    """Send and receive all messages as one group, and wait."""
    posted = post("shards", ranks, send=send, receive=receive)
    try:
        posted.wait_for_all()
    finally:
        posted.drop()


def check_shards(q: Tensor, k: Tensor, v: Tensor, *, ranks: Ranks, sharding: Sharding, enable_gqa: bool) -> None:
    """Raise TypeError or ValueError unless q (B, H, L, D), k (B, G, L, D) and v (B, G, L, E) are shards of this rank.

    They must fit each other, the device of the ranks, and the number of tokens of this rank, L, which may be 0.
    """
    check_tensors(*_with_a_token(q, k, v), enable_gqa=enable_gqa)
    check_sharding(sharding, ranks)
    check_device(ranks, q)
    length = sharding.length(ranks.rank)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            "q, k and v must be this rank's shards of one sequence; to attend to another sequence, gather its keys: "
            "flexdilated.attend(q, unshard(k, mesh), unshard(v, mesh), pattern, q_offset=position of this rank's first "
            f"query); got {q.shape[2]} queries and {k.shape[2]} keys"
        )
    if not q.shape[2] == k.shape[2] == length:
        raise ValueError(
            f"q, k and v must be this rank's shard, {length} of {sharding.num_tokens} tokens for rank {ranks.rank} of "
            f"{ranks.size}; got {q.shape[2]} queries and {k.shape[2]} keys"
        )


def check_sharding(sharding: object, ranks: Ranks) -> Sharding:
    """Return `sharding`; raises TypeError or ValueError unless it is a `Sharding` over `ranks.size` ranks."""
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding must be a flexdilated.distributed.Sharding or None; got {type(sharding).__name__}")
    if sharding.num_ranks != ranks.size:
        raise ValueError(f"sharding must have as many ranks as the mesh, {ranks.size}; got {sharding.num_ranks}")
    return sharding


def equal_shards(length: int, ranks: Ranks) -> Sharding:
    """Return the default sharding: contiguous, with `length` tokens on every rank. Raises ValueError if length is 0."""
    length = index(length)  # a constant in a compiled graph
    if not length:
        raise ValueError(
            "without a sharding all ranks must hold equally many tokens; got a rank with none: pass a `Sharding`"
        )
    return Sharding(length * ranks.size, ranks.size)


def _with_a_token(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors or, if all are (B, heads, 0, D), uninitialised tensors (B, heads, 1, D)."""
    if any(not isinstance(x, Tensor) or x.dim() != 4 or x.shape[2] for x in tensors):
        return tensors
    return tuple(x.new_empty(*x.shape[:2], 1, x.shape[3]) for x in tensors)
