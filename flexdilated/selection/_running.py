"""A choice that goes on: pools of the keys so far, and what the row that is not done yet chose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ._pools import Pools, pools_of
from ._scores import Scorer
from ._select_op import choose_blocks
from ._selector import BlockSelector

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim, T tables, R rows, C blocks of keys


class Running(NamedTuple):
    """What a selector knows after some tokens.

    pools: of the blocks of the first `tokens` keys. row: the last row that chose; blocks and scores are its choice.
    """

    tokens: int
    pools: tuple[Float[Tensor, "B G C D"], ...]
    row: int
    blocks: Int64[Tensor, "B T 1 most"]
    scores: Float[Tensor, "B T 1 most"]
    coarse: Running | None

    @property
    def nbytes(self) -> int:
        own = sum(x.nbytes for x in (*self.pools, self.blocks, self.scores))
        return own + (0 if self.coarse is None else self.coarse.nbytes)

    def cut(self, tokens: int) -> Running:
        """After fewer tokens: of keys that come then nothing is known."""
        coarse = None if self.coarse is None else self.coarse.cut(tokens)
        return self._replace(tokens=min(tokens, self.tokens), coarse=coarse)

    def select(self, entries: Int64[Tensor, " C"]) -> Running:
        """Of these batch entries."""
        at = entries.to(self.blocks.device)
        pools = tuple(pool.index_select(0, at) for pool in self.pools)
        coarse = None if self.coarse is None else self.coarse.select(entries)
        blocks, scores = (x.index_select(0, at) for x in (self.blocks, self.scores))
        return self._replace(pools=pools, blocks=blocks, scores=scores, coarse=coarse)


def knows_row(selector: BlockSelector, known: Running | None, position: int) -> bool:
    """Whether queries from this position on begin a row, or go on in the one that chose last."""
    begun = position % selector.query_block
    if begun and (known is None or known.row != position // selector.query_block):
        return False
    inner = None if known is None else known.coarse
    return selector.coarse is None or knows_row(selector.coarse, inner, position)


def advance(
    selector: BlockSelector,
    known: Running | None,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    scale: float,
) -> tuple[Int64[Tensor, "B T R most"], Float[Tensor, "B T R most"], Running]:
    """(blocks, scores, what is known then) of the rows of the next queries; k holds all keys up to theirs."""
    first = k.shape[2] - q.shape[2]
    coarse = inner = None
    if selector.coarse is not None:
        coarse, _, inner = advance(selector.coarse, None if known is None else known.coarse, q, k, scale)
    pools = _pools(selector, known, k)
    side = selector.query_block
    late = min(-first % side, q.shape[2])  # queries whose row has chosen
    found = [] if not late or known is None else [(known.blocks, known.scores)]
    if late < q.shape[2]:
        if selector.coarse is not None and coarse is not None:
            coarse = coarse[
                :, :, (first + late) // selector.coarse.query_block - first // selector.coarse.query_block :
            ]
        found.append(_choice(selector, q[:, :, late:], k, coarse, pools, first + late, scale))
    blocks, scores = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    row = (k.shape[2] - 1) // side
    return blocks, scores, Running(k.shape[2], pools, row, blocks[:, :, -1:], scores[:, :, -1:], inner)


def _choice(
    selector: BlockSelector,
    q: Tensor,
    k: Tensor,
    coarse: Tensor | None,
    pools: tuple[Tensor, ...],
    q_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    call, given = selector.call(selector.within, q_offset, scale), None
    if isinstance(selector.scorer, nn.Module):
        given = selector.by_module(selector.scorer, q, k, [], call, Pools(*pools))
    blocks, _, scores, *_ = choose_blocks(q, k, given, coarse, [], call, pools)
    return blocks, scores


def _pools(
    selector: BlockSelector, known: Running | None, k: Float[Tensor, "B G M D"]
) -> tuple[Float[Tensor, "B G C D"], ...]:
    """The pools of all keys: those of blocks that were full are there, the one that was not is made anew."""
    done = 0 if known is None else known.tokens // selector.block
    new = k[:, :, done * selector.block :]
    if isinstance(selector.scorer, nn.Module):
        made = tuple(pools_of(new, selector.block))
    else:
        made = Scorer(selector.scorer, 1.0, selector.stride).pools(new, selector.block)
    if known is None or not done:
        return made
    return tuple(torch.cat([old[:, :, :done], more], 2) for old, more in zip(known.pools, made, strict=True))
