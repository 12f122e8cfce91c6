"""Random blocks, block lists and neighbourhoods: parameters and sizes that their rules do not allow."""

import pytest
import torch

from flexdilated import masks


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: masks.random_blocks(0), ValueError, "num_tokens must be at least 1; got num_tokens=0"),
        (lambda: masks.random_blocks(64.0), TypeError, "num_tokens=64.0"),
        (lambda: masks.random_blocks(64, block=0), ValueError, "block must be at least 1; got block=0"),
        (lambda: masks.random_blocks(64, block=8, count=0), ValueError, "count must be at least 1; got count=0"),
        (lambda: masks.random_blocks(64, block=8, count=9), ValueError, "count=9, and 64 tokens hold 8 blocks of 8"),
        (lambda: masks.random_blocks(640, seed=-1), ValueError, "seed must be at least 0; got seed=-1"),
        (lambda: masks.random_blocks(640, seed=1 << 63), ValueError, "seed must be at most 9223372036854775807"),
        (lambda: masks.random_blocks(640, seed=None), TypeError, "seed=None"),
        (lambda: masks.block_list([], block=4), ValueError, r"a table needs at least one row; got rows=\[\]"),
        (lambda: masks.block_list([[], [[0]]], block=4), ValueError, r"at least one row; got rows\[0\]=\[\]"),
        (lambda: masks.block_list("01", block=4), TypeError, "one such table a head; got str"),
        (lambda: masks.block_list(iter([[0]]), block=4), TypeError, "got list_iterator"),
        (lambda: masks.block_list([0, 1], block=4), TypeError, r"rows of block numbers.*got rows\[0\]=0"),
        (lambda: masks.block_list([[0], [[1]]], block=4), TypeError, r"rows of block numbers.*got rows\[0\]\[0\]=0"),
        (
            lambda: masks.block_list([[[0]], [[[1]]]], block=4),
            TypeError,
            r"rows of block .*got rows\[1\]\[0\]=\[\[1\]\]",
        ),
        (lambda: masks.block_list([[0], ["1"]], block=4), TypeError, r"rows\[1\]\[0\] must be an integer; got .*'1'"),
        (lambda: masks.block_list([[0.0]], block=4), TypeError, r"rows\[0\]\[0\]=0.0"),
        (lambda: masks.block_list([[[0, True]]], block=4), TypeError, r"rows\[0\]\[0\]\[1\]=True"),
        (
            lambda: masks.block_list([[0], [3, -2]], block=4),
            ValueError,
            r"rows\[1\]\[1\] must be at least 0; got .*=-2",
        ),
        (lambda: masks.block_list([[1 << 30]], block=4), ValueError, r"rows\[0\]\[0\] must be below 2\*\*30"),
        (lambda: masks.block_list([[0], [3, 1, 3]], block=4), ValueError, r"got rows\[1\] with block 3 twice"),
        (lambda: masks.block_list([[0]], block=0), ValueError, "block must be at least 1; got block=0"),
        (lambda: masks.block_list(torch.zeros(2, 2), block=4), TypeError, "integers or booleans; got torch.float32"),
        (lambda: masks.block_list(torch.zeros(2).int(), block=4), ValueError, r"2 dims, .* got shape \(2,\)"),
        (lambda: masks.block_list(torch.zeros(2, 0, 3).bool(), block=4), ValueError, r"one row; .* shape \(2, 0, 3\)"),
        (lambda: masks.block_list(torch.tensor([[1, 1]]), block=4), ValueError, r"rows\[0\] with block 1 twice"),
        (lambda: masks.neighborhood(64, 1), TypeError, "grid must be a sequence of axis lengths; got grid=64"),
        (lambda: masks.neighborhood((), 1), ValueError, r"1, 2 or 3 axes; got grid=\(\)"),
        (lambda: masks.neighborhood((4, 4, 4, 4), 1), ValueError, "1, 2 or 3 axes"),
        (lambda: masks.neighborhood((4, 0), 0), ValueError, r"grid\[1\] must be at least 1; got grid\[1\]=0"),
        (lambda: masks.neighborhood((4, 4.0), 1), TypeError, r"grid\[1\]=4.0"),
        (lambda: masks.neighborhood((4, 4), -1), ValueError, r"radius\[0\] must be at least 0; got radius\[0\]=-1"),
        (lambda: masks.neighborhood((4, 4), (1, 1, 1)), ValueError, r"one an axis of \(4, 4\); got radius=\(1, 1, 1\)"),
        (lambda: masks.neighborhood((4, 4), 1, rate=0), ValueError, r"rate\[0\] must be at least 1"),
        (lambda: masks.neighborhood((4, 4), 1, rate=(1,)), ValueError, r"rate must be one value, or one an axis"),
        (lambda: masks.neighborhood((9, 4), 2), ValueError, "kernel_size=5 and rate=1 on axis 1 of 4"),
        (lambda: masks.neighborhood((9, 5), 1, rate=2), ValueError, "kernel_size=3 and rate=2 on axis 1 of 5"),
        (
            lambda: masks.neighborhood((9, 5), kernel_size=(9, 6), causal=True),
            ValueError,
            "kernel_size=6 and rate=1 on axis 1 of 5",
        ),
        (lambda: masks.neighborhood((9, 9), None), ValueError, "takes one of radius and kernel_size"),
        (lambda: masks.neighborhood((9, 9), 1, kernel_size=3), ValueError, r"radius=\(1, 1\), kernel_size=\(3, 3\)"),
        (lambda: masks.neighborhood((9, 9), (1, None)), TypeError, r"radius\[1\]=None"),
        (lambda: masks.neighborhood((9, 9), kernel_size=0), ValueError, r"kernel_size\[0\] must be at least 1"),
        (
            lambda: masks.neighborhood((9, 9), kernel_size=(3,)),
            ValueError,
            r"one an axis of \(9, 9\); got kernel_size=",
        ),
        (lambda: masks.neighborhood((9, 9), kernel_size=2.0), TypeError, r"kernel_size\[0\] must be an integer"),
        (lambda: masks.neighborhood((9, 9), 1, stride=0), ValueError, r"stride\[0\] must be at least 1"),
        (lambda: masks.neighborhood((9, 9), 1, stride=(3, 4)), ValueError, "stride=4 and kernel_size=3 on axis 1"),
        (lambda: masks.neighborhood((9, 9), 1, stride=None), TypeError, r"stride\[0\] must be an integer"),
        (lambda: masks.neighborhood((9, 9), 1, rate=None), TypeError, r"rate\[0\] must be an integer"),
        (lambda: masks.neighborhood((9, 9), kernel_size=3, causal=1), TypeError, r"causal\[0\] must be True or False"),
        (lambda: masks.neighborhood((9, 9), kernel_size=3, causal=(True,)), ValueError, r"got causal=\(True,\)"),
        (
            lambda: masks.neighborhood((9, 9), 1, causal=(True, False)),
            ValueError,
            "write kernel_size in place of radius",
        ),
    ],
)
def test_bad_parameters(build, error, says):
    with pytest.raises(error, match=says):
        build()


LISTED = masks.block_list([[0], [2], [1]], block=4)
BY_HEAD = masks.block_list([[[0]], [[0, 5]]], block=4)
GRID = masks.neighborhood((3, 4), 1)


@pytest.mark.parametrize(
    ("pattern", "sizes", "says"),
    [
        (LISTED, (8, 8), "row 1 names key block 2, but 8 tokens hold 2 blocks of 4"),
        (LISTED & masks.causal(), (8, 8), "row 1 names key block 2"),
        (~LISTED | masks.causal(), (8, 8), "row 1 names key block 2"),
        (LISTED + masks.causal(), (8, 8), "row 1 names key block 2"),
        (masks.per_head([masks.causal(), LISTED]), (8, 8), "row 1 names key block 2"),
        (masks.blockwise(LISTED, 3), (24, 24), "row 1 names key block 2, but 8 tokens hold 2 blocks of 4"),
        (BY_HEAD, (1, 20), "row 0 of head 1 names key block 5, but 20 tokens hold 5 blocks of 4"),
        (GRID, (13, 12), "a grid of 3x4 holds 12 tokens; got queries up to 13 and keys up to 12"),
        (GRID | masks.causal(), (1, 13), "got queries up to 1 and keys up to 13"),
    ],
)
def test_bad_sizes(pattern, sizes, says):
    with pytest.raises(ValueError, match=says):
        pattern.bind(num_heads=2, num_queries=sizes[0], num_keys=sizes[1])


def test_only_the_rows_of_these_queries_are_asked():
    """A decode step holds the keys so far: rows that come later may name later blocks."""
    LISTED.bind(num_heads=1, num_queries=4, num_keys=4)
    LISTED.bind(num_heads=1, num_queries=4, num_keys=5, q_offset=8)
    LISTED.bind(num_heads=1, num_queries=5, num_keys=9)
    LISTED.bind(num_heads=1, num_queries=100, num_keys=1, k_offset=8)
    GRID.bind(num_heads=1, num_queries=4, num_keys=12, q_offset=8)


def test_a_table_for_each_head():
    with pytest.raises(ValueError, match="block_list needs one table a head; got 2 for 3 heads"):
        BY_HEAD.bind(num_heads=3, num_queries=1, num_keys=30)


def test_no_head_before_the_first_draws() -> None:
    text = masks.to_json(masks.random_blocks(64, block=8)).replace('"head":null', '"head":-1')
    assert '"head":-1' in text
    with pytest.raises(ValueError, match="head must be at least 0"):
        masks.from_json(text)


def test_rows_of_a_table_are_held_to_the_keys_there_are() -> None:
    """Those of the queries that take part: row 2 names block 5, row 0 does not."""
    pattern = masks.block_list([[0], [1], [5]], block=8)
    sizes = {"num_heads": 1, "num_queries": 8, "num_keys": 40}
    assert pattern.bind(**sizes).num_queries == 8
    with pytest.raises(ValueError, match="5"):
        pattern.bind(q_offset=16, **sizes)
