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
    "dilated_window": (
        masks.dilated_window(left=1, right=2, rate=2),
        "#.#.#... .#.#.#.. #.#.#.#. .#.#.#.# ..#.#.#. ...#.#.# ....#.#. .....#.#",
    ),
    "global_tokens": (
        masks.global_tokens(2),
        "######## ######## ##...... ##...... ##...... ##...... ##...... ##......",
    ),
    "global rows": (masks.global_tokens(1, columns=False), "######## " + 7 * "........ "),
    "global columns": (masks.global_tokens(3, rows=False), 8 * "###..... "),
    "first_tokens": (masks.first_tokens(3), 8 * "###..... "),
    "more than there are": (masks.global_tokens(9), 8 * "######## "),
    "strided": (
        masks.strided(3),
        "#..#..#. .#..#..# ..#..#.. #..#..#. .#..#..# ..#..#.. #..#..#. .#..#..#",
    ),
    "fixed": (masks.fixed(3, summary=2), 8 * ".##.##.# "),
    "fixed, one key": (masks.fixed(4), 8 * "...#...# "),
    "prefix_lm": (
        masks.prefix_lm(3),
        "###..... ###..... ###..... ####.... #####... ######.. #######. ########",
    ),
    "chunked": (
        masks.chunked(3),
        "###..... ###..... ###..... ...###.. ...###.. ...###.. ......## ......##",
    ),
    "dilated, tokens 1 and 3 of each segment, of which the last is short": (
        masks.dilated(5, 2, 1),
        "........ .#.#.... ........ .#.#.... ........ ........ ......#. ........",
    ),
    "a window of blocks": (masks.blockwise(masks.local_window(left=1, right=0), 2), "##... ##... ####. ####. ..###"),
    "a window that stays whole at the ends": (
        masks.neighborhood((6,), 1),
        "###... ###... .###.. ..###. ...### ...###",
    ),
    "every other token": (
        masks.neighborhood((7,), 1, rate=2),
        "#.#.#.. .#.#.#. #.#.#.. .#.#.#. ..#.#.# .#.#.#. ..#.#.#",
    ),
    "one row of an image": (masks.neighborhood((2, 3), (0, 1)), 3 * "###... " + 3 * "...### "),
    "one column of an image": (masks.neighborhood((3, 2), (1, 0)), 3 * "#.#.#. .#.#.# "),
    "itself": (masks.neighborhood((2, 2, 1), 0), "#... .#.. ..#. ...#"),
    "rows of blocks": (
        masks.block_list([[1], [], [2, 0]], block=2),
        "..##.. ..##.. ...... ...... ##..## ##..##",
    ),
    "no rows left": (masks.block_list([[0]], block=1), "#... .... .... ...."),
    "a short last block": (masks.block_list([[0, 1], [1]], block=3), "##### ##### ##### ...## ...##"),
    "an even kernel has one key more before": (
        masks.neighborhood((8,), kernel_size=4),
        "####.... ####.... ####.... .####... ..####.. ...####. ....#### ....####",
    ),
    "of two keys, the earlier": (masks.neighborhood((4,), kernel_size=2), "##.. ##.. .##. ..##"),
    "pairs led by the second": (
        masks.neighborhood((7,), kernel_size=3, stride=2),
        "###.... ###.... ..###.. ..###.. ....### ....### ....###",
    ),
    "a short last group is led by the last token": (
        masks.neighborhood((10,), kernel_size=4, stride=4),
        4 * "####...... " + 4 * "....####.. " + 2 * "......#### ",
    ),
    "threes led by their middle": (
        masks.neighborhood((8,), kernel_size=5, stride=3),
        3 * "#####... " + 3 * "..#####. " + 2 * "...##### ",
    ),
    "causal": (masks.neighborhood((5,), kernel_size=3, causal=True), "#.... ##... ###.. .###. ..###"),
    "causal pairs": (
        masks.neighborhood((7,), kernel_size=3, stride=2, causal=True),
        "#...... ##..... .##.... .###... ...##.. ...###. ....###",
    ),
    "causal threes, of which the last is short": (
        masks.neighborhood((8,), kernel_size=4, stride=3, causal=True),
        "#....... ##...... ###..... ..##.... ..###... ..####.. ....###. ....####",
    ),
    "an even kernel in each residue": (
        masks.neighborhood((7,), kernel_size=2, rate=2),
        "#.#.... .#.#... #.#.... .#.#... ..#.#.. ...#.#. ....#.#",
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
    "a stride along one axis": (
        masks.neighborhood((2, 4), kernel_size=(1, 2), stride=(1, 2)),
        2 * "##...... " + 2 * "..##.... " + 2 * "....##.. " + 2 * "......## ",
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


def test_an_image_by_hand():
    """A 4 x 5 image, one pixel to each side: windows of 3 x 3, shifted inwards at the border."""
    mask = evaluated(masks.neighborhood((4, 5), 1).bind(num_heads=1, num_queries=20, num_keys=20))[0]
    assert mask[0].nonzero().flatten().tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 12]
    assert mask[12].nonzero().flatten().tolist() == [6, 7, 8, 11, 12, 13, 16, 17, 18]
    assert mask[14].nonzero().flatten().tolist() == [7, 8, 9, 12, 13, 14, 17, 18, 19]
    assert (mask.sum(1) == 9).all()


def test_every_head_belongs_to_a_group():
    """Twelve heads on five branches: groups of 3, 3, 2, 2, 2."""
    pattern = masks.longnet([2, 3, 4, 5, 6], [1] * 5, heads="grouped")
    mask = evaluated(pattern.bind(num_heads=12, num_queries=12, num_keys=12))
    seen = mask[:, 0].sum(-1).tolist()  # token 0 sees one whole segment
    assert seen == [2] * 3 + [3] * 3 + [4] * 2 + [5] * 2 + [6] * 2


def test_sparse_transformer_by_hand():
    """Both forms at stride 4 (arXiv 1904.10509, section 4.2): what query 9 sees."""
    strided = (masks.local_window(left=4, right=0) | masks.strided(4)) & masks.causal()
    fixed = (masks.chunked(4) | masks.fixed(4, summary=1)) & masks.causal()
    for pattern, keys in ((strided, [1, 5, 6, 7, 8, 9]), (fixed, [3, 7, 8, 9])):
        mask = evaluated(pattern.bind(num_heads=1, num_queries=12, num_keys=12))
        assert mask[0, 9].nonzero().flatten().tolist() == keys


def test_one_implementation_an_idea():
    """What is a special case of another pattern is that pattern."""
    assert masks.dilated_window(left=3, right=1, rate=1) == masks.local_window(left=3, right=1)
    assert masks.first_tokens(4) == masks.global_tokens(4, rows=False)
    assert masks.prefix_lm(4) == masks.causal() | masks.first_tokens(4)
    assert masks.chunked(16) == masks.dilated(16, 1)
