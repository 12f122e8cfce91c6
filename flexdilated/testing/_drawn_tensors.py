"""Tensors that hypothesis draws: ordinary values, and those that break a softmax which is written carelessly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..masks.core._check import require_bool
from ._drawn_sizes import AttentionSizes
from ._memory_layouts import MEMORY_LAYOUTS, laid_out

# The first is the simplest. "ties": equal numbers, so that scores tie; "large": scores of which exp overflows.
_VALUES = ("ordinary", "ties", "zeros", "large", "tiny", "one far above")
_SEEDS = st.integers(0, 1 << 16)


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    values: Sequence[str] = _VALUES,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of this shape: ordinary values, or ties, zeros and -0.0, large or tiny ones, one far above the others.

    Drawn is a kind and a seed, so that a tensor of any size costs as little; they shrink towards ordinary values of
    seed 0. All values are finite in `dtype`.
    """
    require_bool("requires_grad", requires_grad)
    _require_kinds(values)
    kind, seed = draw(st.sampled_from(list(values))), draw(_SEEDS)
    generator = torch.Generator("cpu").manual_seed(seed)
    return _filled(shape, kind, generator).to(dtype).requires_grad_(requires_grad)


def _filled(shape: Sequence[int], kind: str, generator: torch.Generator) -> Tensor:
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    if kind == "ties":
        x = x.round().clamp(-1, 1)
    elif kind == "zeros":
        x = torch.where(x < 0, -0.0, 0.0).double()
    elif kind == "large":
        x = x * 100
    elif kind == "tiny":
        x = x * 1e-4
    elif kind == "one far above" and x.numel():
        x.view(-1)[int(torch.randint(x.numel(), (), generator=generator))] = 1e4
    return x


@st.composite
def attention_inputs(
    draw: st.DrawFn,
    sizes: AttentionSizes,
    *,
    dtype: torch.dtype = torch.float32,
    values: Sequence[str] = _VALUES,
    layouts: Sequence[str] = MEMORY_LAYOUTS,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, N, D), k and v (B, G, M, D), each with a kind of values and a layout in memory of its own.

    layouts: some of those that `flexdilated.testing.laid_out` knows; they shrink towards the first.
    Of one seed, so that no two of the tensors are equal, however far they shrink.
    """
    _require_kinds(values)
    seed = draw(_SEEDS)
    generator = torch.Generator("cpu").manual_seed(seed)

    def one(heads: int, tokens: int) -> Tensor:
        shape = (sizes.batch, heads, tokens, sizes.head_dim)
        x = _filled(shape, draw(st.sampled_from(list(values))), generator).to(dtype)
        return laid_out(x, draw(st.sampled_from(list(layouts)))).requires_grad_(requires_grad)

    queries, keys = (sizes.num_heads, sizes.num_queries), (sizes.num_kv_heads, sizes.num_keys)
    return one(*queries), one(*keys), one(*keys)


def _require_kinds(values: Sequence[str]) -> None:
    if not values or any(value not in _VALUES for value in values):
        raise ValueError(f"values must be some of {', '.join(map(repr, _VALUES))}; got {values!r}")
