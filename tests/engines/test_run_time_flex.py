"""Run-time tensors on the flex engine: its path around the kernel, the widths of compiled tables, one compilation."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo import testing
from torch.nn.attention.flex_attention import BlockMask
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated._validate import run_time_tensors
from flexdilated.engines._call import Call
from flexdilated.engines.flex._flex_op import blank_program, run_time_program
from flexdilated.engines.flex._program import list_width
from tests.engines.test_flex import CPU, around_dense, dense_flex
from tests.support.agreement import assert_agrees
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import block_sides, tensors

ACCELERATOR = torch.device("meta")  # any device but the CPU: there tables are as narrow as may be


def key_of(packed: Packed, kv_heads: int, side: int) -> Call:
    sizes = (packed.num_heads, kv_heads, packed.num_queries, packed.num_keys)
    return Call(packed.pattern.text, *sizes, packed.q_offset, packed.k_offset, 0, packed.num_heads, 1, (side, side))


def entry_by_entry(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, **options: Any):
    """The stand-in for the kernel, which knows one batch entry, with the tables of each."""
    parts = []
    for batch, each in enumerate(zip(q[:, None], k[:, None], v[:, None], strict=True)):
        parts.append(dense_flex(*each, block_mask=_entry(block_mask, batch), **options))
    return torch.cat([out for out, _ in parts]), SimpleNamespace(lse=torch.cat([aux.lse for _, aux in parts]))


def _entry(mask: BlockMask, batch: int) -> Any:
    fields = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    tables = {name: getattr(mask, name) for name in fields}
    rows = {name: table[min(batch, len(table) - 1), None] for name, table in tables.items()}

    def mask_mod(_, h, q, k):
        return mask.mask_mod(torch.tensor(batch), h, q, k)

    return SimpleNamespace(**rows, mask_mod=mask_mod, BLOCK_SIZE=mask.BLOCK_SIZE)


@given(packed_cases(), st.data(), block_sides)
def test_the_engine_around_the_kernel_is_the_oracle(packed: Packed, data, side):
    """One plan for all values, the tables of these: what each batch entry gets, with its gradients.

    No list is longer than a compiled table, whose width is known before the values: by the shapes of the tensors, and
    what the pattern declares.
    """
    drawn = data.draw(tensors(packed, batch=packed.batch))
    key, bindings = key_of(packed, drawn[1].shape[1], side), run_time_tensors(packed.pattern, None)
    program = run_time_program(key, CPU, bindings, packed.batch)
    assert_agrees(around_dense(program, 0.5, kernel=entry_by_entry), drawn, packed.counts, scale=0.5)
    blank = blank_program(key, CPU, bindings, packed.batch)
    for step, planned in zip(program.steps, blank.steps, strict=True):
        by_row, by_column = list_width(planned.term, key.block_size, ACCELERATOR)
        assert list_width(step.term, key.block_size, ACCELERATOR) == (by_row, by_column)
        mask = step.mask
        assert mask.full_kv_num_blocks is not None
        assert mask.q_num_blocks is not None
        assert mask.full_q_num_blocks is not None
        assert max(int(count.max()) for count in (mask.kv_num_blocks, mask.full_kv_num_blocks)) <= by_row
        assert max(int(count.max()) for count in (mask.q_num_blocks, mask.full_q_num_blocks)) <= by_column


def widths(pattern: masks.Pattern, num_tokens: int, side: int) -> list[tuple[int, int]]:
    key = Call(pattern.text, 2, 2, num_tokens, num_tokens, 0, 0, 0, 2, 1, (side, side))
    program = blank_program(key, CPU, [torch.zeros(num_tokens, dtype=torch.int64)], 1)
    return [list_width(step.term, key.block_size, ACCELERATOR) for step in program.steps]


def test_a_declared_bound_narrows_tables():
    """A document of at most 16 tokens touches two blocks of 16; so does a window that reaches 16 back."""
    causal = masks.causal()
    assert widths(causal & masks.documents("ids"), 512, 16) == [(32, 32)]
    assert widths(causal & masks.documents("ids", longest=16), 512, 16) == [(2, 2)]
    assert widths(causal.per_document(masks.documents("ids", longest=17)), 512, 16) == [(2, 2)]
    assert widths(masks.local_window(left=16, right=0).per_document("ids"), 512, 16) == [(2, 2)]
    assert widths(masks.dilated(4, 2).per_document(masks.documents("ids", longest=8)), 64, 8) == [(3, 3)]


def test_branches_that_name_one_tensor_stay_apart():
    """Two paddings of one name are two rules, before the values are known too."""
    causal, rows = masks.causal(), torch.tensor([3, 7])
    pattern = (causal & masks.lengths("n")) + (causal & masks.lengths("n", padding="left"))
    key = Call(pattern.text, 1, 1, 8, 8, 0, 0, 0, 1, 1, (8, 8))
    program = run_time_program(key, CPU, [rows], 2)
    assert [step.structure.multiplicity for step in program.steps] == [1, 1]
    q, k, v = torch.randn(3, 2, 1, 8, 4, dtype=torch.float64)
    found = around_dense(program, 0.5, kernel=entry_by_entry)(q, k, v)
    exact = fd.attend(q, k, v, pattern, scale=0.5, bindings={"n": rows}, engine="reference", return_lse=True)
    assert_close(found, exact)


CUT = masks.local_window(left=60, right=0) & masks.documents("ids")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "backend"),
    [
        (CUT, "eager"),
        (masks.dilated(64, 2).per_document(masks.documents("ids", longest=290)), "inductor"),
    ],
    ids=["cut", "restarted"],
)
def test_new_values_do_not_recompile(pattern, backend):
    """One graph for all values, rows that differ by batch entry included; in it, too, a longer document raises."""
    compilations = testing.CompileCounterWithBackend(backend)

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return fd.attend(q, k, v, pattern, engine="flex", bindings={"ids": ids})

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend=compilations)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for last in (1, 4, 8):
            q, k, v = torch.randn(3, 2, 2, 300, 24, generator=generator)
            ids = torch.randint(-1, last + 1, (2, 300), generator=generator).sort(1).values
            ids[:, :20] = -1
            exact = fd.attend(q, k, v, pattern, engine="reference", bindings={"ids": ids})
            assert_close(compiled(q, k, v, ids), exact, rtol=1e-4, atol=1e-5)
        if pattern.text != CUT.text:
            with pytest.raises(ValueError, match="at most longest=290 tokens; got one of 300"):
                compiled(q, k, v, torch.zeros_like(ids))
    assert compilations.frame_count == 1
