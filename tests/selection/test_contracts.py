"""What a choice promises: no later token, no other entry, no hidden key, no host, no N x M, one graph."""

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import flexdilated as fd
from flexdilated import masks
from flexdilated.selection import _boxes, _scores
from flexdilated.selection._boxes import QueryBlocks, SelectionRule, _build_boxes
from flexdilated.selection._select_op import choose_blocks
from tests.selection.cases import Case, cases, with_coarse
from tests.support import selection_oracle as oracle

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

BAD = st.sampled_from([float("nan"), float("inf"), -float("inf")])


def row_of(found: fd.Selection, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    return found.blocks[:, :, row], found.scores[:, :, row]


CAUSAL = [
    masks.causal().per_document("docs") & masks.visible_keys("shown"),
    masks.local_window(left=5, right=0) & masks.lengths("real"),
    masks.per_head([masks.causal(), masks.local_window(left=2, right=0), masks.causal()]),
    masks.causal() & masks.selected_blocks("chosen", block=4, most=2),
]
NOT_CAUSAL = [
    masks.local_window(left=5, right=1),
    masks.documents("docs"),
    masks.selected_blocks("chosen", block=4, most=2),
    masks.per_head([masks.causal(), masks.every(), masks.causal()]),
]


@pytest.mark.parametrize("within", CAUSAL + NOT_CAUSAL, ids=repr)
def test_rows_of_a_causal_rule_must_choose_by_their_first_query(within: masks.Pattern) -> None:
    """Those of other rules may look with all their queries."""
    options = {"block": 4, "query_block": 2, "choose": fd.TopK(2), "within": within}
    if any(within is each for each in NOT_CAUSAL):
        fd.BlockSelector(**options)
        return
    with pytest.raises(ValueError, match=r"query_summary='first', or .*future_in_choice=True"):
        fd.BlockSelector(**options)
    q = torch.randn(1, 3, 4, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"call it under torch\.no_grad"):
        fd.BlockSelector(**options, future_in_choice=True)(q, q)


@settings(max_examples=15)
@given(cases(), st.data(), BAD)
def test_hidden_keys_touch_nothing(case: Case, data, value: float) -> None:
    """Keys that a row's view does not see, whatever they hold, for rows drawn one at a time."""
    rows = oracle.rows_of(case.q.shape[2], case.q_offset, case.selector.query_block)
    row = data.draw(st.integers(0, len(rows) - 1), label="row")
    view = rows[row] if case.selector._scores_all_queries else rows[row][:1]
    hidden = ~case.table(case.selector.within)[:, :, view].any(2).any(1)  # (B, M)
    k = case.k.masked_fill(hidden[:, None, :, None], value)
    before, after = case.run(), case.run(k=k)
    assert all(map(torch.equal, row_of(before, row), row_of(after, row)))


@settings(max_examples=15)
@given(cases(), BAD)
def test_gradients_of_hidden_tokens_are_zero(case: Case, value: float) -> None:
    """Keys that no row sees and queries that see nothing: their gradients are 0, and those of others are numbers."""
    case.selector._sees_ahead = False  # which is all that forbids gradients
    within = case.table(case.selector.within)
    blind, hidden = ~within.any(3), ~within.any(2).unflatten(1, (case.k.shape[1], -1)).any(2)

    def gradients(bad: float) -> tuple[torch.Tensor, ...]:
        q = case.q.masked_fill(blind[..., None], bad).requires_grad_()
        k = case.k.masked_fill(hidden[..., None], bad).requires_grad_()
        scores = case.run(q, k).scores
        return torch.autograd.grad(scores[scores > -torch.inf].sin().sum(), (q, k))

    for one, other in zip(gradients(value), gradients(0.0), strict=True):
        assert torch.equal(one, other)
        assert not one.isnan().any()


@settings(max_examples=10)
@given(cases(), st.booleans(), st.integers(1, 3))
def test_what_bounds_memory_cuts_the_work_and_only_that(case: Case, by_coarse: bool, few: int) -> None:
    """A few rows at a time, and a few of all that is computed for them at once, with nothing kept: the same numbers."""
    case = (
        with_coarse(case, ratio=2, rows=2, most=3) if by_coarse and case.options["scorer"] != "antidiagonal" else case
    )
    case.selector._sees_ahead = False  # which is all that forbids gradients
    if case.selector.coarse is not None:
        case.selector.coarse._sees_ahead = False

    def results() -> tuple[torch.Tensor, ...]:
        q, k = case.q.clone().requires_grad_(), case.k.clone().requires_grad_()
        found = case.run(q, k)
        return *found, *torch.autograd.grad(found.scores[found.blocks >= 0].sin().sum(), (q, k))

    def portions(rows: QueryBlocks, numbers: int) -> list[range]:
        return [range(at, min(at + few, rows.num_query_blocks)) for at in range(0, rows.num_query_blocks, few)]

    whole = results()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QueryBlocks, "portions", portions)
        for module, name, value in (
            (_boxes, "_PAIRS_AT_ONCE", 1),
            (_boxes, "_MOST_BOXES_IN_GROUP", 2),
            (_boxes, "_MOST_CACHED_BOXES", 0),
        ):
            patch.setattr(module, name, value)
        patch.setattr(_scores, "_MOST_ELEMENTS", 1)
        assert_close(results(), whole, rtol=1e-9, atol=1e-9)


def test_equal_scores_choose_the_first_blocks() -> None:
    found = fd.BlockSelector(block=4, choose=fd.TopK(3))(torch.ones(1, 1, 40, 2), torch.ones(1, 1, 40, 2))
    assert found.blocks[0, 0, -1].tolist() == [0, 1, 2]
    found = fd.BlockSelector(block=4, choose=fd.TopK(3))(-torch.ones(1, 1, 40, 2), torch.ones(1, 1, 40, 2))
    assert found.blocks[0, 0, -1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["plain", "autocast", "inference"])
def test_scores_are_summed_in_float32(dtype: torch.dtype, mode: str) -> None:
    """Those of half precision are those of the same numbers in float32, under autocast and without."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 96, 16).to(dtype)
    selector = fd.BlockSelector(block=8, choose=fd.TopK(3), scorer="minmax")
    expected = selector(q.float(), k.float())
    with torch.autocast("cpu", enabled=mode == "autocast"), torch.inference_mode(mode == "inference"):
        found = selector(q, k)
    assert found.scores.dtype == torch.float32
    assert found.blocks.equal(expected.blocks)
    assert_close(found.scores, expected.scores)


class Watched(TorchDispatchMode):
    """Counts what reads values on the host, and the bytes of the largest tensor that is made."""

    HOST = ("_local_scalar_dense", "nonzero", "item", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.reads[name] += name.startswith(self.HOST)
        for x in found if isinstance(found, tuple | list) else [found]:
            # Views of what was there already have no memory of their own.
            fresh = isinstance(x, torch.Tensor) and not any(
                isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata == x.untyped_storage()._cdata
                for arg in args
            )
            self.largest = max(self.largest, x.numel() * x.element_size() if fresh else 0)
        return found


RULES = [masks.causal(), masks.local_window(left=40, right=0), masks.causal() & masks.strided(3)]


@pytest.mark.parametrize(
    ("scorer", "within", "coarse"),
    [
        *(("mean", within, False) for within in RULES),
        *((scorer, RULES[1], coarse) for scorer in ("minmax", "mass", "antidiagonal") for coarse in (False, True)),
    ],
    ids=repr,
)
def test_a_second_call_reads_nothing_on_the_host(scorer: str, within: masks.Pattern, coarse: bool) -> None:
    """Inside of an op no mode sees anything: the op's own function is watched. What it kept goes with the pattern."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 100, 8)
    options = {"within": within, "future_in_choice": True, "always": masks.chunked(8)}
    selector = fd.BlockSelector(block=8, query_block=8, scorer=scorer, choose=fd.TopP(0.6, most=3), **options)
    chosen = fd.BlockSelector(block=16, query_block=8, choose=fd.TopK(2), **options)(q, k).blocks if coarse else None
    call = selector.call(selector.within, 0, 0.3)._replace(coarse_block=16 * coarse, coarse_query_block=8 * coarse)
    expected = choose_blocks(q, k, None, chosen, [], call)
    misses = masks.cache().stats().misses
    with Watched() as watched:
        found = choose_blocks(q, k, None, chosen, [], call)
        assert +watched.reads == Counter()
        found[0].sum().item()
    assert watched.reads["_local_scalar_dense"] == 1
    assert masks.cache().stats().misses == misses
    assert all(map(torch.equal, found, expected))
    assert masks.cache().forget(within) > 0


@pytest.mark.parametrize("scorer", ["minmax", "mass"])
def test_nothing_is_as_large_as_queries_by_keys(scorer: str) -> None:
    """Tensors stay below a sixteenth of the scores of all pairs, also where the boxes are built."""
    torch.manual_seed(0)
    N = 4096
    q, k = torch.randn(2, 1, 2, N, 8)
    selector = fd.BlockSelector(block=256, scorer=scorer, choose=fd.TopK(4), always=masks.chunked(256))
    call = selector.call(selector.within, 0, 0.3)
    choose_blocks(q, k, None, None, [], call)
    with Watched() as watched:
        choose_blocks(q, k, None, None, [], call)
    rows = QueryBlocks(N, N, 0, 256, 1, False)
    part = next(iter(rows.portions(2 * rows.num_key_blocks)))
    with Watched() as built:
        _build_boxes(SelectionRule(masks.causal(), masks.chunked(256), 0, 2), rows, part)
    assert 0 < watched.largest <= 4 * 2 * N * N // 16
    assert 0 < built.largest <= 4 * 2 * N * N // 16


COMPILED = {
    "mean": {"scorer": "mean", "choose": fd.TopK(3), "within": masks.causal() & masks.documents("docs")},
    "minmax": {"scorer": "minmax", "choose": fd.TopP(0.7, most=3), "query_block": 8, "query_summary": "first"},
    "coarse": {
        "choose": fd.TopK(2),
        "coarse": fd.BlockSelector(block=16, choose=fd.TopK(2), share="all"),
        "within": masks.causal() & masks.local_window(left=70, right=0),
    },
}


@pytest.fixture
def from_the_start() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.thorough  # test_selected_attention.py compiles the module around the selector
@pytest.mark.usefixtures("from_the_start")
def test_compiled_equals_eager() -> None:
    """Selectors in one graph for two lengths, with the gradients of what follows.

    To a graph the scorer is a number of the one op. A module as a scorer has a graph a length, and goes through AOT in
    tests of SelectedAttention.
    """
    selectors = [fd.BlockSelector(block=8, **options) for options in COMPILED.values()]

    def run(q, k, docs):
        found = [each(q, k, bindings=tensors) for each, tensors in zip_longest(selectors, [{"docs": docs}])]
        return found, sum(each.scores.masked_fill(each.blocks < 0, 0.0).sin().sum() for each in found)

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=graphs)
    for tokens in (100, 60):
        torch.manual_seed(tokens)
        docs, (q, k) = torch.arange(tokens) // 37, (torch.randn(2, 2, tokens, 8, requires_grad=True) for _ in range(2))
        for x, dim in ((q, 2), (k, 2), (docs, 0)):
            torch._dynamo.mark_dynamic(x, dim)
        results = []
        for function in (run, compiled):
            found, loss = function(q, k, docs)
            results.append([*(x for each in found for x in each), *torch.autograd.grad(loss, (q, k))])
        assert_close(*results)
    assert graphs.frame_count == 1
