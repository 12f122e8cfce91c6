"""Numbers that patterns are written and bound with: out of range, or no integers, they are refused by name."""

import re

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.core import LARGEST, require_finite, require_int

C = masks.causal()


def diagonal(b, h, q, k):
    return q == k


# What the error names, the least number, and where it is given.
NUMBERS = [
    ("segment", 1, lambda n: masks.dilated(n, 2)),
    ("rate", 1, lambda n: masks.dilated(8, n)),
    ("offset", 0, lambda n: masks.dilated(8, 2, n)),
    ("segment_lengths[1]", 1, lambda n: masks.longnet([8, n], [1, 2])),
    ("dilation_rates[0]", 1, lambda n: masks.longnet([8, 16], [n, 2])),
    ("size", 1, masks.chunked),
    ("left", 0, lambda n: masks.local_window(left=n, right=0)),
    ("right", 0, lambda n: masks.local_window(left=0, right=n)),
    ("left", 0, lambda n: masks.dilated_window(left=n, right=0, rate=2)),
    ("right", 0, lambda n: masks.dilated_window(left=0, right=n, rate=2)),
    ("rate", 1, lambda n: masks.dilated_window(left=1, right=1, rate=n)),
    ("stride", 1, masks.strided),
    ("stride", 1, masks.fixed),
    ("summary", 1, lambda n: masks.fixed(4, summary=n)),
    ("count", 1, masks.global_tokens),
    ("count", 1, masks.first_tokens),
    ("prefix", 1, masks.prefix_lm),
    ("stride", 1, masks.landmark_tokens),
    ("block", 1, lambda n: masks.blockwise(C, n)),
    ("start", 0, lambda n: C.after(n)),
    ("stop", 1, lambda n: C.before(n)),
    ("longest", 1, lambda n: masks.documents("ids", longest=n)),
    ("block", 1, lambda n: masks.selected_blocks("chosen", block=(4, n), most=2)),
    ("most", 1, lambda n: masks.selected_blocks("chosen", block=4, most=n)),
    ("block", 1, lambda n: masks.block_list([[0]], block=n)),
    ("rows[1][0]", 0, lambda n: masks.block_list([[0], [n]], block=4)),
    ("rows[0][0][1]", 0, lambda n: masks.block_list([[[0, n]]], block=4)),
    ("num_tokens", 1, masks.random_blocks),
    ("block", 1, lambda n: masks.random_blocks(64, block=n)),
    ("count", 1, lambda n: masks.random_blocks(64, block=8, count=n)),
    ("head", 0, lambda n: masks.random_blocks(64, block=8, head=n)),
    ("grid[1]", 1, lambda n: masks.neighborhood((4, n), 0)),
    ("radius[0]", 0, lambda n: masks.neighborhood((9, 9), n)),
    ("kernel_size[0]", 1, lambda n: masks.neighborhood((9, 9), kernel_size=n)),
    ("rate[0]", 1, lambda n: masks.neighborhood((9, 9), 1, rate=n)),
    ("stride[0]", 1, lambda n: masks.neighborhood((9, 9), 1, stride=n)),
    ("period", 1, lambda n: masks.custom(diagonal, period=n)),
    ("num_heads", 1, lambda n: C.bind(num_heads=n, num_queries=4, num_keys=4)),
    ("num_queries", 1, lambda n: C.bind(num_heads=1, num_queries=n, num_keys=4)),
    ("num_keys", 1, lambda n: C.bind(num_heads=1, num_queries=4, num_keys=n)),
    ("head_offset", 0, lambda n: C.bind(num_heads=1, num_queries=4, num_keys=4, head_offset=n)),
    ("q_offset", 0, lambda n: C.bind(num_heads=1, num_queries=4, num_keys=4, q_offset=n)),
    ("k_offset", 0, lambda n: C.bind(num_heads=1, num_queries=4, num_keys=4, k_offset=n)),
    ("batch", 1, lambda n: C.bind(num_heads=1, num_queries=4, num_keys=4, batch=n)),
]


@pytest.mark.parametrize(("name", "least", "build"), NUMBERS)
def test_numbers_have_a_range(name, least, build):
    """Kernels count positions in int32; and a number of thousands of digits is one that Python does not write."""
    with pytest.raises(ValueError, match=re.escape(f"{name} must be at least {least}; got {name}={least - 1}")):
        build(least - 1)
    for number in (LARGEST + 1, 2**63, 10**5000):
        with pytest.raises(ValueError, match=re.escape(f"{name} must be at most {LARGEST}; got {name}=")):
            build(number)
    for wrong in (2.5, True):
        with pytest.raises(TypeError, match=re.escape(f"{name} must be an integer; got {name}={wrong} of type")):
            build(wrong)


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_too_long_to_write_are_answered(sign):
    with pytest.raises(ValueError, match="got rate=an integer of 16610 bits"):
        require_int("rate", sign * 10**5000, minimum=1)
    with pytest.raises(ValueError, match="scale must be finite; got scale=an integer of 16610 bits"):
        require_finite("scale", sign * 10**5000)
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match="scale must be finite; got "):
        fd.attend(q, q, q, C, scale=sign * 10**400)


LISTED, C3 = masks.block_list([[0], [2], [1]], block=4), [C] * 3
GRID = masks.neighborhood((3, 4), 1)


@pytest.mark.parametrize(
    ("pattern", "sizes", "says"),
    [
        (~masks.per_head([C]) & C, {}, "got 1 for 2 heads"),
        (masks.longnet([8, 16], [1, 2]) & masks.per_head(C3), {}, "got 3 for 2 heads"),
        (masks.blockwise(masks.per_head(C3), 4), {}, "got 3 for 2 heads"),
        (~LISTED | C, {"num_keys": 8}, "got block 2 in row 1"),
        (LISTED + C, {"num_keys": 8}, "got block 2 in row 1"),
        (masks.per_head([C, LISTED]), {"num_keys": 8}, "got block 2 in row 1"),
        (masks.blockwise(LISTED, 3), {"num_queries": 24, "num_keys": 24}, "8 keys; got block 2 in row 1"),
        (
            masks.block_list([[[0]], [[0, 5]]], block=4),
            {"num_queries": 1},
            "for 20 keys; got block 5 in row 0 of head 1",
        ),
        (GRID | C, {"num_queries": 1, "num_keys": 13}, "got queries up to position 0 and keys up to position 12"),
    ],
)
def test_bad_sizes(pattern, sizes, says):
    with pytest.raises(ValueError, match=says):
        pattern.bind(**{"num_heads": 2, "num_queries": 8, "num_keys": 20} | sizes)


def test_only_the_rows_of_these_queries_are_asked():
    """A decode step holds the keys so far: rows that come later may name later blocks."""
    LISTED.bind(num_heads=1, num_queries=4, num_keys=4)
    LISTED.bind(num_heads=1, num_queries=4, num_keys=5, q_offset=8)
    LISTED.bind(num_heads=1, num_queries=5, num_keys=9)
    LISTED.bind(num_heads=1, num_queries=100, num_keys=1, k_offset=8)
    GRID.bind(num_heads=1, num_queries=4, num_keys=12, q_offset=8)
    masks.blockwise(LISTED, 3).bind(num_heads=1, num_queries=36, num_keys=36)
    late = masks.block_list([[0], [1], [5]], block=8)
    late.bind(num_heads=1, num_queries=8, num_keys=40)
    with pytest.raises(ValueError, match="got block 5 in row 2"):
        late.bind(num_heads=1, num_queries=8, num_keys=40, q_offset=16)
