"""Recipes that choose blocks: BlockSelectors with the settings of papers; and the gate of SeerAttention."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ...masks import Pattern, causal, chunked, first_tokens
from ...masks.core import advises, require_choice, require_finite, require_int
from .._choose import Threshold, TopK, TopP, require_share
from .._scores import Pools
from .._selector import BlockSelector
from ._rotary import angles_at, rotate

# B batch, H query heads, G key/value heads, N queries, M keys, R query blocks, C key blocks, T tables, D head dim,
# E gate dim


@advises()
def moba(*, block: int = 512, top: int = 3, within: Pattern = causal()) -> BlockSelector:  # noqa: B008 (frozen)
    """Return MoBA's `BlockSelector`: each query of each head reads its own block and the best earlier blocks.

    The score of a block is q · mean of its keys, in float32 or wider. Of the blocks before the query's own, the
    `top` - 1 with the highest scores are chosen, or all if there are fewer. The query's own block is read up to the
    query.

    block: tokens of a block; the paper uses 512 with top=3, 2048 with top=3 and 4096 with top=12.
    top: blocks that are read, the own block included; at least 2.
    within: the mask of the attention, a set pattern: causal(), or its intersection with patterns that hide further
        keys. This is not checked.

    Raises TypeError or ValueError for other values.
    Source: MoBA (Mixture of Block Attention), arXiv 2502.13189, section 2.2.

    >>> q, k = torch.randn(2, 1, 4, 256, 64)
    >>> fd.selection.recipes.moba(block=32)(q, k).blocks.shape
    torch.Size([1, 4, 256, 2])
    """
    require_int("block", block, minimum=1)
    require_int("top", top, minimum=2)
    return BlockSelector(block=block, choose=TopK(top - 1), within=within, always=chunked(block))


@advises()
def quest(*, budget: int, block: int = 16, within: Pattern = causal()) -> BlockSelector:  # noqa: B008 (frozen)
    """Return Quest's `BlockSelector`: each query of each head reads the last page and the pages with the best bounds.

    A page is a key block. Its score is sum_d max(q_d · min_d, q_d · max_d), with the minimum and maximum of each
    channel over its keys: an upper bound of the scores of its keys. The last page is the query's own. The paper uses
    Quest in decoding, with one query at a time, and leaves the first two layers dense. With several queries, each
    chooses separately.

    budget: keys that are read, a multiple of `block` and at least two blocks, the last page included. The paper uses
        256 to 4096.
    block: keys of a page.
    within: as in `moba`.

    Raises TypeError or ValueError for other values.
    Source: Quest, arXiv 2406.10774, algorithm 1; its code counts the last page in the budget.

    >>> q, k = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 1000, 64)
    >>> chosen = fd.selection.recipes.quest(budget=128)(q, k, q_offset=999)
    >>> chosen.blocks.shape  # seven pages in addition to the last
    torch.Size([1, 4, 1, 7])
    """
    require_int("block", block, minimum=1)
    require_int("budget", budget, minimum=2 * block)
    if budget % block:
        raise ValueError(f"budget, the number of keys, must be a multiple of {block=}; got {budget=}")
    choose = TopK(budget // block - 1)
    return BlockSelector(block=block, scorer="minmax", choose=choose, within=within, always=chunked(block))


@advises()
def xattention(
    *,
    most: int,
    block: int = 128,
    stride: int = 8,
    threshold: float = 0.9,
    within: Pattern = causal(),  # noqa: B008 (frozen)
) -> BlockSelector:
    """Return XAttention's `BlockSelector`: a query block reads the fewest key blocks that reach a share of attention.

    Shares are estimated. The score of a tile of stride × stride pairs is the mean score of its antidiagonal. For each
    run of `stride` queries, a softmax over its tiles is summed over the tiles of a key block; the mean of these sums
    over the runs is the block's share. The first block and the query's own are always read, and their shares count;
    other blocks are added in descending order of share until the sum reaches `threshold`. Pairs that `within` hides are
    left out of antidiagonals; the paper's code keeps them in tiles on the diagonal.

    For prefill only, as the queries of a block choose together (`future_in_choice`). Random queries and keys attend
    everywhere, so `threshold` chooses nearly all blocks: test it on the queries and keys of a model.

    most: width of the table, which the paper does not bound; `Selection.cut` is the share of query blocks that needed
        more.
    block: tokens of a query block and of a key block, above 1, a multiple of `stride`.
    stride: 8 or 16 in the paper.
    threshold: above 0, at most 1.
    within: as in `moba`.

    Raises TypeError or ValueError for other values.
    Source: XAttention, arXiv 2503.16428, section 2 and algorithm 1.

    >>> q, k = torch.randn(2, 1, 4, 512, 64)
    >>> fd.selection.recipes.xattention(block=64, most=4)(q, k).blocks.shape
    torch.Size([1, 4, 8, 4])
    """
    require_share("threshold", threshold)
    require_int("block", block, minimum=2)
    return BlockSelector(
        block=block,
        query_block=block,
        scorer="antidiagonal",
        choose=TopP(threshold, most=most, of="row"),
        within=within,
        always=chunked(block) | first_tokens(block),
        future_in_choice=True,
        stride=stride,
    )


@advises()
def seer_attention(
    gate: SeerGate,
    *,
    choose: TopK | TopP | Threshold,
    within: Pattern = causal(),  # noqa: B008 (frozen)
) -> BlockSelector:
    """Return SeerAttention's `BlockSelector`: a trained gate chooses key blocks for query blocks; for prefill only.

    The gate scores the mean query of each block of `gate.block` queries with the maximum, minimum and mean of each
    block of `gate.block` keys. The query's own block is always read. Pass q and k before the model's rotary embedding,
    as the gate applies its own. `SelectedAttention.distill_loss` trains the gate.

    gate: a `SeerGate` with share="head".
    choose: the paper uses a threshold or a fixed share of the blocks: fd.Threshold(t, most=) or fd.TopK(k).
    within: as in `moba`.

    Raises TypeError or ValueError for other values.
    Source: SeerAttention, arXiv 2410.13276, section 3.

    >>> q, k = torch.randn(2, 1, 4, 256, 16)
    >>> gate = fd.selection.recipes.SeerGate(16, 4, block=32)
    >>> fd.selection.recipes.seer_attention(gate, choose=fd.TopK(3))(q, k).blocks.shape
    torch.Size([1, 4, 8, 3])
    """
    _require_gate(gate, share="head")
    always, rows = chunked(gate.block), gate.block
    options = {"within": within, "always": always, "future_in_choice": rows > 1}
    return BlockSelector(block=gate.block, query_block=rows, scorer=gate, choose=choose, **options)


@advises()
def seer_attention_r(
    gate: SeerGate,
    *,
    choose: TopK | TopP | Threshold,
    within: Pattern = causal(),  # noqa: B008 (frozen)
) -> BlockSelector:
    """Return SeerAttention-R's `BlockSelector`: a trained gate chooses key blocks for each query and key/value head.

    The query heads of a key/value head share the choice. It is like `seer_attention`, but without pooling of queries,
    so that decoding chooses as training does.

    gate: a `SeerGate` with share="group".
    choose: the paper uses a threshold, or a budget that includes the own block: fd.TopK(budget // block - 1).
    within: as in `moba`.

    Raises TypeError or ValueError for other values.
    Source: SeerAttention-R, arXiv 2506.08889, section 2.

    >>> q, k = torch.randn(1, 4, 256, 16), torch.randn(1, 2, 256, 16)
    >>> gate = fd.selection.recipes.SeerGate(16, 4, 2, block=32, share="group")
    >>> fd.selection.recipes.seer_attention_r(gate, choose=fd.TopK(3))(q, k).blocks.shape
    torch.Size([1, 2, 256, 3])
    """
    _require_gate(gate, share="group")
    always = chunked(gate.block)
    return BlockSelector(block=gate.block, scorer=gate, choose=choose, within=within, always=always, share="group")


def _require_gate(gate: object, *, share: str) -> None:
    if not isinstance(gate, SeerGate):
        raise TypeError(
            f"gate must be a SeerGate; got {type(gate).__name__}: for other modules write BlockSelector(scorer=module)"
        )
    if gate.share != share:
        raise ValueError(f"gate must be a SeerGate with {share=}; got share={gate.share!r}")


_SHARES = ("head", "group")


@advises()
class SeerGate(nn.Module):
    """Scores key blocks for query blocks: RoPE(W_q query) · RoPE(W_k [greatest, least, mean] keys) / sqrt(dim).

    A scorer for `BlockSelector`, used by `seer_attention` and `seer_attention_r`. Each head has separate weights. RoPE
    uses the position of the first token of a query block, and of the first key of a block. Pass queries and keys before
    the model's own rotary embedding.

    head_dim, num_heads, num_kv_heads: of the attention; num_kv_heads divides num_heads, and equals it by default.
    block: tokens of a key block, as in the selector.
    dim: width of the projected queries and keys, even; 128 in the paper.
    share: "head", one score per query head; "group", one per key/value head, for the sum of its projected queries, as
        in SeerAttention-R.
    base: base of the rotary embedding's frequencies.

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
            raise ValueError(f"dim must be even, as the rotary embedding rotates pairs of channels; got {dim=}")
        if require_finite("base", base) <= 1:
            raise ValueError(f"base must be above 1; got {base=}")
        self.block, self.share = require_int("block", block, minimum=1), require_choice("share", share, _SHARES)
        self.base = float(base)
        self.query = nn.Parameter(torch.randn(num_heads, head_dim, dim) * head_dim**-0.5)
        self.key = nn.Parameter(torch.randn(groups, 3 * head_dim, dim) * (3 * head_dim) ** -0.5)

    def forward(
        self, queries: Float[Tensor, "B H R D"], pools: Pools, positions: Int64[Tensor, " R"]
    ) -> Float[Tensor, "B T R C"]:
        """Return the scores of all C key blocks for R query blocks; T = H or, with share="group", T = G.

        queries: one per query block.
        pools: mean, least and greatest keys of each block, (B, G, C, D) each.
        positions: position of the first token of each query block.

        Raises ValueError for other numbers of heads than the gate's.
        """
        expected, came = (len(self.query), len(self.key)), (queries.shape[1], pools.mean.shape[1])
        if came != expected:
            raise ValueError(
                f"q and k must have as many heads as the gate, {expected[0]} and {expected[1]}; got {came[0]} and "
                f"{came[1]}"
            )
        q = queries @ self.query.to(queries.dtype)
        k = torch.cat([pools.greatest, pools.least, pools.mean], -1) @ self.key.to(queries.dtype)
        q = q.unflatten(1, (k.shape[1], -1))
        q = q.sum(2, keepdim=True) if self.share == "group" else q
        begins, dim = torch.arange(k.shape[2], device=k.device) * self.block, k.shape[-1]
        q, k = (
            rotate(x, angles.cos(), angles.sin())
            for x, angles in ((q, angles_at(positions, dim, self.base)), (k, angles_at(begins, dim, self.base)))
        )
        return (q @ k.unsqueeze(2).mT).flatten(1, 2) * dim**-0.5

    def extra_repr(self) -> str:
        heads, head_dim, dim = self.query.shape
        sizes = f"{head_dim}, {heads}, {len(self.key)}, block={self.block}, dim={dim}"
        return f"{sizes}, share={self.share!r}, base={self.base}"
