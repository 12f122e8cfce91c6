"""Flex: more elements than a kernel can count, how little a call holds, tables of run-time tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._dynamo import testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated._validate import run_time_tensors
from flexdilated.engines import Features, _operands
from flexdilated.engines._call import Call
from flexdilated.engines._operands import within_reach
from flexdilated.engines.flex import _flex_op, _program
from flexdilated.engines.flex._flex import run_flex
from flexdilated.engines.flex._flex_op import allowed_on, blank_program, heads_of_part, kv_head_parts, run_time_program
from flexdilated.engines.flex._program import list_width, make_flex_program
from flexdilated.engines.flex._traced import traced_name
from flexdilated.masks import Layout
from flexdilated.masks.planning import plan
from tests.engines.test_flex import CPU
from tests.support.dense_flex import dense_flex, flex_on_cpu
from tests.support.ladders import LONGNET_5
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import block_sides

PATTERN = masks.longnet([8, 32], [1, 4]) & masks.causal()


def on_meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_a_million_tokens_of_many_heads():
    """Parts as large as may be; CPU tensors are never parted."""
    million = 1 << 20
    q, k = on_meta(1, 32, million, 128), on_meta(1, 8, million, 128)
    parts = kv_head_parts(q, k, k)
    assert parts == [range(begin, begin + 3) if begin < 6 else range(6, 8) for begin in (0, 3, 6)]
    assert all(heads_of_part(q, part, 8).numel() < 1 << 31 for part in parts)
    assert kv_head_parts(*[on_meta(1, 8, million, 128)] * 3) == [range(8)]
    q, k = (torch.empty(1).expand(4, heads, million, 128) for heads in (32, 8))
    assert kv_head_parts(q, k, k) == [range(8)]
    q, v = on_meta(1, 32, million, 16), on_meta(1, 8, million, 128)
    assert kv_head_parts(q, q[:, :8], v) == parts, "an output as wide as v"


def test_one_head_that_is_too_large():
    q, k = on_meta(64, 8, 1 << 20, 128), on_meta(64, 2, 1 << 20, 128)
    with pytest.raises(ValueError, match=r"at most 2147483647 elements.*got 34359738368.*parts of the batch.*head_off"):
        kv_head_parts(q, k, k)
    # Keys count too, where they are more than queries.
    with pytest.raises(ValueError, match="got 2147483648"):
        kv_head_parts(on_meta(128, 1, 1, 16), *[on_meta(128, 1, 1 << 20, 16)] * 2)


def test_views_that_reach_too_far_are_copied(monkeypatch):
    """Of two batch entries the second one's heads lie behind all heads of the first; a projection holds q, k and v."""
    monkeypatch.setattr(_operands, "_HAS_WIDE_OFFSETS", False)
    q = on_meta(2, 16, 1 << 20, 128)
    assert within_reach(heads_of_part(q, range(3, 6), 16), is_flash=False).is_contiguous()
    assert within_reach(heads_of_part(q[:1], range(3, 6), 16), is_flash=False).storage_offset() == 3 << 27
    sizes = {"vocab_size": 8, "embed_dim": 1024, "depth": 1, "num_heads": 8}
    config = fd.LongNetConfig(**sizes, segment_lengths=(2048,), dilation_rates=(1,))
    model = fd.LongNet(config).to("meta", torch.bfloat16)
    handed: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexdilated.nn._longnet_block.attend", lambda *qkv, **_: (handed.extend(qkv[:3]), qkv[0])[1])
        model(torch.zeros(1, 1 << 20, dtype=torch.int64, device="meta"))
    assert max(map(reach, handed)) > 1 << 31, "or this test needs another model"
    assert max(reach(within_reach(x, is_flash=False)) for x in handed) < 1 << 31
    monkeypatch.setattr(_operands, "_HAS_WIDE_OFFSETS", True)
    assert all(within_reach(x, is_flash=False) is x for x in handed)
    assert max(reach(within_reach(x, is_flash=True)) for x in handed) < 1 << 31


def reach(x: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def slanted(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    """Every index moves the score, so that one taken for another shows."""
    return score * 0.5 + (q_idx - k_idx) * 0.01 * (h + 1)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_parts_are_the_whole(monkeypatch, limit):
    """Grouped heads with offsets of their own, a score_mod by head, sinks, and heads that are not the first."""
    B, H, G, N, D = 2, 6, 3, 50, 4
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, N, D, dtype=torch.float64) for heads in (H, G, G))
    sinks = torch.randn(H, dtype=torch.float64)
    key = Call(PATTERN.text, H, G, N, N, 0, 0, 2, 9, 1, (16, 16))
    seen: list[Call] = []

    def stand_in(q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], key: Call, features: Features) -> Any:
        seen.append(key)
        return run_flex(_flex_op.static_program(key, q.device), q, k, v, features, dense_flex)

    monkeypatch.setattr(_flex_op, "_attend", stand_in)
    monkeypatch.setattr(_flex_op, "MOST_ELEMENTS", limit * B * (H // G) * N * D)
    elsewhere = SimpleNamespace(device=torch.device("cuda"), shape=q.shape, numel=q.numel)
    monkeypatch.setattr(_flex_op, "kv_head_parts", lambda q, k, v, copies=1: kv_head_parts(elsewhere, k, v))
    options = {"scale": 0.5, "score_mod": slanted, "return_lse": True}
    out, lse = _flex_op.flex(q, k, v, [], key, Features(0.5, slanted, sinks))
    assert [each.num_kv_heads for each in seen] == {1: [1, 1, 1], 2: [2, 1], 3: [3]}[limit]
    where = {"head_offset": 2, "num_heads_global": 9, "enable_gqa": True}
    exact = fd.attend(q, k, v, PATTERN, engine="reference", sinks=sinks, **where, **options)
    assert_close((out, lse), exact)


@pytest.mark.parametrize("pattern", [masks.longnet(*LONGNET_5), masks.longnet(*LONGNET_5) & masks.causal()])
def test_a_million_tokens_hold_little(pattern):
    """All that a call keeps on an accelerator, tables included, is small beside q: 2 GiB in bfloat16."""
    N, H = 1 << 20, 8
    bound = pattern.bind(num_heads=H, num_queries=N, num_keys=N)
    chosen = plan(bound, device="cuda", allowed=allowed_on(torch.device("cuda")))
    options = {"num_kv_heads": H, "block_size": (128, 128), "device": torch.device("meta")}
    program = make_flex_program(chosen, Layout(N), **options)
    assert program.nbytes < (2 << 30) / 256
    assert sum(step.nbytes for step in program.steps) < 1 << 12


ACCELERATOR = torch.device("meta")  # any device but the CPU: there tables are as narrow as may be


def key_of(packed: Packed, kv_heads: int, side: int) -> Call:
    sizes = (packed.num_heads, kv_heads, packed.num_queries, packed.num_keys)
    return Call(packed.pattern.text, *sizes, packed.q_offset, packed.k_offset, 0, packed.num_heads, 1, (side, side))


@settings(max_examples=12)
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


@pytest.mark.parametrize("equal", [False, True])
def test_tables_of_a_graph_have_their_shapes_whatever_the_values(equal: bool, monkeypatch) -> None:
    """Tables of heads that are equal are one table, of which small blocks would make no long lists."""
    monkeypatch.setattr(_program, "_MOST_NUMBERS", 600)
    q, chosen = torch.zeros(1, 8, 1024, 1), torch.zeros(8, 8, 2, dtype=torch.int64)
    chosen[:, :, 1] = 1
    chosen[0, 0, 1] = 1 if equal else 2
    call = Call.at(q, q, masks.selected_blocks("t", block=128, most=2).text, num_heads_global=8)
    found = _flex_op.run_time_tables(q, q, [chosen], *call.arguments)
    with FakeTensorMode(allow_non_fake_inputs=True):
        declared = _flex_op.run_time_tables(torch.empty_like(q), torch.empty_like(q), [chosen], *call.arguments)
    assert [x.shape for x in found] == [x.shape for x in declared]


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


@pytest.mark.slow
def test_new_values_do_not_recompile():
    """One graph for all values, rows that differ by batch entry included; in it, too, a longer document raises."""
    compilations = testing.CompileCounterWithBackend("eager")
    pattern = masks.dilated(64, 2).per_document(masks.documents("ids", longest=290))

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return fd.attend(q, k, v, pattern, engine="flex", bindings={"ids": ids})

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend=compilations)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for last in (1, 8):
            q, k, v = torch.randn(3, 2, 2, 300, 24, generator=generator)
            ids = torch.randint(-1, last + 1, (2, 300), generator=generator).sort(1).values
            ids[:, :20] = -1
            exact = fd.attend(q, k, v, pattern, engine="reference", bindings={"ids": ids})
            assert_close(compiled(q, k, v, ids), exact, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="at most longest=290 tokens; got one of 300"):
            compiled(q, k, v, torch.zeros_like(ids))
    assert compilations.frame_count == 1


def test_devices_of_a_kind_have_objects_of_their_own():
    """A graph traced on one device must not get the tables of a program on another one."""
    pattern, names = masks.causal() & masks.documents("ids"), set()
    with FakeTensorMode():
        for device in ("cuda:0", "cuda:1", "cpu"):
            q, ids = torch.empty(1, 2, 16, 16, device=device), torch.zeros(16, dtype=torch.int64, device=device)
            names.add(traced_name("program", Call.at(q, q, pattern.text, num_heads_global=2), [ids], q))
    assert len(names) == 3
