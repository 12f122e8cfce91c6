"""attention_received: attention that each key receives, computed as the gradient of v for a cotangent of ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .._attend import attend, autocast, planned_call
from .._engines import choose_engine
from .._validate import check_lse, check_tensors
from ..engines import refuse_transforms, sum_dtype, tiles_backward
from ..masks import Layout, Mixture, Pattern
from ..masks.core import advises, device_kind, require_expression

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


@advises()
def attention_received(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    lse: Float[Tensor, "B H N"],
    pattern: Pattern | Mixture,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    bindings: Mapping[str, Tensor] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    layout: Layout | None = None,
    engine: str | None = None,
    block_size: int | tuple[int, int] | None = None,
) -> Float[Tensor, "B H M"]:
    """Attention that each key receives: sum over queries of multiplicity * exp(score - lse), per query head.

    lse: as `attend(q, k, v, pattern, return_lse=True)` returns it; other arguments: as in that call. A query
    distributes 1 over its keys, and nothing if its lse is -inf. So a head's entries sum to the number of its queries
    with keys, less the share of sinks and zero keys, which the lse includes. If the lse covers more keys than k, the
    result is the share of the keys in k.

    Uses as much memory as a backward pass, and no N x M matrix. The result is float32, or float64 for float64 inputs,
    and has no gradient. On CPU half precision is computed in float32; on accelerators engine="flex" rounds the result
    to half.

    engine: as in `attend`, except that "flex" has no backward on CPU. block_size: as in `attend`.

    Raises ValueError or TypeError, before any work, for inputs that do not fit together.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> _, lse = fd.attend(q, k, v, masks.causal(), return_lse=True)
    >>> fd.attention_received(q, k, lse, masks.causal()).shape
    torch.Size([1, 4, 256])
    """
    require_expression(pattern)
    q, k, _ = autocast(q, k, k)
    check_tensors(q, k, k, enable_gqa=enable_gqa)
    check_lse(lse, q)
    where = {"q_offset": q_offset, "k_offset": k_offset, "head_offset": head_offset}
    options = {**where, "num_heads_global": num_heads_global, "layout": layout, "block_size": block_size}
    call, tensors, factor = planned_call(q, k, pattern, scale=scale, bindings=bindings, **options)
    if engine == "flex" and not device_kind(q.device).flex_trains:
        raise ValueError("attention_received needs a backward, and flex has none on CPU; engine='tiles' serves it")
    if engine == "flash":
        raise ValueError("attention_received is a gradient of v alone, which flash has not; engine='flex' serves it")
    chosen = choose_engine(engine, q, k, k, pattern, first=call.first, return_lse=True, score_mod=None, sinks=None)
    refuse_transforms("attention_received", (q, k, lse))
    q, k, lse = q.detach(), k.detach(), lse.detach().to(sum_dtype(q))
    if 0 in q.shape or 0 in k.shape:
        return lse.new_zeros(q.shape[0], q.shape[1], k.shape[2])
    if chosen == "tiles":
        return _by_tiles(q, k, lse, tensors, *call.arguments, factor)
    options |= {"scale": factor, "num_heads_global": call.num_heads_global}
    return _by_autograd(q, k, lse, pattern, bindings=bindings, engine=chosen, **options)


def _by_tiles(q: Tensor, k: Tensor, lse: Tensor, bindings: list[Tensor], *options: Any) -> Tensor:
    """Call the backward op of `attend` with the given lse.

    The gradient of v depends on neither out nor v, so out is 0 and k is passed as v.
    """
    wide = sum_dtype(q)
    # Gradients of keys wider than queries are as wide; the op reads the keys in the queries' dtype.
    q, k = (q.to(wide) if device_kind(q.device).on_host else q), k.to(wide)
    out = torch.zeros_like(q)
    found = [
        _columns(tiles_backward(cotangent, None, q, k, k, out, lse, bindings, *options)[2], members)
        for members, cotangent in _cotangents(q, k.shape[1])
    ]
    return torch.cat(found, 2).flatten(1, 2)


def _by_autograd(
    q: Tensor, k: Tensor, lse: Tensor, pattern: Pattern | Mixture, *, engine: str, **options: Any
) -> Tensor:
    """Differentiate `attend`, whose lse covers only these keys and no sinks; rescale the shares to the given lse."""
    wide = sum_dtype(q)
    with torch.inference_mode(False), torch.enable_grad():
        q, k, lse = (x.clone() if x.is_inference() else x for x in (q, k, lse))
        if engine == "reference":
            q, k = q.double(), k.double()  # else the engine would round its float64 result to their dtype
        v = torch.zeros_like(k).requires_grad_()
        out, own = attend(q, k, v, pattern, enable_gqa=True, engine=engine, return_lse=True, **options)
        none = (own == -torch.inf) | (lse == -torch.inf)
        weight = (own.detach() - lse.masked_fill(none, 0.0)).masked_fill(none, -torch.inf).exp()[..., None]
        found = [
            _columns(torch.autograd.grad(out, v, (cotangent * weight).to(out.dtype), retain_graph=True)[0], members)
            for members, cotangent in _cotangents(q, k.shape[1])
        ]
    return torch.cat(found, 2).flatten(1, 2).to(wide)


def _cotangents(q: Tensor, num_kv_heads: int) -> Iterator[tuple[range, Tensor]]:
    """(members of each group of query heads, cotangent of out): for each member, ones in a separate column.

    The gradient of v is summed over the group of a key/value head; separate columns keep the members' shares apart.
    """
    dim, group = q.shape[3], q.shape[1] // num_kv_heads
    member, column = torch.arange(q.shape[1], device=q.device) % group, torch.arange(dim, device=q.device)
    for first in range(0, group, dim):
        ones = (member[:, None] - first == column).to(q.dtype)
        yield range(first, min(first + dim, group)), torch.empty_like(q).copy_(ones[:, None, :].expand_as(q))


def _columns(grad_v: Float[Tensor, "B G M D"], members: range) -> Float[Tensor, "B G C M"]:
    return grad_v[..., : len(members)].transpose(2, 3)
