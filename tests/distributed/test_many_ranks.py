"""Any number of ranks give what one gives, by any schedule and with any feature, and just what is needed is sent."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flexdilated import attend, masks
from flexdilated.distributed import Sharding, traffic
from flexdilated.distributed._exchange import exchange_backward_op, exchange_op
from flexdilated.distributed._ring import ring_backward_op, ring_op
from flexdilated.distributed.group import PlainCall
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import (
    DRAWN,
    HEADS,
    NAMES,
    SEED,
    WAYS,
    ShardedCase,
    Way,
    assert_whole,
    by_each_way,
    by_way,
    call,
    leaves_of,
    line,
    run_time_cases,
    sharded_cases,
    shares_of,
    tensors_for,
    together,
    ways_of,
)

# B batch, H query heads, G key/value heads, L tokens of a rank, D head dim


@pytest.mark.parametrize(("W", "most"), [(1, 3), (2, 6), (3, 5), (5, 3)])
@DRAWN
@given(data=st.data())
def test_many_ranks_are_one(W: int, most: int, data: st.DataObject):
    """Output, lse and all gradients equal those of one rank, by every schedule that serves the call.

    For drawn patterns, run-time tensors, heads and offsets of heads, shardings, engines and features.
    """
    kinds = sharded_cases(W) | run_time_cases(W)
    cases = data.draw(st.lists(kinds, min_size=most - 2, max_size=most))
    engine = data.draw(st.sampled_from([None, "portable", "flex"]))
    for found in by_each_way([(case, ways_of(case, engine)) for case in cases]):
        assert_whole(*found)


def third_keys(b, h, q, k):
    return (k % 3 == h % 3) & (k <= q)


def not_drawn() -> list[ShardedCase]:
    """Zero keys with dropout, keys of batch 1, what a rank reads of heads in odd groups, and a function."""
    ragged, zigzag = Sharding(48, 3, shard_lengths=(30, 0, 18)), Sharding(48, 3, "zigzag")
    tensors, shared = tensors_for(6, 3, 48, B=2, D=4, E=3, sinks=True), tensors_for(6, 6, 48, B=3)
    zeros, positions = masks.longnet([8, 20, 48], [1, 2, 4], padding="zeros"), torch.arange(48)
    shared = (shared[0], *(x[:1].clone() for x in shared[1:]))  # one key of batch 1 for all entries
    longnet = oracle.counts(oracle.longnet([8, 16, 40], [1, 2, 4]), range(12), 12, positions, positions)
    custom = oracle.both(oracle.causal(), lambda h, H, q, k: (k[None] % 3 == h % 3).expand(len(q), -1).long())
    counts = oracle.counts(custom, range(4), 4, positions, positions)
    return [
        ShardedCase(zeros, None, zigzag, tensors, dropout_p=0.4),
        ShardedCase(masks.causal(), None, ragged, shared),
        ShardedCase(masks.longnet([8, 16, 40], [1, 2, 4]), longnet, zigzag, tensors_for(12, 4, 48, B=2, D=4)),
        ShardedCase(masks.custom(third_keys), counts, ragged, tensors_for(4, 2, 48, B=2, D=4, sinks=True)),
    ]


def test_what_is_not_drawn():
    """In a ring, the lse of each part, by which parts are merged, is that without dropout."""
    for found in by_way(not_drawn(), None):
        assert_whole(*found)


def errors_of(case: ShardedCase, found: tuple[Tensor, ...]) -> dict[str, float]:
    """The root mean square error of each result but the lse.

    That is a sum of logarithms, rounded once a part, to a few units in its last place.
    """
    pairs = zip(NAMES, found, case.whole, strict=False)
    return {name: float((x - y).square().mean().sqrt()) for name, x, y in pairs if name != "lse"}


def test_the_error_does_not_grow_with_the_ranks():
    """Against float64, many ranks are at most 1.1 times as far off as one, in output and gradients.

    Also of key/value heads that several ranks read: what they add up has not been rounded before.
    """
    N = 96
    counts = oracle.counts(oracle.causal(), range(8), 8, torch.arange(N), torch.arange(N))
    tensors = [tensors_for(8, 2, N, D=32, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    cases = [ShardedCase(masks.causal(), counts, Sharding(N, 4, "zigzag"), each) for each in tensors]
    for case, way, shares in by_way(cases, [*WAYS, {"schedule": "ring", "engine": "portable"}, HEADS]):
        leaves = [x.clone().requires_grad_() for x in case.tensors]
        out, lse = attend(*leaves, case.pattern, enable_gqa=True, engine=way.get("engine"), return_lse=True)
        one = out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, case.cotangents)
        alone, many = errors_of(case, one), errors_of(case, together(case, shares))
        assert all(many[name] <= 1.1 * alone[name] for name in alone), (way, alone, many)


LONGNET = masks.longnet([8, 32], [1, 2]) & masks.causal()


def a_case(W: int, order: Any = "zigzag", **size: Any) -> ShardedCase:
    rule = oracle.both(oracle.longnet([8, 32], [1, 2]), oracle.causal())
    counts = oracle.counts(rule, range(4), 4, torch.arange(30), torch.arange(30))
    return ShardedCase(LONGNET, counts, Sharding(30, W, order), tensors_for(4, 2, 30, sinks=True, **size))


def bits_of_two_runs(case: ShardedCase) -> bool:
    pairs = [(shares_of(case, **way).parts, shares_of(case, **way).parts) for way in WAYS]
    return all(torch.equal(x, y) for first, second in pairs for x, y in zip(first, second, strict=True))


def test_results_are_equal_to_the_last_bit_every_time():
    assert on_ranks(3, bits_of_two_runs, a_case(3, B=2)) == [True] * 3


def gradients_by_use(case: ShardedCase) -> list[tuple[str, list[list[Tensor]]]]:
    """On a rank: gradients that must be alike, of output and lse that are used in different ways."""
    found = []
    for way in WAYS:
        out, lse = call(case, *(leaves := leaves_of(case)), **way)
        alone = torch.autograd.grad(lse.sum(), leaves)
        out, lse = call(case, *(leaves := leaves_of(case)), **way)
        found.append((f"lse alone, {way}", [alone, torch.autograd.grad(lse.sum() + (out * 0.0).sum(), leaves)]))
        both = []
        for ignored in (Unused.apply, lambda x: x * 0):
            out, _ = call(case, *(leaves := leaves_of(case)), **way)
            both.append(torch.autograd.grad((ignored(out) if dist.get_rank() == 0 else out).sum(), leaves))
        found.append((f"an unused output, {way}", both))
    return found


class Unused(torch.autograd.Function):
    """Zeros that send no gradient back: not even zeros."""

    @staticmethod
    def forward(ctx, x):
        return x * 0

    @staticmethod
    def backward(ctx, *_):
        return None


def test_gradients_do_not_depend_on_how_results_are_used():
    """Through lse alone or beside zeros; and a rank that uses nothing keeps nobody waiting."""
    for uses in on_ranks(3, gradients_by_use, a_case(3, B=2)):
        for name, (one, other) in uses:
            assert any(x.any() for x in one) or "unused" in name
            for x, y in zip(one, other, strict=True):
                assert_close(x, y, **TIGHT, msg=lambda text, name=name: f"{name}: {text}")


def two_steps(cases: list[ShardedCase], way: Way) -> list[tuple[list[list[dict[str, int]]], bool]]:
    """On a rank: transfers, bytes sent and received of two steps of each case; True if the RNG is as on one rank."""
    found = []
    for case in cases:
        steps = []
        for _ in range(2):
            shares_of(case, **way)
            steps.append([dict(each) for each in (traffic().transfers, traffic().sent, traffic().received)])
        torch.manual_seed(SEED)
        call(case, *leaves_of(case), **way)
        state = torch.get_rng_state()
        torch.manual_seed(SEED)
        attend(*case.tensors[:3], case.pattern, **case.options)
        found.append((steps, torch.equal(state, torch.get_rng_state())))
    return found


@pytest.mark.parametrize("way", [*WAYS, HEADS], ids=lambda way: way["schedule"])
def test_nothing_is_planned_together_after_the_first_step(way: Way):
    """The check of the call is made once. An exchange is one all-to-all for the keys and one for the gradients.

    Each head of a token goes once to each rank that computes with it, and comes back once; the lse on its own. A seed
    is eight bytes, from rank 0, and every rank's generator advances as on one rank.
    """
    N, W, D = 24, 4, 4
    sharding = Sharding(N, W, "zigzag", (10, 2, 5, 7))
    size = torch.ones(8, N, N), sharding, tensors_for(8, 2, N, B=2, D=D)
    cases = [ShardedCase(masks.every(), *size, dropout_p=p) for p in (0.0, 0.3)]
    known = {"exchange": {"keys": 1, "gradients": 1}, "heads": {"heads": 6}}
    for rank, by_case in enumerate(on_ranks(W, two_steps, cases, way)):
        for case, ((first, second), is_same) in zip(cases, by_case, strict=True):
            seed = (1, 8 * (rank == 0), 8 * (rank > 0)) if case.dropout_p else (0, 0, 0)
            assert is_same
            assert first[0].pop("set-up") == 1 + seed[0]
            assert tuple(each.pop("set-up", 0) for each in second) == seed
            assert second[0] == known.get(way["schedule"], first[0])
            if way == HEADS:
                number, length = 2 * 8, sharding.length(rank)  # bytes of one number of both batch entries
                # 2 query heads a rank, and one head of keys and of values; and 2 of output, with one number of lse.
                brought, returned = (2 + 1 + 1) * D * number, 2 * (D + 1) * number
                assert second[1] == second[2] == {"heads": (3 * length + N - length) * (brought + returned)}


ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def checked(case: ShardedCase) -> None:
    """On the only rank: torch's own checks of the ops and their derivatives."""
    group = line().get_group().group_name
    call = PlainCall(case.pattern.text, 0.3, 0, 4, "aten", (), case.sharding.numbers(), group, None, 0.0, "")
    for op, backward_op in ((ring_op, ring_backward_op), (exchange_op, exchange_backward_op)):
        q, k, v, sinks = (x.clone().requires_grad_() for x in case.tensors)
        heads_inside = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for x, checks in ((q, ALL_CHECKS), (heads_inside, ALL_CHECKS[:3])):
            torch.library.opcheck(op, (x, k, v, sinks, [], call.constants), test_utils=checks)
            found = op(x, k, v, sinks, [], call.constants)
            plain = [each.detach() for each in (*found[:2], x, k, v, *found)]
            torch.library.opcheck(
                backward_op, (*plain, [], call.constants), test_utils=("test_schema", "test_faketensor")
            )
        (grad,) = torch.autograd.grad(found[0].square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"the (ring|exchange) has no second derivative"):
            torch.autograd.grad(grad.sum(), x)
        with torch.no_grad():
            assert op(q, k, v, sinks, [], call.constants)[0].grad_fn is None


def test_the_ops_are_what_they_tell_torch():
    on_ranks(1, checked, a_case(1, B=2))
