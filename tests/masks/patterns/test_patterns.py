"""Patterns: the elementwise rule against the dense rules, the algebra, and mixtures as counts."""

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given

from flexdilated import masks
from flexdilated.engines._reference import multiplicity
from tests.support import oracle
from tests.support.ladders import GIGAPATH_5, LADDERS, PAPER_5, scaled
from tests.support.strategies import cases, sets


def evaluated(bound: masks.Bound) -> torch.Tensor:
    """(H, N, M): the mask_mod of a bound on every pair."""
    h = torch.arange(bound.num_heads)[:, None, None]
    q, k = torch.arange(bound.num_queries)[None, :, None], torch.arange(bound.num_keys)[None, None, :]
    mask = bound.mask_mod()(torch.tensor(0), h, q, k)
    assert mask.dtype == torch.bool
    return mask.expand(bound.num_heads, bound.num_queries, bound.num_keys)


@given(cases())
def test_mask_mod_is_the_dense_rule(case):
    assert torch.equal(evaluated(case.bind()), case.counts() > 0)


@given(cases())
def test_branches_count_as_the_dense_rule(case):
    assert torch.equal(multiplicity(case.bind(), torch.device("cpu"))[0], case.counts())


@pytest.mark.parametrize("offsets", ["interleaved", "contiguous"])
@pytest.mark.parametrize("heads", ["all", "grouped"])
@pytest.mark.parametrize("name", LADDERS)
def test_ladders_at_full_size(name, heads, offsets):
    """Longer segments than tokens, rates that divide neither segments nor heads; on a spread of queries."""
    rules = {"offsets": offsets, "heads": heads}
    bound = masks.longnet(*LADDERS[name], **rules).bind(num_heads=16, num_queries=1, num_keys=1501, q_offset=0)
    queries = torch.cat([torch.arange(0, 1501, 61), torch.tensor([1023, 1024, 1500])])
    expected = oracle.counts(oracle.longnet(*LADDERS[name], **rules), range(16), 16, queries, torch.arange(1501))
    h, k = torch.arange(16)[:, None, None], torch.arange(1501)[None, None, :]
    found = sum(
        branch.mask_mod(num_heads=16, device=torch.device("cpu"))(torch.tensor(0), h, queries[:, None], k).long()
        for branch in bound.pattern.branches()
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("ladder", [PAPER_5, GIGAPATH_5], ids=["paper-5", "gigapath-5"])
def test_ladders_scaled_down(ladder):
    segments, rates = scaled(ladder, 200)
    bound = masks.longnet(segments, rates).bind(num_heads=16, num_queries=301, num_keys=301)
    positions = torch.arange(301)
    expected = oracle.counts(oracle.longnet(segments, rates), range(16), 16, positions, positions)
    assert torch.equal(multiplicity(bound, torch.device("cpu"))[0], expected)


def test_a_small_pattern_by_hand():
    """Segments of 5, every second token from 1 on: tokens 1 and 3 of each; the last segment is short."""
    mask = evaluated(masks.dilated(5, 2, 1).bind(num_heads=1, num_queries=8, num_keys=8))[0]
    pairs = {(1, 1), (1, 3), (3, 1), (3, 3), (6, 6)}
    assert {tuple(pair) for pair in mask.nonzero().tolist()} == pairs


def test_every_head_belongs_to_a_group():
    """Twelve heads on five branches: groups of 3, 3, 2, 2, 2."""
    pattern = masks.longnet([2, 3, 4, 5, 6], [1] * 5, heads="grouped")
    mask = evaluated(pattern.bind(num_heads=12, num_queries=12, num_keys=12))
    seen = mask[:, 0].sum(-1).tolist()  # token 0 sees one whole segment
    assert seen == [2] * 3 + [3] * 3 + [4] * 2 + [5] * 2 + [6] * 2


@given(sets(3), sets(3))
def test_algebra_on_sets(a, b):
    a, b = a.pattern, b.pattern

    def same(left, right):
        sizes = {"num_heads": 3, "num_queries": 13, "num_keys": 17, "q_offset": 2}
        return torch.equal(evaluated(left.bind(**sizes)), evaluated(right.bind(**sizes)))

    assert same(~(a & b), ~a | ~b)
    assert same(a & b, b & a)
    assert same(a | (a & b), a)
    assert ~~a == a
    assert a & a == a


def test_values_compare_hash_and_pickle():
    a = masks.longnet([8, 16], [1, 2]) & masks.causal()
    b = masks.longnet((8, 16), (1, 2)) & masks.causal()
    assert a == b
    assert len({a, b, masks.longnet([8, 16], [1, 4]) & masks.causal()}) == 2
    assert pickle.loads(pickle.dumps(a)) == a
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.parts = ()


def test_a_mixture_counts_and_a_set_does_not():
    causal = masks.causal()
    assert causal + causal != causal
    assert causal | causal == causal
    assert (causal + causal).branches() == (causal, causal)
    assert ((causal + causal) + causal).branches() == (causal,) * 3


def test_intersection_distributes_over_a_mixture():
    mixture, window = masks.longnet([8, 16], [1, 2]), masks.local_window(left=3, right=0)
    expected = tuple(branch & window for branch in mixture.branches())
    assert (mixture & window).branches() == expected
    assert {frozenset(branch.parts) for branch in (window & mixture).branches()} == {
        frozenset(branch.parts) for branch in expected
    }


_SET, _MIXTURE = masks.causal(), masks.longnet([8, 16], [1, 2])


@pytest.mark.parametrize(
    "operation",
    [
        lambda: ~_MIXTURE,
        lambda: _MIXTURE | _SET,
        lambda: _SET | _MIXTURE,
        lambda: _MIXTURE | _MIXTURE,
        lambda: _MIXTURE & _MIXTURE,
        lambda: masks.per_head([_SET, _MIXTURE]),
        lambda: _SET & 3,
        lambda: 3 | _SET,
        lambda: _SET + "causal",
        lambda: _MIXTURE & None,
    ],
)
def test_a_set_is_needed(operation):
    with pytest.raises(TypeError):
        operation()


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: masks.dilated(0, 1), ValueError, "segment must be at least 1; got segment=0"),
        (lambda: masks.dilated(4, 0), ValueError, "rate must be at least 1; got rate=0"),
        (lambda: masks.dilated(4, 2, 2), ValueError, "offset=2, rate=2"),
        (lambda: masks.dilated(4, 2, -1), ValueError, "offset must be at least 0"),
        (lambda: masks.dilated(4.0, 2), TypeError, "segment=4.0"),
        (lambda: masks.dilated(4, True), TypeError, "rate=True"),
        (lambda: masks.dilated(4, 2, "odd"), ValueError, "'interleaved', 'contiguous'; got offset='odd'"),
        (lambda: masks.local_window(left=-1, right=0), ValueError, "left must be at least 0; got left=-1"),
        (lambda: masks.local_window(left=0, right=-1), ValueError, "right must be at least 0; got right=-1"),
        (lambda: masks.local_window(left=1, right=0.5), TypeError, "right=0.5"),
        (lambda: masks.longnet([], []), ValueError, "at least one"),
        (lambda: masks.longnet([4, 8], [1]), ValueError, r"\[4, 8\] and dilation_rates=\[1\]"),
        (lambda: masks.longnet([4, 0], [1, 1]), ValueError, r"segment_lengths\[1\] must be at least 1; got .*=0"),
        (lambda: masks.longnet([4, 8], [1, -2]), ValueError, r"dilation_rates\[1\] must be at least 1; got .*=-2"),
        (
            lambda: masks.longnet([4], [1], offsets="random"),
            ValueError,
            "'interleaved', 'contiguous'; got offsets=",
        ),
        (lambda: masks.longnet([4], [1], heads="some"), ValueError, "'all', 'grouped'; got heads='some'"),
        (lambda: masks.per_head([]), ValueError, "at least 1"),
        (lambda: masks.per_head([3]), TypeError, "3"),
    ],
)
def test_bad_parameters(build, error, says):
    with pytest.raises(error, match=says):
        build()


SIZES = {"num_heads": 2, "num_queries": 4, "num_keys": 4}


@pytest.mark.parametrize(
    ("pattern", "change", "error", "says"),
    [
        (_SET, {"num_heads": 0}, ValueError, "num_heads=0"),
        (_SET, {"num_queries": 0}, ValueError, "num_queries=0"),
        (_SET, {"num_keys": -3}, ValueError, "num_keys=-3"),
        (_SET, {"num_queries": 2.0}, TypeError, "num_queries=2.0"),
        (_SET, {"q_offset": -1}, ValueError, "q_offset=-1"),
        (_SET, {"k_offset": -1}, ValueError, "k_offset=-1"),
        (_SET, {"head_offset": 2, "num_heads_global": 3}, ValueError, "num_heads_global=3"),
        (_SET, {"batch": 0}, ValueError, "batch=0"),
        (masks.per_head([_SET]), {}, ValueError, "got 1 for 2 heads"),
        (~masks.per_head([_SET]) & _SET, {}, ValueError, "got 1 for 2 heads"),
        (masks.longnet([4] * 3, [1] * 3, heads="grouped"), {}, ValueError, "num_heads=2"),
        (_MIXTURE & masks.per_head([_SET] * 3), {}, ValueError, "got 3 for 2 heads"),
    ],
)
def test_bad_sizes(pattern, change, error, says):
    with pytest.raises(error, match=says):
        pattern.bind(**SIZES | change)


def test_patterns_of_single_heads_are_asked_about_all_heads() -> None:
    """A part that has rules for three heads is no rule for two."""
    pattern = masks.per_head([masks.head_groups([masks.causal()] * 3), masks.causal()])
    with pytest.raises(ValueError, match="head"):
        pattern.bind(num_heads=2, num_queries=4, num_keys=4)


@pytest.mark.parametrize(
    "change",
    [
        {"pattern": _SET},
        {"pattern": _MIXTURE + _SET},
        *(
            {name: 9}
            for name in ("num_queries", "num_keys", "num_heads", "head_offset", "q_offset", "k_offset", "batch")
        ),
        {"num_heads_global": 30},
    ],
    ids=str,
)
def test_key_tells_bounds_apart(change):
    """A plan found by key is the plan of these sizes: everything a mask depends on is in the key."""
    bound = _MIXTURE.bind(num_heads=2, num_queries=4, num_keys=4, head_offset=1, num_heads_global=20)
    assert dataclasses.replace(bound, **change).key() != bound.key()
    assert dataclasses.replace(bound).key() == bound.key()
    assert hash(bound.key()) == hash(dataclasses.replace(bound).key())
