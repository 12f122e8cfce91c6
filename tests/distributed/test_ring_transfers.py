"""What moves in a ring: when, how much is held of it, in which buffers, by which codecs, and what a failure leaves."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed import DistError
from torch.testing import assert_close

from flexdilated import masks
from flexdilated.distributed.group._sharding import Sharding
from flexdilated.distributed.ring import _transfers
from flexdilated.distributed.wire._codec import codec_named, gradient_codec
from flexdilated.distributed.wire._pool import BufferPool
from flexdilated.engines._placed_call import PlacedCall
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks, outcomes_on_ranks
from tests.support.ring_cases import RingCase, Shares, all_ranks, run, tensors_for, together, whole_of

# W ranks, N tokens of all of them


def a_case(W: int, N: int = 40, order: Any = "contiguous", pattern: Any = None, **kind: Any) -> RingCase:
    """A dense call, unless a pattern is given (whose counts nobody asks for), with grouped heads."""
    pattern = masks.every() if pattern is None else pattern
    return RingCase(pattern, torch.ones(1, N, N), Sharding(N, W, order), tensors_for(4, 2, N, B=2, **kind))


def events_of(case: RingCase) -> list[str]:
    """On a rank: the order in which messages are posted and shards computed with, in the forward."""
    events: list[str] = []
    post, forward = _transfers.post, PlacedCall.forward

    def logged_post(role, *args, **options):
        events.append(f"post {role}")
        return post(role, *args, **options)

    def logged_forward(*args, **options):
        events.append("compute")
        return forward(*args, **options)

    with patch.object(_transfers, "post", logged_post), patch.object(PlacedCall, "forward", logged_forward):
        run([case])
    return events[: events.index("post gradients")]


def test_the_next_shard_is_on_its_way_while_one_is_computed_with():
    for events in on_ranks(4, events_of, a_case(4)):
        forward = ["post keys", "compute", "post keys", "compute", "post keys", "compute", "compute"]
        assert events[:7] == forward


def held_by(case: RingCase) -> dict[str, float]:
    """On a rank: the most that lived at once of what messages carry, in shards; "own" is where its keys come from."""
    live, peak, known = Counter[str](), Counter[str](), set[int]()
    post = _transfers.post

    def hold(x: Tensor, role: str) -> None:
        storage = x.untyped_storage()
        if storage._cdata in known:
            return
        known.add(storage._cdata)
        live[role] += storage.nbytes()
        peak[role] = max(peak[role], live[role])
        weakref.finalize(storage, drop, storage._cdata, role, storage.nbytes()).atexit = False

    def drop(key: int, role: str, nbytes: int) -> None:
        known.discard(key)
        live[role] -= nbytes

    def counting(role, ranks, *, send=(), receive=()):
        for x, _ in receive:
            hold(x, role)
        for x, _ in send:
            hold(x, "own" if role == "keys" else role)
        return post(role, ranks, send=send, receive=receive)

    with patch.object(_transfers, "post", counting):
        run([case])
    assert live.total() == 0, "all that was held must be freed"
    k = case.tensors[1]
    return {role: nbytes / (2 * k.nbytes / case.sharding.num_ranks) for role, nbytes in peak.items()}


@pytest.mark.parametrize("W", [3, 5])
def test_two_shards_of_others_are_held_and_two_of_gradients(W: int):
    """However many ranks there are: the one in use and the next, and those that go back and come back."""
    for peak in on_ranks(W, held_by, a_case(W, 20 * W)):
        assert peak == {"keys": 2.0, "gradients": 2.0, "own": 1.0}


def test_parts_of_a_shard_are_sent_from_where_they_lie():
    """In zigzag order a causal rule needs one run of some shards, whole shards of others."""
    case = a_case(4, 80, "zigzag", masks.causal())
    (shares,) = zip(*on_ranks(4, run, [case]), strict=True)
    assert len({share.received["keys"] for share in shares}) > 1
    for peak in on_ranks(4, held_by, case):
        assert peak["own"] == 1.0
        assert peak["keys"] <= 2.0
        assert peak["gradients"] <= 2.0


def leased(case: RingCase) -> tuple[Shares, Shares, Any, Any]:
    """On a rank: the shares without a pool and with one, and its statistics after one step and after three."""
    pool = BufferPool("cpu", threshold_bytes=0, debug=True)
    (plain,), (first,) = run([case]), run([case], {"pool": pool.name})
    after_one = pool.statistics
    run([case, case], {"pool": pool.name})
    return plain, first, after_one, pool.statistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_of_a_pool_change_nothing_and_are_used_again(dtype: torch.dtype):
    case = a_case(4, 50, "zigzag", masks.causal(), dtype=dtype)
    for plain, pooled, after_one, after_three in on_ranks(4, leased, case):
        for x, y in zip(plain.parts, pooled.parts, strict=True):
            assert torch.equal(x, y)
        assert after_one.num_leases >= after_one.num_allocations > 0
        assert after_three.num_leases == 3 * after_one.num_leases
        assert after_three.num_allocations == after_one.num_allocations
        assert after_three.leased_bytes == 0


def test_results_are_equal_to_the_last_bit_every_time():
    case = a_case(3, 60, "zigzag", masks.longnet([8, 16, 64], [1, 2, 4]), dtype=torch.float32)
    for first, second in on_ranks(3, run, [case, case]):
        for x, y in zip(first.parts, second.parts, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("codec", "dtype"), [("bf16", torch.float64), ("int8", torch.float64), ("int8", torch.half)])
def test_codecs_change_what_comes_and_nothing_else(codec: Any, dtype: torch.dtype):
    """Each rank's output is that of its own keys as they are and the others' as they come; bytes are the codec's."""
    W, N, coder = 3, 30, codec_named(codec)
    case = a_case(W, N, dtype=dtype)
    q, *own = (x.double() for x in case.tensors)
    wide = torch.promote_types(dtype, torch.float32)
    came = []
    for x in case.tensors[1:]:
        room = torch.empty_like(x, dtype=wide)
        came.append(coder.decode(coder.encode(x), 8, dtype, out=room).double())
    shares = [shares for (shares,) in on_ranks(W, run, [case], {"codec": codec})]
    tolerance = TIGHT if dtype == torch.float64 else {"rtol": 2**-8, "atol": 2**-12}
    for rank, share in enumerate(shares):
        mine = torch.arange(N) // (N // W) == rank
        k, v = (torch.where(mine[:, None], x, y) for x, y in zip(own, came, strict=True))
        out, lse = oracle.attention(q[:, :, mine], k, v, torch.ones(1, int(mine.sum()), N))
        assert_close(share.parts[0].double(), out, **tolerance)
        assert_close(share.parts[1].double(), lse, rtol=1e-6, atol=1e-6)
        rows = 2 * 2 * 2 * (N // W) * (W - 1)  # K and V, batch, heads, tokens
        assert share.received["keys"] == 2 * rows * coder.row_bytes(8, dtype)
        assert share.received["gradients"] == rows * gradient_codec(coder, wide).row_bytes(8, wide)
    exact = whole_of(case)
    for name, found, truth in zip(("dq", "dk", "dv"), together(case, shares)[2:], exact[2:], strict=False):
        error = (found - truth).norm() / truth.norm()
        assert error < 0.03, (name, error)  # gradients are those of the keys that came


def test_a_codec_with_a_bound_is_chosen_by_all_ranks_alike():
    case = a_case(3, 31, dtype=torch.float64)
    bounds = {0.05: "int8", 0.005: "bf16", 1e-5: None}
    for bound, name in bounds.items():
        for share in (each for (each,) in on_ranks(3, run, [case], {"codec": "auto", "error_bound": bound})):
            rows = share.received["keys"] / codec_named(name).row_bytes(8, torch.float64)
            assert rows in (2 * 8 * 20, 2 * 8 * 21), (bound, rows)


def failing(case: RingCase, how: str, where: str, when: int) -> Any:
    """On a rank: rank 1 fails in a pass at its shard number `when`; each tells what it was told and has left."""
    pool = BufferPool("cpu", threshold_bytes=0)
    compute, shards = getattr(PlacedCall, where), []

    def fails(*args, **options):
        shards.append(None)
        if len(shards) == when:
            if how == "dies":
                os._exit(7)
            raise MemoryError("no more")
        return compute(*args, **options)

    with patch.object(PlacedCall, where, fails if all_ranks().rank == 1 else compute):
        try:
            run([case], {"pool": pool.name})
        except (DistError, MemoryError) as error:
            return type(error).__name__, str(error), pool.statistics
    return None


@pytest.mark.parametrize(
    ("how", "where", "when"),
    [("dies", "forward", 2), ("dies", "backward", 2), ("raises", "forward", 1), ("raises", "backward", 2)],
)
def test_a_rank_that_fails_leaves_no_other_waiting_and_no_buffer_leased(how: str, where: str, when: int):
    outcomes = outcomes_on_ranks(3, failing, a_case(3), how, where, when, group_timeout=10)
    if how == "dies":
        assert "died with exit code 7" in (outcomes[1].error or "")
    told = [outcome.result for outcome in outcomes if outcome.result is not None]
    assert len(told) == (2 if how == "dies" else 3)
    for name, text, statistics in told:
        assert statistics.num_leases > statistics.leased_bytes == 0
        assert name == "MemoryError" or ("receiving" in text and "timeout of the process group is 10 s" in text)
