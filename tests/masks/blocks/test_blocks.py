"""Block lists: exactly the non-empty blocks of the dense rule, in every order of tokens, at little cost."""

import operator
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks.blocks import BlockPlaces, PackedBlocks, _block_search, _blocks, dense_masks, mask_classes
from flexdilated.masks.blocks._blocks import UNKNOWN, Blocks, build_blocks
from flexdilated.masks.blocks._rule import Rule
from flexdilated.masks.orders._layout import Compact, Layout, ListedOrder
from flexdilated.masks.planning.lowering import _term
from flexdilated.masks.planning.lowering._layouts import compact_terms, shared_terms
from flexdilated.masks.planning.lowering._term import Term
from tests.support import twins
from tests.support.strategies import (
    Case,
    block_lists,
    block_sides,
    cases,
    dilated,
    functions,
    global_kinds,
    local_windows,
    random_blocks,
    sets,
)
from tests.support.twins import Twin


def in_blocks(counts: Tensor, q_block: int, k_block: int) -> Tensor:
    """(H, R, C): allowed pairs in each block of an (H, N, M) table."""
    H, N, M = counts.shape
    rows, columns = -(-N // q_block), -(-M // k_block)
    padded = torch.zeros(H, rows * q_block, columns * k_block, dtype=torch.int64)
    padded[:, :N, :M] = counts
    return padded.view(H, rows, q_block, columns, k_block).sum((2, 4))


def assert_lists(blocks: Blocks, pairs: Tensor, *, exact: bool = True) -> None:
    """The lists hold the blocks with pairs, in order, each once; what they say of a block is true."""
    shape = (blocks.num_tables, blocks.num_rows, blocks.num_columns)
    key = (blocks.table.long() * shape[1] + blocks.row) * shape[2] + blocks.column
    assert (key.diff() > 0).all()
    listed, full, known = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    where = (blocks.table.long(), blocks.row.long(), blocks.column.long())
    listed[where], full[where], known[where] = 1, blocks.full.long(), blocks.pairs.long()
    listed, full, known = (x[list(blocks.heads)] for x in (listed, full, known))
    assert listed.shape == pairs.shape
    whole = pairs == blocks.q_block * blocks.k_block
    assert (whole | (full == 0)).all()
    assert ((known == pairs) | (listed == 0) | (known == UNKNOWN)).all()
    assert ((pairs == 0) | (listed == 1)).all()
    if exact:
        assert torch.equal(listed == 1, pairs > 0)
        assert torch.equal(full == 1, whole)


def in_order(case: Case, q: Layout, k: Layout) -> Tensor:
    return case.counts()[:, q.positions()][:, :, k.positions()]


def assert_same(found: Blocks, expected: Blocks) -> None:
    assert (found.shape, found.heads) == (expected.shape, expected.heads)
    for name in ("table", "row", "column", "full", "pairs"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


def assert_alike(term: Term, q_block: int, k_block: int) -> int:
    """Blocks of one kind have the same mask. Return the number of kinds."""
    rule, shape = term.table_rule(), (term.q.num_slots, term.k.num_slots, q_block, k_block)
    sides = [-(-slots // side) for slots, side in zip(shape[:2], shape[2:], strict=True)]
    everywhere = [torch.arange(number) for number in (len(rule.heads), *sides)]
    places = BlockPlaces(*torch.cartesian_prod(*everywhere).unbind(1))
    number, one_of_each = mask_classes(rule, places, shape)
    tiles = torch.cat(list(dense_masks(rule, places, shape)))
    assert torch.equal(number[one_of_each], torch.arange(len(one_of_each)))
    assert torch.equal(tiles[one_of_each][number], tiles)
    return len(one_of_each)


def by_head(num_heads: int, *parts: Twin) -> Twin:
    return twins.per_head(list(islice(cycle(parts), num_heads)))


# Tables of blocks a and b with other rules c and d: the search begins at the squares that tables list.
WITH_TABLES = [
    lambda H, a, b, c, d: a,
    lambda H, a, b, c, d: a | c,
    lambda H, a, b, c, d: a | b,
    lambda H, a, b, c, d: a & b,
    lambda H, a, b, c, d: a & c,
    lambda H, a, b, c, d: a & ~c,
    lambda H, a, b, c, d: (a | c | twins.global_tokens(3, rows=True, columns=True)) & twins.causal(),
    lambda H, a, b, c, d: (a | c) & (b | d),
    lambda H, a, b, c, d: ~a & c,
    lambda H, a, b, c, d: by_head(H, a, b, c),
    lambda H, a, b, c, d: by_head(H, a & c, b, a),
    lambda H, a, b, c, d: by_head(H, a, b, c) & a | d,
]


def with_tables(num_heads: int) -> st.SearchStrategy[Twin]:
    tables = random_blocks() | block_lists()
    others = st.just(twins.causal()) | local_windows() | global_kinds() | dilated()
    return st.builds(lambda join, *parts: join(num_heads, *parts), st.sampled_from(WITH_TABLES), *[tables, others] * 2)


@st.composite
def small_limits(draw: st.DrawFn) -> list[tuple[Any, str, int]]:
    """Limits at which the search and the building of lists change their ways, as small as the drawn cases need."""
    limits = [
        (_block_search, "_FEW_BLOCKS", 0),
        (_block_search, "_MOST_LEAVES", draw(st.integers(1, 20))),
        (_blocks, "_UNDECIDED_AT_ONCE", draw(st.sampled_from([0, 1, 3, 7, 40]))),
        (_block_search, "_MOST_ROOTS", 0),
    ]
    chosen = [each for each in limits if draw(st.booleans())]
    if limits[-1] in chosen:
        chosen += [(_block_search, "_FEW_RUN_PAIRS", 0), (_term, "_MANY_CLASSES", 1)]
    return chosen


def check_lists(case: Case, rate: int, q_block: int, k_block: int, limits: list[tuple[Any, str, int]]) -> None:
    """The lists are the dense rule's and come back from their compact storage; blocks of one kind have one mask."""
    (term,) = shared_terms(case.twin.pattern, 1, case.bind(), rate)
    pairs = in_blocks(in_order(case, term.q, term.k), q_block, k_block)
    with pytest.MonkeyPatch.context() as patch:
        for limit in limits:
            patch.setattr(*limit)
        for settle in (True, False):
            blocks = term.blocks(q_block, k_block, settle=settle)
            assert_lists(blocks, pairs, exact=settle)
            assert_same(PackedBlocks.pack(blocks).unpack(), blocks)
    assert_alike(term, q_block, k_block)


NEAR, LISTED = twins.local_window(left=5, right=2), twins.block_list([[0], [1], [2]], block=8)
DOUBTFUL = NEAR | twins.chunked(4) | twins.strided(8)
MANY_LEAVES = (_block_search, "_MOST_LEAVES", 3)
HALVED = [(_blocks, "_UNDECIDED_AT_ONCE", 3), (_block_search, "_MOST_ROOTS", 0), (_block_search, "_FEW_BLOCKS", 0)]
RATES = st.just(1) | st.integers(1, 7) | st.integers(8, 130)


@settings(max_examples=30)
@given(cases(lambda H: sets(H) | functions()), RATES, block_sides, block_sides, small_limits())
@example(Case.whole(twins.causal() & ~twins.causal(), 1, 30), 1, 8, 8, [])
@example(Case.whole(DOUBTFUL & twins.causal(), 1, 90), 8, 8, 8, [])  # settled by diagonals
@example(Case.whole(DOUBTFUL & twins.causal(), 2, 90), 1, 8, 8, HALVED)  # tables and rows are built in halves
# The blocks of one period are copied, where pairs stay within it.
@example(Case.whole(~twins.dilated(16, 1, 0), 1, 48), 1, 8, 8, [])
@example(Case.whole(twins.dilated(16, 2, 1) & twins.causal(), 3, 48), 2, 8, 4, [])
@example(Case.whole((twins.dilated(32, 2, 0) | twins.dilated(16, 1, 0)) & NEAR, 1, 96), 1, 8, 8, [])
def test_lists_are_the_dense_rule(case, rate, q_block, k_block, limits):
    """Natural and residue-major order, unequal sides, ragged ends, some of the heads, any queries, small limits."""
    check_lists(case, rate, q_block, k_block, limits)


@settings(max_examples=30)
@given(cases(with_tables), block_sides, block_sides, small_limits())
@example(Case.whole(LISTED | twins.strided(3), 1, 24), 4, 4, [MANY_LEAVES])
@example(Case.whole((LISTED | NEAR | twins.first_tokens(3)) & twins.causal(), 1, 24), 4, 4, [])
def test_lists_of_tables_and_other_rules_are_the_dense_rule(case, q_block, k_block, limits):
    """In natural order the search begins at the squares that tables list, unless it finds too many blocks."""
    check_lists(case, 1, q_block, k_block, limits)


@settings(max_examples=14)
@given(cases(lambda H: st.one_of(dilated(), dilated_and_more(H))), block_sides, block_sides)
def test_compact_lists_are_the_dense_rule(case, q_block, k_block):
    """Every fold of a compact term has the lists of the first."""
    counts = case.counts()
    for term in compact_terms(case.twin.pattern, 1, case.bind()) or []:
        blocks = term.blocks(q_block, k_block)
        assert_alike(term, q_block, k_block)
        for fold in range(term.folds):
            assert_lists(blocks, in_blocks(of_fold(term, counts, fold), q_block, k_block))


def dilated_and_more(num_heads: int) -> st.SearchStrategy:
    return st.builds(operator.and_, dilated(), sets(num_heads, 1))


def of_fold(term: Term, counts: Tensor, fold: int) -> Tensor:
    """(heads, S, T): counts between the tokens in a fold's slots."""
    assert isinstance(term.q, Compact)
    assert isinstance(term.k, Compact)
    q, k = term.q.tokens(), term.k.tokens()
    return torch.stack([
        counts[head][q[index, fold]][:, k[index, fold]] for index, head in enumerate(term.heads)
    ])  # fmt: skip


def test_heads_of_one_rule_share_a_table():
    """Sixteen heads at rate 4 have four different tables; the lists hold each once."""
    bound = masks.longnet([64], [4], heads="grouped").bind(num_heads=16, num_queries=256, num_keys=256)
    (term,) = shared_terms(bound.pattern, 1, bound, 4)
    assert term.tables() == (0, 1, 2, 3) * 4
    assert term.blocks(16, 16).num_tables == 4


def test_squares_are_no_beginning_where_one_side_has_an_order_of_its_own() -> None:
    """Tables list squares of positions: slots of queries that lie apart are none."""
    pattern = masks.block_list([[0], [1], [2], [3], [4]], block=8)
    queries = ListedOrder((range(8, 16), range(32, 40)))
    rule = Rule(pattern, 1, (0,), queries.pieces(0), Layout(40).pieces(0))
    found = build_blocks(rule, q_block=8, k_block=8)
    assert list(zip(found.row.tolist(), found.column.tolist(), strict=True)) == [(0, 1), (1, 4)]
