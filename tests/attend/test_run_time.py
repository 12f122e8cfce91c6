"""Run-time tensors: masks of values, ids of any kind, copies, compilations; patterns and positions by batch entry."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo import testing
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines._reference import multiplicity
from flexdilated.masks.planning._planner import plan
from flexdilated.testing import check_pattern
from flexdilated.testing import strategies as fst
from tests.support.drawn_calls import OF_SAMPLES
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import block_sides

LONGNET, CAUSAL = masks.longnet([8, 16], [1, 3]) & masks.causal(), masks.causal()
IDS = torch.tensor([0] * 5 + [1] * 7 + [4] * 12)
ROWS = torch.stack([IDS, torch.tensor([-1] * 3 + [0] * 20 + [1])])


@settings(max_examples=40)
@given(
    packed=packed_cases() | st.sampled_from(OF_SAMPLES).flatmap(lambda kind: packed_cases(kinds=[kind])),
    sides=st.tuples(block_sides, block_sides),
)
def test_masks_and_block_lists_are_the_dense_rule(packed: Packed, sides: tuple[int, int]):
    """A table a batch entry, and in it the blocks that hold a pair."""
    assert torch.equal(multiplicity(packed.bind(), torch.device("cpu")).expand(packed.counts.shape), packed.counts)
    sizes = (packed.num_queries, packed.num_keys), {"num_heads": packed.num_heads, **packed.offsets}
    found = masks.block_mask(packed.pattern, *sizes[0], block_size=sides, **sizes[1]).to_dense()
    allowed = (packed.counts > 0).flatten(0, 1).float()
    expected = torch.nn.functional.max_pool2d(allowed, sides, ceil_mode=True)
    assert torch.equal(found.expand(*packed.counts.shape[:2], -1, -1).flatten(0, 1).float(), expected)


def test_documents_compute_no_pair_across():
    """Cut along documents, work is the documents' own: a block list would compute whole blocks."""
    ids = torch.arange(64).repeat_interleave(16)
    planned = plan((masks.causal() & masks.documents(ids)).bind(num_heads=1, num_queries=1024, num_keys=1024))
    assert [(term.shape, term.q.num_slots, term.folds) for term in planned.terms] == [("causal", 16, 64)]


def test_batch_entries_that_are_equal_are_one_rule():
    ids = torch.tensor([[0, 0, 1, 1]])
    one, three = (masks.causal() & masks.documents(rows) for rows in (ids, ids.expand(3, -1)))
    assert masks.describe(three, 4).useful_pairs == masks.describe(one, 4).useful_pairs == 6


def qkv(batch: int = 2, *, heads: int = 4, kv_heads: int = 4, num_tokens: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * num_tokens)
    q, k, v = (
        torch.randn(batch, count, num_tokens, 8, generator=generator, dtype=torch.float64)
        for count in (heads, kv_heads, kv_heads)
    )
    return q, k, v


def assert_exact(pattern: masks.Pattern | masks.Mixture, *x: Tensor, **options) -> None:
    found = fd.attend(*x, pattern, return_lse=True, **options)
    assert_close(found, fd.attend(*x, pattern, return_lse=True, engine="reference", **options), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "ids",
    [
        *(IDS.to(dtype) for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint64)),
        IDS << 60,
        IDS[None],
        torch.stack([IDS, IDS], dim=1)[:, 0],
        IDS.expand(2, -1),
        torch.full((24,), -5),
        torch.arange(24),
        IDS.tolist(),
        IDS.numpy(),
    ],
    ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')} {getattr(ids, 'shape', '')}",
)
def test_ids_of_any_kind(ids):
    """Any integers, however they lie in memory: padding alone and documents of one token, too."""
    assert_exact(LONGNET & masks.documents(ids), *qkv())
    assert_exact(LONGNET.per_document(ids), *qkv())


def test_one_head_may_have_documents():
    causal = masks.causal()
    heads = [causal & masks.documents(ROWS), causal, causal.per_document(ROWS), masks.local_window(left=2, right=2)]
    assert_exact(masks.per_head(heads), *qkv())
    assert_exact(masks.head_groups([causal, masks.documents(IDS)]), *qkv(kv_heads=2), enable_gqa=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_take_the_values_along(copied: Callable):
    """A copy's tensor is another: the patterns are not equal, and the one no longer follows the other."""
    ids = IDS.clone()
    pattern = LONGNET.per_document(ids) & masks.documents(ids)
    twin = copied(pattern)
    assert twin != pattern
    before = fd.attend(*qkv(), twin)
    assert torch.equal(before, fd.attend(*qkv(), pattern))
    ids[:] = 0
    assert torch.equal(before, fd.attend(*qkv(), twin))
    assert not torch.equal(before, fd.attend(*qkv(), pattern))


def test_documents_of_one_grid():
    """Packed as apart: a grid has no place for more tokens, and a shorter document leaves some empty."""
    assert_exact(masks.neighborhood((3, 4), 1).per_document(IDS), *qkv())


TABLE = torch.linspace(-1, 1, 24)
SELECTED, KEYS = (masks.selected_blocks("chosen", block=(rows, 4), most=1) for rows in (4, 1))
CALLS: dict[str, Callable[..., Tensor]] = {
    "intersected": lambda *qkv, ids: fd.attend(*qkv, LONGNET & masks.documents(ids) & masks.visible_keys(ids > 0)),
    "named": lambda *qkv, ids: fd.attend(*qkv, LONGNET.per_document("ids"), bindings={"ids": ids}),
    "positions": lambda *qkv, ids: fd.attend(*qkv, CAUSAL, q_offset=ids[:, 12]),
    "rows of blocks": lambda *qkv, ids: fd.attend(*qkv, SELECTED, bindings={"chosen": ids[:, None, ::4, None]}),
    "rows of queries": lambda *qkv, ids: fd.attend(
        *qkv, (KEYS | masks.chunked(8)) & CAUSAL, bindings={"chosen": ids[:, None, :, None]}
    ),
    "a score_mod": lambda *qkv, ids: fd.attend(
        *qkv, CAUSAL & masks.documents(ids), block_size=8, score_mod=lambda s, b, h, i, j: s.tanh() + TABLE[i - j]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.thorough if each == "a score_mod" else ()) for each in CALLS]
)
def test_new_values_do_not_recompile(name):
    compilations = testing.CompileCounterWithBackend("eager")
    torch.compiler.reset()
    compiled = torch.compile(CALLS[name], fullgraph=True, dynamic=False, backend=compilations)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        q, k, v = (torch.randn(2, 2, 24, 4, generator=generator).requires_grad_() for _ in range(3))
        ids = torch.randint(0, 4, (2, 24), generator=generator).sort(1).values
        outs = [call(q, k, v, ids=ids) for call in (compiled, CALLS[name])]
        grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in outs]
        assert_close((outs[0], *grads[0]), (outs[1], *grads[1]))
    assert compilations.frame_count == 1


ROW, PAIR = torch.tensor([0, 0, 1, 1]), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])


@pytest.mark.parametrize("engine", ["aten", "flex", "portable", "reference"])
def test_every_engine_checks_the_values(engine):
    """By one check, of which tests/project/errors.md has the texts."""
    x = torch.randn(2, 1, 4, 4)
    for pattern, says in (
        (masks.documents(torch.tensor([0, 1, 0, 1])), "got 0 at position 2 after 1"),
        (masks.documents(PAIR.repeat(2, 1)), "one for each .*batch entr.*; got 4 rows"),
        (masks.documents(ROW, longest=1), "at most longest=1 tokens; got one of 2"),
        (masks.lengths(torch.tensor([1, -1])), "got -1 in batch entry 1"),
        (masks.mask(torch.ones(2, 4, 4) > 0), r"each dim may be 1; got \(2, 4, 4\)"),
        (masks.documents("ids"), "needs the run-time tensor 'ids'"),
    ):
        with pytest.raises(ValueError, match=says):
            fd.attend(x, x, x, masks.causal() & pattern, engine=engine)


def test_check_pattern_draws_its_own_positions():
    for pattern in (LONGNET.per_document(IDS), LONGNET & masks.documents("packing")):
        with pytest.raises(ValueError, match="must have no run-time tensors: check it without them"):
            check_pattern(pattern)


B, H, N, M = 3, 4, 5, 90
STARTS = torch.tensor([85, 0, 41])


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((B, H, N, 8), (B, 2, M, 8), (B, 2, M, 16))
    q, k, v = (torch.randn(size, generator=draw, dtype=dtype).requires_grad_() for size in sizes)
    return q, k, v


def sample_by_sample(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """Results of a separate call attend(index, q, k, v) for each batch entry, concatenated."""
    return torch.cat([attend(b, q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(len(q))])


@settings(max_examples=8)
@given(fst.patterns(num_heads=H, max_positions=M), st.lists(st.integers(0, M - N), min_size=B, max_size=B))
def test_positions_of_samples_are_a_pattern(pattern, starts):
    """The one that `queries_from` makes, which test_oracle.py draws."""
    q, k, v = (x.detach() for x in tensors())
    seen = masks.visible_keys(torch.rand(B, M, generator=torch.Generator().manual_seed(1)) < 0.7)
    found = fd.attend(q, k, v, pattern & seen, q_offset=torch.tensor(starts), enable_gqa=True)
    moved = pattern.queries_from(torch.tensor(starts)) & seen
    assert torch.equal(found, fd.attend(q, k, v, moved, enable_gqa=True))


@pytest.mark.parametrize("engine", ["portable", "reference"])
def test_score_mod_gets_positions(engine):
    q, k, v = tensors()
    table = torch.randn(H, 61, dtype=torch.float64, requires_grad=True)
    how = {"engine": engine, "enable_gqa": True, "score_mod": fd.biases.relative(table)}
    rule = masks.causal()
    out = fd.attend(q, k, v, rule, q_offset=STARTS, **how)
    expected = sample_by_sample(q, k, v, lambda b, *x: fd.attend(*x, rule, q_offset=int(STARTS[b]), **how))
    assert_close(out, expected, rtol=1e-10, atol=1e-10)
    mine, theirs = (torch.autograd.grad(x.square().sum(), table)[0] for x in (out, expected))
    assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_each_sample_its_own_pattern_by_default():
    q, k, v = tensors()
    rules = [masks.causal(), masks.every(), masks.local_window(left=1, right=1)]
    out = fd.attend(q, k, v, masks.per_sample(rules), enable_gqa=True, q_offset=40)
    expected = sample_by_sample(q, k, v, lambda b, *x: fd.attend(*x, rules[b], enable_gqa=True, q_offset=40))
    assert_close(out, expected, rtol=1e-10, atol=1e-10)
