"""NATTEN's neighbourhoods, restated, against the function that docs/integrations/migration.md writes in their place.

Source: https://github.com/SHI-Labs/NATTEN, `natten.functional` and its documentation of windows and dilation.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

GRIDS = {
    "na1d": ((23,), (5,), (2,)),
    "na2d": ((7, 12), (3, 5), (1, 2)),
    "na2d, one number": ((9, 9), 3, 2),
    "na2d, all of the grid": ((5, 7), (5, 7), 1),
    "na3d": ((4, 5, 6), (3, 1, 5), (1, 2, 1)),
    "even": ((7, 12), (4, 6), (1, 2)),
    "strides": ((9, 11), (4, 5), 1, (2, 3)),
    "a causal axis": ((5, 6, 6), (3, 4, 3), 1, (2, 1, 3), (True, False, False)),
    "causal, with rates": ((23,), 4, 2, 3, True),
}


def each_axis(number: Any, grid: tuple[int, ...]) -> tuple[Any, ...]:
    return (number,) * len(grid) if isinstance(number, int) else number


def window(place: int, length: int, size: int, dilation: int, stride: int = 1, is_causal: bool = False) -> list[int]:
    """Of the tokens with the query's remainder, `size` in a row, with its leader as near their middle as can be."""
    fellows = list(range(place % dilation, length, dilation))
    group = fellows.index(place) // stride * stride
    if is_causal:
        leader = min(group + stride - 1, len(fellows) - 1)
        return [each for each in fellows[max(leader - size + 1, 0) : leader + 1] if each <= place]
    leader = min(group + stride // 2, len(fellows) - 1)
    start = min(max(leader - size // 2, 0), len(fellows) - size)
    return fellows[start : start + size]


def dense_natten(q: Tensor, k: Tensor, v: Tensor, *numbers: Any) -> Tensor:
    """Token by token; tensors are (batch, *grid, heads, head dim)."""
    grid = tuple(q.shape[1:-2])
    axes = list(zip(grid, *(each_axis(number, grid) for number in numbers), strict=True))
    out = torch.empty_like(q)
    for place in product(*map(range, grid)):
        near = [torch.tensor(window(at, *axis)) for at, axis in zip(place, axes, strict=True)]
        index = (slice(None), *torch.meshgrid(*near, indexing="ij"))
        keys, values = (x[index].flatten(1, -3).transpose(1, 2) for x in (k, v))
        query = q[(slice(None), *place)].unsqueeze(2)
        out[(slice(None), *place)] = F.scaled_dot_product_attention(query, keys, values).squeeze(2)
    return out


def tensors(grid: tuple[int, ...]) -> Tensor:
    return torch.randn(3, 2, *grid, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", GRIDS)
def test_same_function(page: SimpleNamespace, name: str) -> None:
    """Outputs and gradients."""
    grid, *numbers = GRIDS[name]
    qkv = tensors(grid).requires_grad_()
    options = dict(zip(("kernel_size", "dilation", "stride", "is_causal"), numbers, strict=False))
    found = page.neighborhood_attention(*qkv, **options)
    want = dense_natten(*qkv, *numbers)
    torch.testing.assert_close(found, want)
    grads = [torch.autograd.grad(out.sin().sum(), qkv)[0] for out in (found, want)]
    torch.testing.assert_close(*grads)


def test_scale_and_grouped_heads(page: SimpleNamespace) -> None:
    q, k, v = tensors((5, 6))
    found = page.neighborhood_attention(q, k[..., :1, :], v[..., :1, :], 3, scale=0.7, enable_gqa=True)
    k, v = (x[..., :1, :].expand(-1, -1, -1, 2, -1) for x in (k, v))
    torch.testing.assert_close(found, dense_natten(q * (0.7 * 8**0.5), k, v, 3, 1))
