"""Run-time tensors: packed equals separate, padded equals unpadded, in any composition and for any values."""

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
from tests.support import oracle
from tests.support.agreement import TIGHT, assert_agrees, gradients
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import block_sides, expressions, mixtures, tensors

LONGNET = masks.longnet([8, 16], [1, 3]) & masks.causal()


def assert_mask_mod(packed: Packed) -> None:
    bound = packed.pattern.bind(**packed.sizes)
    assert torch.equal(multiplicity(bound, torch.device("cpu")).expand(packed.counts.shape), packed.counts)


def assert_attends(packed: Packed, data: st.DataObject) -> None:
    """Output, lse and gradients, by spans or by block lists, with every batch entry's own values."""
    qkv = data.draw(tensors(packed, batch=packed.batch))
    side = data.draw(block_sides)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return fd.attend(
            q, k, v, packed.pattern, enable_gqa=True, block_size=side, engine="aten", return_lse=True, **packed.offsets
        )

    assert_agrees(attend, qkv, packed.counts)


def assert_block_lists(packed: Packed, q_block: int, k_block: int) -> None:
    """A table a batch entry, and in it the blocks that hold a pair, full ones told apart."""
    sizes = {name: value for name, value in packed.sizes.items() if name != "batch"}
    mask = masks.block_mask(
        packed.pattern, sizes.pop("num_queries"), sizes.pop("num_keys"), block_size=(q_block, k_block), **sizes
    )
    expected = torch.nn.functional.max_pool2d(
        (packed.counts > 0).flatten(0, 1).float(), (q_block, k_block), ceil_mode=True
    )
    found = mask.to_dense().expand(packed.counts.shape[:2] + mask.to_dense().shape[2:]).flatten(0, 1)
    assert torch.equal(found.float(), expected)


@given(packed_cases())
def test_mask_mod_is_the_dense_rule(packed: Packed):
    assert_mask_mod(packed)


@given(packed_cases(), st.data())
def test_attend_is_the_oracle(packed: Packed, data):
    assert_attends(packed, data)


@given(packed_cases(), block_sides, block_sides)
def test_block_lists_are_exact(packed: Packed, q_block: int, k_block: int):
    assert_block_lists(packed, q_block, k_block)


@pytest.mark.parametrize("kind", ["mask", "same_document", "per_sample", "queries_from"])
@settings(max_examples=40)
@given(st.data())
def test_each_rule_of_samples(kind, data):
    """The tests above, for rules that they seldom draw."""
    packed = data.draw(packed_cases(kinds=[kind]))
    assert_mask_mod(packed)
    assert_block_lists(packed, data.draw(block_sides), data.draw(block_sides))
    assert_attends(packed, data)


@settings(max_examples=12)
@given(expressions(3), st.lists(st.integers(1, 14), min_size=1, max_size=3), st.integers(0, 5))
def test_packed_equals_separate(twin, lengths, padding):
    """per_document gives each document what it gets alone, and its gradients."""
    ids = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)] + [-1] * padding)
    generator = torch.Generator().manual_seed(len(ids))
    qkv = tuple(
        torch.randn(2, 3, len(ids), 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)
    )
    packed = fd.attend(*qkv, twin.pattern.per_document(ids), return_lse=True)
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        alone = fd.attend(*(x[:, :, part] for x in qkv), twin.pattern, return_lse=True)
        assert_close(packed[0][:, :, part], alone[0], **TIGHT)
        assert_close(packed[1][:, :, part], alone[1], **TIGHT)
        begin += length
    assert not packed[0][:, :, begin:].any()
    assert (packed[1][:, :, begin:] == -torch.inf).all()


@settings(max_examples=14)
@given(mixtures(2), st.integers(1, 20), st.integers(0, 9), st.sampled_from(["right", "left"]))
def test_padded_equals_unpadded(twin, length, padding, side):
    """Output and gradients of the real tokens, whatever the padding holds."""
    total = length + padding
    real = slice(0, length) if side == "right" else slice(padding, total)
    generator = torch.Generator().manual_seed(total)
    alone = tuple(
        torch.randn(1, 2, length, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)
    )
    with_padding = tuple(torch.full((1, 2, total, 4), 1e3, dtype=torch.float64) for _ in range(3))
    for x, y in zip(with_padding, alone, strict=True):
        x[:, :, real] = y.detach()
        x.requires_grad_()
    rule = masks.lengths(torch.tensor([length]), padding=side)
    pattern = twin.pattern & rule if side == "right" else twin.pattern.per_document(rule)

    def padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = fd.attend(q, k, v, pattern, return_lse=True)
        return out[:, :, real], lse[:, :, real]

    def unpadded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return fd.attend(q, k, v, twin.pattern, return_lse=True)

    for found, expected in zip(padded(*with_padding), unpadded(*alone), strict=True):
        assert_close(found, expected, **TIGHT)
    for found, expected in zip(gradients(padded, with_padding), gradients(unpadded, alone), strict=True):
        assert_close(found[:, :, real], expected, **TIGHT)


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


def test_oracle_is_not_the_library():
    """The dense rule of a document, by hand."""
    rule = oracle.per_document(oracle.dilated(4, 2, 1), torch.tensor([0, 0, 0, 1, 1, 1, -1]))
    table = rule(0, 1, torch.arange(7), torch.arange(7))
    assert {tuple(pair) for pair in table.nonzero().tolist()} == {(1, 1), (4, 4)}
