"""The aten engine: ladders of real sizes, scales, strides and dtypes of results, programs of a million tokens."""

from functools import partial
from time import process_time

import pytest
import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import WholeRows
from flexdilated.engines.aten._aten_op import plan_aten, portions_on
from flexdilated.engines.aten._program import make_program
from flexdilated.masks import Layout
from flexdilated.masks.orders import Compact
from flexdilated.masks.planning._planner import Plan, plan
from tests.support import oracle
from tests.support.agreement import assert_agrees
from tests.support.ladders import GIGAPATH_5, LONGNET_5, PAPER_5, scaled


class RunPlan(torch.autograd.Function):
    """A program as a differentiable function: the engine without its op, for plans no one would choose."""

    @staticmethod
    def forward(ctx, program, q, k, v):
        out, lse = program.forward(q, k, v, 0.5)
        ctx.program = program
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse = ctx.saved_tensors
        return None, *ctx.program.backward(q, k, v, WholeRows(out, lse, grad_out, grad_lse), 0.5)


def assert_plan_agrees(chosen: Plan, given_order: Layout, data: tuple[Tensor, ...], counts: Tensor, side: int) -> None:
    program = make_program(chosen, given_order, num_kv_heads=data[1].shape[1], block_size=(side, side))
    assert_agrees(lambda q, k, v: RunPlan.apply(program, q, k, v), data, counts, scale=0.5)


LADDERS = {
    "longnet-5": scaled(LONGNET_5, 128),
    "paper-5": scaled(PAPER_5, 128),
    "paper-5, full size": PAPER_5,
    "gigapath-5": scaled(GIGAPATH_5, 180),
    "gigapath-5, full size": GIGAPATH_5,
}


@pytest.mark.parametrize(("causal", "rate"), [(False, 8), (True, 1)], ids=["full, residue", "causal, natural"])
@pytest.mark.parametrize("name", LADDERS)
def test_ladders(name, causal, rate):
    """Grouped heads of different offsets; N a multiple of nothing; in the natural order and in another."""
    segments, rates = LADDERS[name]
    N, H, G = 351, 4, 2
    pattern, rule = masks.longnet(segments, rates), oracle.longnet(segments, rates)
    if causal:
        pattern, rule = pattern & masks.causal(), oracle.both(rule, oracle.causal())
    layout = Layout(N, rate)
    counts = oracle.counts(rule, range(H), H, layout.positions(), layout.positions())
    torch.manual_seed(0)
    drawn = tuple(torch.randn(1, heads, N, 8, dtype=torch.float64, requires_grad=True) for heads in (H, G, G))

    def attend(q, k, v):
        return fd.attend(q, k, v, pattern, enable_gqa=True, layout=layout, return_lse=True)

    assert_agrees(attend, drawn, counts)


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-300, -1e-300])
def test_a_causal_scale_need_not_be_positive(scale):
    """ATen's causal kernel alone would give NaN here."""
    torch.manual_seed(0)
    drawn = tuple(torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    counts = oracle.counts(oracle.causal(), range(2), 2, torch.arange(9), torch.arange(9))
    attend = partial(fd.attend, pattern=masks.causal(), scale=scale, return_lse=True)
    assert_agrees(attend, drawn, counts, scale=scale)


def test_the_output_is_laid_out_like_the_queries():
    """The custom op promises its compiler the strides of q."""
    x = torch.randn(2, 30, 3, 4)
    for q in (
        x.transpose(1, 2),
        x.transpose(1, 2).contiguous(),
        x.permute(2, 0, 1, 3)[:2].expand(2, 2, 30, 4),
    ):
        out = fd.attend(q, q, q, masks.longnet([8], [2]))
        assert out.stride() == torch.empty_like(q).stride()
        q = q.detach().requires_grad_()
        (grad,) = torch.autograd.grad(fd.attend(q, q, q, masks.longnet([8], [2])).sum(), q)
        assert grad.stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_of_one_and_of_several_parts_have_the_dtype_of_q(dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8).to(dtype)
    for pattern in (masks.causal(), masks.longnet([8, 16], [1, 2]), masks.dilated(8, 6, offset=5)):
        out, lse = fd.attend(q, k, v, pattern, engine="aten", return_lse=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)


def test_a_program_over_a_million_tokens_is_made_in_seconds():
    """Hundreds of portions: what each adds must not be looked for among all rows."""
    tokens = Layout(1 << 20)
    pattern = masks.longnet([2048, 4096, 8192], [1, 2, 4]) & masks.causal()
    bound = pattern.bind(num_heads=16, num_queries=1 << 20, num_keys=1 << 20)
    plan = plan_aten(bound, tokens, "cpu", None)
    begin = process_time()
    program = make_program(plan, tokens, num_kv_heads=16, block_size=(), **portions_on("cpu"))
    assert process_time() - begin < 15
    assert len(program.steps) > 100
    assert program.complete


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("most", [1 << 20, 300, 64])
def test_portions_hold_so_many_slots_and_together_all(most, num_heads) -> None:
    """Heads and folds are parted, as far as one fold of one head allows."""
    pattern = masks.longnet([64, 100], [1, 4]) & masks.causal()
    bound = pattern.bind(num_heads=num_heads, num_queries=530, num_keys=530)
    for term in (term for option in plan(bound).options for each in option for term in each.terms):
        parts = term.portions(most)
        tokens = [part.q.tokens().expand(len(part.heads), -1, -1) for part in parts]
        found = [(head, rows.tolist()) for part, each in zip(parts, tokens, strict=True)
                 for head, folds in zip(part.heads, each, strict=True) for rows in folds]  # fmt: skip
        whole = term.q.tokens().expand(len(term.heads), -1, -1)
        wanted = [(head, rows.tolist()) for head, folds in zip(term.heads, whole, strict=True) for rows in folds]
        assert sorted(found) == sorted(wanted)
        if isinstance(term.q, Compact):
            assert all(part.q.num_slots * part.folds * len(part.heads) <= max(most, part.q.num_slots) for part in parts)
