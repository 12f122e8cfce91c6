"""What moves over ranks: when, how much is held of it, in which buffers, by which codecs, and what a failure leaves."""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError
from torch.testing import assert_close

from flexdilated import masks
from flexdilated.distributed import BufferPool, Sharding, _ring
from flexdilated.distributed.wire import Lease
from flexdilated.distributed.wire._codec import Codec, codec_named, gradient_codec
from flexdilated.engines._placed_call import PlacedCall
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.rank_worker import set_group_timeout
from tests.support.ranks import on_ranks, outcomes_on_ranks
from tests.support.sharded_cases import WAYS, ShardedCase, Shares, Way, by_way, shares_of, tensors_for, together

# W ranks, N tokens of all of them

EXCHANGE, RING = WAYS


def a_case(W: int, N: int = 40, order: Any = "contiguous", pattern: Any = None, **kind: Any) -> ShardedCase:
    """A dense call, unless a pattern is given (whose counts nobody asks for), with grouped heads."""
    pattern = masks.every() if pattern is None else pattern
    return ShardedCase(pattern, torch.ones(4, N, N), Sharding(N, W, order), tensors_for(4, 2, N, B=2, **kind))


@contextmanager
def logged() -> Iterator[list[str]]:
    """What happens on this rank, in order: transfers that begin and end, and computing with own keys and others'."""
    events: list[str] = []
    transfer = dist.all_to_all_single

    def begun(*args: Any, **options: Any) -> Any:
        work = transfer(*args, **options)
        events.append("go")
        return SimpleNamespace(wait=lambda: events.append("wait") or work.wait())

    def computed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(call: PlacedCall, *args: Any, **options: Any) -> Any:
            events.append("own" if call.placement.keys == (call.placement.queries,) else "others")
            return function(call, *args, **options)

        return run

    computing = {name: computed(getattr(PlacedCall, name)) for name in ("forward", "backward")}
    with patch.object(dist, "all_to_all_single", begun), patch.multiple(PlacedCall, **computing):
        yield events


def events_of(case: ShardedCase) -> list[str]:
    """On a rank: what happens in a step of an exchange."""
    with logged() as events:
        shares_of(case, **EXCHANGE)
    return events


def test_what_comes_is_on_its_way_while_a_rank_computes():
    """In an exchange own keys' gradients come last, so that the others' are on their way meanwhile."""
    for events in on_ranks(4, events_of, a_case(4)):
        assert events == ["go", "own", "wait", "others", "others", "go", "own", "wait"]


def held_by(case: ShardedCase) -> dict[str, float]:
    """On a rank: the most that lived at once of what messages carry, in shards; "own" is where its keys come from."""
    live, peak, known = Counter[str](), Counter[str](), set[int]()
    post = _ring.post

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

    def counting(role, ranks, *, send=(), receive=(), **buffer):
        for x, _ in receive:
            hold(x, role)
        for x, _ in send:
            hold(x, "own" if role == "keys" else role)
        return post(role, ranks, send=send, receive=receive, **buffer)

    with patch.object(_ring, "post", counting):
        shares_of(case, **RING)
    assert live.total() == 0, "all that was held must be freed"
    k = case.tensors[1]
    return {role: nbytes / (2 * k.nbytes / case.sharding.num_ranks) for role, nbytes in peak.items()}


@pytest.mark.parametrize("W", [3, 5])
def test_two_shards_of_others_are_held_and_two_of_gradients(W: int):
    """However many ranks there are: the one in use and the next, and those that go back and come back."""
    for peak in on_ranks(W, held_by, a_case(W, 20 * W)):
        assert peak == {"keys": 2.0, "gradients": 2.0, "own": 1.0}


class Poisoned(BufferPool):
    """Fills each buffer with NaN before and after its lease."""

    def lease(self, *args: Any) -> Lease:
        lease = super().lease(*args)
        _poison(lease.tensor)
        return lease

    def _take_back(self, lease: Lease) -> None:
        if lease._tensor is not None:
            _poison(lease._tensor)
        super()._take_back(lease)


def _poison(x: torch.Tensor) -> None:
    x.detach().reshape(-1).view(torch.uint8).fill_(0xFF)


def leased(cases: list[ShardedCase]) -> list[tuple[bool, Any, Any]]:
    """On a rank: whether a pool of its own and that of the device change nothing; statistics after steps 1 and 2.

    Each type is sent as it is one way, as int8 the other.
    """
    found, codecs = [], (None, "int8", "int8", None)
    for (case, way), codec in zip(product(cases, WAYS), codecs, strict=True):
        way = way | {"codec": codec}
        pool = Poisoned("cpu", threshold_bytes=0)
        plain, *pooled = (shares_of(case, **way, pool=given) for given in (None, pool, "auto"))
        same = all(torch.equal(x, y) for each in pooled for x, y in zip(plain.parts, each.parts, strict=True))
        after_one = pool.statistics
        shares_of(case, **way, pool=pool)
        found.append((same, after_one, pool.statistics))
    return found


def test_buffers_of_a_pool_change_no_bit_and_are_used_again():
    """What is read without having been written, or after its return, would be NaN."""
    ragged = Sharding(50, 3, "zigzag", (21, 10, 19))
    cases = [
        ShardedCase(masks.causal(), torch.ones(4, 50, 50), ragged, tensors_for(4, 2, 50, B=2, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for by_case in on_ranks(3, leased, cases):
        for same, after_one, after_two in by_case:
            assert same
            assert after_two.num_leases == 2 * after_one.num_leases > 0
            assert after_one.num_leases >= after_one.num_allocations == after_two.num_allocations > 0
            assert after_two.leased_bytes == 0


CODECS = [
    ("bf16", None, "bf16", torch.float64),
    ("int8", None, "int8", torch.float64),
    ("int8", None, "int8", torch.half),
    ("int8", None, "int8", torch.bfloat16),
    ("bf16", None, None, torch.bfloat16),  # it is written so anyway
    ("auto", 0.1, "int8", torch.float32),  # peaks of rows are below 3
    ("auto", 0.005, "bf16", torch.float32),
    ("auto", 1e-5, None, torch.float64),
]


def test_codecs_change_what_comes_and_nothing_else():
    """Each rank's output is that of its own keys as they are and the others' as they come; bytes are the codec's."""
    W, N, D = 3, 31, 7  # rows of int8 begin at odd bytes
    for dtype in dict.fromkeys(dtype for *_, dtype in CODECS):
        given = [each for each in CODECS if each[3] == dtype]
        ways = [
            {**way, "codec": name, "error_bound": bound} for name, bound, _, _ in [(None, None, None, None), *given]
            for way in WAYS
        ]  # fmt: skip
        case = a_case(W, N, dtype=dtype, D=D)
        plain = {}
        for index, (_, way, shares) in enumerate(by_way([case], ways)):
            if way["codec"] is None:
                plain[way["schedule"]] = shares
            else:
                name = given[(index - 2) // 2][2]
                check_coded(case, way, codec_named(name), shares, plain[way["schedule"]])


CLOSE = {
    torch.float64: TIGHT,
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.half: {"rtol": 2**-8, "atol": 2**-8},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
}


def check_coded(case: ShardedCase, way: Way, coder: Codec, shares: list[Shares], plain: list[Shares]) -> None:
    """Gradients are those of the keys that came, and have passed bf16 once."""
    (q, *own), dtype, D = (x.double() for x in case.tensors), case.tensors[0].dtype, case.tensors[0].shape[-1]
    wide, came = torch.promote_types(dtype, torch.float32), []
    for x in case.tensors[1:]:
        came.append(coder.decode(coder.encode(x), D, dtype, out=torch.empty_like(x, dtype=wide)).double())
    totals = [torch.zeros_like(x) for x in own]
    for rank, (share, bare) in enumerate(zip(shares, plain, strict=True)):
        held = case.sharding.positions(rank)
        read = [y.index_copy(2, held, x[:, :, held]) for x, y in zip(own, came, strict=True)]
        leaves = [x.requires_grad_() for x in (q[:, :, held], *read)]
        results = oracle.attention(*leaves, torch.ones(1, len(held), q.shape[2]))
        sent = [x[:, :, held].double() for x in case.cotangents]
        dq, *others = torch.autograd.grad(results, leaves, sent)
        totals = [total + each for total, each in zip(totals, others, strict=True)]
        for found, truth in zip(share.parts, (*results, dq), strict=False):
            assert_close(found.double(), truth.detach(), **CLOSE[dtype], msg=lambda text: f"{way}: {text}")
        row, returned = coder.vector_bytes(D, dtype), gradient_codec(coder, wide).vector_bytes(D, wide)
        assert share.received["keys"] * D * dtype.itemsize == bare.received["keys"] * row, way
        assert share.received["gradients"] * D * wide.itemsize == bare.received["gradients"] * returned, way
        if coder.name is None:
            assert all(torch.equal(x, y) for x, y in zip(share.parts, bare.parts, strict=True)), way
    for found, truth in zip(together(case, shares)[3:], totals, strict=True):
        assert float((found - truth).norm() / truth.norm()) < max(CLOSE[dtype]["rtol"], 1.01 * 2**-8), way


def failing(case: ShardedCase, schedule: str, how: str, where: str) -> Any:
    """On a rank: rank 1 raises as it computes with its own keys (exchange) or its second shard (ring), or dies there.

    In an exchange it dies before it sends. Each tells what it was told, what it has left, and what happened.
    """
    pool, calls = BufferPool("cpu", threshold_bytes=0), []
    holder, name = (dist, "all_to_all_single") if (schedule, how) == ("exchange", "dies") else (PlacedCall, where)
    work, when = getattr(holder, name), 1 if (schedule, where) == ("exchange", "forward") else 2

    def fails(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == when:
            if how == "dies":
                os._exit(7)
            raise MemoryError("no more")
        return work(*args, **options)

    shares_of(case, schedule=schedule)  # plans, so that none is made while others wait
    set_group_timeout(1)
    with patch.object(holder, name, fails if dist.get_rank() == 1 else work), logged() as events:
        try:
            shares_of(case, schedule=schedule, pool=pool)
        except (DistError, MemoryError) as error:
            if isinstance(error, MemoryError) and (schedule, where) != ("exchange", "backward"):
                dist.destroy_process_group()  # the others need not wait for the timeout
            return type(error).__name__, str(error), pool.statistics, events
    return None


@pytest.mark.parametrize("schedule", ["exchange", "ring"])
@pytest.mark.parametrize("how", ["dies", "raises"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_fails_leaves_no_other_waiting_and_no_buffer_leased(schedule: str, how: str, where: str):
    """The lease ends after the transfer; where an exchange fails in the forward, others miss it in the backward."""
    outcomes = outcomes_on_ranks(3, failing, a_case(3), schedule, how, where, group_timeout=4)
    if how == "dies":
        assert "died with exit code 7" in (outcomes[1].error or "")
    else:
        name, text, statistics, events = outcomes[1].result
        assert (name, text) == ("MemoryError", "no more")
        assert statistics.num_leases > statistics.leased_bytes == 0
        if schedule == "exchange":
            assert events[-3:] == ["go", "own", "wait"]
    for outcome in (outcomes[0], outcomes[2]):
        if (schedule, how, where) == ("exchange", "raises", "backward"):
            assert outcome.result is None  # what rank 1 sends was on its way
            continue
        name, text, statistics, _ = outcome.result
        assert name == "DistError"
        assert "the exchange of " in text or "sending and receiving " in text
        assert "timeout of the process group is 1 s" in text
        assert statistics.num_leases > statistics.leased_bytes == 0
