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
    "set": (fst.set_patterns(), lambda p: p != masks.causal(), masks.local_window(left=0, right=0)),
    "mixture": (fst.mixtures(), lambda p: len(p.branches()) == 2, masks.causal() + masks.causal()),
    "strided": (fst.set_patterns(), lambda p: "strided" in repr(p), masks.strided(1)),
    "window": (fst.set_patterns(), lambda p: getattr(p, "left", 0) >= 3, masks.local_window(left=3, right=0)),
    "LongNet": (fst.longnets(), lambda p: any(part.segment >= 10 for part in p.branches()), masks.longnet([10], [1])),
    "sizes": (fst.attention_sizes(), None, SIZES(1, 1, 1, 1, 1, 1)),
    "grouped": (fst.attention_sizes(), lambda s: s.num_kv_heads < s.num_heads, SIZES(1, 2, 1, 1, 1, 1)),
    "heads": (fst.attention_sizes(num_heads=6), lambda s: s.num_kv_heads == 3, SIZES(1, 6, 3, 1, 1, 1)),
    "some heads": (
        fst.attention_sizes(all_heads=False),
        lambda s: s.head_offset > 0,
        SIZES(1, 1, 1, 1, 1, 1, head_offset=1, num_heads_global=2),
    ),
    "cross": (
        fst.attention_sizes(self_attention=False),
        lambda s: s.num_queries != s.num_keys,
        SIZES(1, 1, 1, 2, 1, 1),
    ),
    "run-time": (
        fst.run_time_patterns(SIZES(2, 1, 1, 3, 3, 1)).map(lambda p: (p.parts[0], p.parts[1].given.tensor.tolist())),
        None,
        (masks.causal(), [[0, 0, 0]]),
    ),
    "grid": (fst.neighborhoods(max_tokens=8).map(lambda p: p.grid), lambda g: len(g) == 3 and min(g) > 1, (2, 2, 2)),
    "empty shard": (
        fst.shardings(8).map(lambda s: (s.num_ranks, s.order, sorted(s.lengths))),
        lambda s: 0 in s[2],
        (2, "contiguous", [0, 8]),
    ),
    "documents": (fst.document_lengths(7), None, (7,)),
    "three documents": (fst.document_lengths(7), lambda held: len(held) == 3, (1, 1, 5)),
    "ids": (fst.document_ids(4).map(torch.Tensor.tolist), None, [[0, 0, 0, 0]]),
    "padded ids": (fst.document_ids(4).map(torch.Tensor.tolist), lambda ids: -1 in ids[0], [[0, 0, 0, -1]]),
    "sharding": (fst.shardings(8), None, distributed.Sharding(8, 1)),
    "zigzag": (
        fst.shardings(8),
        lambda s: s.order == "zigzag" and s.num_ranks > 2,
        distributed.Sharding(8, 3, "zigzag"),
    ),
    "even": (fst.shardings(8, ragged=False), lambda s: s.num_ranks == 3, distributed.Sharding(8, 3)),
    "length": (fst.lengths(masks.chunked(12), max_tokens=40, blocks=[16]), None, 1),
    "long": (fst.lengths(masks.chunked(12), max_tokens=40, blocks=[16]), lambda n: n > 20, 21),
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


@given(st.data())
def test_run_time_patterns_bind(data) -> None:
    sizes = data.draw(fst.attention_sizes(max_tokens=20, self_attention=False))
    pattern = data.draw(fst.run_time_patterns(sizes))
    tensors = {"num_queries": sizes.num_queries, "num_keys": max(sizes.num_queries + sizes.q_offset, sizes.num_keys)}
    assert pattern.varies
    if not sizes.q_offset and sizes.num_queries <= sizes.num_keys:
        bound = pattern.bind(num_heads=sizes.num_heads, **tensors, **sizes.places, batch=sizes.batch)
        assert bound.batch in (1, sizes.batch)


@pytest.mark.parametrize(
    ("pattern", "edges"),
    [
        (masks.longnet([64, 256], [1, 4]), (1, 4, 64, 256)),
        (masks.local_window(left=3, right=5), (3, 5, 9)),
        (masks.dilated_window(left=2, right=0, rate=7), (2, 7, 15)),
        (masks.blockwise(masks.chunked(5), 8), (1, 5, 8, 40)),
        (masks.neighborhood((4, 5, 6), 1), (1, 4, 5, 6, 30, 120)),
        (masks.block_list([[0], [1], [0, 2]], block=16), (16, 48)),
        (masks.random_blocks(100, block=8, count=3, seed=77), (3, 8, 100)),
        (masks.custom(lambda b, h, q, k: q % 6 == k % 6, period=6), (6,)),
        (masks.causal() & masks.documents(torch.tensor([0, 0, 1]), longest=2), (2,)),
        (~masks.causal(), ()),
    ],
    ids=repr,
)
def test_edges(pattern, edges) -> None:
    assert fst.edges_of(pattern) == edges


def test_lengths_lie_around_edges() -> None:
    drawn = set()

    @settings(max_examples=100, derandomize=True, database=None)
    @given(fst.lengths([237], max_tokens=5000))
    def draw(length):
        drawn.add(length)

    draw()
    assert drawn > {237 * times + step for times in (1, 2, 3, 4) for step in (-1, 0, 1)}
    around = fst.lengths(masks.chunked(12), max_tokens=40, blocks=[16])
    for wanted in (11, 12, 13, 15, 16, 17, 25, 33, 37):
        assert smallest(around, lambda n, wanted=wanted: n == wanted) == wanted


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
    ids = data.draw(fst.document_ids(9, batch=2))
    masks.documents(ids).bind(num_heads=1, num_queries=9, num_keys=9)


def test_tensors() -> None:
    x = smallest(fst.tensors((2, 3)))
    assert x.equal(torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float())
    signed = smallest(fst.tensors((8,)), lambda x: bool(((x == 0) & torch.signbit(x)).any()) and not x.any())
    assert not signed.any()
    assert smallest(fst.tensors((50,)), lambda x: bool((x.abs() > 1e3).any())).isfinite().all()
    assert smallest(fst.tensors((50,), values=["ties"])).unique().numel() <= 3
    q, k, v = smallest(
        fst.attention_inputs(fst.AttentionSizes(1, 4, 2, 3, 5, 8), dtype=torch.bfloat16, requires_grad=True)
    )
    assert (q.shape, k.shape, v.shape) == ((1, 4, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    assert q.dtype == torch.bfloat16
    assert v.requires_grad
    assert not k.equal(v)
    transposed = smallest(
        fst.attention_inputs(fst.AttentionSizes(1, 4, 2, 3, 5, 8)), lambda qkv: not qkv[0].is_contiguous()
    )
    assert transposed[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda: fst.patterns(num_heads=0), "num_heads must be at least 1"),
        (lambda: fst.lengths([0]), "an edge must be at least 1"),
        (lambda: fst.tensors((2,), values=["odd"]), "values must be some of 'ordinary'"),
        (lambda: fst.document_lengths(0), "num_tokens must be at least 1"),
    ],
)
def test_bad_arguments(strategy, message) -> None:
    with pytest.raises(ValueError, match=message):
        smallest(strategy())


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
