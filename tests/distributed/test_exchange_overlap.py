"""The exchange during its transfers: what is computed meanwhile, in parts that may be empty, and how that may fail."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistError
from torch.distributed.device_mesh import init_device_mesh

from flexdilated import masks
from flexdilated.distributed import BufferPool, Sharding
from flexdilated.distributed.exchange._op import exchange_backward_op, exchange_op
from flexdilated.distributed.wire._pool import Lease
from flexdilated.engines._placed_call import PlacedCall
from flexdilated.testing.strategies import shardings
from tests.distributed.test_exchange import DRAWN, assert_whole, run, run_exchange
from tests.support import oracle
from tests.support.ranks import on_ranks, outcomes_on_ranks
from tests.support.ring_cases import RingCase, tensors_for

# W ranks, N tokens of all of them

N, BLOCK = 48, 8


def a_case(W: int) -> RingCase:
    """Dense, with grouped heads, sinks and a gradient through lse."""
    return RingCase(masks.every(), torch.ones(4, N, N), Sharding(N, W, "zigzag"), tensors_for(4, 2, N, sinks=True))


def is_own(call: PlacedCall) -> bool:
    """Whether these are a rank's own keys."""
    return call.placement.keys == (call.placement.queries,)


class Logged:
    """What happens on this rank, in order: transfers that begin and end, computing, and leases that end."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.originals = dist.all_to_all_single, PlacedCall.forward, PlacedCall.backward, Lease.release

    def __enter__(self) -> list[str]:
        transfer, forward, backward, release = self.originals
        self.patches = [
            patch.object(dist, "all_to_all_single", lambda *args, **options: self.begun(transfer(*args, **options))),
            patch.object(PlacedCall, "forward", lambda *args, **options: self.computed(forward, *args, **options)),
            patch.object(PlacedCall, "backward", lambda *args, **options: self.computed(backward, *args, **options)),
            patch.object(Lease, "release", lambda lease: self.logged("release", release, lease)),
        ]
        for each in self.patches:
            each.start()
        return self.events

    def __exit__(self, *_: object) -> None:
        for each in self.patches:
            each.stop()

    def logged(self, event: str, function: Any, *args: Any, **options: Any) -> Any:
        self.events.append(event)
        return function(*args, **options)

    def begun(self, work: dist.Work) -> Any:
        self.events.append("go")
        return type("Work", (), {"wait": lambda _: self.logged("wait", work.wait)})()

    def computed(self, function: Any, call: PlacedCall, *args: Any, **options: Any) -> Any:
        return self.logged("own" if is_own(call) else "others", function, call, *args, **options)


def events_of(case: RingCase) -> list[str]:
    with Logged() as events:
        run_exchange([case])
    return events


def test_own_keys_are_computed_with_during_either_transfer():
    """Their gradients come last, so that the others' are on their way meanwhile."""
    forward = ["go", "own", "wait", "release", "release", "others"]
    backward = ["others", "go", "own", "wait", "release", "release"]
    assert on_ranks(3, events_of, a_case(3)) == [[*forward, *backward]] * 3


def late(case: RingCase) -> Any:
    """Rank 1 sends nothing, in either direction, before rank 0 has computed with its own keys."""
    store, transfer = dist.distributed_c10d._get_default_store(), dist.all_to_all_single
    directions = iter(("forward", "backward"))

    def after_the_other(*args: Any, **options: Any) -> Any:
        store.wait([f"rank 0 has computed: {next(directions)}"])
        return transfer(*args, **options)

    def then_told(direction: str) -> Any:
        compute = getattr(PlacedCall, direction)

        def told(call: PlacedCall, *args: Any, **options: Any) -> Any:
            found = compute(call, *args, **options)
            if is_own(call):
                store.set(f"rank 0 has computed: {direction}", "yes")
            return found

        return patch.object(PlacedCall, direction, told)

    if dist.get_rank() == 0:
        with then_told("forward"), then_told("backward"):
            return run_exchange([case])
    with patch.object(dist, "all_to_all_single", after_the_other):
        return run_exchange([case])


def test_own_keys_wait_for_nobody():
    case = a_case(2)
    assert_whole(case, [shares for (shares,) in on_ranks(2, late, case, group_timeout=20)])


@st.composite
def block_cases(draw: st.DrawFn, W: int) -> RingCase:
    """Any blocks of keys for each block of queries: ranks whose queries see no own key, or no other, or none at all."""
    rows = st.lists(
        st.sets(st.integers(0, N // BLOCK - 1), max_size=3).map(sorted), min_size=N // BLOCK, max_size=N // BLOCK
    )
    tables = draw(st.lists(rows, min_size=4, max_size=4))
    pattern = masks.block_list(tables, block=BLOCK)
    counts = oracle.counts(oracle.block_list(tables, BLOCK), range(4), 4, torch.arange(N), torch.arange(N))
    heads, sinks = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    tensors = tensors_for(4, heads, N, B=2, D=4, sinks=sinks, seed=draw(st.integers(0, 999)))
    return RingCase(pattern, counts, draw(shardings(N, num_ranks=W)), tensors, through_lse=draw(st.booleans()))


@pytest.mark.parametrize("W", [2, 4])
@DRAWN
@given(data=st.data())
def test_parts_that_may_be_empty_are_one(W: int, data: st.DataObject):
    cases = data.draw(st.lists(block_cases(W), min_size=4, max_size=8))
    for case, *shares in zip(cases, *on_ranks(W, run_exchange, cases), strict=True):
        assert_whole(case, shares)


LISTS = {
    "own keys alone": [[0], [1], [2], [3]],
    "others' keys alone": [[3], [0], [1], [2]],
    "the first sees none and serves": [[], [0, 1], [2], [0, 3]],
    "none sees any": [[], [], [], []],
}


@pytest.mark.parametrize("rows", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("lengths", [(12, 12, 12, 12), (24, 0, 0, 24)])
@pytest.mark.parametrize("sinks", [False, True])
def test_ranks_without_some_keys(rows: list[list[int]], lengths: tuple[int, ...], sinks: bool):
    """And without tokens: rows without keys have output 0 and lse -inf, or their sink."""
    counts = oracle.counts(oracle.block_list([rows], 12), range(4), 4, torch.arange(N), torch.arange(N))
    sharding = Sharding(N, 4, shard_lengths=lengths)
    case = RingCase(masks.block_list(rows, block=12), counts, sharding, tensors_for(4, 2, N, sinks=sinks))
    assert_whole(case, [shares for (shares,) in on_ranks(4, run_exchange, [case])])


def failing(case: RingCase, where: str) -> Any:
    """On a rank: rank 1 fails while it computes with its own keys; each tells what it was told and has left."""
    pool, compute = BufferPool("cpu", threshold_bytes=0), getattr(PlacedCall, where)

    def fails(call: PlacedCall, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1 and is_own(call):
            raise MemoryError("no more")
        return compute(call, *args, **options)

    with patch.object(PlacedCall, where, fails), Logged() as events:
        try:
            run([case], schedule="exchange", pool=pool)
        except (DistError, MemoryError) as error:
            return type(error).__name__, str(error), pool.statistics, events
    return None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failure_meanwhile_leaves_no_memory_to_what_still_comes(where: str):
    """The lease ends after the transfer; where a rank fails in the forward, others miss it in the backward."""
    outcomes = outcomes_on_ranks(3, failing, a_case(3), where, group_timeout=10)
    name, text, statistics, events = outcomes[1].result
    assert (name, text) == ("MemoryError", "no more")
    assert events[-5:] == ["go", "own", "wait", "release", "release"]
    assert statistics.num_leases > statistics.leased_bytes == 0
    for outcome in (outcomes[0], outcomes[2]):
        if where == "backward":
            assert outcome.result is None  # what rank 1 sends was on its way
        else:
            name, text, statistics, _ = outcome.result
            assert name == "DistError"
            assert "the exchange of gradients failed after" in text
            assert statistics.leased_bytes == 0


def checked(case: RingCase) -> None:
    """On the only rank: torch's own checks of the op and its derivative."""
    q, k, v, sinks = (x.clone().requires_grad_() for x in case.tensors)
    group = init_device_mesh("cpu", (1,)).get_group().group_name
    options = (case.pattern.text, 0.3, 0, 4, "tiles", [], list(case.sharding.numbers()), group, None, 0.0, "")
    for x in (q, q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()):
        torch.library.opcheck(exchange_op, (x, k, v, sinks, [], *options))
        found = exchange_op(x, k, v, sinks, [], *options)
        plain = [each.detach() for each in (found[0], found[1], x, k, v, *found)]
        torch.library.opcheck(
            exchange_backward_op, (*plain, [], *options), test_utils=("test_schema", "test_faketensor")
        )


def test_the_op_is_what_it_tells_torch():
    on_ranks(1, checked, a_case(1))
