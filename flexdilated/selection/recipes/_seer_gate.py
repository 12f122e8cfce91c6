"""The gate of SeerAttention, and how it learns: from the exact share of attention of each block."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ...masks.core import require_choice, require_finite, require_int
from .._choose import TopP
from .._pools import Pools
from .._selector import BlockSelector

# B batch, H query heads, G key/value heads, N queries, M keys, R rows, C blocks of keys, T tables, D head dim,
# E gate dim


_SHARES = ("head", "group")


class SeerGate(nn.Module):
    """Scores blocks of keys for rows of queries: RoPE(W_q query) · RoPE(W_k [greatest, least, mean] keys) / sqrt(dim).

    A scorer for `BlockSelector`, as `seer_attention` and `seer_attention_r` build them. Each head has its own weights.
    The rotary embedding counts tokens: a row stands where it begins, a block at its first key. So queries and keys come
    before the model's own rotary embedding.

    head_dim, num_heads, num_kv_heads: of the attention; num_kv_heads divides num_heads, and is as many if not given.
    block: tokens of a block of keys, as in the selector. dim: of the gate, even; 128 in the paper.
    share: "head", a score for each query head; "group", one for those of a key/value head, whose projected queries are
    added up, as in SeerAttention-R. base: of the rotary embedding.

    Raises TypeError or ValueError for other values.
    Source: SeerAttention, arXiv 2410.13276, section 3.1, and SeerAttention-R, arXiv 2506.08889.

    >>> gate = fd.selection.recipes.SeerGate(64, 4, block=32)
    >>> gate.query.shape, gate.key.shape
    (torch.Size([4, 64, 128]), torch.Size([4, 192, 128]))
    """

    takes_positions = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        block: int,
        dim: int = 128,
        share: str = "head",
        base: float = 10_000.0,
    ) -> None:
        super().__init__()
        require_int("head_dim", head_dim, minimum=1)
        require_int("num_heads", num_heads, minimum=1)
        groups = require_int("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads, minimum=1)
        if num_heads % groups:
            raise ValueError(f"num_kv_heads must divide num_heads; got num_kv_heads={groups} and {num_heads=}")
        if require_int("dim", dim, minimum=2) % 2:
            raise ValueError(f"dim must be even, as the rotary embedding turns pairs; got {dim=}")
        if require_finite("base", base) <= 1:
            raise ValueError(f"base must be above 1; got {base=}")
        self.block, self.share = require_int("block", block, minimum=1), require_choice("share", share, _SHARES)
        self.base = float(base)
        self.query = nn.Parameter(torch.randn(num_heads, head_dim, dim) * head_dim**-0.5)
        self.key = nn.Parameter(torch.randn(groups, 3 * head_dim, dim) * (3 * head_dim) ** -0.5)

    def forward(
        self, queries: Float[Tensor, "B H R D"], pools: Pools, positions: Int64[Tensor, " R"]
    ) -> Float[Tensor, "B T R C"]:
        """Scores of all blocks, T = H or, with share="group", T = G; `positions` are those at which rows begin."""
        expected, came = (len(self.query), len(self.key)), (queries.shape[1], pools.mean.shape[1])
        if came != expected:
            raise ValueError(f"the gate serves {expected[0]} heads and {expected[1]} key/value heads; got {came}")
        q = queries @ self.query.to(queries.dtype)
        k = torch.cat([pools.greatest, pools.least, pools.mean], -1) @ self.key.to(queries.dtype)
        q = q.unflatten(1, (k.shape[1], -1))
        q = q.sum(2, keepdim=True) if self.share == "group" else q
        begins = torch.arange(k.shape[2], device=k.device) * self.block
        q, k = _turned(q, positions, self.base), _turned(k, begins, self.base)
        return (q @ k.unsqueeze(2).mT).flatten(1, 2) * k.shape[-1] ** -0.5

    def extra_repr(self) -> str:
        heads, head_dim, dim = self.query.shape
        sizes = f"{head_dim}, {heads}, {len(self.key)}, block={self.block}, dim={dim}"
        return f"{sizes}, share={self.share!r}, base={self.base}"


def _turned(x: Float[Tensor, "... n E"], positions: Int64[Tensor, " n"], base: float) -> Float[Tensor, "... n E"]:
    """Rotary embedding: channel i and channel i + E/2 are turned by position * base^(-2 i / E)."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def distillation_loss(
    selector: BlockSelector,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    *,
    teacher: tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G M D"]] | None = None,
    scale: float | None = None,
    q_offset: int = 0,
    bindings: Mapping[str, Tensor] | None = None,
) -> Float[Tensor, ""]:
    """KL(exact || gate), the mean over tables and rows that have a candidate: what a selector's module learns from.

    exact: the share of the row's attention that each candidate block holds, of what all candidates hold, as
    scorer="mass" computes it. gate: a softmax over the candidates of the module's scores. Heads that share a table have
    the mean of their shares on both sides. The papers take the maximum over the columns of the attention map in place
    of its sum, and SeerAttention-R that over the heads; the sum is what dropping a block loses.

    No gradient reaches q and k: the module alone learns. A `coarse` selector is left aside, all blocks being scored.
    Shares and scores of all rows and blocks exist at once. Call it outside of torch.compile.

    selector: one whose scorer is a module. q, k: as the selector gets them. teacher: the queries and keys of the
    attention where these are others, such as those after rotary embedding; of the same shapes. scale: of the teacher's
    scores, 1 / sqrt(D) by default. q_offset, bindings: as in calls of the selector.

    Raises ValueError for a selector whose scorer is no module, and errors of the selector for what does not fit.
    Source: SeerAttention, arXiv 2410.13276, section 3.2, and SeerAttention-R, arXiv 2506.08889.

    >>> q, k = torch.randn(2, 1, 4, 256, 16)
    >>> gate = fd.selection.recipes.SeerGate(16, 4, block=32)
    >>> selector = fd.selection.recipes.seer_attention(gate, choose=fd.TopK(3))
    >>> fd.selection.recipes.distillation_loss(selector, q, k).backward()
    >>> gate.query.grad.shape
    torch.Size([4, 16, 128])
    """
    if not isinstance(selector, BlockSelector) or not isinstance(selector.scorer, nn.Module):
        came = getattr(selector, "scorer", selector)
        raise ValueError(f"selector must be a BlockSelector whose scorer is a module, which learns; got {came!r:.80}")
    own_q, own_k = (q, k) if teacher is None else teacher
    if (own_q.shape, own_k.shape) != (q.shape, k.shape):
        came = f"{tuple(own_q.shape)} and {tuple(own_k.shape)} for {tuple(q.shape)} and {tuple(k.shape)}"
        raise ValueError(f"the teacher's q and k must have the shapes of those that the gate gets; got {came}")
    options = {"scale": scale, "q_offset": q_offset, "bindings": bindings}
    num_blocks = max(1, -(-k.shape[2] // selector.block))
    student = _of_all_candidates(selector, selector.scorer, num_blocks)(q.detach(), k.detach(), **options)
    with torch.no_grad():
        found = _of_all_candidates(selector, "mass", num_blocks)(own_q.detach(), own_k.detach(), **options)
        # In the order of blocks, then in the student's. Blocks that it does not judge have no part.
        shares = found.scores.new_zeros(*found.scores.shape[:3], num_blocks + 1)
        shares.scatter_(-1, found.blocks.where(found.blocks >= 0, num_blocks), found.scores.exp())
        none = student.blocks < 0
        exact = shares.gather(-1, student.blocks.where(~none, num_blocks)).masked_fill(none, 0.0)
        total = exact.sum(-1, keepdim=True)
        exact = exact / total.masked_fill(total == 0, 1.0)
    logs = student.scores.masked_fill(none, torch.finfo(student.scores.dtype).min).log_softmax(-1)
    lost = torch.xlogy(exact, exact) - exact * logs.masked_fill(none, 0.0)
    return lost.sum() / (total > 0).sum().clamp(min=1)


def _of_all_candidates(selector: BlockSelector, scorer: str | nn.Module, num_blocks: int) -> BlockSelector:
    """One that chooses every candidate; its scores are logarithms of shares where heads share a table."""
    return BlockSelector(
        block=selector.block,
        query_block=selector.query_block,
        scorer=scorer,
        choose=TopP(1.0, most=num_blocks),
        within=selector.within,
        always=selector.always,
        share=selector.share,
        query_summary=selector.query_summary,
        future_in_choice=selector.future_in_choice,
    )
