"""Score functions by name, with the tensors that they read, as torch's tests of FlexAttention have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values


@dataclass(frozen=True)
class Size:
    """Lengths of a call; kv_heads and kv_batch are None for those of the queries, value_dim for the head dim."""

    batch: int = 2
    heads: int = 4
    queries: int = 96
    keys: int = 96
    dim: int = 16
    kv_heads: int | None = None
    kv_batch: int | None = None
    value_dim: int | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of q, k and v."""
        rows = self.kv_batch or self.batch, self.kv_heads or self.heads, self.keys
        return {
            "q": (self.batch, self.heads, self.queries, self.dim),
            "k": (*rows, self.dim),
            "v": (*rows, self.value_dim or self.dim),
        }

    def shape(self, axes: str) -> tuple[int, ...]:
        """Shape of a tensor that a function reads: b, h, q, k; e the head dim; d for distances; digits as they are."""
        lengths = {"b": self.batch, "h": self.heads, "q": self.queries, "k": self.keys, "e": self.dim}
        lengths["d"] = self.queries + self.keys
        return tuple(lengths[axis] if axis in lengths else int(axis) for axis in axes)


SIZE = Size()


class Reads(NamedTuple):
    """A function of a call, and what it reads.

    make: takes a tensor for each of `axes`, and gives the function: (score, b, h, q_idx, kv_idx) -> score, or
        (b, h, q_idx, kv_idx) -> bool.
    axes: of each tensor, as in `Size.shape`; it is learned, of the dtype of q. "Q" is the query itself.
    values: of each other tensor, from the size; they follow the learned ones.
    dtype: of the learned tensors; None for that of q.
    """

    make: Callable[..., Callable[..., Tensor]]
    axes: tuple[str, ...] = ()
    values: tuple[Callable[[Size], Any], ...] = ()
    dtype: torch.dtype | None = None


def plain(function: Callable[..., Any]) -> Reads:
    """A function that reads nothing."""
    return Reads(lambda: function)


def silu(s: Tensor) -> Tensor:
    return torch.nn.functional.silu(s)


def places(i: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Row, not rounded, and column of a place in a grid."""
    return i / width, i % width


class Causal(torch.autograd.Function):
    """A masked score by a function of autograd's own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(score: Tensor, allowed: Tensor) -> Tensor:
        return torch.where(allowed, score, -torch.inf)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.mark_non_differentiable(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Holder(torch.nn.Module):
    """A module that holds a table, whose method is a score function."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def score(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + self.table[h]


@dataclass(frozen=True)
class Steeper:
    """A score function that is an object."""

    slope: float

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + self.slope * (k - q)


def shifted(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, by: float) -> Tensor:
    return s + by * (q - k)


def causal_score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q >= k, s, -torch.inf)


INF = float("inf")
BUILT_IN: dict[str, Reads] = {
    "identity": plain(lambda s, b, h, q, k: s),
    "twice": plain(lambda s, b, h, q, k: s * 2),
    "squared": plain(lambda s, b, h, q, k: s * s),
    "causal": plain(causal_score),
    "inverse causal": plain(lambda s, b, h, q, k: torch.where(q <= k, s, -INF)),
    "relative": plain(lambda s, b, h, q, k: s + (q - k)),
    "relative, causal": plain(lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), -INF)),
    "ALiBi": plain(lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 2.0))),
}
SCORES: dict[str, Reads] = {
    "sine of cosine": plain(lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b)),
    "sine times cosine": plain(lambda s, b, h, q, k: torch.cos(s) * torch.sin(s) + torch.tan(b)),
    "SiLU": plain(lambda s, b, h, q, k: silu(s)),
    "sigmoid": plain(lambda s, b, h, q, k: torch.sigmoid(s)),
    "GELU": plain(lambda s, b, h, q, k: torch.nn.functional.gelu(s)),
    "soft cap": plain(lambda s, b, h, q, k: 20 * torch.tanh(s / 20)),
    "absolute value": plain(lambda s, b, h, q, k: s.abs()),
    "clamp": plain(lambda s, b, h, q, k: s.clamp(-1.5, 1.5)),
    "maximum": plain(lambda s, b, h, q, k: torch.maximum(s, -s / 3)),
    "power": plain(lambda s, b, h, q, k: s**3 / 10),
    "root": plain(lambda s, b, h, q, k: (s * s + 1).sqrt()),
    "exponential": plain(lambda s, b, h, q, k: torch.exp(s / 4)),
    "reciprocal": plain(lambda s, b, h, q, k: 1 / (2 + s.abs())),
    "a number": plain(lambda s, b, h, q, k: s + 2.5),
    "negative": plain(lambda s, b, h, q, k: -s),
    "floor division": plain(lambda s, b, h, q, k: s - q // (1 + k)),
    "remainder": plain(lambda s, b, h, q, k: s + (q - k) % 5),
    "logarithm of a distance": plain(lambda s, b, h, q, k: s - torch.log1p((q - k).abs().float())),
    "even keys": plain(lambda s, b, h, q, k: torch.where(k % 2 == 0, s, -INF)),
    "window": plain(lambda s, b, h, q, k: torch.where((q - k).abs() <= 20, s, -INF)),
    "prefix": plain(lambda s, b, h, q, k: torch.where((k < 17) | (q >= k), s, -INF)),
    "grid window": plain(
        lambda s, b, h, q, k: torch.where(
            ((places(q, 12)[0] - places(k, 12)[0]).abs() <= 3) | ((places(q, 12)[1] - places(k, 12)[1]).abs() <= 3),
            s,
            -INF,
        )
    ),
    "by batch entry and head": plain(lambda s, b, h, q, k: s * (b + 1) + h),
    "by parity of the head": plain(lambda s, b, h, q, k: torch.where(h % 2 == 0, s, s / 2)),
    "a Python condition": plain(lambda s, b, h, q, k: s + 1 if isinstance(b, Tensor) else s),
    "wider": plain(lambda s, b, h, q, k: s.double() * 1.5),
    "float32 within": plain(lambda s, b, h, q, k: torch.tanh(s.float()).to(s.dtype)),
    "two, composed": plain(lambda s, b, h, q, k: causal_score(s + (q - k), b, h, q, k)),
    "partial": plain(partial(shifted, by=0.25)),
    "an object": plain(Steeper(0.125)),
    "a new index": plain(lambda s, b, h, q, k: s + h.new_zeros(h.shape)),
    "function of autograd": plain(lambda s, b, h, q, k: Causal.apply(s, q >= k)),
}


def documents(size: Size) -> Tensor:
    return torch.arange(max(size.queries, size.keys)) // 23


def offsets(size: Size) -> Tensor:
    """Of each place, the first of its document."""
    return documents(size) * 23


def per_entry(size: Size) -> Tensor:
    """A length for each batch entry."""
    return torch.arange(size.batch) * 20 + 31


def mixed(size: Size) -> Tensor:
    """A place for each place."""
    return (torch.arange(max(size.queries, size.keys)) * 29 + 7) % min(size.queries, size.keys)


def integer(value: float) -> Callable[[Size], Tensor]:
    return lambda size: torch.tensor(value)


def biased_by_queries(q: Tensor, table: Tensor) -> Callable[..., Tensor]:
    """Scores of the queries themselves with 3 rows, by column of the key."""
    bias = torch.einsum("bhqd,cd->bhqc", q, table)
    return lambda s, b, h, i, j: s + bias[b, h, i, j % 3]


def biased_by_sums(y: Tensor) -> Callable[..., Tensor]:
    bias = y[:, :, None] + y[:, None]
    return lambda s, b, h, q, k: s + bias[b, q, k]


def biased_by_network(wide: Tensor, narrow: Tensor) -> Callable[..., Tensor]:
    """A bias for each head and distance, by two layers over the distance's signed logarithm."""
    distances = torch.arange(-128.0, 129.0).to(wide.dtype)[:, None]
    bias = torch.relu(distances.sign() * distances.abs().log1p() * wide) @ narrow
    return lambda s, b, h, q, k: s + bias[q - k + 128, h]


def summed(*tables: Tensor) -> Callable[..., Tensor]:
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for table in tables:
            s = s + table[q] * table[k] / len(tables)
        return s

    return score


BUFFERS: dict[str, Reads] = {
    "of heads": Reads(lambda t: lambda s, b, h, q, k: s * t[h], ("h",)),
    "of batch entries": Reads(lambda t: lambda s, b, h, q, k: s + t[b], ("b",)),
    "of keys": Reads(lambda t: lambda s, b, h, q, k: s + t[k], ("k",)),
    "of batch entries, heads and queries, three": Reads(
        lambda t, u, w: lambda s, b, h, q, k: s + t[q] + u[b] + w[h], ("q", "b", "h")
    ),
    "one number": Reads(lambda t: lambda s, b, h, q, k: s * t, ("",)),
    "one integer": Reads(lambda t: lambda s, b, h, q, k: s + t, values=(integer(1),)),
    "one row of one": Reads(lambda t: lambda s, b, h, q, k: s + t[0], ("1",)),
    "Python's numbers": Reads(lambda t, u: lambda s, b, h, q, k: s * t + u, values=(lambda n: 1.5, lambda n: 2)),
    "queries and keys": Reads(lambda t: lambda s, b, h, q, k: s + t[q, k], ("qk",)),
    "batch entries, queries and keys": Reads(lambda t: lambda s, b, h, q, k: s + t[b, q, k], ("bqk",)),
    "all four": Reads(lambda t: lambda s, b, h, q, k: s + t[b, h, q, k], ("bhqk",)),
    "distances": Reads(lambda t: lambda s, b, h, q, k: s + t[q - k + 96], ("d",)),
    "index after index": Reads(lambda t: lambda s, b, h, q, k: s + t[b][q], ("bq",)),
    "a row, then two indices, then one": Reads(lambda t: lambda s, b, h, q, k: s + t[0][b, h][q], ("4bhq",)),
    "an index that is read": Reads(
        lambda t, which: lambda s, b, h, q, k: s + t[b][h][which, q], ("bh4q",), (integer(2),)
    ),
    "a place that is read": Reads(lambda t, at: lambda s, b, h, q, k: s + t[at[k]], ("k",), (mixed,)),
    "a place of a place": Reads(lambda t, at: lambda s, b, h, q, k: s + t[at[at[q]]], ("q",), (mixed,)),
    "remainder of a place": Reads(lambda t: lambda s, b, h, q, k: s + t[k % 7], ("7",)),
    "clamped distance": Reads(lambda t: lambda s, b, h, q, k: s + t[(q - k).clamp(-4, 4) + 4], ("9",)),
    "documents": Reads(
        lambda d: lambda s, b, h, q, k: torch.where((q >= k) & (d[q] == d[k]), s, -INF), values=(documents,)
    ),
    "two halves": Reads(
        lambda d: lambda s, b, h, q, k: torch.where(d[q] == d[k], s, -INF), values=(lambda n: documents(n) > 1,)
    ),
    "places within documents": Reads(
        lambda d: lambda s, b, h, q, k: torch.where(q - d[q] >= k - d[k], s, -INF), values=(offsets,)
    ),
    "places by documents": Reads(
        lambda d: lambda s, b, h, q, k: s + (q - 23 * d[q]) - (k - 23 * d[k]), values=(documents,)
    ),
    "both ways for some": Reads(
        lambda n: lambda s, b, h, q, k: torch.where(((q <= n[b]) & (k <= n[b])) | (q >= k), s, -INF),
        values=(per_entry,),
    ),
    "bound on the score": Reads(
        lambda n: lambda s, b, h, q, k: torch.where(s <= n[b], causal_score(s, b, h, q, k), -INF), values=(per_entry,)
    ),
    "a view": Reads(lambda t: lambda s, b, h, q, k: s + t.view(-1, 96)[h, q], ("hq",)),
    "transposed": Reads(lambda t: lambda s, b, h, q, k: s + t.mT[q, k], ("kq",)),
    "permuted": Reads(lambda t: lambda s, b, h, q, k: s + t.permute(2, 0, 1)[h, q, k], ("qkh",)),
    "sliced": Reads(lambda t: lambda s, b, h, q, k: s + t[1:, ::2][h, k], ("5d",)),
    "expanded": Reads(lambda t: lambda s, b, h, q, k: s + t.expand(4, -1)[h, k], ("1k",)),
    "twice its value": Reads(lambda t: lambda s, b, h, q, k: s + (2 * t)[b, h, q, k], ("bhqk",)),
    "float32": Reads(lambda t: lambda s, b, h, q, k: s + t[h, k], ("hk",), dtype=torch.float32),
    "bfloat16": Reads(lambda t: lambda s, b, h, q, k: s + t[h, k], ("hk",), dtype=torch.bfloat16),
    "distance of three coordinates": Reads(
        lambda t, u, w: lambda s, b, h, q, k: s * torch.exp(-(t[q] - u[k]).pow(2).sum(-1).sqrt() / (2 + w[h].abs())),
        ("q3", "k3", "h"),
    ),
    "sum over a row": Reads(lambda t: lambda s, b, h, q, k: s + t[b].sum(-1), ("b8",)),
    "product of two rows": Reads(lambda t, u: lambda s, b, h, q, k: s + (t[q] * u[k]).sum(-1), ("q4", "k4")),
    "gate of the queries": Reads(lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t[b, h, q]), ("bhq",)),
    "gate in float32": Reads(lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t[h].to(torch.float32)), ("h",)),
    "of a module": Reads(lambda t: Holder(t).score, ("h",)),
    "of a module, read outside": Reads(lambda t: (lambda m: lambda s, b, h, q, k: s + m.table[k])(Holder(t)), ("k",)),
    "of a list": Reads(lambda *ts: lambda s, b, h, q, k: s + ts[0][q] + ts[1][k], ("q", "k")),
    "of a dictionary": Reads(
        lambda t, u: (lambda ts: lambda s, b, h, q, k: s + ts["t"][q] + ts["u"][k])({"t": t, "u": u}), ("q", "k")
    ),
    "in a loop": Reads(summed, ("d", "d", "d")),
    "a default argument": Reads(lambda t: lambda s, b, h, q, k, t=t: s + t[h], ("h",)),
    "keyword of a partial": Reads(lambda t: partial(lambda s, b, h, q, k, t: s + t[k], t=t), ("k",)),
    "two closures": Reads(
        lambda t, u: (lambda f: lambda s, b, h, q, k: f(s * u[h], q, k))(lambda s, q, k: s + t[q, k]), ("qk", "h")
    ),
    "its length": Reads(lambda t: lambda s, b, h, q, k: s + t[h] * t.shape[0], ("h",)),
    "of a small network": Reads(biased_by_network, ("18", "8h")),
    "a new index": Reads(lambda t: lambda s, b, h, q, k: s + t[b, h.new_zeros(h.shape), q, k], ("b1qk",)),
}
NARROW = "float32", "bfloat16", "gate in float32"  # which round in float64
# Functions of learned tensors, for any lengths.
LEARNED: dict[str, Reads] = {
    "distances": Reads(lambda t: lambda s, b, h, q, k: s + t[torch.abs(q - k)], ("d",)),
    "sums of places": Reads(lambda t: lambda s, b, h, q, k: s + t[q + k], ("d",)),
    "queries and keys": Reads(lambda t: lambda s, b, h, q, k: s + t[q, k], ("qk",)),
    "heads": Reads(lambda t: lambda s, b, h, q, k: s + t[h], ("h",)),
    "heads, queries and keys": Reads(lambda t: lambda s, b, h, q, k: s + t[h, q, k], ("hqk",)),
    "all four": Reads(lambda t: lambda s, b, h, q, k: s + t[b, h, q, k], ("bhqk",)),
    "factor": Reads(lambda t: lambda s, b, h, q, k: s * t[q], ("q",)),
    "window": Reads(lambda t: lambda s, b, h, q, k: s + t[torch.clamp(q - k, -4, 4) + 4], ("9",)),
    "keys": Reads(lambda t: lambda s, b, h, q, k: s + t[k], ("k",)),
    "one of four": Reads(lambda t, at: lambda s, b, h, q, k: s + t[b, h, at, q], ("bh4q",), (integer(0),)),
    "at places that are read": Reads(lambda t, at: lambda s, b, h, q, k: s + t[at[q]], ("q",), (mixed,)),
    "queries plus keys": Reads(lambda t: lambda s, b, h, q, k: s + t[q] + t[k], ("d",)),
    "keys and queries": Reads(lambda t: lambda s, b, h, q, k: s + t[k, q], ("kq",)),
    "heads, keys and queries": Reads(lambda t: lambda s, b, h, q, k: s + t[h, k, q], ("hkq",)),
    "gate of heads": Reads(lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t[h]), ("h",)),
    "two": Reads(lambda t, u: lambda s, b, h, q, k: s + t[q] + u[k], ("q", "k")),
    "queries, then keys": Reads(lambda t: lambda s, b, h, q, k: s + t[q][k], ("qk",)),
    "one number": Reads(lambda t: lambda s, b, h, q, k: s * t, ("",)),
    "made before": Reads(biased_by_sums, ("bd",)),
    "made of the queries": Reads(biased_by_queries, ("Q", "3e")),
}
