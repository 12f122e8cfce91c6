"""Causal terms in a dense part and a triangle: the same pairs, each once."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.planning._planner import plan
from flexdilated.masks.planning.lowering._ways import compact_terms, shared_terms, split_causal
from tests.masks.planning.test_planner import weight_of_all
from tests.support import oracle

RULES = {
    "causal": (masks.causal(), oracle.causal()),
    "dilated": (masks.dilated(16, 3) & masks.causal(), oracle.both(oracle.dilated(16, 3, 0), oracle.causal())),
    "by head": (
        masks.dilated(12, 2, offset="interleaved") & masks.causal(),
        oracle.both(oracle.dilated(12, 2, "interleaved"), oracle.causal()),
    ),
    "strided": (masks.strided(4) & masks.causal(), oracle.both(oracle.strided(4), oracle.causal())),
}


@given(
    name=st.sampled_from(sorted(RULES)),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 60)),
    offsets=st.tuples(st.integers(0, 60), st.integers(0, 30)),
    heads=st.integers(1, 3),
)
def test_the_same_pairs_each_once(name, sizes, offsets, heads):
    pattern, rule = RULES[name]
    where = {"q_offset": offsets[0], "k_offset": offsets[1]}
    bound = pattern.bind(num_heads=heads, num_queries=sizes[0], num_keys=sizes[1], **where)
    expected = oracle.counts(
        rule, range(heads), heads, torch.arange(sizes[0]) + offsets[0], torch.arange(sizes[1]) + offsets[1]
    )
    for terms in (compact_terms(pattern, 1, bound), shared_terms(pattern, 1, bound, 1)):
        split = None if terms is None else split_causal(terms)
        if split is not None:
            assert torch.equal(weight_of_all(split, expected.shape), expected)


def test_queries_after_all_keys_are_one_dense_term():
    bound = masks.causal().bind(num_heads=2, num_queries=64, num_keys=100, q_offset=100)
    found = split_causal(shared_terms(bound.pattern, 1, bound, 1)) or ()
    assert [term.shape for term in found] == ["dense"]


def test_the_planner_splits_long_ones():
    """A chunk of 1,024 queries after 16,384 keys: no block lists are left."""
    bound = masks.causal().bind(num_heads=4, num_queries=1024, num_keys=17_408, q_offset=16_384)
    best = plan(bound)
    assert best.options[0][0].layout == "natural, split"
    assert [term.shape for term in best.terms] == ["dense", "causal"]
    assert best.shares_rows


def test_what_is_no_shifted_triangle_stays():
    for pattern, offset in ((masks.causal(), 0), (masks.local_window(left=9, right=0), 50), (masks.every(), 50)):
        bound = pattern.bind(num_heads=2, num_queries=30, num_keys=60, q_offset=offset)
        assert split_causal(shared_terms(bound.pattern, 1, bound, 1)) is None


def test_no_part_without_keys_is_split_off() -> None:
    """Queries that begin where the keys do: there are none before all of them."""
    bound = masks.causal().bind(num_heads=2, num_queries=8, num_keys=20)
    (term,) = shared_terms(masks.causal(), 1, bound, 1)
    blocks = replace(term, shape="blocks")
    assert all(part.k.num_slots > 0 for part in split_causal([blocks]) or ())
