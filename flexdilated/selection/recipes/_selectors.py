"""Recipes that choose blocks: each is a BlockSelector with the settings of a paper."""

from __future__ import annotations

from ...masks import Pattern, causal, chunked, first_tokens
from ...masks.core import require_int
from .._choose import Threshold, TopK, TopP, require_share
from .._selector import BlockSelector
from ._seer_gate import SeerGate


def moba(*, block: int = 512, top: int = 3, within: Pattern = causal()) -> BlockSelector:  # noqa: B008 (frozen)
    """Mixture of Block Attention: each query of each head reads its own block and the best of those before.

    The score of a block is q · mean of its keys, in float32; of the blocks before the query's own the `top` - 1 of
    highest score are chosen, and all where there are fewer. The own block is read up to the query.

    block: tokens of a block; the paper takes 512 with top=3, 2048 with 3 and 4096 with 12. top: blocks that are read,
    the own one included, so at least 2. within: the rule that holds in any case, causal() and whatever else hides keys.

    Raises TypeError or ValueError for other values.
    Source: MoBA, arXiv 2502.13189, section 2.2.

    >>> q, k = torch.randn(2, 1, 4, 256, 64)
    >>> fd.selection.recipes.moba(block=32)(q, k).blocks.shape
    torch.Size([1, 4, 256, 2])
    """
    require_int("block", block, minimum=1)
    require_int("top", top, minimum=2)
    return BlockSelector(block=block, choose=TopK(top - 1), within=within, always=chunked(block))


def quest(*, budget: int, block: int = 16, within: Pattern = causal()) -> BlockSelector:  # noqa: B008 (frozen)
    """Quest: each query of each head reads the last page and the pages whose scores could be highest.

    A page is a block of keys. Its score is sum_d max(q_d · min_d, q_d · max_d) over the least and the greatest of each
    channel of its keys, which no score of a key in it exceeds. The last page is the one in which the query stands.
    The paper decodes so, one query at a time, and leaves the first two layers dense; more queries choose alike.

    budget: keys that are read, a multiple of `block` and at least two blocks; the last page counts as one of them. The
    paper takes 256 to 4096. block: keys of a page. within: as in `moba`.

    Raises TypeError or ValueError for other values.
    Source: Quest, arXiv 2406.10774, algorithm 1; its code counts the last page in the budget.

    >>> q, k = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 1000, 64)
    >>> chosen = fd.selection.recipes.quest(budget=128)(q, k, q_offset=999)
    >>> chosen.blocks.shape  # seven pages beside the last
    torch.Size([1, 4, 1, 7])
    """
    require_int("block", block, minimum=1)
    require_int("budget", budget, minimum=2 * block)
    if budget % block:
        raise ValueError(f"budget counts keys of whole blocks: a multiple of {block=}; got {budget=}")
    choose = TopK(budget // block - 1)
    return BlockSelector(block=block, scorer="minmax", choose=choose, within=within, always=chunked(block))


def xattention(
    *,
    most: int,
    block: int = 128,
    stride: int = 8,
    threshold: float = 0.9,
    within: Pattern = causal(),  # noqa: B008 (frozen)
) -> BlockSelector:
    """XAttention: a block of queries reads the fewest blocks of keys that hold most of its attention, as estimated.

    Tiles of stride × stride pairs stand for the mean score of their antidiagonal; a softmax over the tiles of a line,
    summed over the tiles of a block, gives the block's share, and the mean over the lines its score. The first block
    and the query's own are read in any case and count; of others the highest shares are added until all reach
    `threshold`. Pairs that `within` hides are left out of antidiagonals; the paper's code leaves those of tiles on the
    diagonal in.

    For prefill alone, since queries of a block choose together (`future_in_choice`).

    most: width of the table, which the paper does not bound; `Selection.cut` tells how many rows wanted more. block:
    tokens of a block, of queries and of keys, a multiple of `stride`: 8 or 16 in the paper. threshold: above 0, at
    most 1. within: as in `moba`.

    Raises TypeError or ValueError for other values.
    Source: XAttention, arXiv 2503.16428, section 2 and algorithm 1.

    >>> q, k = torch.randn(2, 1, 4, 512, 64)
    >>> fd.selection.recipes.xattention(block=64, most=4)(q, k).blocks.shape
    torch.Size([1, 4, 8, 4])
    """
    require_share("threshold", threshold)
    require_int("block", block, minimum=1)
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


def seer_attention(
    gate: SeerGate,
    *,
    choose: TopK | TopP | Threshold,
    within: Pattern = causal(),  # noqa: B008 (frozen)
) -> BlockSelector:
    """SeerAttention: a trained gate chooses for blocks of queries; prefill alone.

    The gate gets the mean query of each block of `gate.block` queries and the greatest, least and mean of each block of
    as many keys, and scores them. The own block is read in any case. q and k are those before rotary embedding: the
    gate has its own. `SelectedAttention.distill_loss` trains it.

    gate: a `SeerGate` for each head. choose: the paper takes a threshold or a share of all blocks:
    fd.Threshold(t, most=) or fd.TopK(k). within: as in `moba`.

    Raises TypeError for a gate of another kind, and ValueError for one with share="group".
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


def seer_attention_r(
    gate: SeerGate,
    *,
    choose: TopK | TopP | Threshold,
    within: Pattern = causal(),  # noqa: B008 (frozen)
) -> BlockSelector:
    """SeerAttention-R: a trained gate chooses for each query, alike for the query heads of a key/value head.

    As `seer_attention`, without pooling of queries, so that decoding chooses as training does.

    gate: a `SeerGate` with share="group". choose: the paper takes a budget, fd.TopK(budget // block - 1) beside the own
    block, or a threshold. within: as in `moba`.

    Raises TypeError for a gate of another kind, and ValueError for one with share="head".
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
            f"gate must be a SeerGate; got {type(gate).__name__}: give BlockSelector(scorer=) other modules"
        )
    if gate.share != share:
        raise ValueError(f"gate must be a SeerGate with {share=}; got share={gate.share!r}")
