"""The public strategies: what they draw is valid, reaches the edges, and shrinks to the small and simple."""

import sys
from importlib import import_module

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import flexdilated.testing
from flexdilated import distributed, masks
from flexdilated.masks.core._expression import KINDS
from flexdilated.testing import strategies as fst

# `find` gives the last example that was tried: no others are to follow the smallest.
PHASES = [Phase.generate, Phase.shrink]
SEARCH = settings(max_examples=2000, deadline=None, derandomize=True, database=None, phases=PHASES)


def smallest(strategy, condition=lambda value: True):
    return find(strategy, condition, settings=SEARCH)


SIZES = fst.AttentionSizes
SMALLEST = {  # strategy, condition, the smallest value
    "pattern": (fst.patterns(num_heads=3), None, masks.causal()),
    "window": (fst.set_patterns(), lambda p: getattr(p, "left", 0) >= 3, masks.local_window(left=3, right=0)),
    "LongNet": (fst.longnets(), lambda p: any(part.segment >= 10 for part in p.branches()), masks.longnet([10], [1])),
    "sizes": (fst.attention_sizes(), None, SIZES(1, 1, 1, 1, 1, 1)),
    "grouped": (fst.attention_sizes(), lambda s: s.num_kv_heads < s.num_heads, SIZES(1, 2, 1, 1, 1, 1)),
    "grid": (fst.neighborhoods(max_tokens=8).map(lambda p: p.grid), lambda g: len(g) == 3, (1, 1, 1)),
    "documents": (fst.document_lengths(7), None, (7,)),
    "ids": (fst.document_ids(4).map(torch.Tensor.tolist), None, [[0, 0, 0, 0]]),
    "sharding": (fst.shardings(8), None, distributed.Sharding(8, 1)),
    "length": (fst.lengths(masks.chunked(12), max_tokens=40, blocks=[16]), None, 1),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_shrinks(name) -> None:
    strategy, condition, expected = SMALLEST[name]
    assert smallest(strategy, condition or (lambda value: True)) == expected


def kinds_in(data) -> set[str]:
    parts = [*data.get("parts", ()), *(data[name] for name in ("part", "spans", "which", "starts") if name in data)]
    return {data["kind"]}.union(*map(kinds_in, parts))


def test_every_kind_is_drawn() -> None:
    """All that a text may hold, and functions, which have none; in not too many examples.

    The lengths of a BlockMask are drawn with BlockMasks, in tests/masks/patterns/test_from_block_mask.py.
    """
    wanted = {kind for kind, made in KINDS.items() if made.__module__.startswith("flexdilated.")} - {"positions_below"}
    found: set[str] = set()
    varying = fst.attention_sizes(num_heads=2, max_tokens=12).flatmap(fst.run_time_patterns)
    drawn = st.one_of(fst.patterns(num_heads=2, closures=True), varying, fst.longnets(padding=True))

    def is_last(pattern: masks.Pattern | masks.Mixture) -> bool:
        found.update(kinds_in(pattern.to_data()))
        return found >= wanted

    find(drawn, is_last, settings=settings(SEARCH, max_examples=800, phases=[Phase.generate]))
    assert found == wanted


def test_lengths_lie_around_edges() -> None:
    drawn = set()

    @settings(max_examples=100, derandomize=True, database=None)
    @given(fst.lengths([237], max_tokens=5000))
    def draw(length):
        drawn.add(length)

    draw()
    assert drawn > {237 * times + step for times in (1, 2, 3, 4) for step in (-1, 0, 1)}


@given(st.data())
def test_what_is_drawn_binds(data) -> None:
    """Any pattern to its sizes; a list of blocks to fewer keys than queries, if no row names a block beyond them."""
    heads = data.draw(st.integers(1, 4))
    listed = st.just(masks.block_list([[0], [1], [1], [3]], block=4))
    pattern = data.draw(st.one_of(fst.patterns(num_heads=heads, max_number=12), listed))
    assert masks.from_json(masks.to_json(pattern)) == pattern
    sizes = data.draw(fst.attention_sizes(pattern, num_heads=heads, self_attention=data.draw(st.booleans())))
    bound = pattern.bind(num_heads=heads, num_queries=sizes.num_queries, num_keys=sizes.num_keys, **sizes.places)
    assert bound.num_queries == sizes.num_queries
    most = data.draw(st.integers(1, 6))
    few = data.draw(fst.attention_sizes(max_tokens=most, self_attention=False))
    assert max(few.num_queries, few.num_keys, few.q_offset, few.k_offset) <= most
    whole = data.draw(fst.attention_sizes(num_heads=heads, max_tokens=20))
    varying = data.draw(fst.run_time_patterns(whole))
    assert varying.varies
    places = {"num_heads": heads, "num_queries": whole.num_queries, "num_keys": whole.num_keys}
    assert varying.bind(**places, **whole.places, batch=whole.batch).batch in (1, whole.batch)
    q, k, v = data.draw(fst.attention_inputs(whole, dtype=torch.bfloat16, requires_grad=True))
    assert {(x.dtype, x.requires_grad) for x in (q, k, v)} == {(torch.bfloat16, True)}
    assert q.shape == (whole.batch, heads, whole.num_queries, whole.head_dim)
    ids = data.draw(fst.document_ids(9, batch=2))
    masks.documents(ids).bind(num_heads=1, num_queries=9, num_keys=9)


def test_without_hypothesis(monkeypatch) -> None:
    """The rest of flexdilated.testing works, and the error says what to install."""
    monkeypatch.setattr(flexdilated, "testing", flexdilated.testing)  # importing it again sets it
    for name in [name for name in sys.modules if name.startswith("flexdilated.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    testing = import_module("flexdilated.testing")
    assert testing is sys.modules["flexdilated.testing"]
    assert callable(testing.check_attention_module)
    with pytest.raises(ImportError, match=r'is not installed: pip install "flexdilated\[testing\]"$'):
        _ = testing.strategies
