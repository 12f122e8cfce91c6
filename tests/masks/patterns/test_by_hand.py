"""Small masks drawn by hand: the rule pair by pair, row by row and in bounds, for each kind of pattern.

Neighbourhoods with kernel sizes, strides and causal axes are worked out from NATTEN's definition,
https://github.com/SHI-Labs/NATTEN, csrc/include/natten/cuda/reference/mask.hpp.
"""

import pytest
import torch

from flexdilated import masks
from flexdilated.masks.core import Box, Progression
from flexdilated.masks.patterns import Neighborhood
from tests.masks.patterns.test_patterns import evaluated

CPU = torch.device("cpu")

# One word a query: # for each key that it sees.
BY_HAND = {
    "dilated, tokens 1 and 3 of each segment, of which the last is short": (
        masks.dilated(5, 2, 1),
        "........ .#.#.... ........ .#.#.... ........ ........ ......#. ........",
    ),
    "a window that stays whole at the ends": (
        masks.neighborhood((6,), 1),
        "###... ###... .###.. ..###. ...### ...###",
    ),
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
        packed = pattern.packed(CPU)
        assert packed is not None
        assert torch.equal(packed(torch.tensor(0), torch.tensor(0), query[:, None], torch.arange(keys)), expected)
