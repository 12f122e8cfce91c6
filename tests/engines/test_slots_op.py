"""Gathering and joining by strides: the ops against index arithmetic, their gradients, and torch's own op checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from flexdilated import masks
from flexdilated.engines import _slots
from flexdilated.engines._gather import side_of
from flexdilated.engines._merge import merge
from flexdilated.engines._slots import add_slots, join, join_slots, pick_of, take, take_ahead, take_slots
from flexdilated.engines.flex._flex import make_flex_program
from flexdilated.engines.flex._flex_op import allowed_on
from flexdilated.masks import Layout
from flexdilated.masks.orders._layout import Compact
from flexdilated.masks.planning._planner import plan
from tests.support.ladders import LONGNET_5

CPU = torch.device("cpu")

# B batch, X heads of a tensor, N tokens; a term has H heads, F folds, S slots; D head dim


@st.composite
def compacts(draw, num_heads: int, num_tokens: int) -> Compact:
    """Some heads' slots, in folds that do not overlap, anywhere among the tokens."""
    slots, step = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    length = (slots - 1) * step + 1
    apart = draw(st.booleans())
    folds = draw(st.integers(1, num_tokens // (length + 2)) if apart else st.integers(1, step))
    stride = draw(st.integers(length, length + 2)) if apart else 1
    most = num_tokens - length - (folds - 1) * stride
    heads = tuple(sorted(draw(st.sets(st.integers(0, num_heads - 1), min_size=1))))
    starts = tuple(draw(st.integers(0, most)) for _ in heads)
    return Compact(heads, starts, step, slots, folds, stride)


def picked(layout: Compact, heads: tuple[int, ...], num_tokens: int):
    """The slots in tensors of so many tokens in natural order."""
    return pick_of(side_of(layout, Layout(num_tokens), heads), num_tokens, CPU)


def rows_of(layout: Compact, heads: tuple[int, ...], num_tokens: int) -> Tensor:
    """The rows of (heads * tokens) that the slots are: (F, H, S)."""
    return (torch.tensor(heads)[:, None, None] * num_tokens + layout.tokens()).transpose(0, 1)


@st.composite
def problems(draw) -> tuple[int, int, int, list[Compact]]:
    batch, heads, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(14, 24))
    return batch, heads, tokens, draw(st.lists(compacts(heads, tokens), min_size=1, max_size=3))


@given(problems(), st.booleans())
def test_slots_are_the_tokens_that_indices_pick(problem, ahead):
    """In values and gradients; with grouped heads, which share keys, and from tensors that are views."""
    B, X, N, layouts = problem
    torch.manual_seed(0)
    x = torch.randn(B, N, -(-X // 2), 3, dtype=torch.float64).transpose(1, 2).requires_grad_(ahead)
    owners = [tuple(head // 2 for head in layout.heads) for layout in layouts]
    picks = [picked(layout, heads, N) for layout, heads in zip(layouts, owners, strict=True)]
    found = [take(x, pick, taken) for pick, taken in zip(picks, take_ahead(x, picks), strict=True)]
    rows = [rows_of(layout, heads, N) for layout, heads in zip(layouts, owners, strict=True)]
    truth = [x.flatten(1, 2)[:, index].flatten(0, 1) for index in rows]
    for slots, expected in zip(found, truth, strict=True):
        assert torch.equal(slots, expected)
    if ahead:
        sent = [torch.randn_like(slots) for slots in found]
        grads = [torch.autograd.grad(each, x, sent)[0] for each in (found, truth)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("heads", [(0, 2, 4), (1, 2), (3,), (2, 2, 2), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize(("start", "slots", "folds"), [(0, 15, 1), (0, 3, 5), (3, 4, 2), (6, 1, 7)])
def test_consecutive_tokens_are_views(heads, start, slots, folds):
    """Runs of heads, also with gaps or all of one, need no copy; gradients come back to where they belong."""
    x = torch.randn(1, 5, 15, 3, dtype=torch.float64, requires_grad=True)
    layout = Compact(tuple(range(len(heads))), (start,) * len(heads), 1, slots, folds, slots)
    pick = picked(layout, heads, 15)
    assert pick.is_view
    found, expected = take(x, pick, None), x.flatten(1, 2)[:, rows_of(layout, heads, 15)].flatten(0, 1)
    assert torch.equal(found, expected)
    assert found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    sent = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(each, x, sent)[0] for each in (found, expected)))


def reference_join(parts: list[Tensor], lses: list[Tensor], rows: list[Tensor], shape: tuple[int, int, int]):
    """One part after the other, into copies of the rows."""
    B, X, N = shape
    out = parts[0].new_zeros(B, X * N, parts[0].shape[-1])
    lse = out.new_full(out.shape[:2], -torch.inf)
    for part, part_lse, index in zip(parts, lses, rows, strict=True):
        flat = index.flatten()
        sides = out[:, flat], lse[:, flat], part.reshape(B, len(flat), -1), part_lse.reshape(B, len(flat))
        joined, joined_lse = merge(*sides)
        out, lse = out.index_copy(1, flat, joined), lse.index_copy(1, flat, joined_lse)
    return out.view(B, X, N, -1), lse.view(B, X, N)


def drawn_parts(B: int, layouts: list[Compact]) -> tuple[list[Tensor], list[Tensor]]:
    """Parts and lses as a kernel gives them: rows without keys among them."""
    torch.manual_seed(1)
    shapes = [(B * layout.folds, len(layout.heads), layout.num_slots) for layout in layouts]
    parts = [torch.randn(*shape, 3, dtype=torch.float64) for shape in shapes]
    lses = [torch.randn(shape, dtype=torch.float64) * 5 for shape in shapes]
    for part, lse in zip(parts, lses, strict=True):
        empty = torch.rand_like(lse) < 0.2
        lse.masked_fill_(empty, -torch.inf)
        part.masked_fill_(empty[..., None], 0.0)
    return [x.requires_grad_() for x in parts], [x.requires_grad_() for x in lses]


@given(problems(), st.sampled_from(["out", "lse", "both"]))
def test_joining_is_merging_one_by_one(problem, through):
    """Values and gradients, through either result: rows in many parts, in one, in none, and without keys."""
    B, X, N, layouts = problem
    parts, lses = drawn_parts(B, layouts)
    found = join_slots(parts, lses, numbers_of(layouts, N), [B, X, N], False)
    truth = reference_join(parts, lses, [rows_of(layout, layout.heads, N) for layout in layouts], (B, X, N))
    for each, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(each, expected)
    empty = truth[1] == -torch.inf
    sent = [torch.randn_like(truth[0]), torch.randn_like(truth[1]).masked_fill(empty, 0.0)]
    chosen = {"out": [0], "lse": [1], "both": [0, 1]}[through]

    def gradients(results: tuple[Tensor, Tensor]) -> list[Tensor]:
        outputs, cotangents, inputs = [results[i] for i in chosen], [sent[i] for i in chosen], [*parts, *lses]
        grads = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]

    for grad, expected in zip(gradients(found), gradients(truth), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-11)


def numbers_of(layouts: list[Compact], num_tokens: int) -> list[int]:
    return [n for layout in layouts for n in picked(layout, layout.heads, num_tokens).numbers]


APART = [Compact((0, 2), (0, 3), 2, 3, 2, 6), Compact((1,), (1,), 1, 4, 1, 0)]


def test_parts_that_share_no_row_need_no_lse():
    """They are put where they belong, in their own type; other rows are 0."""
    parts = [x.float().detach().requires_grad_() for x in drawn_parts(2, APART)[0]]
    out, lse = join_slots(parts, [], numbers_of(APART, 16), [2, 3, 16], True)
    assert (out.dtype, len(lse)) == (torch.float32, 0)
    expected = torch.zeros(2, 48, 3)
    for layout, part in zip(APART, parts, strict=True):
        expected[:, rows_of(layout, layout.heads, 16).flatten()] = part.detach().reshape(2, -1, 3)
    assert torch.equal(out, expected.view(2, 3, 16, 3))
    sent = torch.randn_like(out)
    taken = take_slots(sent, numbers_of(APART, 16))
    assert all(torch.equal(*pair) for pair in zip(torch.autograd.grad(out, parts, sent), taken, strict=True))


def test_the_ops_keep_what_they_promise():
    """Schemas, shape rules with static and dynamic sizes, autograd registration: torch's own checks."""
    sides, (parts, lses) = numbers_of(APART, 16), drawn_parts(2, APART)
    x = torch.randn(2, 3, 16, 3, requires_grad=True)
    opcheck(take_slots, (x, sides))
    opcheck(add_slots, ([part.detach() for part in parts], sides, [2, 3, 16, 3]))
    for keep_wide in (False, True):
        opcheck(join_slots, (parts, lses, sides, [2, 3, 16], keep_wide))
        opcheck(join_slots, (parts, [], sides, [2, 3, 16], keep_wide))


@pytest.mark.parametrize("keep_wide", [False, True])
def test_the_type_of_what_is_joined(keep_wide):
    """Sums are wide; out is rounded once, and its gradient is that of the rounded parts' own type."""
    exact, lses = drawn_parts(2, APART)
    parts = [part.detach().bfloat16().requires_grad_() for part in exact]
    sums = [lse.detach().float().requires_grad_() for lse in lses]
    out, lse = join_slots(parts, sums, numbers_of(APART, 16), [2, 3, 16], keep_wide)
    assert (out.dtype, lse.dtype) == (torch.float32 if keep_wide else torch.bfloat16, torch.float32)
    wide = [[x.detach().double().requires_grad_() for x in each] for each in (parts, sums)]
    truth = reference_join(*wide, [rows_of(layout, layout.heads, 16) for layout in APART], (2, 3, 16))
    sent = torch.randn_like(truth[0]).to(out.dtype)
    torch.testing.assert_close(out, truth[0].to(out.dtype))
    grads = torch.autograd.grad(out, [*parts, *sums], sent)
    true_grads = torch.autograd.grad(truth[0], [*wide[0], *wide[1]], sent.double())
    for grad, expected in zip(grads, true_grads, strict=True):
        assert (grad.double() - expected).norm() <= 1e-2 * expected.norm()


def test_views_and_copies_side_by_side():
    """What is copied ahead goes to the pick it was copied for."""
    x = torch.randn(2, 3, 16, 3, dtype=torch.float64, requires_grad=True)
    layouts = [APART[1], APART[0], APART[1], Compact((0,), (2,), 3, 3, 1, 0)]
    picks = [picked(layout, layout.heads, 16) for layout in layouts]
    ahead = take_ahead(x, picks)
    assert [each is None for each in ahead] == [pick.is_view for pick in picks] == [True, False, True, False]
    for layout, pick, taken in zip(layouts, picks, ahead, strict=True):
        expected = x.flatten(1, 2)[:, rows_of(layout, layout.heads, 16)].flatten(0, 1)
        assert torch.equal(take(x, pick, taken), expected)
    assert take_ahead(x.detach(), picks) == [None] * 4


def test_slots_that_no_gradient_reaches():
    """Of several sides taken at once, some may be unused."""
    x = torch.randn(2, 3, 16, 3, dtype=torch.float64, requires_grad=True)
    for index, layout in enumerate(APART):
        slots = take_slots(x, numbers_of(APART, 16))[index]
        expected = x.flatten(1, 2)[:, rows_of(layout, layout.heads, 16)].flatten(0, 1)
        grads = [torch.autograd.grad(each.square().sum(), x)[0] for each in (slots, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.slow
def test_a_graph_trains_through_them():
    """Gathered, changed, joined and sent back by inductor as by autograd: what a compiled training step does."""
    picks = [picked(layout, layout.heads, 16) for layout in APART]

    def step(x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        taken = [take(x, pick, ahead) for pick, ahead in zip(picks, take_ahead(x, picks), strict=True)]
        out, lse = join(picks, [each.sin() for each in taken], [each.sum(-1) + shift for each in taken], (2, 3, 16))
        assert lse is not None
        return out, lse

    x, shift = torch.randn(2, 3, 16, 3, requires_grad=True), torch.ones((), requires_grad=True)
    torch.compiler.reset()
    results = []
    for run in (step, torch.compile(step, fullgraph=True, dynamic=False)):
        out, lse = run(x, shift)
        reached = torch.where(lse == -torch.inf, 0.0, lse)
        grads = torch.autograd.grad(out.square().sum() + reached.sum(), (x, shift))
        results.append((out, lse, *grads))
    torch.testing.assert_close(*results)


def test_sums_over_terms_are_kept_wide():
    """Many small gradients on one large one: bfloat16 would lose them."""
    layout = Compact((0,), (0,), 1, 4, 1, 0)
    slots = [torch.full((1, 1, 4, 2), value, dtype=torch.bfloat16) for value in (256.0, *[1.0] * 64)]
    total = add_slots(slots, numbers_of([layout] * 65, 4), [1, 1, 4, 2])
    assert total.dtype == torch.bfloat16
    assert (total == 320).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_words(dtype):
    """Rows in units of 16 bytes, where all of them consist of such: the same bits."""
    x = torch.randn(2, 9, 40).to(dtype)
    x[0, 0, 0] = torch.nan
    assert _slots._in_words(x[:, ::2, 8:24])
    assert not any(_slots._in_words(y) for y in (x[..., :9], x[..., 1:17], x[..., ::2], x.mT[:, :8].mT[..., :7]))
    target = torch.zeros(2, 5, 24, dtype=dtype)[..., 8:]
    source = x[:, ::2, 8:24]
    target.view(_slots._WORD).copy_(source.view(_slots._WORD))
    assert torch.equal(target.view(torch.uint8), source.contiguous().view(torch.uint8))


@pytest.mark.parametrize("pattern", [masks.longnet(*LONGNET_5), masks.longnet(*LONGNET_5) & masks.causal()])
def test_a_million_tokens_hold_little(pattern):
    """All that a call keeps on an accelerator, tables included, is small beside q: 2 GiB in bfloat16."""
    N, H = 1 << 20, 8
    bound = pattern.bind(num_heads=H, num_queries=N, num_keys=N)
    chosen = plan(bound, device="cuda", allowed=allowed_on(torch.device("cuda")))
    options = {"num_kv_heads": H, "block_size": (128, 128), "device": torch.device("meta")}
    assert make_flex_program(chosen, Layout(N), **options).nbytes < (2 << 30) / 32
    compact = [next(each for each in options if each.layout == "compact") for options in chosen.options]
    terms = tuple(term for option in compact for term in option.terms)
    program = make_flex_program(replace(chosen, terms=terms), Layout(N), **options)
    assert sum(step.nbytes for step in program.steps) < 1 << 10
    assert program.nbytes < 1 << 20
