"""Tables of single keys by engine portable: the keys of each query are gathered, with every feature of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Call, Dropout, Features, WholeRows, fixed_score_mod
from flexdilated.engines.aten import _single_keys
from flexdilated.engines.aten._aten_op import attention, gradients
from flexdilated.engines.flex import _portable_op
from flexdilated.engines.flex._portable_op import portable_run
from flexdilated.engines.kernels import _key_lists
from flexdilated.memory import AttentionSize, LiveBytes, attention_memory
from tests.attend.test_selected_blocks import BESIDE, packed
from tests.support.dense_flex import flex_on_cpu

HUBS = torch.cat([torch.full((1, 4), 300), torch.full((1, 300), 3)], 1)[0]  # lengths of rows: a few hubs among others


def ragged(lengths: Tensor, num_keys: int, seed: int = 0) -> Tensor:
    """A table (1, rows, most) of different keys, rows of these lengths padded with -1."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(len(lengths), num_keys, generator=generator).argsort(1)[:, : int(lengths.max())]
    return keys.where(torch.arange(keys.shape[1]) < lengths[:, None], -1)[None]


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[_key_lists.ListChunk]:
    """The chunks that are computed."""
    found, of = [], _key_lists.ListProblems.chunks

    def watched(problems: _key_lists.ListProblems) -> Iterator[_key_lists.ListChunk]:
        for chunk in of(problems):
            found.append(chunk)
            yield chunk

    monkeypatch.setattr(_key_lists.ListProblems, "chunks", watched)
    return found


@settings(max_examples=24)
@given(data=st.data(), gathered=st.sampled_from([1, 300, 4000, 1 << 23]))
def test_every_feature_is_that_of_dense_attention(gathered: int, data: st.DataObject) -> None:
    """Output, lse and all gradients in float64, at any offsets, in chunks of any size, with any of the features."""
    case = data.draw(packed(data.draw(st.sampled_from([*BESIDE]))))
    groups = data.draw(st.sampled_from([each for each in (1, 2, 3) if case.num_heads % each == 0]))
    widths = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    shapes = (case.num_heads, case.num_queries, widths[0]), (groups, case.num_keys, widths[0])
    shapes = *shapes, (groups, case.num_keys, widths[1])
    leaves = [torch.randn(case.batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    bias, sinks = torch.randn(2, case.num_heads, 97, generator=generator, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*leaves, bias, sinks[:, 0].clone())]
    features: dict[str, Any] = {"score_mod": lambda score, b, h, q, k: score * (1 + b) + leaves[3][h, (3 * q + k) % 97]}
    features |= {"dropout_p": 0.4, "sinks": leaves[4]}
    features = {name: features[name] for name in features if data.draw(st.booleans())}

    def outcome(engine: str) -> list[Tensor]:
        torch.manual_seed(5)
        how = {"enable_gqa": True, "return_lse": True, "engine": engine} | case.offsets | features
        out, lse = fd.attend(*leaves[:3], case.pattern, **how)
        total = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
        return [out, lse, *torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)]

    with mock.patch.object(_key_lists, "GATHERED_BYTES", gathered):
        for found, true in zip(outcome("portable"), outcome("reference"), strict=True):
            assert_close(found, true, rtol=1e-9, atol=1e-10)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1 << 30),
    matrix=st.booleans(),
    named=st.booleans(),
    scored=st.booleans(),
    with_sinks=st.booleans(),
    engine=st.sampled_from([None, "portable"]),
    beside=st.sampled_from(["alone", "causal", "union", "complement"]),
    compiled=st.just(False),  # seconds each
)
@example(195, False, True, True, False, None, "alone", True)  # equal lists of six heads and two batch entries
def test_rows_of_heavy_tails(seed, matrix, named, scored, with_sinks, engine, beside, compiled) -> None:
    """Lengths by a Pareto law, for heads and batch entries apart or together: out and gradients, also in graphs."""
    draw = torch.Generator().manual_seed(seed)
    B, G, group, N, M = (int(torch.randint(1, most + 1, (), generator=draw)) for most in (2, 2, 3, 40, 50))
    own = int(torch.randint(2, (), generator=draw)), int(torch.randint(3, (), generator=draw))
    H, entries, tables = G * group, (1, B)[own[0]], (1, G, G * group)[own[1]]
    M = max(M, N)
    lengths = ((1 - torch.rand(entries, tables, N, generator=draw)) ** -0.9 - 0.5).long().clamp(max=M)
    order = torch.rand(entries, tables, N, M, generator=draw).argsort(-1)
    if seed % 5 == 0:  # heads and batch entries with equal lists, which a graph does not know
        lengths, order = (x[:1, :1].expand(entries, tables, *x.shape[2:]) for x in (lengths, order))
    listed = torch.arange(M) < lengths[..., None]
    chosen = torch.zeros(entries, tables, N, M, dtype=torch.bool).scatter(-1, order, listed)
    if matrix:
        earlier = torch.zeros(entries, tables, M - N, M, dtype=torch.bool)  # a matrix has rows from position 0 on
        pattern, tensor = masks.sparse, torch.cat([earlier, chosen], 2).double().to_sparse()
    else:
        pattern, tensor = masks.selected_keys, order.masked_fill(~listed, -1)[..., : max(1, int(lengths.max()))]
    own_pattern = pattern("keys", most=tensor.shape[-1]) if named and not matrix else pattern(tensor)
    near, past = masks.local_window(left=2, right=0), masks.causal()
    whole = {"alone": own_pattern, "causal": own_pattern & past, "union": own_pattern | near}
    whole = (whole | {"complement": ~own_pattern & past})[beside]
    distance = M - N + torch.arange(N)[:, None] - torch.arange(M)
    true = {"alone": chosen, "causal": chosen & (distance >= 0), "complement": ~chosen & (distance >= 0)}
    true["union"] = chosen | ((distance >= 0) & (distance <= 2))
    earlier = torch.zeros(entries, H, M - N, M, dtype=torch.bool)
    dense = masks.mask(torch.cat([earlier, true[beside].repeat_interleave(H // tables, 1)], 2))
    shapes = (B, H, N, 5), (B, G, M, 5), (B, G, M, 3), (H, 60), (H,)
    leaves = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]

    def call(
        pattern: masks.Pattern, engine: str | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor
    ) -> Tensor:
        how = {"sinks": sinks if with_sinks else None, "q_offset": M - N, "enable_gqa": True}
        how["score_mod"] = (lambda s, b, h, i, j: s + bias[h, (i * 7 + j) % 60]) if scored else None
        how["bindings"] = {"keys": tensor} if named and pattern is whole and not matrix else None
        return fd.attend(q, k, v, pattern, engine=engine, **how)

    torch.compiler.reset()
    found = (torch.compile(call, backend="eager", fullgraph=True) if compiled else call)(whole, engine, *leaves)
    wanted = call(dense, "reference", *leaves)
    assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    how = {"materialize_grads": True, "allow_unused": True}
    grads = (torch.autograd.grad(out.square().sum(), leaves, **how) for out in (found, wanted))
    assert_close(*grads, rtol=1e-8, atol=1e-9)


def test_a_graph_gathers_the_keys_of_a_table() -> None:
    """With a score_mod, beside other pairs; unseen keys hold NaN, and the first query has none."""
    table = torch.randint(10, 30, (1, 40, 4), generator=torch.Generator().manual_seed(0))
    table[0, 0] = -1
    near, captured = masks.local_window(left=1, right=0) & ~masks.first_tokens(20), []
    pattern = masks.selected_keys("keys", most=4) | near
    q, kv, bias = (torch.randn(shape).double() for shape in ((1, 2, 40, 8), (1, 1, 40, 8), (2, 40)))
    kv, bias = kv.index_fill(2, torch.arange(10), torch.nan).requires_grad_(), bias.requires_grad_()

    def call(kv: Tensor, bias: Tensor) -> Tensor:
        def of_listed(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + bias[h, j] + bias.sum() * (j - 9).log()  # no number for keys that are in no list

        how = {"bindings": {"keys": table}, "score_mod": of_listed}
        return fd.attend(q, kv, kv, pattern, enable_gqa=True, **how)

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        captured.append(graph.code)
        return graph

    torch.compiler.reset()
    outs = call(kv, bias), torch.compile(call, backend=keep, fullgraph=True)(kv, bias)
    assert_close(outs[1], outs[0])
    assert_close(*(torch.autograd.grad(out.sum(), (kv, bias)) for out in outs))
    (code,) = captured
    assert "listed_rows" in code
    assert "run_time_tables" not in code


def test_only_listed_pairs_are_computed(chunks: list[_key_lists.ListChunk]) -> None:
    """No block list is made; rows of very different lengths are padded by less than their own number."""
    table, rows = ragged(HUBS, 900), len(HUBS)
    q, k, v = torch.randn(1, 4, rows, 8), *torch.randn(2, 1, 2, 900, 8)
    pattern = masks.selected_keys(table)
    with mock.patch.object(_portable_op, "_program", side_effect=AssertionError("block lists")):
        found = fd.attend(q, k, v, pattern, enable_gqa=True, engine="portable")
    assert_close(found, fd.attend(q, k, v, pattern, enable_gqa=True, engine="reference"))
    pairs = 2 * int(HUBS.sum())  # two key/value heads, each with two query heads in a gather
    assert pairs <= sum(chunk.block.numel() for chunk in chunks) < 1.1 * pairs
    assert all(chunk.problem[1].shape[2] == 2 for chunk in chunks)


def test_chunks_bound_the_gathered_bytes(chunks: list[_key_lists.ListChunk]) -> None:
    """But for the list of a single query, which is not split."""
    table = ragged(torch.randint(1, 40, (300,), generator=torch.Generator().manual_seed(0)), 500)
    q, k, v = torch.randn(3, 6, 300, 8), *torch.randn(2, 3, 6, 500, 8)
    with mock.patch.object(_key_lists, "GATHERED_BYTES", 64 * 100):  # 100 keys and values of 8 floats
        fd.attend(q, k, v, masks.selected_keys(table), engine="portable")
    assert all(chunk.block.numel() <= 100 or chunk.block.shape[:2] == (1, 1) for chunk in chunks)
    assert sum(chunk.block.numel() for chunk in chunks) < 3 * 6 * 500 * 40


@settings(max_examples=4)
@given(
    tokens=st.integers(400, 900),
    widths=st.sampled_from([(16, 16), (24, 64)]),
    kv_heads=st.sampled_from([1, 4]),
    drops=st.booleans(),
    beside=st.sampled_from(["alone", "causal", "own block"]),
    scored=st.booleans(),
)
def test_memory_is_predicted(tokens, widths, kv_heads, drops, beside, scored) -> None:
    table = ragged(torch.randint(1, 64, (tokens,), generator=torch.Generator().manual_seed(tokens)), tokens)
    pattern = BESIDE[beside][0](masks.selected_keys(table))
    size = AttentionSize(tokens, 4, widths[0], torch.float32, 2, kv_heads, value_dim=widths[1])
    score_mod = (lambda score, b, h, q, k: score + (q - k) * 0.1) if scored else None
    found = attention_memory(
        pattern.bind(num_heads=4, num_queries=tokens, num_keys=tokens).pattern,
        size,
        engine="portable",
        drops=drops,
        score_mod=score_mod,
    )
    q, k, v = (
        torch.randn(2, heads, tokens, dim)
        for heads, dim in ((4, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))
    )
    call = Call.at(q, k, pattern.text, num_heads_global=4)
    features = Features(0.25, fixed_score_mod(score_mod, q.dtype, q.device)).with_dropout(
        Dropout.drawn(0.2, q.device) if drops else None
    )
    with torch.no_grad(), LiveBytes(q, k, v) as live:
        out, lse = portable_run(call, q, [table], features).forward(q, k, v)
        forward = live.peak
        live.restart()
        portable_run(call, q, [table], features).backward(q, k, v, WholeRows(out, lse, torch.ones_like(out)))
    assert abs(found.forward_peak / forward - 1) < 0.03
    assert abs(found.backward_peak / live.peak - 1) < 0.03


def test_a_plan_counts_the_gathered_pairs() -> None:
    table = ragged(torch.full((512,), 4), 512)
    pattern = masks.selected_keys(table)
    for engine in (None, "portable"):
        report = fd.plan(pattern, 512, num_heads=2, engine=engine, dropout_p=0.1 if engine is None else 0.0)
        assert (report.engine, report.computed_pairs) == ("portable", 2 * 512 * 4)
        assert "table, keys gathered" in str(report)
    on_triton = fd.plan(pattern, 512, num_heads=2, device="cuda")
    assert (on_triton.engine, on_triton.computed_pairs) == ("flex", report.computed_pairs)
    assert "table, keys in place" in str(on_triton)


def test_selected_keys_are_blocks_of_one_token() -> None:
    """By value and by name; each prints and reads back."""
    table = ragged(torch.full((8,), 3), 8)
    carried = masks.selected_keys(table, name="near")
    assert carried == masks.selected_blocks(table, block=1, most=3, name="near")
    by_name = masks.selected_keys("near", most=3)
    assert repr(by_name) == repr(carried) == "selected_keys('near', most=3)"
    assert masks.parse(repr(by_name)) == masks.from_json(masks.to_json(by_name)) == by_name


def graph(num_queries: int, num_keys: int, share: float = 0.1, seed: int = 0) -> Tensor:
    """A sparse matrix in COO with its entries in no order."""
    allowed = torch.rand(num_queries, num_keys, generator=torch.Generator().manual_seed(seed)) < share
    index = allowed.nonzero().T
    index = index[:, torch.randperm(index.shape[1], generator=torch.Generator().manual_seed(1))]
    size = (num_queries, num_keys)
    return torch.sparse_coo_tensor(index, torch.arange(1.0, 1 + index.shape[1]), size, check_invariants=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_matrix_in_any_form_is_its_nonzero_entries() -> None:
    """In COO, CSR, CSC and SciPy's; repeated entries are summed, zeros are none, and later writes do not matter."""
    matrix = graph(30, 40)
    dense = matrix.to_dense()
    true = masks.mask(dense != 0)
    q, k, v = torch.randn(1, 2, 30, 8), *torch.randn(2, 1, 2, 40, 8)
    wanted = fd.attend(q, k, v, true)
    scipy = pytest.importorskip("scipy.sparse")
    index, ones = torch.cat([dense.nonzero(), dense.nonzero()[:7], torch.zeros(2, 2).long()]).T, torch.ones(7)
    values = torch.cat([torch.ones(int((dense != 0).sum())), ones, torch.tensor([1.0, -1.0])])
    repeated = torch.sparse_coo_tensor(index, values, dense.shape, check_invariants=True)
    assert dense[0, 0] == 0
    forms = [matrix, dense.to_sparse_csr(), dense.to_sparse_csc(), dense.bool().to_sparse(), repeated]
    for each in [*forms, scipy.csr_array(dense.numpy()), scipy.coo_matrix(dense.numpy())]:
        pattern = masks.sparse(each)
        assert_close(fd.attend(q, k, v, pattern), wanted)
        assert_close(fd.attend(q, k, v, masks.sparse("graph"), bindings={"graph": each}), wanted)
        assert masks.describe(pattern, 30, 40).useful_pairs == int((dense != 0).sum())
    values = matrix.coalesce().values()
    written = torch.sparse_coo_tensor(matrix.coalesce().indices(), values, dense.shape, check_invariants=True)
    pattern = masks.sparse(written)
    values.zero_()
    assert_close(fd.attend(q, k, v, pattern), wanted)


@pytest.mark.parametrize("within", [masks.every(), masks.causal()])
def test_many_keys_are_computed_under_a_dense_mask(within: masks.Pattern) -> None:
    """A plan says so; queries without keys and keys that none sees, which hold NaN, do not reach the others."""
    tokens = 96
    table = ragged(torch.randint(30, 60, (tokens,), generator=torch.Generator().manual_seed(0)), tokens - 9)
    table[0, 5] = -1
    pattern = masks.selected_keys(table) & within
    report = fd.plan(pattern, tokens, num_heads=2)
    assert "table, dense mask" in str(report)
    assert report.computed_pairs == 2 * tokens * tokens
    q, k, v = (torch.randn(1, 2, tokens, 8, dtype=torch.float64) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = fd.attend(*leaves, pattern, engine="reference")
    gradients = torch.autograd.grad(wanted.square().sum(), leaves)
    q[:, :, 5], k[:, :, -9:], v[:, :, -9:] = torch.nan, torch.nan, torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with mock.patch.object(_single_keys, "_MASK_BYTES", 1 << 14):
        found = fd.attend(*leaves, pattern, engine="aten")
        assert_close(found, wanted)
        for one, other in zip(torch.autograd.grad(found.square().sum(), leaves), gradients, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("beside", ["alone", "causal", "own block"])
def test_a_value_for_each_pair(by_head: bool, beside: str) -> None:
    """Of a matrix in the order of its values, of a table in its places; with the gradient of a dense bias."""
    generator = torch.Generator().manual_seed(0)
    matrix, table = graph(20, 20, 0.3), ragged(torch.randint(1, 7, (20,), generator=generator), 20)
    q, k, v = torch.randn(3, 2, 3, 20, 8, generator=generator, dtype=torch.float64)
    listed, batch = table[0] >= 0, torch.stack([graph(20, 20, 0.3, seed).to_dense() for seed in (1, 2)]).to_sparse()
    entry, places = torch.arange(2)[:, None], torch.stack([listed.nonzero()[:, 0], table[0][listed]])
    cases = [(masks.sparse(matrix), (entry, *matrix._indices()), (matrix._nnz(),), None)]
    cases.append((masks.sparse(batch), tuple(batch.indices()), (batch._nnz(),), None))
    cases.append((masks.selected_keys(table), (entry, *places), table.shape[1:], listed))
    tables = torch.stack([table, table.flip(1)])
    each = (tables >= 0)[:, 0]
    own = each.nonzero()[:, 0], each.nonzero()[:, 1], tables[:, 0][each]
    cases.append((masks.selected_keys(tables), own, tables[:, 0].shape, each))
    for pattern, pairs, shape, used in cases:
        at = 1 if used is each else 0  # of the heads
        shape = (*shape[:at], *((3,) if by_head else ()), *shape[at:])
        strided = torch.randn((*shape, 2), generator=generator, dtype=torch.float64)[..., 0]
        values, later = strided.requires_grad_(), torch.randn(shape, generator=generator, dtype=torch.float64)
        score_mod = fd.biases.entries(values, pattern)  # which reads the values that are there when it is called
        with torch.no_grad():
            values.copy_(later)
        of_heads = values.movedim(at, 0) if by_head else values.expand(3, *values.shape)
        numbers = of_heads if used is None else of_heads[:, used]
        bias = torch.stack([torch.zeros(2, 20, 20, dtype=torch.float64).index_put(pairs, each) for each in numbers], 1)
        whole = BESIDE[beside][0](pattern)
        found = fd.attend(q, k, v, whole, score_mod=score_mod)
        dense = lambda score, b, h, i, j, bias=bias: score + bias[b, h, i, j]  # noqa: E731
        wanted = fd.attend(q, k, v, whole, score_mod=dense, engine="reference")
        assert_close(found, wanted)
        of_found, of_wanted = (torch.autograd.grad(x.square().sum(), values)[0] for x in (found, wanted))
        assert_close(of_found, of_wanted)


def test_a_graph_breaks_where_entries_are_read() -> None:
    q, table = torch.randn(2, 1, 8, 4), torch.randint(8, (2, 1, 8, 1))

    def call(values: torch.Tensor) -> torch.Tensor:
        pattern = masks.selected_keys(table)
        return fd.attend(q, q, q, pattern, score_mod=fd.biases.entries(values, pattern))

    for _ in range(2):
        values = torch.randn(2, 8, 1)
        assert torch.equal(torch.compile(call, backend="eager")(values), call(values))


def test_block_lists_serve_a_matrix_on_an_accelerator() -> None:
    """Its kernels for tables take rows of equal lengths."""
    q, k, v = torch.randn(3, 1, 2, 50, 16)
    pattern = masks.sparse(graph(50, 50))
    with flex_on_cpu():
        found = fd.attend(q, k, v, pattern & masks.causal(), engine="flex")
    assert_close(found, fd.attend(q, k, v, pattern & masks.causal(), engine="reference"))


def test_gradients_that_are_summed_with_others_are_wide() -> None:
    """Also dq of keys that are gathered: ranks and other pairs add theirs before it is rounded."""
    q, k, v = torch.randn(3, 1, 2, 2048, 16, dtype=torch.bfloat16)
    table = torch.randint(0, 2048, (1, 2048, 8))
    call = Call.at(q, k, masks.selected_keys(table).text, num_heads_global=2)
    out, lse = attention(call, q, k, v, None, [table], 1.0)
    found = gradients(call, q, k, v, [table], WholeRows(out, lse, torch.ones_like(out)), 1.0, wide=True)
    assert {x.dtype for x in found} == {torch.float32}
