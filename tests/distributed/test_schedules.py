"""Exchange and ring: any number of ranks give what one gives, and just what is needed is sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flexdilated import attend, masks
from flexdilated.distributed import Sharding, _attend, traffic
from flexdilated.distributed._exchange import exchange_backward_op, exchange_op
from flexdilated.distributed._ring import ring_backward_op, ring_op
from flexdilated.distributed.group import PlainCall
from flexdilated.engines._placed_call import PlacedCall
from flexdilated.masks.text import read_text
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.compilers import without_inductor
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import (
    NAMES,
    WAYS,
    ShardedCase,
    Shares,
    assert_whole,
    block_cases,
    by_way,
    call,
    compiled_on_the_last,
    leaves_of,
    line,
    sharded_cases,
    shares_of,
    tensors_for,
    together,
)

# B batch, H query heads, G key/value heads, L tokens of a rank, D head dim

# A failure is shown as it was drawn: to shrink it takes a call of all ranks a step.
DRAWN = settings(max_examples=max(2, settings.default.max_examples // 20), phases=(Phase.reuse, Phase.generate))


@pytest.mark.parametrize(("W", "most"), [(2, 5), (3, 5), (5, 3)])
@DRAWN
@given(data=st.data())
def test_many_ranks_are_one(W: int, most: int, data: st.DataObject):
    """Output, lse and all gradients equal those of one rank, for drawn patterns, heads, shardings and engines."""
    cases = data.draw(st.lists(sharded_cases(W) | block_cases(W), min_size=2, max_size=most))
    engine = data.draw(st.sampled_from([None, "portable"]))
    for found in by_way(cases, [way | {"engine": engine} for way in WAYS]):
        assert_whole(*found)


def third_keys(b, h, q, k):
    return (k % 3 == h % 3) & (k <= q)


def families() -> dict[str, tuple[masks.Pattern | masks.Mixture, Tensor]]:
    """Patterns of each kind for 4 heads over 48 tokens, and how often they allow each pair."""
    causal, window, dense = oracle.causal(), oracle.local_window(5, 2), oracle.every()
    longnet = oracle.longnet([8, 16, 48], [1, 2, 4])
    bigbird = oracle.either(oracle.global_tokens(3, True, True), oracle.random_blocks(48, 4, 2, 7), window)
    heads = [causal, window, oracle.strided(5), oracle.dilated(16, 2, 1)]
    ids = torch.tensor([[0] * 20 + [1] * 9 + [2] * 15 + [-1] * 4, [0] * 3 + [1] * 45])
    seen = torch.arange(48) % 5 != 0
    rows = [[0, 3], [1], [], [0, 1, 2, 3, 4, 5], [5], [2]]
    chosen = torch.tensor([[[0, 3], [1, -1], [2, 0]], [[2, 2], [-1, -1], [5, 1]]])
    beside = masks.selected_blocks(chosen, block=(16, 8), most=2) | masks.local_window(left=5, right=2)
    third = oracle.both(causal, lambda h, H, q, k: (k[None] % 3 == h % 3).expand(len(q), -1).long())
    ladder = masks.longnet([8, 16, 48], [1, 2, 4])
    per_head = [masks.causal(), masks.local_window(left=5, right=2), masks.strided(5), masks.dilated(16, 2, 1)]
    mixed_bigbird = masks.global_tokens(3) | masks.random_blocks(48, block=4, count=2, seed=7)
    return {
        "dense": (masks.every(), _counts(dense)),
        "causal": (masks.causal(), _counts(causal)),
        "longnet": (ladder, _counts(longnet)),
        "causal longnet": (ladder & masks.causal(), _counts(oracle.both(longnet, causal))),
        # In zigzag order, of some shards the second run alone is needed.
        "causal window": (masks.local_window(left=5, right=0), _counts(oracle.local_window(5, 0))),
        "window": (masks.local_window(left=5, right=2), _counts(window)),
        "bigbird": (mixed_bigbird | masks.local_window(left=5, right=2), _counts(bigbird)),
        "per head": (masks.per_head(per_head), _counts(oracle.per_head(*heads))),
        "custom": (masks.custom(third_keys), _counts(third)),
        "block list": (masks.block_list(rows, block=8), _counts(oracle.block_list([rows], 8))),
        "mixture": (masks.causal() + masks.strided(5), _counts(oracle.total(causal, oracle.strided(5)))),
        "documents": (masks.causal() & masks.documents(ids), _counts(causal, ids)),
        "packed longnet": (
            ladder.per_document(masks.documents(ids)),
            torch.stack([_counts(oracle.per_document(longnet, row)) for row in ids]),
        ),
        "padding": (masks.visible_keys(seen), _counts(oracle.visible_keys(seen))),
        "selected": (beside, _counts(oracle.either(oracle.selected_blocks(chosen, (16, 8), 3), window))),
    }


def _counts(rule: oracle.Rule, ids: Tensor | None = None) -> Tensor:
    """(H, N, N), or (B, H, N, N) where documents are kept apart."""
    positions = torch.arange(48)
    if ids is None:
        return oracle.counts(rule, range(4), 4, positions, positions)
    return torch.stack([_counts(oracle.both(rule, oracle.documents(row))) for row in ids])


SHARDINGS = {
    1: [Sharding(48, 1), Sharding(48, 1, "zigzag")],
    2: [Sharding(48, 2, "zigzag"), Sharding(48, 2, shard_lengths=(48, 0))],
    3: [Sharding(48, 3), Sharding(48, 3, "zigzag", (30, 0, 18))],
    4: [Sharding(48, 4, "zigzag"), Sharding(48, 4, shard_lengths=(1, 40, 0, 7))],
    8: [Sharding(48, 8, shard_lengths=(9, 9, 5, 5, 5, 5, 9, 1))],
}
KINDS = {1: slice(0, None, 5), 2: slice(1, None, 2), 3: slice(1, None, 2), 4: slice(0, None, 2), 8: slice(5, 6)}


@pytest.mark.parametrize("W", [1, 2, 3, 4, 8])
def test_every_family_on_every_number_of_ranks(W: int):
    """With grouped heads, sinks, and a gradient through lse; in both orders, ragged, a rank with nothing."""
    tensors = tensors_for(4, 2, 48, B=2, D=4, sinks=True)
    kinds = list(families().values())[KINDS[W]]
    cases = [ShardedCase(*kind, sharding, tensors) for kind, sharding in zip(kinds, cycle(SHARDINGS[W]))]
    portable = [way | {"engine": "portable"} for way in WAYS] if W == 3 else []
    for found in by_way(cases, [*WAYS, *portable]):
        assert_whole(*found)


LISTS = {
    "own keys alone": [[0], [1], [2], [3]],
    "others' keys alone": [[3], [0], [1], [2]],
    "the first sees none and serves": [[], [0, 1], [2], [0, 3]],
    "none sees any": [[], [], [], []],
}


def test_ranks_without_some_keys():
    """And without tokens: rows without keys have output 0 and lse -inf, or their sink."""
    cases = []
    for place, rows in enumerate(LISTS.values()):
        counts = oracle.counts(oracle.block_list([rows], 12), range(4), 4, torch.arange(48), torch.arange(48))
        for lengths, sinks in (((12, 12, 12, 12), place % 2 == 0), ((24, 0, 0, 24), place % 2 == 1)):
            sharding, tensors = Sharding(48, 4, shard_lengths=lengths), tensors_for(4, 2, 48, sinks=sinks)
            cases.append(ShardedCase(masks.block_list(rows, block=12), counts, sharding, tensors))
    for found in by_way(cases):
        assert_whole(*found)


def on_one_rank(case: ShardedCase, engine: str | None = None) -> tuple[Tensor, ...]:
    """What `attend` makes of the whole."""
    leaves = [x.clone().requires_grad_() for x in case.tensors]
    out, lse = attend(*leaves, case.pattern, enable_gqa=True, engine=engine, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, case.cotangents)


def errors_of(case: ShardedCase, found: Sequence[Tensor]) -> dict[str, float]:
    """The root mean square error of each result but the lse.

    That is a sum of logarithms, rounded once a part, to a few units in its last place.
    """
    pairs = zip(NAMES, found, case.whole, strict=False)
    return {name: float((x - y).square().mean().sqrt()) for name, x, y in pairs if name != "lse"}


@pytest.mark.parametrize("engine", [None, "portable"])
def test_the_error_does_not_grow_with_the_ranks(engine: str | None):
    """Against float64, many ranks are at most 1.1 times as far off as one, in output and gradients."""
    N = 192
    counts = oracle.counts(oracle.causal(), range(4), 4, torch.arange(N), torch.arange(N))
    tensors = [tensors_for(4, 2, N, D=32, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for W, order in ((2, "zigzag"), (8, "contiguous")):
        cases = [ShardedCase(masks.causal(), counts, Sharding(N, W, order), each) for each in tensors]
        for case, way, shares in by_way(cases, [way | {"engine": engine} for way in WAYS]):
            alone, many = errors_of(case, on_one_rank(case, engine)), errors_of(case, together(case, shares))
            assert all(many[name] <= 1.1 * alone[name] for name in alone), (way, W, alone, many)


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
        for outermost in (False, True):  # of a plain sum cotangents are expanded
            leaves = [x.detach() for x in leaves_of(case)]
            if outermost:
                leaves[:3] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves[:3]]
            out, lse = call(case, *(x.requires_grad_() for x in leaves), **way)
            both.append([out.detach(), lse.detach(), *torch.autograd.grad(out.sum() + lse.sum(), leaves)])
        found.append((f"memory formats, {way}", both))
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
    """Through lse alone or beside zeros; in either memory format; and a rank that uses nothing keeps nobody waiting."""
    for uses in on_ranks(3, gradients_by_use, a_case(3, B=2)):
        for name, (one, other) in uses:
            assert any(x.any() for x in one) or "unused" in name
            for x, y in zip(one, other, strict=True):
                assert_close(x, y, **TIGHT, msg=lambda text, name=name: f"{name}: {text}")


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


def dense_forward(self: PlacedCall, q, k, v, bindings, *, wide=False):
    """What flex gives on an accelerator, as autograd follows it."""
    sides = (self.placement.queries, self.placement.keys[0])
    q_at, k_at = (torch.tensor([at for run in runs for at in run]) for runs in sides)
    pattern = read_text(self.pattern)
    places = (torch.zeros(1, dtype=torch.int64), torch.arange(4)[:, None, None], q_at[:, None], k_at[None])
    rules = [rule.mask_mod(num_heads=4, device=torch.device("cpu")) for rule in pattern.branches()]
    counts = sum(rule(*places).expand(4, len(q_at), len(k_at)).long() for rule in rules)
    assert isinstance(counts, Tensor)
    return oracle.attention(q, k, v, counts, self.scale)


def run_by_autograd(case: ShardedCase) -> Shares:
    """On a rank: the ring by an engine without a backward of its own."""
    engine = {"choose_engine": lambda *_, **__: "flex", "placed_engine": lambda *_: "flex"}
    with patch.object(PlacedCall, "forward", dense_forward), patch.multiple(_attend, **engine):
        return shares_of(case, schedule="ring")


def test_an_engine_whose_backward_is_autograds_gives_the_same_gradients():
    """flex, of which this machine has no backward: its forward is stood in for, its backward is that of autograd."""
    case = a_case(3)
    assert_whole(case, WAYS[1], on_ranks(3, run_by_autograd, case))


def flex_and_refusals(case: ShardedCase) -> float:
    """How far flex, eager and in one graph, is from tiles; engines that cannot serve say so before anything is sent."""
    window = masks.causal() & masks.local_window(left=10, right=0)
    q, k, v = (x.detach().float() for x in leaves_of(case)[:3])
    options: dict[str, Any] = {"mesh": line(), "sharding": case.sharding, "enable_gqa": True}

    def exchanged(engine: str) -> Tensor:
        return _attend.attend(q, k, v, window, schedule="exchange", engine=engine, **options)

    with without_inductor():  # its kernels run parts in tests/engines/test_placed_call.py
        flex = (exchanged("flex"), compiled_on_the_last(exchanged)("flex"))
    traffic().reset()
    with pytest.raises(ValueError, match=r"flex gives no lse on CPU.*engine='aten' serves it"):
        _attend.attend(q, k, v, window, schedule="ring", engine="flex", **options)
    with pytest.raises(ValueError, match="engine='reference' runs whole sequences"):
        _attend.attend(q, k, v, window, schedule="ring", engine="reference", **options)
    assert not traffic().sent
    return max(float((each - exchanged("aten")).abs().max()) for each in flex)


def test_flex_attends_to_what_came():
    assert max(on_ranks(2, flex_and_refusals, a_case(2, D=16))) < 1e-5


def steps_and_transfers(case: ShardedCase, schedule: str) -> list[dict[str, int]]:
    """The transfers of each of three steps."""
    found = []
    for _ in range(3):
        traffic().reset()
        call(case, *leaves_of(case), schedule=schedule)[0].sum().backward()
        found.append(dict(traffic().transfers))
    return found


def test_nothing_is_planned_together_after_the_first_step():
    """The set-up's check is made once. An exchange is one all-to-all for the keys and one for the gradients."""
    for steps in on_ranks(3, steps_and_transfers, a_case(3, B=2), "exchange"):
        assert steps[0] == {"set-up": 1, "keys": 1, "gradients": 1}
        assert steps[1:] == [{"keys": 1, "gradients": 1}] * 2
    for first, *later in on_ranks(3, steps_and_transfers, a_case(3, B=2), "ring"):
        assert first["set-up"] == 1
        assert later == [{role: times for role, times in first.items() if role != "set-up"}] * 2
