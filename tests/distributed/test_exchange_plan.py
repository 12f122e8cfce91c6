"""The exchange plan: no rank gets a token that it does not need, and counts know it without a plan."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.distributed._exchange_plan import ExchangePlan
from flexdilated.distributed.counts import _tokens
from flexdilated.distributed.counts._loads import choose_schedule, token_counts
from flexdilated.masks.attended._search import attended_keys
from flexdilated.masks.core._bound import Extent
from flexdilated.testing.strategies import lengths, shardings
from tests.support import oracle, twins
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import expressions
from tests.support.twins import Twin

# W ranks, G KV heads, N tokens


@dataclass(frozen=True)
class Many:
    """A pattern over the shards of W ranks: H of all heads, from head_offset on, in G groups."""

    twin: Twin
    sharding: Sharding
    num_heads: int
    num_kv_heads: int
    head_offset: int
    num_heads_global: int

    @property
    def sizes(self) -> dict[str, int]:
        names = ("num_heads", "num_kv_heads", "head_offset", "num_heads_global")
        return {name: getattr(self, name) for name in names}

    def plan(self, rank: int) -> ExchangePlan:
        return ExchangePlan.of(self.twin.pattern, self.sharding, rank, **self.sizes)

    def needed(self) -> Tensor:
        """(G, W, N): whether some query of the rank, in some head of the group, may attend to the token."""
        positions = torch.arange(self.sharding.num_tokens)
        heads = range(self.head_offset, self.head_offset + self.num_heads)
        counts = oracle.counts(self.twin.rule, heads, self.num_heads_global, positions, positions)
        return needed_by_rank(counts.unflatten(0, (self.num_kv_heads, -1)).sum(1), self.sharding)


def needed_by_rank(pairs: Tensor, sharding: Sharding) -> Tensor:
    """(G, W, N) from a dense table (G, N, N)."""
    return torch.stack([pairs[:, sharding.positions(rank)].any(1) for rank in range(sharding.num_ranks)], 1)


def exchange_counts(*args, **sizes) -> Tensor:
    return token_counts(*args, **sizes)["exchange"]


def minimum(needed: Tensor, sharding: Sharding) -> Tensor:
    """(W, W): (KV head, token) pairs that each target needs of each source; nothing of itself."""
    ranks = range(sharding.num_ranks)
    counts = torch.stack([needed[:, :, sharding.positions(source)].sum((0, 2)) for source in ranks], 1)
    return counts.fill_diagonal_(0)


@st.composite
def manies(draw: st.DrawFn) -> Many:
    total = draw(st.sampled_from([1, 2, 4, 6]))
    twin = draw(expressions(total))
    here = draw(st.integers(1, total))
    offset = draw(st.integers(0, total - here))
    groups = draw(st.sampled_from([groups for groups in range(1, here + 1) if here % groups == 0]))
    tokens = draw(st.one_of(lengths(twin.edges), *[st.integers(8, 60)] * 3))
    return Many(twin, draw(shardings(tokens, max_ranks=7)), here, groups, offset, total)


@given(manies())
def test_plans_and_counts(many: Many):
    check_minimum(many)
    check_bytes_of_schedules(many)


def check_minimum(many: Many) -> None:
    """Each rank receives exactly what it needs, in each KV head once, and the counts know it without a plan."""
    sharding, needed = many.sharding, many.needed()
    for rank in range(sharding.num_ranks):
        for source, by_head in enumerate(many.plan(rank).received):
            for head, keys in enumerate(by_head):
                positions = [key for each in keys for key in each]
                held = sharding.positions(source) if source != rank else torch.arange(0)
                assert sorted(positions) == held[needed[head, rank, held]].tolist()
    for at_once in (_tokens._MOST_COUNTS, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_tokens, "_MOST_COUNTS", at_once)
            counts = exchange_counts(many.twin.pattern, sharding, **many.sizes)
        assert counts.dtype == torch.int64
        assert torch.equal(counts, minimum(needed, sharding))


@st.composite
def ladders(draw: st.DrawFn) -> Many:
    """Branches whose rates divide their segments and one another: counted in closed form."""
    rates = [draw(st.integers(1, 3))]
    for _ in range(draw(st.integers(0, 3))):
        rates.append(rates[-1] * draw(st.sampled_from([1, 1, 2, 3, 4])))
    segments = [rate * draw(st.integers(1, 12)) for rate in rates]
    offsets = draw(st.sampled_from(["interleaved", "contiguous"]))
    twin = twins.longnet(segments, rates, offsets=offsets)
    twin = twin & twins.causal() if draw(st.booleans()) else twin
    total = draw(st.sampled_from([1, 2, 4, 6]))
    groups = draw(st.sampled_from([groups for groups in range(1, total + 1) if total % groups == 0]))
    tokens = draw(st.one_of(st.integers(1, 9), st.integers(8, 90)))
    return Many(twin, draw(shardings(tokens, max_ranks=7)), total, groups, 0, total)


@given(ladders())
def test_counts_in_closed_form(many: Many):
    """By the closed form, a rank at a time too, and by what counts other patterns."""
    expected = minimum(many.needed(), many.sharding)
    for module, name, value in (
        (_tokens, "_of_group", None),
        (_tokens, "_MOST_VALUES", 0),
        (_tokens, "as_branches", lambda _: None),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, value)
            assert torch.equal(exchange_counts(many.twin.pattern, many.sharding, **many.sizes), expected)


def check_bytes_of_schedules(many: Many):
    """Of the rank that has most of each: what it receives, on the wire, and holds; in a ring whole runs, two shards."""
    sharding, needed, ranks = many.sharding, many.needed(), range(many.sharding.num_ranks)
    runs = [
        [[len(run) for run in sharding.ranges(other) if needed[:, rank, run.start : run.stop].any()] for other in ranks]
        for rank in ranks
    ]
    shards = many.num_kv_heads * torch.tensor([[sum(each) for each in row] for row in runs]).fill_diagonal_(0)
    exchanged, ringed = int(minimum(needed, sharding).sum(1).max()), int(shards.sum(1).max())
    held = int(shards.sort(1, descending=True).values[:, :2].sum(1).max())
    how = {"head_dim": 3, "dtype": torch.float32, "batch": 2, "wire_row_bytes": 7}
    choice = choose_schedule(many.twin.pattern, sharding, **many.sizes, **how)
    row, wire = 2 * 2 * 3 * 4, 2 * 2 * 7
    assert (choice.exchange_bytes, choice.exchange_memory) == (wire * exchanged, row * exchanged)
    assert (choice.ring_bytes, choice.ring_memory) == (wire * ringed, row * held)


@given(packed_cases(whole=True), st.data())
def test_run_time_patterns(packed: Packed, data):
    """Documents, lengths and marks: what any batch entry needs."""
    N = packed.num_keys
    pattern = packed.pattern.resolve(packed.pattern.given_tensors(), Extent(N, N))
    sharding = data.draw(shardings(N, max_ranks=7))
    needed = needed_by_rank(packed.counts.sum(0), sharding)
    counts = exchange_counts(pattern, sharding, num_heads=packed.num_heads, num_kv_heads=packed.num_heads)
    assert torch.equal(counts, minimum(needed, sharding))


LADDER = masks.longnet([2048 << power for power in range(10)], [1 << power for power in range(10)])


@pytest.mark.parametrize(
    "pattern", [LADDER & masks.causal(), masks.local_window(left=300_000, right=0) | masks.first_tokens(4)], ids=str
)
def test_counts_of_many_ranks(pattern):
    """Forty million tokens on 200 ranks, where chunks begin anywhere: pairs drawn at random, and neighbours."""
    sharding = Sharding(40_000_007, 200, "zigzag")
    counts = exchange_counts(pattern, sharding, num_heads=4, num_kv_heads=2)
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(200, (20, 2), generator=generator)
    near = torch.arange(20)[:, None] * 10 + torch.tensor([1, 0])
    for target, source in torch.cat([pairs, near]).tolist():
        needed = [
            attended_keys(
                pattern,
                queries=sharding.ranges(target),
                keys=sharding.ranges(source),
                heads=heads,
                num_heads_global=4,
            )
            for heads in (range(2), range(2, 4))
        ]
        expected = sum(len(keys) for ranges in needed for keys in ranges) if target != source else 0
        assert int(counts[target, source]) == expected
