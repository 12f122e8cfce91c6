"""Run-time tensors on the flex engine: the widths of compiled tables, and one compilation."""

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._dynamo import testing
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated._validate import run_time_tensors
from flexdilated.engines._call import Call
from flexdilated.engines.flex._flex_op import blank_program, run_time_program
from flexdilated.engines.flex._program import list_width
from tests.engines.test_flex import CPU
from tests.support.dense_flex import flex_on_cpu
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import block_sides

ACCELERATOR = torch.device("meta")  # any device but the CPU: there tables are as narrow as may be


def key_of(packed: Packed, kv_heads: int, side: int) -> Call:
    sizes = (packed.num_heads, kv_heads, packed.num_queries, packed.num_keys)
    return Call(packed.pattern.text, *sizes, packed.q_offset, packed.k_offset, 0, packed.num_heads, 1, (side, side))


@given(packed_cases(), block_sides)
def test_no_list_is_longer_than_a_compiled_table(packed: Packed, side):
    """The table's width is known before the values: by the shapes of the tensors, and what the pattern declares."""
    key, bindings = key_of(packed, packed.num_heads, side), run_time_tensors(packed.pattern, None)
    program = run_time_program(key, CPU, bindings, packed.batch)
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
    causal, q = masks.causal(), torch.randn(2, 1, 8, 4, dtype=torch.float64)
    pattern = (causal & masks.lengths("n")) + (causal & masks.lengths("n", padding="left"))
    how = {"bindings": {"n": torch.tensor([3, 7])}, "return_lse": True}
    exact = fd.attend(q, q, q, pattern, engine="reference", **how)
    with flex_on_cpu():
        assert_close(fd.attend(q, q, q, pattern, engine="flex", **how), exact)


CUT = masks.local_window(left=60, right=0) & masks.documents("ids")


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", [CUT, masks.dilated(64, 2).per_document(masks.documents("ids", longest=290))], ids=["cut", "restarted"]
)
def test_new_values_do_not_recompile(pattern):
    """One graph for all values, rows that differ by batch entry included; in it, too, a longer document raises."""
    compilations = testing.CompileCounterWithBackend("eager")

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
