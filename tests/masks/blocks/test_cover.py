"""Listed squares as the beginning of the search: the same blocks as a search everywhere, from far fewer looks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.blocks import _block_search, _blocks
from flexdilated.masks.blocks._blocks import Blocks
from flexdilated.masks.patterns._block_list import BlockTable
from flexdilated.masks.planning.lowering._layouts import shared_terms
from flexdilated.testing.strategies import lengths
from tests.support.strategies import block_lists, block_sides, random_blocks

tables = st.one_of(random_blocks(), block_lists()).map(lambda twin: twin.pattern)
others = st.one_of(
    st.just(masks.causal()),
    st.builds(lambda a, b: masks.local_window(left=a, right=b), st.integers(0, 9), st.integers(0, 9)),
    st.builds(masks.global_tokens, st.integers(1, 9)),
    st.builds(masks.dilated, st.integers(1, 20), st.integers(1, 3)),
)
SHAPES = {
    "alone": lambda a, b, c, d: a,
    "united with another": lambda a, b, c, d: a | c,
    "two tables": lambda a, b, c, d: a | b,
    "both of two tables": lambda a, b, c, d: a & b,
    "cut": lambda a, b, c, d: a & c,
    "cut by what is not": lambda a, b, c, d: a & ~c,
    "BigBird's form": lambda a, b, c, d: (a | c | masks.global_tokens(3)) & masks.causal(),
    "unions that meet": lambda a, b, c, d: (a | c) & (b | d),
    "not": lambda a, b, c, d: ~a & c,
    "by head": lambda a, b, c, d: masks.per_head([a, b, c]),
    "a table for each head": lambda a, b, c, d: masks.per_head([a & c, b, a]),
    "by head, in part": lambda a, b, c, d: masks.per_head([a, b, c]) & a | d,
}


def built(pattern: masks.Pattern, sizes: dict[str, int], sides: tuple[int, int]) -> Blocks:
    bound = pattern.bind(num_heads=3, **sizes)
    (term,) = shared_terms(pattern, 1, bound, 1)
    return term.blocks(*sides)


def same(one: Blocks, other: Blocks) -> bool:
    names = ("table", "row", "column", "full")
    return one.shape == other.shape and all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@settings(max_examples=25)
@given(st.sampled_from(sorted(SHAPES)), st.data())
def test_the_blocks_of_a_search_everywhere(shape, data):
    pattern = SHAPES[shape](*(data.draw(part) for part in (tables, tables, others, others)))
    offset, tokens = data.draw(st.integers(0, 12)), data.draw(lengths([1, 16], max_tokens=40))
    sizes = {"num_queries": tokens, "num_keys": tokens, "q_offset": offset, "k_offset": offset}
    sides = data.draw(st.tuples(block_sides, block_sides))
    found = built(pattern, sizes, sides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_block_search, "_in_order", lambda rule: False)
        expected = built(pattern, sizes, sides)
    assert same(found, expected)


@given(st.data())
def test_more_blocks_than_are_held(data):
    """The search everywhere is the way out, and finds the same."""
    pattern = data.draw(tables) | data.draw(others)
    sizes, sides = {"num_queries": 40, "num_keys": 40}, (4, 8)
    found = built(pattern, sizes, sides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_block_search, "_MOST_LEAVES", data.draw(st.integers(3, 20)))
        patch.setattr(_blocks, "_DOUBTS_AT_ONCE", data.draw(st.integers(0, 3)))  # few block rows at a time
        assert same(found, built(pattern, sizes, sides))


def looked_at(pattern: masks.Pattern, num_tokens: int, monkeypatch) -> int:
    """The boxes in which a table's entries are counted while blocks are found."""
    boxes, count = [], BlockTable.count
    with monkeypatch.context() as patch:
        patch.setattr(BlockTable, "count", lambda self, table, box: boxes.append(len(table)) or count(self, table, box))
        built(pattern, {"num_queries": num_tokens, "num_keys": num_tokens}, (128, 128))
    return sum(boxes)


def test_scattered_blocks_are_found_where_they_are_listed(monkeypatch):
    """One look at each listed pair of blocks, and one at each block of the whole."""
    tokens = 1 << 15
    pattern = masks.random_blocks(tokens)
    drawn = 3 * 3 * tokens // 64
    assert looked_at(pattern, tokens, monkeypatch) == drawn
    assert looked_at(masks.per_head([pattern & masks.causal()] * 3), tokens, monkeypatch) == drawn
    united = (pattern | masks.local_window(left=64, right=64) | masks.global_tokens(64)) & masks.causal()
    assert looked_at(united, tokens, monkeypatch) < 4 * drawn


def test_many_alternatives_are_not_multiplied_out():
    """Five unions of two would be 32 intersections: one search for the whole instead."""
    unions = [masks.chunked(size) | masks.strided(size) for size in range(2, 7)]
    whole = unions[0] & unions[1] & unions[2] & unions[3] & unions[4]
    assert _block_search._alternatives(whole) == [whole]
    assert len(_block_search._alternatives(unions[0] & unions[1])) == 4
