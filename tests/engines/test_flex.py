"""The flex engine: its BlockMasks compiled on CPU, how long their lists are, and tables of selected blocks."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config as inductor_config
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import flexdilated as fd
from bench._catalogue import ENTRIES
from flexdilated import masks
from flexdilated.engines import Dropout, Features, _operands, allowed_on
from flexdilated.engines._call import Call
from flexdilated.engines.flex import _flex, _program, _selected_flex
from flexdilated.engines.flex._flex import run_flex
from flexdilated.engines.flex._flex_op import run_time_program, static_program
from flexdilated.engines.flex._program import TABLES, FlexProgram
from flexdilated.engines.flex._selected_flex import CallOffsets, SelectedBlockSizes, attend_selected, unit_of
from flexdilated.masks import planning
from flexdilated.masks.blocks import dense_masks
from flexdilated.masks.core import Box, Progression
from flexdilated.masks.patterns import table_split
from flexdilated.testing._drawn_patterns import window_by_head
from tests.support import oracle
from tests.support.agreement import assert_agrees
from tests.support.compilers import without_inductor
from tests.support.custom_rules import TABLE, window
from tests.support.dense_flex import dense_flex
from tests.support.run_time_strategies import Packed
from tests.support.strategies import cases, tensors
from tests.support.ties import NoTies, tied

CPU = torch.device("cpu")


def around_dense(
    program: FlexProgram,
    scale: float,
    *,
    kernel: Callable[..., tuple] = dense_flex,
    dropout: Dropout | None = None,
    **features,
):
    """The engine with a stand-in for its kernel."""

    def run(q, k, v, sinks=None):
        given = Features(scale, sinks=sinks, **features).with_dropout(dropout)
        return run_flex(program, q, k, v, given, kernel)

    return run


@given(cases(), st.sampled_from([1, 2, 4]), st.integers(16, 400))
def test_lists_are_short_in_blocks_that_fit(case, smallest, most):
    """The engine's own block sides grow with what its lists would hold."""
    sizes = (case.num_heads, case.num_heads, case.num_queries, case.num_keys, *case.sizes.values())
    key = Call(case.twin.pattern.text, *sizes, 1, ())
    with patch.object(_program, "TILE", smallest), patch.object(_program, "_MOST_NUMBERS", most):
        program = static_program(key, CPU)
        for step in program.steps:
            assert step.structure.sides[0] >= smallest
            counts = [getattr(step.mask, name) for name in TABLES if name.endswith("num_blocks")]
            assert sum(int(count.max()) * count.numel() for count in counts) <= most
        fd.masks.cache().clear()  # programs of such sides are nobody else's


def test_a_million_causal_tokens_have_short_lists():
    """In blocks of 128 they would be a gigabyte; a window's lists are short, and its blocks stay small."""
    N = 1 << 20
    causal, window, wide = masks.causal(), *(masks.local_window(left=left, right=0) for left in (4096, 65536))
    sides = []
    for pattern in (causal, window, wide):
        program = static_program(Call(pattern.text, 2, 2, N, N, 0, 0, 0, 2, 1, ()), CPU)
        assert program.nbytes < 40e6
        sides.append({step.structure.sides for step in program.steps})
        fd.masks.cache().clear()
    assert sides == [{(1024, 1024)}, {(128, 128)}, {(512, 512)}]


DOCUMENTS = masks.longnet((256, 1024), (1, 4)).per_document(torch.arange(4096) // 700) & masks.causal()
FEW_EVALUATED = {
    "documents": (DOCUMENTS, 0),
    "a grid": (masks.neighborhood((64, 64), (8, 8)), 0),
    "keys before the queries": ((masks.local_window(left=128, right=0) | masks.strided(128)) & masks.causal(), 1000),
}


@pytest.mark.parametrize(("pattern", "q_offset"), FEW_EVALUATED.values(), ids=FEW_EVALUATED)
def test_hidden_slots_are_found_in_few_blocks(pattern, q_offset, monkeypatch):
    """Most by a pair of a token with itself and by bounds: a batch of new documents has them found anew."""
    evaluated = []

    def counted(rule, places, shape):
        evaluated.append(len(places.table))
        return dense_masks(rule, places, shape)

    monkeypatch.setattr(_operands, "dense_masks", counted)
    call = Call(pattern.text, 2, 2, 4096 - q_offset, 4096, q_offset, 0, 0, 2, 1, ())
    bindings = list(pattern.given_tensors().values())
    program = run_time_program(call, CPU, bindings, 1) if bindings else static_program(call, CPU)
    assert sum(evaluated) < sum(int(step.mask.kv_num_blocks.sum()) for step in program.steps) / 5


def test_kernels_of_the_cpu_get_no_narrow_heads():
    """Which they compute wrongly: a thorough test has the values."""
    seen = []

    def kernel(q, k, v, **how):
        seen.append((q.shape[-1], k.shape[-1]))
        return flex_attention(q, k, v, **how)

    q = torch.randn(1, 2, 40, 8)
    with without_inductor(), patch.object(_flex, "flex_attention", kernel):
        out = fd.attend(q, q, q, masks.causal(), engine="flex")
    torch.testing.assert_close(out, fd.attend(q, q, q, masks.causal(), engine="reference"))
    assert seen == [(24, 24)]


@pytest.mark.slow
def test_built_by_inductor():
    """Planned while tracing, a function a head: queries straight from a Linear, keys and values views of one buffer.

    Scores are changed by a captured table; relu comes after. torch's template for CPU fails on the queries and on
    relu, and of the views it reads what lies elsewhere.
    """
    torch.manual_seed(0)
    project = [torch.nn.Linear(8, 4 * 24).requires_grad_(False) for _ in range(2)]
    x, slopes = torch.randn(1, 296, 8), torch.tensor([9.0, 0.5, 0.1, 0.0, 0.2])
    by_head, inner = window_by_head(torch.tensor([5, 60, 7, 30, 9])), window(9)
    functions = by_head, lambda b, h, q, k: (TABLE[q % 6] == TABLE[k % 6]) & inner(b, h, q, k)
    own = masks.local_window(left=300, right=20), *map(masks.custom, functions), masks.causal()
    pattern = masks.per_head([masks.every(), *own])

    def score_mod(score, b, h, q_idx, k_idx):
        return torch.tanh(score) - slopes[h] * (q_idx - k_idx).abs() + torch.sin(0.3 * k_idx)

    def model(x: Tensor, engine: str) -> Tensor:
        q, both = (each(x).unflatten(-1, (4, 24)).transpose(1, 2) for each in project)
        k, v = (2 * both).chunk(2, 1)
        where = {"head_offset": 1, "num_heads_global": 5, "enable_gqa": True}
        return fd.attend(q, k, v, pattern, engine=engine, score_mod=score_mod, **where).relu()

    out = torch.compile(model, fullgraph=True, dynamic=False)(x, "flex")
    torch.testing.assert_close(out, model(x, "reference"), rtol=1e-4, atol=1e-5)


def captured(function: Callable[..., Any]) -> Iterator[Tensor]:
    """All tensors in the closure of a function, and in those of the functions that it calls."""
    for cell in function.__closure__ or ():
        values = cell.cell_contents if isinstance(cell.cell_contents, list | tuple) else [cell.cell_contents]
        yield from (value for value in values if isinstance(value, Tensor))
        for value in values:
            yield from captured(value) if isinstance(value, FunctionType) else ()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_masks_capture_contiguous_tensors(entry):
    """FlexAttention's CPU kernel fails on strided ones: it copies them, and does not list the copies as inputs."""
    heads, tokens = max(2, entry.num_heads), 8192
    bound = entry.pattern(tokens).bind(num_heads=heads, num_queries=tokens, num_keys=tokens)
    masks_of_terms = [term.mask_mod(CPU) for term in planning.plan(bound, allowed=allowed_on(CPU)).terms]
    found = [tensor for mask in masks_of_terms for tensor in captured(mask)]
    assert found
    assert all(tensor.is_contiguous() for tensor in found)


@pytest.mark.thorough
def test_narrow_heads_read_no_keys_of_the_next_head():
    """With vectors of 8 floats, torch (2.11 to 2.15) multiplies 16 keys where 8 are left (40 = 2 * 16 + 8)."""
    q, k, v = (torch.randn(1, heads, 40, 8) for heads in (4, 2, 2))
    k[:, 1] *= 1e4
    pattern = masks.local_window(left=20, right=20)
    torch.compiler.reset()
    with inductor_config.patch({"cpp.simdlen": 256}):
        out = fd.attend(q, k, v, pattern, engine="flex", enable_gqa=True)
    torch.testing.assert_close(out, fd.attend(q, k, v, pattern, engine="reference", enable_gqa=True))


def test_block_mask_of_a_user():
    """In residue order: as FlexAttention traces it, and by its lists; 300 tokens are no multiple of the blocks."""
    layout, pattern = masks.Layout(300, 4), (masks.dilated(64, 1) | masks.dilated(256, 4, 2)) & masks.causal()
    mask = masks.block_mask(pattern, 300, num_heads=4, layout=layout)
    traced = torch.compile(flex_attention, fullgraph=True, dynamic=False, backend="eager")
    q, k, v = torch.randn(3, 1, 4, 300, 16)
    exact = fd.attend(q, k, v, pattern, engine="reference")
    for kernel in (traced, partial(dense_flex, scale=0.25, enable_gqa=False)):
        found = layout.invert(kernel(*(layout.apply(x) for x in (q, k, v)), block_mask=mask))
        torch.testing.assert_close(found, exact)


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
            of = SelectedBlockSizes(block, unit, rows.shape[-1], (rows.shape[1], case.num_heads, k.shape[1]))
            places = map(torch.tensor, (0, case.q_offset, case.k_offset))
            where = CallOffsets(*places, case.q_offset % block[0])
            rule = rest.mask_mod(num_heads=case.num_heads, device=CPU)
            classes = classes_of(case, rest, block, rows.shape[2]) if known and unit == 0 else None
            own = rows - case.k_offset // block[1]
            return attend_selected(of, rule, where, own, classes, q, k, v, Features(0.5), dense_flex)

    return attend


@given(drawn=tables(), known=st.booleans(), is_tied=st.booleans(), data=st.data())
def test_the_engine_around_the_kernel_is_the_oracle(drawn, known: bool, is_tied: bool, data: st.DataObject):
    """Also for parts of a row that are equal; no gradient passes a tie."""
    case, block, rows = drawn
    qkv = data.draw(tensors(case, batch=case.batch))
    qkv = tuple(tied(*x.shape, seed=place) for place, x in enumerate(qkv)) if is_tied else qkv
    by_table = attend_by_table(case, block, rows, known=known)

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        with NoTies() if is_tied else nullcontext():
            return by_table(*tensors)

    assert_agrees(attend, qkv, case.counts, scale=0.5)
