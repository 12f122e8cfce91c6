"""Block lists: exactly the non-empty blocks of the dense rule, in every order of tokens, at little cost."""

import operator
from dataclasses import field
from math import log2

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks.blocks import _block_search, _blocks
from flexdilated.masks.blocks._blocks import UNKNOWN, Blocks, build_blocks, estimate_blocks
from flexdilated.masks.blocks._rule import Rule
from flexdilated.masks.core._expression import pattern_kind
from flexdilated.masks.core._pattern import Pattern
from flexdilated.masks.orders._layout import Compact, Layout, ListedOrder
from flexdilated.masks.planning.lowering import _term
from flexdilated.masks.planning.lowering._layouts import compact_terms, shared_terms
from flexdilated.masks.planning.lowering._term import Term
from tests.masks.blocks.test_packed_blocks import assert_same
from tests.support import twins
from tests.support.ladders import LADDERS, scaled
from tests.support.strategies import Case, block_sides, cases, dilated, sets


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


@given(
    *(cases(sets), st.integers(1, 7) | st.integers(8, 130), block_sides, block_sides),
    *(st.sampled_from([0, _block_search._FEW_BLOCKS]), st.sampled_from([0, _block_search._FEW_PAIRS])),
)
def test_lists_are_the_dense_rule(case, rate, q_block, k_block, few, few_pairs):
    """Natural and residue-major order, unequal sides, ragged ends, some of the heads, any queries.

    Boxes are halved down to blocks, or, where these are few, looked at block by block. Residue classes may be as many
    as tokens; they are told apart as very many are, or paired all with all.
    """
    (term,) = shared_terms(case.twin.pattern, 1, case.bind(), rate)
    pairs = in_blocks(in_order(case, term.q, term.k), q_block, k_block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_block_search, "_FEW_BLOCKS", few)
        patch.setattr(_block_search, "_FEW_PAIRS", few_pairs)
        patch.setattr(_block_search, "_ALL_PAIRS", few_pairs)
        patch.setattr(_term, "_MANY_CLASSES", 1 if few_pairs == 0 else _term._MANY_CLASSES)
        assert_lists(term.blocks(q_block, k_block), pairs)
        assert_lists(term.blocks(q_block, k_block, settle=False), pairs, exact=False)


@example(Case(twins.block_list([[0], [1], [0, 2]], block=4), 1, 10, 10, 0, 0, 0, 1), 1, 4, 4)  # a full, ragged block
@given(cases(sets), st.integers(1, 7), block_sides, block_sides)
def test_estimates_of_few_blocks_are_counts(case, rate, q_block, k_block):
    """In rows of neighbours, and in others without and with a block that needs a mask."""
    (term,) = shared_terms(case.twin.pattern, 1, case.bind(), rate)
    tables = term.tables()
    pairs = in_order(case, term.q, term.k)[[tables.index(table) for table in range(max(tables) + 1)]]
    found, cells = (in_blocks(x, q_block, k_block) for x in (pairs, torch.ones_like(pairs)))
    counted = [0, 0, 0]
    for row, size in zip(found.flatten(0, 1), cells.flatten(0, 1), strict=True):
        columns = row.nonzero().squeeze(1)
        if len(columns):
            others = 1 + int((row < size)[columns].any())
            counted[0 if int(columns[-1] - columns[0]) == len(columns) - 1 else others] += len(columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_blocks, "_FEW_CELLS", 1 << 30)
        estimate = estimate_blocks(term.table_rule(), q_block=q_block, k_block=k_block)
    assert list(estimate) == pytest.approx([number / len(pairs) for number in counted])


@settings(max_examples=14)
@given(cases(lambda H: st.one_of(dilated(), dilated_and_more(H))), block_sides, block_sides)
def test_compact_lists_are_the_dense_rule(case, q_block, k_block):
    """Every fold of a compact term has the lists of the first."""
    counts = case.counts()
    for term in compact_terms(case.twin.pattern, 1, case.bind()) or []:
        blocks = term.blocks(q_block, k_block)
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


@pattern_kind("watched")
class Watched(Pattern):
    """A pattern that notes how many boxes it was asked about."""

    inner: Pattern
    asked: list[int] = field(default_factory=list)

    def parameters(self):
        return {}

    def mask_mod(self, *, num_heads, device):
        return self.inner.mask_mod(num_heads=num_heads, device=device)

    def count(self, box, *, num_heads):
        self.asked.append(len(box.area))
        return self.inner.count(box, num_heads=num_heads)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("segment", "rate"), [(2048, 1), (8192, 4), (32768, 16)])
def test_price_grows_with_the_blocks(segment, rate, causal):
    """The builder asks about some boxes for each listed block, not about every block there is."""
    N = 1 << 17
    inner = masks.dilated(segment, rate, rate // 2)
    watched = Watched(inner & masks.causal() if causal else inner)
    pieces = Layout(N, rate).pieces(0)
    blocks = build_blocks(Rule(watched, 1, (0,), pieces, pieces), q_block=128, k_block=128)
    everything = (N // 128) ** 2
    assert len(blocks.row) < everything / 30
    assert sum(watched.asked) < 2 * log2(N) * len(blocks.row)


@pytest.mark.parametrize(("name", "rate"), [("longnet-5", 16), ("paper-5", 1), ("gigapath-5", 16)])
def test_estimates_are_near(name, rate):
    """What the planner weighs: the mean number of blocks a head lists, from a sample."""
    N, H = 8192, 4
    pattern = masks.longnet(*scaled(LADDERS[name], 2)) & masks.causal()
    bound = pattern.bind(num_heads=H, num_queries=N, num_keys=N)
    for branch in pattern.branches():
        (term,) = shared_terms(branch, 1, bound, rate)
        listed = len(term.blocks(128, 128, settle=False).row) / (max(term.tables()) + 1)
        assert estimate_blocks(term.table_rule(), q_block=128, k_block=128).blocks == pytest.approx(listed, rel=0.15)


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


def test_the_rule_of_a_compact_term_is_that_of_its_heads() -> None:
    """Over the term's own heads and slots; both the dilated factor and the rest choose by head."""
    rest = masks.per_head([masks.every(), masks.blockwise(masks.causal(), block=4) & masks.chunked(8)] * 2)
    pattern = masks.dilated(8, 2, "interleaved") & rest
    bound = pattern.bind(num_heads=4, num_queries=32, num_keys=32)
    terms = [term for term in compact_terms(pattern, 1, bound) or [] if term.shape == "blocks"]
    whole = pattern.mask_mod(num_heads=4, device=torch.device("cpu"))
    nothing = torch.tensor(0)
    assert terms
    for term in terms:
        mask_mod = term.mask_mod(torch.device("cpu"))
        for index, head in enumerate(term.heads):
            q, k = (side.alone(0).tokens()[index, 0] for side in (term.q, term.k))
            slots = torch.arange(len(q))
            found = mask_mod(nothing, torch.tensor(index), slots[:, None], torch.arange(len(k)))
            assert torch.equal(found, whole(nothing, torch.tensor(head), q[:, None], k))


UNION = masks.dilated(64, 2) | masks.dilated(32, 1)
PERIODIC = {
    "one branch": masks.dilated(64, 4, 3),
    "causal": masks.dilated(64, 2) & masks.causal(),
    "union": UNION & masks.local_window(left=40, right=3),
    "head groups": masks.longnet([32, 64], [1, 2], heads="grouped"),
    "per head": masks.per_head([masks.dilated(64, 1), masks.dilated(32, 2), UNION, masks.dilated(128, 4)]),
    "window": masks.local_window(left=3, right=3),
    "complement": ~masks.dilated(64, 1),
    "half free": masks.dilated(64, 1) | masks.causal(),
}


@pytest.mark.parametrize(
    ("tokens", "rate", "sides"),
    [(256, 1, (8, 8)), (256, 2, (16, 4)), (256, 4, (8, 8)), (321, 1, (8, 8)), (512, 3, (8, 8))],
)
@pytest.mark.parametrize("name", PERIODIC)
def test_copies_of_a_period_are_what_building_gives(monkeypatch, name, tokens, rate, sides):
    """Where pairs stay within whole periods, blocks of one are copied; without copying all lists are equal."""
    pattern = PERIODIC[name]
    bound = pattern.bind(num_heads=4, num_queries=tokens, num_keys=tokens)
    (shared,) = shared_terms(pattern, 1, bound, rate)
    assert (shared._square(*sides) is not None) == (tokens == 256 and pattern.confined())
    copied = shared.blocks(*sides)
    monkeypatch.setattr(Term, "_square", lambda *_: None)
    assert_same(copied, shared.blocks(*sides))
