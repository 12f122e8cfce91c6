"""The exchange: any number of ranks give what one gives, and exactly the needed keys are sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing import assert_close

from flexdilated import masks
from flexdilated.distributed import BufferPool, Sharding, attend, traffic
from flexdilated.distributed.group._ranks import Ranks
from tests.distributed.test_ring import NAMES, SHARDINGS, families
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks
from tests.support.ring_cases import RingCase, Shares, ring_cases, shares_of, tensors_for, together, whole_of

# A failure is shown as it was drawn: to shrink it takes a call of all ranks a step.
DRAWN = settings(max_examples=max(2, settings.default.max_examples // 20), phases=(Phase.reuse, Phase.generate))


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def call_attend(
    case: RingCase, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The public function on a rank's shards."""
    heads = {"head_offset": case.head_offset, "num_heads_global": case.num_heads_global, "enable_gqa": True}
    where = {"mesh": mesh(), "sharding": case.sharding, "sinks": sinks}
    return attend(q, k, v, case.pattern, return_lse=True, **heads, **where, **options)


def run(cases: list[RingCase], **options: Any) -> list[Shares]:
    ranks = Ranks.of(mesh())
    return [shares_of(case, ranks, call_attend, **options) for case in cases]


def run_exchange(cases: list[RingCase]) -> list[Shares]:
    return run(cases, schedule="exchange")


def needed_bytes(case: RingCase, receiver: int, sender: int) -> int:
    """K and V of every token and key/value head of the sender that the dense rule gives a query of the receiver."""
    k = case.tensors[1]
    rows, columns = case.sharding.positions(receiver), case.sharding.positions(sender)
    allowed = case.counts.flatten(0, -4) if case.counts.dim() > 3 else case.counts[None]
    seen = allowed[:, :, rows][:, :, :, columns].bool().any(2).any(0)  # in some batch entry: (H, keys)
    groups = seen.unflatten(0, (k.shape[1], -1)).any(1)
    return 2 * int(groups.sum()) * k.shape[0] * k.shape[3] * k.element_size()


def assert_whole(case: RingCase, shares: list[Shares]) -> None:
    """All ranks' results together are the definition's; sent is what the dense rule needs, once in each direction."""
    for name, found, truth in zip(NAMES, together(case, shares), whole_of(case), strict=False):
        assert_close(found, truth, **TIGHT, msg=lambda text, name=name: f"{name} of {case}: {text}")
    for rank, share in enumerate(shares):
        others = [other for other in range(len(shares)) if other != rank]
        needed = sum(needed_bytes(case, rank, other) for other in others)
        wanted = sum(needed_bytes(case, other, rank) for other in others)
        moved = [side.get(role, 0) for role in ("keys", "gradients") for side in (share.received, share.sent)]
        assert moved == [needed, wanted, wanted, needed], f"bytes on rank {rank} of {case}"


@pytest.mark.parametrize("W", [2, 3, 5])
@DRAWN
@given(data=st.data())
def test_many_ranks_are_one(W: int, data: st.DataObject):
    """Output, lse and every gradient, for drawn patterns, heads and shardings; several cases a call."""
    cases = data.draw(st.lists(ring_cases(W), min_size=2, max_size=4))
    for case, *shares in zip(cases, *on_ranks(W, run_exchange, cases), strict=True):
        assert_whole(case, shares)


@pytest.mark.parametrize("W", [2, 3, 4, 8])
def test_every_family_on_every_number_of_ranks(W: int):
    """With grouped heads, sinks, a gradient through lse; in both orders, ragged, and with a rank that has nothing."""
    tensors = tensors_for(4, 2, 48, B=2, D=4, sinks=True)
    kinds = list(families().values())[W // 2 % 2 :: 5 if W == 8 else 2]  # on two numbers, or more
    cases = [RingCase(*kind, SHARDINGS[W][place % 2], tensors) for place, kind in enumerate(kinds)]
    for case, *shares in zip(cases, *on_ranks(W, run_exchange, cases), strict=True):
        assert_whole(case, shares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_does_not_grow_with_the_ranks(dtype: torch.dtype):
    """Against float64, many ranks are at most 1.1 times as far off as one, in output and gradients."""
    N = 192
    tensors = tensors_for(4, 2, N, D=32, dtype=dtype)
    counts = oracle.counts(oracle.causal(), range(4), 4, torch.arange(N), torch.arange(N))
    errors = {}
    for W in (1, 2, 4, 8):
        case = RingCase(masks.causal(), counts, Sharding(N, W, "zigzag"), tensors)
        found = together(case, [shares for (shares,) in on_ranks(W, run_exchange, [case])])
        errors[W] = [float((x - truth).square().mean().sqrt()) for x, truth in zip(found, whole_of(case), strict=True)]
    for W in (2, 4, 8):
        ratios = {name: many / one for name, many, one in zip(NAMES, errors[W], errors[1], strict=False)}
        del ratios["lse"]  # a sum of logarithms: it is rounded once a part, to a few units in its last place
        assert max(ratios.values()) <= 1.1, (W, ratios)


CAUSAL = RingCase(
    masks.longnet([8, 16, 48], [1, 2, 4]) & masks.causal(),
    oracle.counts(
        oracle.both(oracle.longnet([8, 16, 48], [1, 2, 4]), oracle.causal()),
        range(4), 4, torch.arange(48), torch.arange(48),
    ),
    Sharding(48, 3, "zigzag", (30, 0, 18)),
    tensors_for(4, 2, 48, dtype=torch.float32, D=16),
)  # fmt: skip


def run_each(options: list[dict[str, Any]]) -> list[Shares]:
    pool = BufferPool(threshold_bytes=0)
    return [run([CAUSAL], **(each | ({"pool": pool} if each.get("pool") else {})))[0] for each in options]


def test_buffers_change_nothing_and_codecs_little():
    """Bit-equal with a pool; a codec's error is the codec's, and it sends fewer bytes."""
    ways = [{}, {"pool": True}, {"codec": "bf16"}, {"codec": "int8"}, {"codec": "auto", "error_bound": 0.02}]
    options = [{"schedule": "exchange", **way} for way in ways]
    plain, pooled, bf16, int8, auto = zip(*on_ranks(3, run_each, options), strict=True)
    for alone, with_pool in zip(plain, pooled, strict=True):
        for x, y in zip(alone.parts, with_pool.parts, strict=True):
            assert torch.equal(x, y)
    truth = together(CAUSAL, plain)
    for coded, rtol in ((bf16, 2**-7), (int8, 0.03), (auto, 0.03)):
        for x, y in zip(together(CAUSAL, coded), truth, strict=True):
            assert float((x - y).norm() / y.norm()) < rtol
        assert all(
            0 < each.sent["keys"] < whole.sent["keys"] for each, whole in zip(coded[::2], plain[::2], strict=True)
        )


def steps_and_transfers() -> list[dict[str, int]]:
    """The transfers of each of three steps."""
    found = []
    for _ in range(3):
        traffic().reset()
        run_without_reset()
        found.append(dict(traffic().transfers))
    return found


def run_without_reset() -> None:
    here = CAUSAL.sharding.positions(dist.get_rank())
    q, k, v = (x[:, :, here].requires_grad_() for x in CAUSAL.tensors)
    options = {"mesh": mesh(), "sharding": CAUSAL.sharding, "schedule": "exchange", "enable_gqa": True}
    attend(q, k, v, CAUSAL.pattern, **options).sum().backward()


def test_nothing_is_planned_together_after_the_first_step():
    """One all-to-all for the keys and one for the gradients; the set-up's check is made once."""
    for steps in on_ranks(3, steps_and_transfers):
        assert steps[0] == {"set-up": 1, "keys": 1, "gradients": 1}
        assert steps[1:] == [{"keys": 1, "gradients": 1}] * 2


def bad_calls() -> list[str]:
    """What each bad call of two ranks answers."""
    q = torch.randn(1, 2, 8, 4)
    options = {"mesh": mesh(), "sharding": Sharding(16, 2)}
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    bad: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, q, q, masks.causal()), {"mesh": grid}),
        ((q, q, q, masks.causal()), {"mesh": None}),
        ((q, q, q, masks.causal()), {"mesh": mesh(), "sharding": Sharding(18, 2)}),
        ((q, q, q, masks.causal()), {"mesh": mesh(), "sharding": Sharding(16, 3)}),
        ((q, q, q, masks.causal()), options | {"schedule": "gather"}),
        ((q, q, q, masks.causal()), options | {"codec": "top-k"}),
        ((q, q, q, masks.causal()), options | {"codec": "auto"}),
        ((q, q, q, masks.causal()), options | {"pool": 3}),
        ((q, q, q, masks.causal()), options | {"engine": "reference"}),
        ((q, q[:, :, :4], q[:, :, :4], masks.causal()), options),
        ((q, q[:, :1], q[:, :1], masks.causal()), options),
        ((q[:, :, :0], q[:, :, :0], q[:, :, :0], masks.causal()), {"mesh": mesh()}),
        ((q, q, q, masks.causal() & masks.documents("ids")), options),
        ((q, q, q, "causal"), options),
    ]
    answers = []
    for arguments, given_options in bad:
        with pytest.raises((TypeError, ValueError)) as error:
            attend(*arguments, **given_options)
        answers.append(str(error.value))
    return answers


def test_bad_calls_are_answered_before_anything_is_sent():
    told = [
        'mesh["data"]', "DeviceMesh", "this rank's shard", "over the ranks of the mesh", "schedule must be one of",
        "codec must be", "error_bound", "pool must be", "runs whole sequences", "this rank's shard", "enable_gqa",
        "needs a `Sharding`", "'ids'", "pattern must be",
    ]  # fmt: skip
    for answers in on_ranks(2, bad_calls):
        for answer, part in zip(answers, told, strict=True):
            assert part in answer
