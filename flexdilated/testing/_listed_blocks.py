"""Are block lists those of the dense rule? For odd sizes, unequal sides, shifted queries and several layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..masks import Layout
from ..masks.blocks._blocks import UNKNOWN, Blocks
from ..masks.core._bound import Bound
from ..masks.orders._layout import residue_rate
from ..masks.planning.lowering._lower import shared_terms
from ._dense_rule import DenseRule

_SIDES = (1, 2, 3, 4, 5, 8, 13, 16)
_RATES = (1, 1, 2, 3, 5)
_TRIES = 50


@dataclass(frozen=True)
class _Case:
    num_queries: int
    num_keys: int
    q_offset: int
    q_block: int
    k_block: int
    rate: int

    def __str__(self) -> str:
        sides = f"blocks of {self.q_block} x {self.k_block}, layout rate {self.rate}"
        return f"{self.num_queries} queries from {self.q_offset} on, {self.num_keys} keys, {sides}"


def check_lists(dense: DenseRule, examples: int, generator: torch.Generator) -> None:
    """Settled lists hold exactly the blocks with pairs, and say truly which are full; unsettled ones hold those."""
    cases = [_draw(dense, generator) for _ in range(max(8, examples // 5))]
    for case in sorted(cases, key=lambda case: case.num_queries * case.num_keys):
        _check_case(dense, case)


def _draw(dense: DenseRule, generator: torch.Generator) -> _Case:
    """Sizes to which the pattern binds: any, but for rules that hold few, such as grids and tables of blocks."""
    case = _draw_any(dense, generator)
    for _ in range(_TRIES):
        if _binds(dense, case):
            return case
        case = _draw_any(dense, generator)
    whole = {"num_queries": dense.num_tokens, "num_keys": dense.num_tokens, "q_offset": 0}
    return replace(_draw_any(dense, generator), **whole)


def _binds(dense: DenseRule, case: _Case) -> bool:
    try:
        _bound(dense, case)
    except ValueError:
        return False
    return True


def _bound(dense: DenseRule, case: _Case) -> Bound:
    sizes = {"num_queries": case.num_queries, "num_keys": case.num_keys, "q_offset": case.q_offset}
    return dense.pattern.bind(num_heads=dense.num_heads, **sizes)


def _draw_any(dense: DenseRule, generator: torch.Generator) -> _Case:
    def below(size: int) -> int:
        return int(torch.randint(size, (), generator=generator))

    tokens, rates = dense.num_tokens, (*_RATES, residue_rate(dense.pattern, dense.num_tokens))
    keys, queries = 1 + below(tokens), 1 + below(tokens)
    if below(2):  # self-attention
        queries, q_offset = keys, 0
    else:
        q_offset = below(tokens - queries + 1)
    sides = _SIDES[below(len(_SIDES))], _SIDES[below(len(_SIDES))]
    return _Case(queries, keys, q_offset, *sides, rates[below(len(rates))])


def _check_case(dense: DenseRule, case: _Case) -> None:
    (term,) = shared_terms(dense.pattern, 1, _bound(dense, case), case.rate)
    q, k = (Layout(size, case.rate).positions() for size in (case.num_queries, case.num_keys))
    truth = _in_blocks(dense.table[:, q + case.q_offset][:, :, k], case.q_block, case.k_block)
    whole = truth == case.q_block * case.k_block
    for settle in (False, True):
        listed, full, pairs = _as_tables(term.blocks(case.q_block, case.k_block, settle=settle))
        _require(dense, case, (truth > 0) & ~listed, truth, "is not listed")
        _require(dense, case, full & ~whole, truth, "is listed as full")
        _require(dense, case, (pairs != truth) & (pairs != UNKNOWN) & listed, truth, "is listed with another count")
        if settle:
            _require(dense, case, listed & (truth == 0), truth, "is listed")
            _require(dense, case, whole & ~full, truth, "is not listed as full")


def _require(dense: DenseRule, case: _Case, wrong: Tensor, truth: Tensor, what: str) -> None:
    if wrong.any():
        head, row, column = wrong.nonzero()[0].tolist()
        block = f"block ({row}, {column}) of head {head} has {int(truth[head, row, column])} pairs and {what}"
        raise AssertionError(f"{dense.pattern!r}: block lists must be those of mask_mod; for {case}: {block}")


def _in_blocks(allowed: Tensor, q_block: int, k_block: int) -> Tensor:
    """(heads, rows, columns): allowed pairs in each block."""
    heads, queries, keys = allowed.shape
    rows, columns = -(-queries // q_block), -(-keys // k_block)
    padded = torch.zeros(heads, rows * q_block, columns * k_block, dtype=torch.int64)
    padded[:, :queries, :keys] = allowed
    return padded.view(heads, rows, q_block, columns, k_block).sum((2, 4))


def _as_tables(blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """(listed, full, pairs) of each head, row and column."""
    shape = (blocks.num_tables, blocks.num_rows, blocks.num_columns)
    listed, full = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    pairs = torch.zeros(shape, dtype=torch.int64)
    where = (blocks.table.long(), blocks.row.long(), blocks.column.long())
    listed[where], full[where], pairs[where] = True, blocks.full, blocks.pairs.long()
    heads = list(blocks.heads)
    return listed[heads], full[heads], pairs[heads]
