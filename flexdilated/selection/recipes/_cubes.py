"""Video sparse attention: tokens attend to the means of all cubes of a grid, and to the tokens of the best cubes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import pad

from ..._attend import attend, autocast
from ..._validate import check_tensors, resolve_scale
from ...engines import sum_dtype
from ...masks import every, selected_blocks, visible_keys
from ...masks.core import advises, require_int, require_ints
from .._choose import choose

# B batch, H query heads, G key/value heads, N tokens, C cubes, L places of a cube, D head dim


@advises()
class VideoSparseAttention(nn.Module):
    """Attention of a video's tokens to the means of its cubes, and to the tokens of the best cubes; no parameters.

    1. Coarse: a cube's query, key and value are the means over its tokens. Each cube attends to all cubes, and each
       token gets the output of its cube.
    2. Fine: the tokens of a cube attend to the tokens of the `top` cubes with the highest products of mean query and
       mean key, chosen for each query head.

    The paper adds both under gates that are linear in the layer's input: gate_coarse * coarse + gate_fine * fine.

    grid: frames, rows and columns of tokens, in row-major order, or another number of axes.
    cube: tokens of a cube along each axis. Cubes begin at token 0 of each axis. On an axis whose length is no multiple
        of the cube's, the last cubes have fewer tokens, but cost as much as whole ones.
    top: cubes that a token reads token by token; all, if there are fewer.

    Gradients pass through the means, and are exact for the chosen cubes; the choice has none.

    Raises TypeError or ValueError for other values.
    Source: VSA, arXiv 2505.13389, whose cubes have 4 x 4 x 4 tokens.

    >>> q, k, v = torch.randn(3, 1, 4, 5 * 6 * 6, 64)
    >>> attention = fd.selection.recipes.VideoSparseAttention((5, 6, 6), top=3)  # of 8 cubes
    >>> coarse, fine = attention(q, k, v)
    >>> fine.shape
    torch.Size([1, 4, 180, 64])
    """

    order: Int64[Tensor, " C*L"]  # token at each place, cube by cube; at places without one, the cube's first
    place: Int64[Tensor, " N"]  # of each token
    is_token: Bool[Tensor, "C L"]

    def __init__(self, grid: Sequence[int], *, cube: Sequence[int] = (4, 4, 4), top: int) -> None:
        super().__init__()
        self.grid, self.cube = require_ints("grid", grid, minimum=1), require_ints("cube", cube, minimum=1)
        self.top = require_int("top", top, minimum=1)
        if not self.grid or len(self.cube) != len(self.grid):
            raise ValueError(f"cube must have a length for each axis of the grid; got cube={cube} for {grid=}")
        places = _places(self.grid, self.cube)
        self._has_smaller = bool((places < 0).any())
        order = torch.where(places < 0, places[:, :1], places)
        self.register_buffer("order", order.flatten(), persistent=False)
        self.register_buffer("place", places.flatten().argsort()[-prod(self.grid) :], persistent=False)
        self.register_buffer("is_token", places >= 0, persistent=False)
        fine = selected_blocks("chosen", block=prod(self.cube), most=min(top, len(places)))
        self._fine_pattern = fine & visible_keys("is_token") if self._has_smaller else fine

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G N D"],
        v: Float[Tensor, "B G N D"],
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N D"]]:
        """Return the outputs (coarse, fine), each in the shape of q.

        scale: factor on the scores, a number; None: 1 / sqrt(D).
        enable_gqa: as in `attend`.

        Raises ValueError or TypeError for inputs that do not fit together or do not have the grid's number of tokens.
        """
        q, k, v = autocast(q, k, v)
        check_tensors(q, k, v, enable_gqa=enable_gqa)
        if not q.shape[2] == k.shape[2] == len(self.place):
            raise ValueError(
                f"q and k must have the {len(self.place)} tokens of a grid of {self.grid}; got {q.shape[2]} and "
                f"{k.shape[2]} in dim 2"
            )
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        q, k, v = (x[:, :, self.order].unflatten(2, self.is_token.shape) for x in (q, k, v))
        queries, keys, values = map(self._means, (q, k, v))
        coarse = attend(queries, keys, values, every(), **options)
        bindings = {"chosen": self._chosen(queries, keys, resolve_scale(scale, q.shape[-1]))}
        if self._has_smaller:
            bindings["is_token"] = self.is_token.flatten()
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        fine = attend(q, k, v, self._fine_pattern, bindings=bindings, **options)
        return coarse[:, :, self.place // self.is_token.shape[1]], fine[:, :, self.place]

    def _means(self, x: Float[Tensor, "B H C L D"]) -> Float[Tensor, "B H C D"]:
        """Return the mean over the tokens of each cube."""
        weights = self.is_token.to(sum_dtype(x))
        sums = (x.to(weights.dtype) * weights.unsqueeze(-1)).sum(3)
        return (sums / weights.sum(1, keepdim=True)).to(x.dtype)

    @torch.no_grad()
    def _chosen(
        self, queries: Float[Tensor, "B H C D"], keys: Float[Tensor, "B G C D"], scale: float
    ) -> Int64[Tensor, "B H C top"]:
        """Return, for each cube, the `top` cubes whose mean keys score highest with its mean query; all, if fewer."""
        wide, ids = sum_dtype(keys), torch.arange(keys.shape[2], device=keys.device)
        grouped = queries.unflatten(1, (keys.shape[1], -1)).to(wide)
        scores = (scale * (grouped @ keys.unsqueeze(2).mT.to(wide))).flatten(1, 2)
        candidates = torch.ones_like(scores, dtype=torch.bool)
        most = min(self.top, len(ids))
        return choose(scores, candidates, ids.expand(scores.shape), kind="top_k", amount=0.0, most=most)[0]

    def extra_repr(self) -> str:
        return f"grid={self.grid}, cube={self.cube}, top={self.top}"


def _places(grid: tuple[int, ...], cube: tuple[int, ...]) -> Int64[Tensor, "C L"]:
    """Return the tokens of each cube, in row-major order of cubes and of places in a cube; -1 outside the grid."""
    beyond = [each for length, size in zip(reversed(grid), reversed(cube), strict=True) for each in (0, -length % size)]
    places = pad(torch.arange(prod(grid)).view(grid), beyond, value=-1)
    for axis, size in enumerate(cube):
        places = places.unflatten(2 * axis, (-1, size))
    axes = range(0, places.dim(), 2)
    return places.permute(*axes, *(axis + 1 for axis in axes)).reshape(-1, prod(cube))
