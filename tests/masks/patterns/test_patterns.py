"""Patterns: the elementwise rule and mixtures as counts against the dense rules, and small masks drawn by hand."""

import pytest
import torch
from hypothesis import example, given

from flexdilated import masks
from flexdilated.engines._reference import multiplicity
from flexdilated.masks.core import Box, Progression
from flexdilated.masks.patterns import Neighborhood
from tests.support import twins
from tests.support.strategies import Case, cases


def evaluated(bound: masks.Bound) -> torch.Tensor:
    """(H, N, M): the mask_mod of a bound on every pair."""
    h = torch.arange(bound.num_heads)[:, None, None]
    q, k = torch.arange(bound.num_queries)[None, :, None], torch.arange(bound.num_keys)[None, None, :]
    mask = bound.mask_mod()(torch.tensor(0), h, q, k)
    assert mask.dtype == torch.bool
    return mask.expand(bound.num_heads, bound.num_queries, bound.num_keys)


# Rows of more blocks than are compared one by one, beside short and empty ones.
LONG_ROWS = twins.block_list([range(0, 40, 3), range(1, 40, 2), [5], [], range(40)], block=2)


@given(cases())
@example(Case.whole(LONG_ROWS, 1, 81))
def test_the_rule_and_the_counts_of_branches_are_the_dense_rule(case):
    counts = case.counts()
    assert torch.equal(evaluated(case.bind()), counts > 0)
    assert torch.equal(multiplicity(case.bind(), torch.device("cpu"))[0], counts)


def test_a_rule_of_one_head_goes_by_the_number_of_heads() -> None:
    """What was asked for before is kept: of other numbers of heads it is another rule."""
    pattern = masks.longnet([8], [4], offsets="contiguous") & masks.causal()
    for num_heads, offset in ((4, 3), (16, 0), (4, 3)):
        assert pattern.for_head(3, num_heads) == masks.dilated(8, 4, offset) & masks.causal()


CPU = torch.device("cpu")

# One word a query: # for each key that it sees.
BY_HAND = {
    "dilated, tokens 1 and 3 of each segment, of which the last is short": (
        masks.dilated(5, 2, 1),
        "........ .#.#.... ........ .#.#.... ........ ........ ......#. ........",
    ),
    "a window that stays whole at the ends": (masks.neighborhood((6,), 1), "###... ###... .###.. ..###. ...### ...###"),
    "every other token": (
        masks.neighborhood((7,), 1, rate=2),
        "#.#.#.. .#.#.#. #.#.#.. .#.#.#. ..#.#.# .#.#.#. ..#.#.#",
    ),
    "one row of an image": (masks.neighborhood((2, 3), (0, 1)), 3 * "###... " + 3 * "...### "),
    "an even kernel has one key more before": (
        masks.neighborhood((8,), kernel_size=4),
        "####.... ####.... ####.... .####... ..####.. ...####. ....#### ....####",
    ),
    "pairs led by the second": (
        masks.neighborhood((7,), kernel_size=3, stride=2),
        "###.... ###.... ..###.. ..###.. ....### ....### ....###",
    ),
    "a short last group is led by the last token": (
        masks.neighborhood((10,), kernel_size=4, stride=4),
        4 * "####...... " + 4 * "....####.. " + 2 * "......#### ",
    ),
    "groups in each residue": (
        masks.neighborhood((11,), kernel_size=3, rate=2, stride=2),
        "#.#.#...... .#.#.#..... #.#.#...... .#.#.#..... ....#.#.#.. .....#.#.#. "
        "....#.#.#.. .....#.#.#. ......#.#.# .....#.#.#. ......#.#.#",
    ),
    "causal pairs in each residue": (
        masks.neighborhood((7,), kernel_size=2, rate=2, stride=2, causal=True),
        "#...... .#..... #.#.... .#.#... ....#.. ...#.#. ....#.#",
    ),
    "frames of a video in order, and two pixels of each": (
        masks.neighborhood((3, 3), kernel_size=(2, 2), causal=(True, False)),
        "##....... ##....... .##...... ##.##.... ##.##.... .##.##... ...##.##. ...##.##. ....##.##",
    ),
    "every other token, round": (
        masks.neighborhood((8,), 1, rate=2, wrap=True),
        "#.#...#. .#.#...# #.#.#... .#.#.#.. ..#.#.#. ...#.#.# #...#.#. .#...#.#",
    ),
    "threes that share a window, round": (
        masks.neighborhood((6,), kernel_size=5, stride=3, wrap=True),
        3 * "####.# " + 3 * "#.#### ",
    ),
    "a cylinder": (
        masks.neighborhood((3, 4), (0, 1), wrap=(False, True)),
        "##.#........ ###......... .###........ #.##........ ....##.#.... ....###..... .....###.... ....#.##.... "
        "........##.# ........###. .........### ........#.##",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_small_masks_by_hand(name):
    pattern, picture = BY_HAND[name]
    expected = torch.tensor([[pair == "#" for pair in row] for row in picture.split()])
    queries, keys = expected.shape
    assert torch.equal(evaluated(pattern.bind(num_heads=1, num_queries=queries, num_keys=keys))[0], expected)
    query, zeros, ones = torch.arange(queries), torch.zeros(queries, dtype=torch.int64), torch.ones(queries).long()
    bounds = pattern.count(Box(zeros, Progression(query, 1, ones), Progression(zeros, 1, keys * ones)), num_heads=1)
    assert ((bounds.low <= expected.sum(1)) & (expected.sum(1) <= bounds.high)).all()
    for number, row in enumerate(expected):
        listed = pattern.for_head(0, 1).row(number, range(keys))
        assert listed is not None
        assert sorted(key for part in listed for key in part) == row.nonzero().flatten().tolist()
    if isinstance(pattern, Neighborhood):
        packed = pattern.packed_mask_mod(CPU)
        assert packed is not None
        assert torch.equal(packed(torch.tensor(0), torch.tensor(0), query[:, None], torch.arange(keys)), expected)
