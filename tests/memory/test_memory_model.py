"""What `plan` says of memory: counts of live bytes are right, and predictions are those of real runs."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexdilated as fd
from bench._jobs import peak_bytes
from bench.memory import prepared_step
from flexdilated import masks
from flexdilated.engines import Dropout, Features, Portable, WholeRows
from flexdilated.engines._call import Call
from flexdilated.engines._score_mod import fixed_score_mod
from flexdilated.engines.aten._aten_op import _planned_programs, attention, gradients
from flexdilated.engines.aten._program import in_format_of
from flexdilated.engines.flex._flex_op import static_program
from flexdilated.masks.core import Expression
from flexdilated.masks.planning import GATHERED_BYTES
from flexdilated.masks.planning.lowering import _table
from flexdilated.memory import _memory
from flexdilated.memory._memory import AttentionSize, KernelBytes, LiveBytes, attention_memory
from flexdilated.nn._model_memory import ModelSize, attention_size, longnet_around, model_memory, training_step

PATTERNS = {
    "causal": "causal()",
    "longnet": "longnet((256, 1024), (1, 4)) & causal()",
    "grouped": "longnet((256, 1024), (1, 4), heads='grouped')",
    "window": "local_window(left=127, right=0)",
    "longformer": "local_window(left=64, right=64) | global_tokens(8)",
    "dilated window": "dilated_window(left=64, right=0, rate=4)",
}


def within(found: float, expected: float, share: float) -> bool:
    return abs(found - expected) <= share * expected


def test_live_bytes_counts_storages_not_views() -> None:
    held = torch.empty(20, 50).T
    with LiveBytes(held, held.T) as live:
        held.add_(1)
        assert torch.empty_like(held, device="meta").stride() == (1, 50)  # which takes no memory
        assert (live.live, live.peak) == (4000, 4000)
    with LiveBytes() as live:
        x = torch.empty(1000)
        y, z = x[:10], x.view(10, 100).t()
        assert live.live == 4000
        w = x + 1
        assert live.live == 8000
        del x, w
        assert (live.live, live.peak) == (4000, 8000)  # y and z hold x's storage
        del y, z
        assert live.live == 0
        live.restart()
        assert live.peak == 0


def real_run(text: str, size: AttentionSize) -> tuple[int, int]:
    """Peaks of a real forward and a real backward of the aten engine, all of its steps, inputs included."""
    shape = size.batch, size.num_tokens, size.num_heads, size.head_dim
    make = torch.randn(shape, dtype=size.dtype)
    q, k, v = (make.clone() if size.tokens_outermost else make.transpose(1, 2).contiguous() for _ in range(3))
    if size.tokens_outermost:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x[:, : size.kv_heads].clone() for x in (k, v))
    heads, tokens = (size.num_heads, size.kv_heads), (size.num_tokens, size.num_tokens)
    key = Call(masks.parse(text).text, *heads, *tokens, 0, 0, 0, size.num_heads, 1, ())
    ((_, program),) = _planned_programs(key, [], size.batch)
    with LiveBytes(q, k, v) as forward:
        out, lse = program.forward(q, k, v, 1.0)
        out = in_format_of(out, q)
    grad = torch.ones_like(out)
    with LiveBytes(q, k, v, out, lse, grad) as backward:
        grads = program.backward(q, k, v, WholeRows(out, lse, grad), 1.0)
        grads = [in_format_of(grad, x) for grad, x in zip(grads, (q, k, v), strict=True)]
    return forward.peak, backward.peak


@pytest.mark.parametrize("name", PATTERNS)
def test_attention_memory_is_that_of_the_real_engine(name) -> None:
    """Every allocation of every step, counted in a real run, against the dry one of a few steps of each kind."""
    text, other = PATTERNS[name], list(PATTERNS).index(name) % 2 == 1
    dtype, tokens_outermost = (torch.bfloat16, False) if other else (torch.float32, True)
    batch, kv_heads = (2, 1) if name == "longnet" else (1, 4)
    size = AttentionSize(2000, 4, 32, dtype, batch, num_kv_heads=kv_heads, tokens_outermost=tokens_outermost)
    found = attention_memory(masks.parse(text), size)
    forward, backward = real_run(text, size)
    assert within(found.forward_peak, forward, 0.03)
    assert within(found.inference_peak, forward, 0.03)
    assert within(found.backward_peak, backward, 0.03)
    shown = batch * (2 * (4 + kv_heads) * 2000 * 32 * dtype.itemsize + 4 * 2000 * 4)
    assert found.inputs_and_results == shown
    assert shown <= found.kept < 1.05 * shown  # q, k, v, out, lse and nothing else


TABLES = {
    "single keys": ((1, 1), 16, lambda table: table),
    "causal keys": ((1, 1), 16, lambda table: table & masks.causal()),
    "own block": ((32, 32), 4, lambda table: (table | masks.chunked(32)) & masks.causal()),
    "grouped": ((1, 64), 2, lambda table: table),
    "a mixture": ((4, 32), 3, lambda table: table + masks.local_window(left=100, right=0)),
}


@pytest.mark.parametrize("gathered", [GATHERED_BYTES, 1 << 18])
@pytest.mark.parametrize("name", TABLES)
def test_memory_of_a_table_is_that_of_the_real_engine(name: str, gathered: int) -> None:
    """The largest batch of problems stands for all."""
    block, most, of = TABLES[name]
    rows, columns = (-(-1000 // side) for side in block)
    table = torch.randint(-1, columns, (2, rows, most), generator=torch.Generator().manual_seed(0))
    pattern = of(masks.selected_blocks(table, block=block, most=most))
    bound = pattern.bind(num_heads=4, num_queries=1000, num_keys=1000)
    size = AttentionSize(1000, 4, 32, torch.float32, num_kv_heads=2)
    q, k, v = torch.randn(1, 4, 1000, 32), *torch.randn(2, 1, 2, 1000, 32)
    key = Call.at(q, k, pattern.text, num_heads_global=4)
    masks.cache().clear()
    with patch.object(_table, "GATHERED_BYTES", gathered):
        found = attention_memory(bound.pattern, size)
        with LiveBytes(q, k, v) as forward:
            out, lse = attention(key, q, k, v, None, [table], 1.0)
        with LiveBytes(q, k, v, out, lse, grad := torch.ones_like(out)) as backward:
            gradients(key, q, k, v, [table], WholeRows(out, lse, grad), 1.0)
    masks.cache().clear()
    assert within(found.forward_peak, forward.peak, 0.03)
    assert within(found.inference_peak, forward.peak, 0.03)
    assert within(found.backward_peak, backward.peak, 0.05)
    assert found.inputs_and_results <= found.kept < 1.05 * found.inputs_and_results
    assert found.tables == 0


def portable_run(pattern: Expression, size: AttentionSize, options: dict[str, Any]) -> tuple[int, int, int]:
    """Peaks of a real forward and a real backward of engine portable, and the bytes that are kept between them."""
    dims, heads = (size.head_dim, *size.dims), (size.num_heads, size.kv_heads, size.kv_heads)
    q, k, v = (
        torch.randn(size.batch, X, size.num_tokens, dim, dtype=size.dtype) for X, dim in zip(heads, dims, strict=True)
    )
    call = Call.at(q, k, pattern.text, num_heads_global=size.num_heads)
    dropout = Dropout.drawn(0.2, q.device) if options["drops"] else None
    score_mod = fixed_score_mod(options["score_mod"], torch.float32, q.device)  # as in attend
    features = Features(0.25, score_mod).with_dropout(dropout)
    run = Portable(static_program(call, q.device, None, call.operands(q)), features)
    with torch.no_grad(), LiveBytes(q, k, v) as live:
        out, lse = run.forward(q, k, v)
        forward, kept = live.peak, live.live
        live.restart()
        run.backward(q, k, v, WholeRows(out, lse, torch.ones_like(out)))
    return forward, kept, live.peak


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SCORE_MODS = (None, lambda score, b, h, q, k: score + SLOPES[h] * (k - q), lambda score, b, h, q, k: score.tanh())


@given(
    st.sampled_from([*sorted(PATTERNS), "all pairs", "padded"]),
    st.integers(1, 500),
    st.tuples(*[st.sampled_from([8, 24, 64, 96])] * 2),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([(1, 4), (3, 2), (2, 1)]),
    st.fixed_dictionaries({"drops": st.booleans(), "score_mod": st.sampled_from(SCORE_MODS)}),
)
@settings(max_examples=8)
def test_portable_holds_what_its_real_run_does(name, num_tokens, dims, dtype, batch_and_groups, options) -> None:
    others = {"all pairs": masks.every(), "padded": masks.longnet((100, 300), (1, 3), heads="grouped")}
    pattern = others[name] if name in others else masks.parse(PATTERNS[name])
    batch, groups = batch_and_groups
    size = AttentionSize(num_tokens, 4, dims[0], dtype, batch, groups, value_dim=dims[1])
    found = attention_memory(pattern, size, engine="portable", **options)
    forward, kept, backward = portable_run(pattern, size, options)
    assert within(found.forward_peak, forward, 0.03)
    assert within(found.inference_peak, forward, 0.03)
    assert within(found.backward_peak, backward, 0.05)
    assert within(found.kept, kept, 0.03)
    assert 0 <= found.kept - found.inputs_and_results < 16384  # q, k, v, out, lse, and the last chunk's tables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device", "engine", "largest", "num_tokens"),
    [
        ("longnet", "cuda", None, 1 << 17, 164_864),  # planned in other ways than 2**16 and 2**17 tokens
        ("longformer", "cpu", None, 1 << 14, 36_900),
    ],
)
def test_beyond_the_largest_run_memory_goes_on_growing(name, device, engine, largest, num_tokens, monkeypatch) -> None:
    size = AttentionSize(num_tokens, 2, 32, torch.float32, value_dim=48)
    monkeypatch.setattr(_memory, "LARGEST_RUN", largest)
    sizes: list[int] = []
    dry_run = _memory._planned_memory
    monkeypatch.setattr(_memory, "_planned_memory", lambda *args: (sizes.append(args[2].num_tokens), dry_run(*args))[1])
    extended = attention_memory(masks.parse(PATTERNS[name]), size, device=device, engine=engine)
    monkeypatch.setattr(_memory, "LARGEST_RUN", 1 << 21)
    exact = attention_memory(masks.parse(PATTERNS[name]), size, device=device, engine=engine)
    ending = size.num_tokens % (1 << 15)
    assert sizes == [largest // 2 + ending, largest + ending, size.num_tokens]
    for part in ("queries", "keys", "outputs", "lse", "kept", "inference_peak", "forward_peak", "backward_peak"):
        assert within(getattr(extended, part), getattr(exact, part), 0.05), part


def test_single_keys_on_accelerators_hold_their_results() -> None:
    """Read where they are; beside other pairs, both parts are kept, and in float32 for their merge."""
    table, window = masks.selected_keys(torch.randint(4096, (1, 4096, 32))), masks.local_window(left=99, right=0)
    alone, near, both = (
        fd.plan(pattern, 4096, num_heads=4, dtype=torch.bfloat16, device="cuda").attention_memory
        for pattern in (table, window, table | window)
    )
    assert alone.inference_peak == alone.forward_peak == alone.kept == alone.inputs_and_results
    of_merge = 4 * both.outputs + both.outputs + both.lse
    assert both.kept == near.kept + alone.outputs + alone.lse + of_merge


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flex_holds_what_its_compiled_program_allocates(dtype) -> None:
    """In rows of q, without the lse: a branch holds what it gathers and its part, the merge the result.

    Training keeps them all, the rows of gathered parts where others join them, and of three branches a float32 sum.
    """
    size = AttentionSize(4096, 4, 64, dtype)
    unit, wide = 4096 * 4 * 64 * dtype.itemsize, 4 // dtype.itemsize

    def rows(text: str) -> list[float]:
        found = attention_memory(masks.parse(text), size, device="cuda")
        parts = found.inference_peak, found.forward_peak, found.kept, found.backward_peak
        return [part / unit for part in parts]

    near = partial(pytest.approx, abs=0.1)
    assert rows("causal()") == near([4, 4, 4, 8])
    # Gathered q, k, v: 3/4, their part: 1/4, the result: 1.
    assert rows("dilated(1024, 4)") == near([4.25, 5, 5, 8.25])
    # The first branch is read where it lies; the second's rows are kept by the merge.
    assert rows("longnet((256, 1024), (1, 4))")[:3] == near([3 + 1.25 + 1, *[3 + 0.75 + 1.25 + 1 + 1] * 2])
    # Operands of the third branch, 3/4, are there when the second has its own, 3/2, and its part.
    three = 3 + 1.5 + 0.75 + 1.75 + 2 + wide + 1
    found = rows("longnet((256, 512, 1024), (1, 2, 4))")
    assert found == near([3 + 1.5 + 0.75 + 1.5, three, three, three + 1 + 2 * wide + 1.75])


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", ["longnet", "window"])
def test_model_memory_is_that_of_a_real_model(name, checkpoint) -> None:
    """The model is real; what its attention operators hold inside is what the test above has checked."""
    size, num_tokens, pattern = ModelSize(64, 3, 2, torch.float32), 1024, masks.parse(PATTERNS[name])
    call = attention_memory(pattern, attention_size(size, num_tokens))
    found = model_memory(size, num_tokens, call, checkpoint=checkpoint)
    model = longnet_around(pattern, size, checkpoint=checkpoint)
    x = torch.randn(1, num_tokens, 64)
    ops = torch.ops.flexdilated
    hidden = {
        ops.aten.default: KernelBytes(call.forward_peak - call.inputs),
        ops.aten_backward.default: KernelBytes(call.backward_peak - call.kept - call.queries),
    }
    with LiveBytes(x, *model.parameters(), hidden=hidden) as live:
        training_step(model, x)
    assert within(found.step_peak, live.peak, 0.03)
    weights = 3 * 12 * 64 * 64 * 4
    assert weights <= found.weights < 1.05 * weights
    assert found.optimizer == 2 * found.weights
    assert found.training_peak == found.step_peak + found.optimizer


@pytest.mark.thorough
def test_predicted_peak_is_within_a_tenth_of_a_measured_one() -> None:
    """Resident memory of a process of its own, kernels' scratch and all."""
    size, num_tokens, text = ModelSize(128, 2, 2, torch.float32), 8192, PATTERNS["longnet"]
    call = attention_memory(masks.parse(text), attention_size(size, num_tokens))
    found = model_memory(size, num_tokens, call, checkpoint=True)
    assert within(found.step_peak, peak_bytes(prepared_step, text, size, num_tokens, True), 0.10)


@pytest.mark.parametrize("value_dim", [32, 192])
def test_flex_holds_values_of_another_head_dim_as_they_are(value_dim) -> None:
    """In rows of q: values and outputs are of their own width, in what is gathered, made and kept."""
    size = AttentionSize(4096, 4, 64, torch.bfloat16, value_dim=value_dim)
    unit, v = 4096 * 4 * 64 * 2, value_dim / 64
    found = [attention_memory(masks.parse(text), size, device="cuda") for text in ("causal()", "dilated(1024, 4)")]
    rows = [[getattr(each, part) / unit for part in ("inference_peak", "kept", "backward_peak")] for each in found]
    assert rows[0] == pytest.approx([2 + 2 * v, 2 + 2 * v, 4 + 4 * v], abs=0.1)
    # Gathered q, k, v and their part are quarters.
    kept = 2 + v + (2 + 2 * v) / 4 + v
    assert rows[1][:2] == pytest.approx([max(2 + v + (2 + 2 * v) / 4, 2 + v + v / 4 + v), kept], abs=0.1)
