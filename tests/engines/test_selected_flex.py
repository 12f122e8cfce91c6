"""Selected blocks on the flex engine: tables made of a table, with a dense stand-in for the kernel."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.engines import Features
from flexdilated.engines.flex import _selected_flex
from flexdilated.engines.flex._selected_flex import SelectedBlocksOf, Where, attend_selected, unit_of
from flexdilated.masks.core import Box, Progression
from flexdilated.masks.patterns import table_split
from tests.engines.test_run_time_flex import entry_by_entry
from tests.support import oracle
from tests.support.agreement import assert_agrees
from tests.support.run_time_strategies import Packed
from tests.support.strategies import tensors

CPU = torch.device("cpu")


@st.composite
def tables(draw: st.DrawFn) -> tuple[Packed, tuple[int, int], Tensor]:
    """A table, with causal order or alone, for blocks that a kernel of 8 x 8 tiles takes."""
    block = draw(st.sampled_from([1, 2, 3, 4, 8, 16])), draw(st.sampled_from([1, 2, 4, 8, 16, 24]))
    heads, batch = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    queries, keys, q_offset = draw(st.integers(1, 40)), draw(st.integers(1, 50)), draw(st.sampled_from([0, 0, 5, 16]))
    k_offset = draw(st.sampled_from([0, block[1]]))
    stop = q_offset + queries
    columns = -(-(k_offset + keys) // block[1])
    most, count = draw(st.integers(1, 4)), draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))
    shape = (draw(st.sampled_from([1, batch])), count, -(-stop // block[0]) - q_offset // block[0], most)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    rows = torch.randint(-1, columns, shape, generator=generator)
    causal = draw(st.booleans())
    chosen = masks.selected_blocks(rows, block=block, most=most)
    positions = torch.arange(q_offset, stop), torch.arange(k_offset, k_offset + keys)
    rules = [oracle.selected_blocks(each, block, -(-stop // block[0])) for each in rows]
    rules = [oracle.both(rule, oracle.causal()) for rule in rules] if causal else rules
    counts = torch.stack([oracle.counts(rule, range(heads), heads, *positions) for rule in rules])
    pattern = chosen & masks.causal() if causal else chosen
    sizes = (batch, heads, queries, keys, q_offset, k_offset)
    return Packed(pattern, counts.expand(batch, -1, -1, -1), *sizes), block, rows


def classes_of(case: Packed, rule: masks.Pattern, block: tuple[int, int], rows: int) -> Tensor:
    """What rows and blocks that are tiles hold: 2 where every pair of theirs is allowed."""
    columns = -(-case.num_keys // block[1])
    row, column = (x.flatten() for x in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    q, k = row * block[0] + case.q_offset, column * block[1] + case.k_offset
    sides = (torch.full_like(q, side) for side in block)
    box = Box(torch.zeros_like(q), *(Progression(at, 1, side) for at, side in zip((q, k), sides, strict=True)))
    bounds = rule.count(box, num_heads=case.num_heads)
    whole = (bounds.low == box.area) & (k + block[1] <= case.k_offset + case.num_keys)
    return (1 + whole.int()).view(1, rows, columns)


def attend_by_table(
    case: Packed, block: tuple[int, int], rows: Tensor, *, known: bool = False
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The engine around a dense kernel of 8 x 8 tiles; known: with the classes of rows and blocks that are tiles."""
    parted = table_split(case.pattern)
    assert parted is not None
    rest = parted.rest

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with mock.patch.object(_selected_flex, "TILE", 8):
            unit = unit_of(block, case.q_offset)
            assert unit is not None
            of = SelectedBlocksOf(block, unit, rows.shape[-1], (rows.shape[1], case.num_heads, k.shape[1]))
            places = map(torch.tensor, (0, case.q_offset, case.k_offset))
            where = Where(*places, case.q_offset % block[0])
            rule = rest.mask_mod(num_heads=case.num_heads, device=CPU)
            classes = classes_of(case, rest, block, rows.shape[2]) if known and unit == 0 else None
            own = rows - case.k_offset // block[1]
            return attend_selected(of, rule, where, own, classes, q, k, v, Features(0.5), entry_by_entry)

    return attend


@given(drawn=tables(), known=st.booleans(), data=st.data())
def test_the_engine_around_the_kernel_is_the_oracle(drawn, known: bool, data: st.DataObject):
    case, block, rows = drawn
    qkv = data.draw(tensors(case, batch=case.batch))
    assert_agrees(attend_by_table(case, block, rows, known=known), qkv, case.counts, scale=0.5)


def test_what_the_kernels_take():
    """Rows of whole tiles as they are, others gathered by as many as divide a tile; no blocks of keys across tiles."""
    assert unit_of((128, 128), 0) == unit_of((256, 512), 512) == 0
    assert unit_of((64, 64), 0) == 64
    assert unit_of((128, 64), 0) == 128
    assert unit_of((1, 512), 7) == unit_of((64, 64), 7) == unit_of((48, 64), 0) == 1
    assert unit_of((128, 96), 0) is None
