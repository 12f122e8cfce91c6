"""Run-time tensors: masks and block lists of their values, plans that documents share, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo import testing
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines._reference import multiplicity
from tests.support.run_time_strategies import packed_cases
from tests.support.strategies import block_sides

LONGNET = masks.longnet([8, 16], [1, 3]) & masks.causal()


@pytest.mark.parametrize("kind", ["any", "mask", "same_document", "per_sample", "queries_from"])
@given(data=st.data(), sides=st.tuples(block_sides, block_sides))
def test_masks_and_block_lists_are_the_dense_rule(kind: str, data: st.DataObject, sides: tuple[int, int]):
    """A table a batch entry, and in it the blocks that hold a pair."""
    packed = data.draw(packed_cases() if kind == "any" else packed_cases(kinds=[kind]))
    assert torch.equal(multiplicity(packed.bind(), torch.device("cpu")).expand(packed.counts.shape), packed.counts)
    sizes = (packed.num_queries, packed.num_keys), {"num_heads": packed.num_heads, **packed.offsets}
    found = masks.block_mask(packed.pattern, *sizes[0], block_size=sides, **sizes[1]).to_dense()
    allowed = (packed.counts > 0).flatten(0, 1).float()
    expected = torch.nn.functional.max_pool2d(allowed, sides, ceil_mode=True)
    assert torch.equal(found.expand(*packed.counts.shape[:2], -1, -1).flatten(0, 1).float(), expected)


def test_documents_compute_no_pair_across():
    """Cut along documents, work is the documents' own: a block list would compute whole blocks."""
    from flexdilated.masks.planning._planner import plan

    ids = torch.arange(64).repeat_interleave(16)
    planned = plan((masks.causal() & masks.documents(ids)).bind(num_heads=1, num_queries=1024, num_keys=1024))
    assert [(term.shape, term.q.num_slots, term.folds) for term in planned.terms] == [("causal", 16, 64)]


def test_batch_entries_that_are_equal_are_one_rule():
    ids = torch.tensor([[0, 0, 1, 1]])
    one, three = (masks.causal() & masks.documents(rows) for rows in (ids, ids.expand(3, -1)))
    assert masks.describe(three, 4).useful_pairs == masks.describe(one, 4).useful_pairs == 6
    with pytest.raises(ValueError, match="got 2 rows that differ"):
        masks.describe(masks.causal() & masks.documents(torch.cat([ids, ids + torch.arange(4)])), 4)


def test_equal_documents_share_their_block_lists(monkeypatch):
    """New values build block lists for no length of document that was there before."""
    monkeypatch.setattr(masks.planning._candidates, "_MOST_MASKED_PAIRS", 0)
    window = masks.local_window(left=5, right=0)
    q, k, v = torch.randn(3, 1, 1, 96, 4)

    def block_lists(*lengths: int) -> int:
        before = masks.cache().stats().misses
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        fd.attend(q, k, v, window & masks.documents(ids))
        return masks.cache().stats().misses - before - 3  # a rule, a plan and a program for these values

    assert block_lists(31, 31, 34) == 2
    assert block_lists(34, 31, 31) == 0
    assert block_lists(31, 65) == 1


@pytest.mark.slow
@pytest.mark.parametrize("carried", ["per document", "intersected", ""], ids=["carried", "intersected", "named"])
def test_new_values_do_not_recompile(carried):
    compilations = testing.CompileCounterWithBackend("aot_eager")

    def attend(q, k, v, ids):
        if carried == "per document":
            return fd.attend(q, k, v, LONGNET.per_document(ids))
        if carried:
            return fd.attend(q, k, v, LONGNET & masks.documents(ids) & masks.visible_keys(ids > 0))
        return fd.attend(q, k, v, LONGNET.per_document("packing"), bindings={"packing": ids})

    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend=compilations)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        q, k, v = (torch.randn(2, 2, 24, 4, generator=generator).requires_grad_() for _ in range(3))
        ids = torch.randint(0, 4, (2, 24), generator=generator).sort(1).values
        out, eager = compiled(q, k, v, ids), attend(q, k, v, ids)
        assert_close(out, eager)
        for found, expected in zip(
            torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(eager.sum(), (q, k, v)), strict=True
        ):
            assert_close(found, expected)
    assert compilations.frame_count == 1


ROW, PAIR = torch.tensor([0, 0, 1, 1]), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])


@pytest.mark.parametrize(
    ("pattern", "error", "says"),
    [
        (lambda: masks.documents(torch.tensor([0, 1, 0, 1])), ValueError, "got 0 at position 2 after 1"),
        (
            lambda: masks.documents(torch.tensor([0, -1, 0, 1])),
            ValueError,
            "must be adjacent; got 0 at position 2 after 0",
        ),
        (lambda: masks.documents(torch.tensor([0, 0, 1])), ValueError, r"each of the 4 positions; got shape \(3,\)"),
        (lambda: masks.documents(ROW.float()), TypeError, "integers; got a tensor of torch.float32"),
        (lambda: masks.documents(ROW[None, None]), ValueError, r"\(tokens,\) or \(batch, tokens\); got \(1, 1, 4\)"),
        (lambda: masks.documents(PAIR.repeat(2, 1)), ValueError, "one for each .*batch entr.*; got 4 rows"),
        (lambda: masks.documents(PAIR) & masks.lengths([1, 2, 3]), ValueError, "each of . batch entries; got . rows"),
        (lambda: masks.documents(ROW, longest=1), ValueError, "at most longest=1 tokens; got one of 2"),
        (lambda: masks.documents(ROW, longest=0), ValueError, "longest must be at least 1"),
        (lambda: masks.documents(ROW, name="a b"), ValueError, "must be an identifier; got 'a b'"),
        (
            lambda: masks.lengths(torch.tensor([5, 1])),
            ValueError,
            "at most the number of positions, 4; got 5 in batch entry 0",
        ),
        (lambda: masks.lengths(torch.tensor([1, -1])), ValueError, "got -1 in batch entry 1"),
        (lambda: masks.lengths(torch.tensor([1.0, 2.0])), TypeError, "must hold integers"),
        (lambda: masks.lengths([1, 2], padding="middle"), ValueError, "'right', 'left'; got padding='middle'"),
        (lambda: masks.visible_keys(ROW), TypeError, "must hold booleans"),
        (lambda: masks.visible_keys(ROW.float()), ValueError, "must hold 0 or -inf; got 1.0: for a mask of 0 and 1"),
        (
            lambda: masks.visible_keys(PAIR[:, :3] > 0),
            ValueError,
            r"shape \(4,\) or \(batch, 4\), one for each position",
        ),
        (lambda: masks.mask(PAIR > 0), ValueError, r"shape \(4, 4\) or \(batch, heads, 4, 4\).*; got \(2, 4\)"),
        (lambda: masks.mask(torch.ones(2, 4, 4) > 0), ValueError, r"each dim may be 1; got \(2, 4, 4\)"),
        (lambda: masks.mask(torch.ones(4, 4)), ValueError, "must hold 0 or -inf; got 1.0: .* write mask.bool"),
        (lambda: masks.mask(torch.full((4, 4), -1e9)), ValueError, "got -1000000000.0: .* write mask == 0"),
        (lambda: masks.mask(torch.full((4, 4), -0.5)), ValueError, r"got -0.5: a bias .*score \+ bias\[q_idx, k_idx\]"),
        (lambda: masks.mask(torch.arange(16.0).view(4, 4)), ValueError, "got 1.0: a bias is no mask"),
        (lambda: masks.mask(-1e4 * torch.arange(16.0).view(4, 4) + 1), ValueError, "got 1.0: a bias is no mask"),
        (lambda: masks.visible_keys(ROW * 0.5), ValueError, r"got 0.5: a bias .*score \+ bias\[k_idx\]"),
        (lambda: masks.mask(torch.ones(4, 4).long()), TypeError, "a mask of pairs must hold booleans"),
        (lambda: masks.mask(torch.ones(2, 3, 4, 4) > 0), ValueError, "1 head or as many as the call; got 3 for 1"),
        (lambda: masks.mask(torch.ones(3, 1, 1, 1) > 0), ValueError, "each of . batch entries; got . rows"),
        (
            lambda: masks.same_document(ROW, ROW[:3]),
            ValueError,
            "4 positions of queries and the 4 of keys.*; got 7 ids",
        ),
        (lambda: masks.same_document(ROW, torch.tensor([0, 1, 0, 1])), ValueError, "got 0 at position 2 after 1"),
        (lambda: masks.same_document(PAIR, PAIR.repeat(2, 1)), ValueError, r"one batch; got \(2, 4\) and \(4, 4\)"),
        (lambda: masks.same_document(ROW, ROW.float()), TypeError, "integers; got a tensor of torch.float32"),
        (lambda: masks.same_document("ids", ROW), TypeError, "takes one name"),
        (lambda: masks.same_document(ROW), TypeError, r"write masks.documents\(ids\); got k_ids=None"),
        (lambda: masks.same_document(ROW, "ids"), TypeError, "one name for both together; .* got k_ids='ids'"),
        (lambda: masks.causal().per_document(masks.causal()), TypeError, "document ids, or a pattern of documents"),
        (lambda: masks.lengths([1, 2]).per_document(ROW), ValueError, "per_document needs a pattern without run-time"),
        (lambda: masks.documents(ROW) | masks.documents(PAIR), ValueError, "got two named 'documents'"),
        (lambda: masks.documents("ids"), ValueError, "needs the run-time tensor 'ids'"),
    ],
)
@pytest.mark.parametrize("engine", ["aten", "flex", "portable", "reference"])
def test_bad_tensors(pattern, error, says, engine):
    x = torch.randn(2, 1, 4, 4)
    with pytest.raises(error, match=says):
        fd.attend(x, x, x, masks.causal() & pattern(), engine=engine)


@pytest.mark.parametrize(
    ("bindings", "error", "says"),
    [
        ({"ids": ROW, "other": ROW}, ValueError, "needs 'ids'; got 'other'"),
        ({"ids": [0, 0, 1, 1]}, TypeError, "must hold tensors; got list for 'ids'"),
        ({}, ValueError, "needs the run-time tensor 'ids'"),
    ],
)
def test_bad_bindings(bindings, error, says):
    x = torch.randn(2, 1, 4, 4)
    with pytest.raises(error, match=says):
        fd.attend(x, x, x, masks.documents("ids"), bindings=bindings)


def test_a_tensor_is_not_given_twice():
    x = torch.randn(2, 1, 4, 4)
    with pytest.raises(ValueError, match="that the pattern holds; got 'documents'"):
        fd.attend(x, x, x, masks.documents(ROW), bindings={"documents": ROW})


def test_values_stay_out_of_the_text():
    assert masks.documents(ROW).text == masks.documents(PAIR).text
    assert masks.documents(ROW) != masks.documents(PAIR)
    assert masks.from_json(masks.to_json(LONGNET.per_document(ROW))) == LONGNET.per_document("documents")
