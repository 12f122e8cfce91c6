"""attend_at: attention of queries and keys that stand at stated positions, for a part of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._attend import autocast
from ._call_key import CallKey
from ._engines import choose_engine
from ._flex_op import flex
from ._tiles import Result
from ._tiles_op import attention, gradients, tiles
from ._validate import check_sinks, check_tensors, resolve_scale, run_time_tensors
from .masks import Mixture, Pattern
from .masks._block_mask import block_sides
from .masks._pattern import require_expression
from .masks._placement import Placement
from .masks._ranges import Ranges

# B batch, H query heads, G key/value heads, L queries, M keys, D head dim


@dataclass(frozen=True)
class PlacedCall:
    """What a call is besides its q, k, v, sinks and run-time tensors, as plain values."""

    pattern: str
    placement: Placement
    scale: float
    head_offset: int
    num_heads_global: int
    engine: str
    sides: tuple[int, ...] = ()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bindings: list[Tensor],
        *,
        return_lse: bool = True,
        wide: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(out, lse if asked for); with `wide`, which has no gradient, out may come wider than q, as it is summed."""
        if self.engine == "tiles" and wide:
            return attention(self._key(q, k), q, k, v, sinks, bindings, self.scale, wide=True)
        if self.engine == "tiles":
            return tiles(q, k, v, sinks, bindings, self.pattern, self.scale, *self._where)
        options = {"scale": self.scale, "score_mod": None, "sinks": sinks, "return_lse": return_lse}
        return flex(q, k, v, bindings, self._key(q, k), **options)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], whole: WholeRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of a part of the keys of `whole`, the rows' outcome over all keys.

        The gradients of all parts add up to those of the whole; tiles gives them in float32 or wider.
        """
        if self.engine == "tiles":
            result = Result(whole.out, whole.lse, whole.grad_out, whole.grad_lse)
            return gradients(self._key(q, k), q, k, v, bindings, result, self.scale, wide=True)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            part, part_lse = self.forward(*leaves, None, bindings, return_lse=True)
        assert part_lse is not None
        return torch.autograd.grad((part, part_lse), leaves, whole.gradients_of(part.detach(), part_lse.detach()))

    def _key(self, q: Tensor, k: Tensor) -> CallKey:
        return CallKey.of(self.pattern, q.shape[1], k.shape[1], q.shape[2], k.shape[2], *self._where)

    @property
    def _where(self) -> tuple[int | list[int] | str, ...]:
        return (0, 0, self.head_offset, self.num_heads_global, 1, list(self.sides), self.placement.text)


@dataclass(frozen=True)
class WholeRows:
    """Rows over all their keys: out, lse, and the gradients that came in."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    def gradients_of(self, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of (out, lse) of a part of the keys: its weight in a row is exp(its lse - lse)."""
        absent = part_lse == -torch.inf
        weight = torch.where(absent, 0.0, (part_lse - torch.where(absent, 0.0, self.lse)).exp())
        wide = self.grad_out.to(self.lse.dtype)
        delta = (wide * (part.to(wide.dtype) - self.out.to(wide.dtype))).sum(-1)
        if self.grad_lse is not None:
            delta = delta + self.grad_lse
        return (weight[..., None] * wide).to(part.dtype), (weight * delta).to(part_lse.dtype)


def attend_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Mixture,
    *,
    queries: Ranges,
    keys: Ranges | Sequence[Ranges],
    num_tokens: int = 0,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
    bindings: Mapping[str, Tensor] | None = None,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    engine: str | None = None,
    block_size: int | tuple[int, int] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the allowed pairs of queries and keys that stand at stated positions of a longer sequence.

    Query token i of q (B, H, L, D) stands at the i-th position of `queries`, runs of step 1. keys: the same for k and
    v (B, G, M, D); keys at other positions are left out. Or a sequence of ranges for each key/value head, of any step:
    then every key that the pattern allows to any of the queries must be among them. k and v may have more tokens than
    stated: what is beyond is not read. Run-time tensors have values for num_tokens positions; 0 stands for one past the
    last that is stated. The rest as in `attend`.
    """
    require_expression(pattern)
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v, enable_gqa=enable_gqa)
    check_sinks(sinks, q)
    sizes = {"num_queries": q.shape[2], "num_keys": k.shape[2], "num_kv_heads": k.shape[1]}
    placement = placement_of(queries, keys, **sizes, num_tokens=num_tokens)
    heads = head_offset + q.shape[1] if num_heads_global is None else num_heads_global
    if not torch.compiler.is_compiling():
        pattern.check_heads(heads)
    features = {"score_mod": None, "sinks": sinks}
    chosen = choose_engine(engine, q, k, v, pattern, first=(head_offset, 0, 0), return_lse=return_lse, **features)
    call = PlacedCall(
        pattern.text,
        placement,
        resolve_scale(scale, q.shape[-1]),
        head_offset,
        heads,
        placed_engine(chosen, q.device),
        () if block_size is None else block_sides(block_size),
    )
    out, lse = call.forward(q, k, v, sinks, run_time_tensors(pattern, bindings), return_lse=return_lse)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def placed_engine(engine: str, device: torch.device) -> str:
    """The engine, if it serves tokens at stated positions; ValueError otherwise."""
    if engine == "reference":
        raise ValueError("engine='reference' runs whole sequences; 'tiles' (on CPU) and 'flex' run parts of one")
    if engine == "tiles" and device.type != "cpu":
        raise ValueError(f"tiles runs parts of a sequence on CPU only; got {device}. engine='flex' serves it")
    return engine


def placement_of(
    queries: Ranges,
    keys: Ranges | Sequence[Ranges],
    *,
    num_queries: int,
    num_keys: int,
    num_kv_heads: int,
    num_tokens: int,
) -> Placement:
    """Where the tokens of q, and of k and v, stand. Raises ValueError for numbers that do not fit."""
    shared = all(isinstance(run, range) for run in keys)
    sides = (tuple(keys),) if shared else tuple(map(tuple, keys))
    placement = Placement(tuple(queries), sides, complete=not shared, num_tokens=num_tokens)
    if placement.num_queries != num_queries:
        raise ValueError(
            f"queries must have a position for each token of q; got {placement.num_queries} for {num_queries}"
        )
    if len(sides) not in (1, num_kv_heads):
        raise ValueError(f"keys must be stated once, or for each of {num_kv_heads} key/value heads; got {len(sides)}")
    if placement.num_keys > num_keys:
        raise ValueError(f"k and v must have a token for each stated position; got {num_keys} for {placement.num_keys}")
    return placement
