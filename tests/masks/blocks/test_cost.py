"""What block lists cost: looks at boxes and pairs, kinds of blocks, bytes in storage, and estimates that are near."""

from dataclasses import field
from math import log2

import pytest

from flexdilated import masks
from flexdilated.masks.blocks import PackedBlocks
from flexdilated.masks.blocks._blocks import Blocks, build_blocks, estimate_blocks
from flexdilated.masks.blocks._rule import Rule
from flexdilated.masks.core._expression import pattern_kind
from flexdilated.masks.core._pattern import Pattern
from flexdilated.masks.orders._layout import Layout
from flexdilated.masks.patterns._block_list import BlockTable
from flexdilated.masks.planning.lowering._layouts import shared_terms
from flexdilated.masks.planning.lowering._term import Term
from tests.support.ladders import LADDERS, scaled


def term_of(pattern: Pattern, num_tokens: int, num_heads: int = 1, rate: int = 1) -> Term:
    bound = pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens)
    (term,) = shared_terms(bound.union, 1, bound, rate)
    return term


# Looks while lists are built


@pattern_kind("watched")
class Watched(Pattern):
    inner: Pattern
    asked: list[int] = field(default_factory=list)

    def parameters(self):
        return {}

    def mask_mod(self, *, num_heads, device):
        return self.inner.mask_mod(num_heads=num_heads, device=device)

    def count(self, box, *, num_heads):
        self.asked.append(len(box.area))
        return self.inner.count(box, num_heads=num_heads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("segment", "rate"), [(2048, 1), (8192, 4), (32768, 16)])
def test_price_grows_with_the_blocks(segment, rate, causal):
    """The builder asks about some boxes for each listed block, not about every block there is."""
    N = 1 << 17
    inner = masks.dilated(segment, rate, rate // 2)
    watched = Watched(inner & masks.causal() if causal else inner)
    pieces = Layout(N, rate).pieces(0)
    blocks = build_blocks(Rule(watched, 1, (0,), pieces, pieces), q_block=128, k_block=128)
    assert len(blocks.row) < (N // 128) ** 2 / 30
    assert sum(watched.asked) < 2 * log2(N) * len(blocks.row)


def test_scattered_blocks_are_found_where_they_are_listed(monkeypatch):
    """One look at each listed pair of blocks, and one at each block of the whole."""
    tokens = 1 << 15
    pattern, drawn = masks.random_blocks(tokens), 3 * 3 * tokens // 64

    def looked_at(pattern: Pattern) -> int:
        boxes, count = [], BlockTable.count
        with monkeypatch.context() as patch:
            patch.setattr(BlockTable, "count", lambda self, t, box: boxes.append(len(t)) or count(self, t, box))
            term_of(pattern, tokens, num_heads=3).blocks(128, 128)
        return sum(boxes)

    assert looked_at(pattern) == drawn
    assert looked_at(masks.per_head([pattern & masks.causal()] * 3)) == drawn
    united = (pattern | masks.local_window(left=64, right=64) | masks.global_tokens(64)) & masks.causal()
    assert looked_at(united) < 4 * drawn


# Kinds of blocks


# Bytes


LONGNET = masks.longnet([2048, 8192], [1, 4]) & masks.causal()


@pytest.mark.parametrize(
    ("pattern", "rate", "factor"),
    [(masks.causal() & masks.local_window(left=1023, right=0), 1, 60), (LONGNET, 1, 40), (LONGNET, 4, 20)],
)
def test_lists_that_repeat_shrink(pattern, rate: int, factor: int):
    blocks: Blocks = term_of(pattern, 1 << 16, num_heads=4, rate=rate).blocks(128, 128)
    assert PackedBlocks.pack(blocks).nbytes * factor < blocks.nbytes


# Estimates


def ladder(name: str) -> masks.Mixture:
    return masks.longnet(*scaled(LADDERS[name], 2)) & masks.causal()


@pytest.mark.parametrize(
    ("pattern", "num_tokens", "num_heads", "rate", "error"),
    [
        # A first row that sees everyone does not stand for the others.
        (masks.global_tokens(64) | masks.local_window(left=512, right=512), 1 << 15, 1, 1, 0.1),
        (masks.first_tokens(4) | masks.local_window(left=1023, right=0), 1 << 15, 1, 1, 0.1),
        ((masks.strided(128) | masks.fixed(256, summary=100)) & masks.causal(), 1 << 15, 1, 1, 0.1),
        (ladder("longnet-5"), 8192, 4, 16, 0.15),
        (ladder("paper-5"), 8192, 4, 1, 0.15),
        (ladder("gigapath-5"), 8192, 4, 16, 0.15),
    ],
)
def test_estimates_are_near(pattern, num_tokens, num_heads, rate, error):
    """What the planner weighs: the mean number of blocks that a head lists, from a sample."""
    for branch in pattern.branches():
        term = term_of(branch, num_tokens, num_heads=num_heads, rate=rate)
        listed = len(term.blocks(128, 128).row) / (max(term.tables()) + 1)
        assert estimate_blocks(term.table_rule(), q_block=128, k_block=128).blocks == pytest.approx(listed, rel=error)


def test_estimates_of_opaque_rules_take_a_bounded_sample(monkeypatch):
    """A million tokens have 2 ** 26 blocks; the planner looks at a sample of them, and evaluates none."""
    pattern, N = masks.custom(lambda b, h, q, k: q == k), 1 << 20
    rule, looked, count = term_of(pattern, N).table_rule(), [], type(pattern).count
    monkeypatch.setattr(
        type(pattern), "count", lambda self, box, **heads: looked.append(len(box.area)) or count(self, box, **heads)
    )
    monkeypatch.setattr(Rule, "allowed", lambda *_: pytest.fail("evaluated"))
    assert estimate_blocks(rule, q_block=128, k_block=128).blocks == (N // 128) ** 2
    assert sum(looked) < 1 << 18
