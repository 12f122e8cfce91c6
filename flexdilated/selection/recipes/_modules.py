"""Recipes that compute more than attention over chosen blocks: coarse to fine, and native sparse attention."""

from __future__ import annotations

from math import log
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from ..._attend import attend, autocast
from ..._validate import check_tensors, resolve_scale
from ...engines import sum_dtype
from ...masks import EMPTY, FULL, PARTIAL, chunked, custom, every, local_window, selected_blocks
from ...masks import causal as causal_pattern
from ...masks.core import advises, require_bool, require_int
from .._choose import TopK, choose
from .._selector import BlockSelector

# B batch, H query heads, G key/value heads, N queries, M keys, W windows, C blocks of keys, D head dim, E embedding dim

_MOST_SCORES = 1 << 22  # most scores of compressed keys in memory


class WindowsBefore:
    """Holds `pattern`, whose keys are windows by index: query t sees window i iff t >= i * stride + reach.

    The pattern has bounds for boxes: a box is full if its first query sees its last window, and empty if its last query
    does not see its first window.
    """

    # Modules store an instance of this class, because a closure cannot be pickled, and because torch.compile can read
    # an existing pattern but not build one from a function.

    def __init__(self, stride: int, reach: int) -> None:
        def seen(b, h, q, k):
            return q >= k * stride + reach

        def classify(head, q_first, q_last, k_first, k_last):
            full, some = q_first >= k_last * stride + reach, q_last >= k_first * stride + reach
            return torch.where(full, FULL, torch.where(some, PARTIAL, EMPTY))

        self.pattern = custom(seen, classify=classify)
        self._made_of = (stride, reach)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of


@advises()
class CoarseToFineAttention(nn.Module):
    """Attention to single keys of `top` blocks, and to all other blocks by their means; it has no parameters.

    The softmax of a query, with scores s, has these terms:

    * each key of the `top` blocks with the highest score q · mean(K): exp(s), with its value. With `causal` these
      blocks are before the query's own block, whose keys up to the query are terms, too;
    * each other whole block (with `causal`, each before the query's own): block * exp(score of its mean key), with its
      mean value, as if all its keys and values were equal to their means.

    A last block of fewer than `block` keys is never pooled: each of its keys that the query sees is a term.

    The result equals dense attention if keys are constant within blocks, or if `top` covers all blocks. The pooled
    terms, of the second kind, are computed for all blocks; the terms of the `top` blocks are then subtracted. This is
    numerically stable: by Jensen's inequality the terms of a block's keys sum to at least its pooled term, so no small
    difference remains.

    block: tokens of a block.
    top: blocks that a query reads key by key.
    causal: hide later keys.

    Gradients are exact for the chosen blocks, and pass through the means; the choice has no gradient. The cost of a
    query is about that of M / block + (top + 1) * block keys, and of M / block scores for the choice.

    Raises TypeError or ValueError for other values.
    Source: the rule is this library's; MRA, arXiv 2207.10284, refines pooled attention in a similar way, but pools
    queries as well.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> attention = fd.selection.recipes.CoarseToFineAttention(block=32, top=2)
    >>> attention(q, k, v).shape
    torch.Size([1, 4, 256, 64])
    """

    def __init__(self, *, block: int = 64, top: int = 8, causal: bool = True) -> None:
        super().__init__()
        self.block, self.top = require_int("block", block, minimum=1), require_int("top", top, minimum=1)
        self.causal = require_bool("causal", causal)
        within, always = (causal_pattern(), chunked(block)) if causal else (every(), None)
        self.selector = BlockSelector(block=block, choose=TopK(top), within=within, always=always)
        fine = selected_blocks("fine", block=(1, block), most=top + 1)
        self._fine_pattern = fine if always is None else (fine | always) & within
        self._past_blocks = WindowsBefore(block, block)

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G M D"],
        v: Float[Tensor, "B G M D"],
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        q_offset: int = 0,
    ) -> Float[Tensor, "B H N D"]:
        """Return the attention output in the shape of q.

        Query i has position q_offset + i, key j position j.

        scale: factor on the scores, a number; None: 1 / sqrt(D).
        enable_gqa: as in `attend`.

        Raises ValueError or TypeError for inputs that do not fit together.
        """
        q, k, v = autocast(q, k, v)
        check_tensors(q, k, v, enable_gqa=enable_gqa)
        require_int("q_offset", q_offset, minimum=0)
        options = {"scale": scale, "enable_gqa": enable_gqa, "q_offset": q_offset, "return_lse": True}
        whole, rest = divmod(k.shape[2], self.block)
        blocks = [x[:, :, : whole * self.block].unflatten(2, (whole, self.block)) for x in (k, v)]
        keys, values = (x.mean(3, dtype=sum_dtype(x)).to(x.dtype) for x in blocks)
        with torch.no_grad():
            chosen = self.selector(q, k[:, :, : whole * self.block], scale=scale, q_offset=q_offset).blocks
        last = chosen.new_full((*chosen.shape[:3], 1), whole if rest else -1)
        fine = attend(q, k, v, self._fine_pattern, bindings={"fine": torch.cat([chosen, last], -1)}, **options)
        pooled = attend(q, keys, values, self._past_blocks.pattern if self.causal else every(), **options)
        by_key = selected_blocks("pooled", block=(1, 1), most=self.top)
        twice = attend(q, keys, values, by_key, bindings={"pooled": chosen}, **options)
        shift = log(self.block)
        return _joint_softmax(fine, (pooled[0], pooled[1] + shift), (twice[0], twice[1] + shift)).to(q.dtype)

    def extra_repr(self) -> str:
        return f"block={self.block}, top={self.top}, causal={self.causal}"


def _joint_softmax(
    fine: tuple[Tensor, Tensor], pooled: tuple[Tensor, Tensor], twice: tuple[Tensor, Tensor]
) -> Float[Tensor, "B H N D"]:
    """Return the output of one softmax over the terms of `fine` and of `pooled`, without the terms of `twice`.

    Each argument is (output, lse) of attention to its terms; `pooled` contains the terms of `twice`.
    """
    outs, lses = zip(fine, pooled, twice, strict=True)
    # A row without keys has lse -inf in all three parts and keeps output 0.
    top = torch.maximum(lses[0].detach(), lses[1].detach()).clamp(min=torch.finfo(lses[0].dtype).min)
    one, other, less = ((lse - top).exp().unsqueeze(-1) for lse in lses)
    total = one + other - less
    out = one * outs[0] + other * outs[1] - less * outs[2]
    return out / total.masked_fill(total == 0, 1.0)


@advises()
class NativeSparseAttention(nn.Module):
    """NSA: sigmoid gates weigh three branches: attention to compressed keys, to selected blocks, and to a window.

    1. Compressed: window i of `length` keys from i * stride becomes one key and one value, by an MLP on the window's
       tokens, to each of which a learned position vector is added. Query t sees window i iff
       t >= i * stride + length - 1.
    2. Selected: blocks of `block` keys. For the query heads of a key/value head together, block j has the score
       sum_{m < block/stride} sum_{n < length/stride} p[(block/stride) j - m - n], where p are the query's weights in
       branch 1, and indices begin at 1, as in the paper: a window that overlaps the block counts once for each `stride`
       keys of the overlap. The first `first` blocks and the last `local` blocks up to the query's own are always
       chosen; `top` blocks in total, or all if there are fewer.
    3. Window: the last `window` keys, the query's own position included.

    A head's output is sum_c g_c · out_c with g = sigmoid(linear(x)), three gates per head and query. The MLPs are
    trained through branch 1, and the gates directly; no gradient passes through the choice. The caller applies a rotary
    embedding.

    embed_dim: E, the size of the gates' input.
    head_dim, num_heads, num_kv_heads: of the attention; num_kv_heads divides num_heads, and equals it by default.
    length, stride, block: `stride` divides length and block.
    top: at least first + local.
    first: at least 0.
    local: at least 1.
    window: at least 1.

    Raises TypeError or ValueError for other values.
    Source: NSA, arXiv 2502.11089, section 3, equations 5 to 12.

    >>> x, q = torch.randn(1, 256, 32), torch.randn(1, 4, 256, 16)
    >>> k, v = torch.randn(2, 3, 1, 2, 256, 16)
    >>> layer = fd.selection.recipes.NativeSparseAttention(32, 16, 4, 2, top=4, window=64)
    >>> layer(x, q, k, v).shape
    torch.Size([1, 4, 256, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        length: int = 32,
        stride: int = 16,
        block: int = 64,
        top: int = 16,
        first: int = 1,
        local: int = 2,
        window: int = 512,
    ) -> None:
        super().__init__()
        require_int("embed_dim", embed_dim, minimum=1)
        require_int("head_dim", head_dim, minimum=1)
        self.num_heads = require_int("num_heads", num_heads, minimum=1)
        groups = num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = require_int("num_kv_heads", groups, minimum=1)
        if num_heads % groups:
            raise ValueError(f"num_kv_heads must divide num_heads; got num_kv_heads={groups} and {num_heads=}")
        self.length, self.stride = require_int("length", length, minimum=1), require_int("stride", stride, minimum=1)
        self.block, self.window = require_int("block", block, minimum=1), require_int("window", window, minimum=1)
        if length % stride or block % stride:
            raise ValueError(f"stride must divide length and block; got {stride=}, {length=} and {block=}")
        self.first, self.local = require_int("first", first, minimum=0), require_int("local", local, minimum=1)
        self.top = require_int("top", top, minimum=1)
        if top < first + local:
            raise ValueError(
                f"top must be at least {first + local}, as it includes the first and local blocks; got {top=}"
            )
        self.compress_keys, self.compress_values = (_Compression(head_dim, length, stride) for _ in range(2))
        self.gates = nn.Linear(embed_dim, 3 * num_heads)
        self._ended_windows = WindowsBefore(stride, length - 1)

    def forward(
        self,
        x: Float[Tensor, "B N E"],
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "3 B G M D"],
        v: Float[Tensor, "3 B G M D"],
        *,
        scale: float | None = None,
        q_offset: int = 0,
    ) -> Float[Tensor, "B H N D"]:
        """Return the gated sum of the outputs of the three branches, in the shape of q.

        k, v: keys and values of the branches compressed, selected and window, in this order; to use one k for all, pass
            k.expand(3, *k.shape).
        x: input of the gates, one token per query.
        scale: factor on scores, 1 / sqrt(D) by default.

        Query i has position q_offset + i, key j position j.

        Raises ValueError or TypeError for inputs that do not fit.
        """
        self._check_inputs(x, q, k, v)
        require_int("q_offset", q_offset, minimum=0)
        options = {"scale": scale, "enable_gqa": True, "q_offset": q_offset}
        keys, values = self.compress_keys(k[0]), self.compress_values(v[0])
        compressed, lse = attend(q, keys, values, self._ended_windows.pattern, return_lse=True, **options)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            blocks = self._chosen_blocks(q, keys, lse, k.shape[3], resolve_scale(scale, q.shape[-1]), q_offset)
        table = selected_blocks("chosen", block=(1, self.block), most=self.top) & causal_pattern()
        selected = attend(q, k[1], v[1], table, bindings={"chosen": blocks}, **options)
        near = attend(q, k[2], v[2], local_window(left=self.window - 1, right=0), **options)
        gates = self.gates(x).sigmoid().unflatten(-1, (3, self.num_heads)).permute(2, 0, 3, 1).unsqueeze(-1)
        return (gates * torch.stack([compressed, selected, near])).sum(0)

    def _chosen_blocks(
        self,
        q: Float[Tensor, "B H N D"],
        keys: Float[Tensor, "B G W D"],
        lse: Float[Tensor, "B H N"],
        num_keys: int,
        scale: float,
        q_offset: int,
    ) -> Int64[Tensor, "B G N top"]:
        """Return the blocks of `block` keys that each query and key/value head chooses, padded with -1.

        keys, lse: compressed keys, and the lse of attention to them, from which the blocks are scored.
        num_keys: number of keys before compression.
        """
        count = -(-num_keys // self.block)
        number, each = q.shape[2], q.shape[0] * q.shape[1] * max(1, keys.shape[2])
        blocks = torch.full((*keys.shape[:2], number, self.top), -1, device=q.device)
        if not num_keys or not each:
            return blocks
        ids = torch.arange(count, device=q.device)
        wide = sum_dtype(q)
        for at in range(0, number, step := max(1, _MOST_SCORES // each)):
            few = slice(at, min(at + step, number))
            position = q_offset + torch.arange(few.start, few.stop, device=q.device)[:, None]
            scores = self._block_scores(q[:, :, few].to(wide), keys.to(wide), lse[:, :, few], position, count, scale)
            own = position // self.block
            kept = (ids < self.first) | ((ids > own - self.local) & (ids <= own))
            scores, candidates = scores.masked_fill(kept, torch.inf), (ids <= own).expand(scores.shape)
            how = {"kind": "top_k", "amount": 0.0, "most": self.top}
            blocks[:, :, few], _ = choose(scores, candidates, ids.expand(scores.shape), **how)
        return blocks

    def _block_scores(
        self,
        q: Float[Tensor, "B H n D"],
        keys: Float[Tensor, "B G W D"],
        lse: Float[Tensor, "B H n"],
        position: Int64[Tensor, "n 1"],
        count: int,
        scale: float,
    ) -> Float[Tensor, "B G n C"]:
        """Return the score of each of `count` blocks for each query and key/value head, from attention to `keys`.

        The score is a sum over the query heads of the key/value head and over the windows that overlap the block: the
        window's attention weight times the number of its parts of `stride` keys inside the block.

        keys, lse: compressed keys, and the log-sum-exp of attention to them.
        """
        scores = scale * (q.unflatten(1, (keys.shape[1], -1)) @ keys.unsqueeze(2).mT)
        begins = torch.arange(keys.shape[2], device=q.device) * self.stride
        sees = position >= begins + self.length - 1
        # Queries that see no window have lse -inf and weights 0.
        shares = (scores - lse.unflatten(1, scores.shape[1:3]).unsqueeze(-1)).masked_fill(~sees, -torch.inf).exp()
        total = shares.sum(2)
        per, reach = self.block // self.stride, self.length // self.stride
        # For each window that overlaps a block, in order: the number of its strides in the block.
        weights = conv1d(total.new_ones(1, 1, per), total.new_ones(1, 1, reach), padding=reach - 1)
        lined = pad(total.flatten(0, 2).unsqueeze(1), (reach - 1, count * per - keys.shape[2]))
        return conv1d(lined, weights, stride=per).view(*total.shape[:3], count)

    def _check_inputs(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        for name, each in (("k", k), ("v", v)):
            if each.dim() != 5 or each.shape[0] != 3:
                raise ValueError(
                    f"{name} must have shape (3, batch, key/value heads, tokens, head dim), for the 3 branches: to use "
                    f"one {name} for all write {name}.expand(3, *{name}.shape); got {tuple(each.shape)}"
                )
        check_tensors(q, k[0], v[0], enable_gqa=True)
        heads, came = (self.num_heads, self.num_kv_heads), (q.shape[1], k.shape[2])
        if came != heads:
            raise ValueError(
                f"the layer has {heads[0]} heads and {heads[1]} key/value heads; got {came[0]} and {came[1]}"
            )
        sizes = (q.shape[0], q.shape[2], self.gates.in_features)
        if tuple(x.shape) != sizes:
            raise ValueError(f"x must have shape (batch, queries, embed dim), here {sizes}; got {tuple(x.shape)}")

    def extra_repr(self) -> str:
        windows = f"length={self.length}, stride={self.stride}, block={self.block}"
        return f"{windows}, top={self.top}, first={self.first}, local={self.local}, window={self.window}"


class _Compression(nn.Module):
    """Compresses each complete window of keys (or values) into one vector, by an MLP shared by all heads."""

    def __init__(self, head_dim: int, length: int, stride: int) -> None:
        super().__init__()
        self.length, self.stride = length, stride
        self.places = nn.Parameter(torch.zeros(length, head_dim))
        self.mlp = nn.Sequential(nn.Linear(length * head_dim, head_dim), nn.GELU(), nn.Linear(head_dim, head_dim))

    def forward(self, x: Float[Tensor, "B G M D"]) -> Float[Tensor, "B G W D"]:
        if x.shape[2] < self.length:
            return x[:, :, :0]
        windows = x.unfold(2, self.length, self.stride).transpose(-1, -2)
        return self.mlp((windows + self.places).flatten(3)).to(x.dtype)
