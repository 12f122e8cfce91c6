"""The ring as an op: compiled as eager, by engines whose backward is autograd's, and what it refuses."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from flexdilated import masks
from flexdilated.distributed import attend
from flexdilated.distributed.group._sharding import Sharding
from flexdilated.distributed.ring._op import ring_backward_op, ring_op
from flexdilated.engines._placed_call import PlacedCall
from flexdilated.masks.text._json import read_text
from tests.distributed.test_ring import assert_whole
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks
from tests.support.ring_cases import RingCase, all_ranks, call_ring, run, shares_of, tensors_for

# B batch, H query heads, G key/value heads, L tokens of a rank, D head dim


def a_case(W: int, order: Any = "zigzag", **size: Any) -> RingCase:
    pattern = masks.longnet([8, 32], [1, 2]) & masks.causal()
    rule = oracle.both(oracle.longnet([8, 32], [1, 2]), oracle.causal())
    counts = oracle.counts(rule, range(4), 4, torch.arange(30), torch.arange(30))
    return RingCase(pattern, counts, Sharding(30, W, order), tensors_for(4, 2, 30, sinks=True, **size))


def compiled_and_eager(case: RingCase) -> list[tuple[Tensor, Tensor]]:
    """On a rank: each result of a function of the ring, compiled in one graph, beside the eager one."""
    ranks = all_ranks()
    here = case.sharding.positions(ranks.rank)

    def step(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = call_ring(case, ranks, q.sin(), k, v, sinks=sinks)
        return out * 2, lse

    results = []
    for function in (torch.compile(step, fullgraph=True, backend="aot_eager"), step):
        leaves = [x[:, :, here].clone().requires_grad_() for x in case.tensors[:3]]
        leaves.append(case.tensors[3].clone().requires_grad_())
        out, lse = function(*leaves)
        grads = torch.autograd.grad((out.sin().sum(), lse.sum()), leaves)
        results.append([x.detach() for x in (out, lse, *grads)])
    return list(zip(*results, strict=True))


def test_compiled_in_one_graph_it_gives_what_it_gives_eagerly():
    for pairs in on_ranks(2, compiled_and_eager, a_case(2)):
        for compiled, eager in pairs:
            assert torch.equal(compiled, eager)


def checked(case: RingCase, transposed: bool) -> None:
    """On the only rank: torch's own checks of the op and its derivative."""
    q, k, v, sinks = (x.clone().requires_grad_() for x in case.tensors)
    if transposed:
        q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    numbers = [[], list(case.sharding.numbers())]
    options = (case.pattern.text, 0.3, 0, 4, "tiles", *numbers, all_ranks().name, None, 0.0, "")
    torch.library.opcheck(ring_op, (q, k, v, sinks, [], *options))
    out, lse = ring_op(q, k, v, sinks, [], *options)
    plain = [x.detach() for x in (out, lse, q, k, v, out, lse)]
    torch.library.opcheck(ring_backward_op, (*plain, [], *options), test_utils=("test_schema", "test_faketensor"))
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="the ring has no second derivative"):
        torch.autograd.grad(grad.sum(), q)
    with torch.no_grad():
        assert ring_op(q, k, v, sinks, [], *options)[0].grad_fn is None


@pytest.mark.parametrize("transposed", [False, True])
def test_the_op_is_what_it_tells_torch(transposed: bool):
    on_ranks(1, checked, a_case(1, B=2), transposed)


def dense_forward(self: PlacedCall, q, k, v, sinks, bindings, *, return_lse=True, wide=False):
    """What flex gives on an accelerator, as autograd follows it."""
    sides = (self.placement.queries, self.placement.keys[0])
    q_at, k_at = (torch.tensor([at for run in runs for at in run]) for runs in sides)
    pattern = read_text(self.pattern)
    places = (torch.zeros(1, dtype=torch.int64), torch.arange(4)[:, None, None], q_at[:, None], k_at[None])
    rules = [rule.mask_mod(num_heads=4, device=torch.device("cpu")) for rule in pattern.branches()]
    counts = sum(rule(*places).expand(4, len(q_at), len(k_at)).long() for rule in rules)
    assert isinstance(counts, Tensor)
    return oracle.attention(q, k, v, counts, self.scale)


def run_by_autograd(case: RingCase):
    """On a rank: the case by an engine without a backward of its own."""
    with patch.object(PlacedCall, "forward", dense_forward):
        return shares_of(case, all_ranks(), engine="flex")


def test_an_engine_whose_backward_is_autograds_gives_the_same_gradients():
    """flex, of which this machine has no backward: its forward is stood in for, its backward is that of autograd."""
    case = a_case(3)
    assert_whole(case, on_ranks(3, run_by_autograd, case))


def unserved(case: RingCase) -> None:
    """On a rank: engines that cannot serve a part of a sequence, or not here, say so before anything is sent."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    leaves = [x[:, :, case.sharding.positions(dist.get_rank())] for x in case.tensors[:3]]
    options = {"mesh": mesh, "sharding": case.sharding, "schedule": "ring", "enable_gqa": True}
    with pytest.raises(ValueError, match="engine='reference' runs whole sequences"):
        attend(*leaves, case.pattern, engine="reference", **options)
    with pytest.raises(ValueError, match="flex gives no lse on CPU"):
        attend(*(x.float() for x in leaves), case.pattern, engine="flex", **options)


def test_engines_that_cannot_serve_say_so():
    on_ranks(2, unserved, a_case(2))


def only_through_lse(case: RingCase) -> list[tuple[Tensor, Tensor]]:
    """On a rank: gradients that come through lse alone, and through a zero output besides."""
    ranks = all_ranks()
    here = case.sharding.positions(ranks.rank)
    found = []
    for weight in (None, 0.0):
        leaves = [x[:, :, here].clone().requires_grad_() for x in case.tensors[:3]]
        out, lse = call_ring(case, ranks, *leaves)
        found.append(torch.autograd.grad(lse.sum() if weight is None else lse.sum() + (out * weight).sum(), leaves))
    return list(zip(*found, strict=True))


def test_a_gradient_may_come_through_lse_alone():
    for pairs in on_ranks(2, only_through_lse, a_case(2)):
        for alone, beside in pairs:
            assert torch.equal(alone, beside)
        assert any(alone.any() for alone, _ in pairs)


def lying(case: RingCase) -> list[tuple[Tensor, Tensor]]:
    """On a rank: gradients of a plain sum, whose cotangents are expanded, for both memory formats."""
    ranks = all_ranks()
    here = case.sharding.positions(ranks.rank)
    found = []
    for tokens_outermost in (False, True):
        leaves = [x[:, :, here] for x in case.tensors[:3]]
        if tokens_outermost:
            leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
        leaves = [x.requires_grad_() for x in leaves]
        out, lse = call_ring(case, ranks, *leaves)
        found.append((out.detach(), lse.detach(), *torch.autograd.grad((out.sum() + lse.sum()), leaves)))
    return list(zip(*found, strict=True))


def test_memory_formats_change_nothing():
    for pairs in on_ranks(3, lying, a_case(3, B=2)):
        for outer, inner in pairs:
            assert_close(outer, inner, **TIGHT)


def test_one_rank_sends_nothing():
    case = a_case(1, "contiguous")
    (((share),),) = on_ranks(1, run, [case])
    assert_whole(case, [share])
    assert share.sent == share.received == {}
