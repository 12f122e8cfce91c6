"""What ranks receive: counted without a plan, planned, and received; the schedule "auto" takes, by bytes and memory."""

import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.distributed._exchange_plan import ExchangePlan
from flexdilated.distributed.counts import _tokens, rank_loads
from flexdilated.distributed.counts._loads import _choice_by_bytes, choose_schedule, token_counts
from flexdilated.masks.attended._search import attended_keys
from flexdilated.masks.core._bound import Extent
from flexdilated.memory import AttentionSize
from flexdilated.testing.strategies import lengths, shardings
from tests.support import oracle, twins
from tests.support.ranks import on_ranks
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.sharded_cases import line
from tests.support.strategies import expressions
from tests.support.twins import Twin

PATTERNS = {
    "longnet": masks.longnet((32, 128), (1, 4)) & masks.causal(),
    "window": masks.local_window(left=40, right=7),
    "causal": masks.causal(),
}
STEPS = [  # pattern, order, schedule, codec
    *(("longnet", "zigzag", "exchange", "int8"), ("longnet", "contiguous", "ring", None)),
    *(("window", "zigzag", "exchange", None), ("causal", "zigzag", "ring", "bf16")),
]


def sharding_in(order: str) -> Sharding:
    return Sharding(200, 3, order, (56, 80, 64))


def bytes_received() -> list[tuple[int, int]]:
    """What this rank receives in the forward and the backward of 2 sequences, 4 heads over 2, keys of 8, values 12."""
    found, traffic = [], fd.distributed.traffic()
    for name, order, schedule, codec in STEPS:
        sharding = sharding_in(order)
        length = sharding.length(dist.get_rank())
        sizes = ((4, 8), (2, 8), (2, 12))
        q, k, v = (torch.randn(2, heads, length, dim, requires_grad=True) for heads, dim in sizes)
        how = {"mesh": line(), "sharding": sharding, "schedule": schedule, "codec": codec, "enable_gqa": True}
        traffic.reset()
        out = fd.distributed.attend(q, k, v, PATTERNS[name], **how)
        forward = traffic.received["keys"]
        out.sum().backward()
        found.append((forward, traffic.received["keys"] - forward + traffic.received["gradients"]))
    return found


def test_what_is_counted_is_what_is_received() -> None:
    by_rank = on_ranks(3, bytes_received)
    for place, (name, order, schedule, codec) in enumerate(STEPS):
        size = AttentionSize(200, 4, 8, torch.float32, 2, 2, value_dim=12)
        loads = rank_loads(PATTERNS[name], sharding_in(order), size, schedule=schedule, codec=codec)
        counted = list(zip(loads.received_forward, loads.received_backward, strict=True))
        assert [received[place] for received in by_rank] == counted


LONGNET = masks.longnet([32, 64, 128, 256, 512], [1, 2, 4, 8, 16])
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.bfloat16}
CHOICES = {
    "sparse": (LONGNET & masks.causal(), 512, 8, "exchange"),
    "dense": (masks.causal(), 512, 8, "ring"),
    "dense on two ranks": (masks.causal(), 512, 2, "exchange"),  # which holds one shard, as the ring does
    "of one rank": (masks.causal(), 512, 1, "exchange"),
    "apart": (masks.chunked(64), 512, 8, "exchange"),
    "a neighbour's keys": (masks.local_window(left=31, right=0), 512, 8, "exchange"),
    "every other key": (masks.strided(2) & masks.causal(), 256, 16, "ring"),
    "every 16th key": (masks.fixed(16, summary=1) & masks.causal(), 512, 16, "exchange"),
}


@pytest.mark.parametrize(("pattern", "tokens", "ranks", "expected"), CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_sparse_is_exchanged_and_dense_goes_round(pattern, tokens, ranks, expected, order) -> None:
    if (pattern, order) == (masks.chunked(64), "zigzag"):
        ranks //= 2  # a chunk in each half of a shard
    choice = choose_schedule(pattern, Sharding(tokens, ranks, order), **SIZES)
    assert choice.name == expected, choice.reason


@pytest.mark.parametrize(
    ("sizes", "name", "facts"),
    [
        ((0, 0, 0, 0), "exchange", []),
        ((7, 7, 7, 7), "exchange", ["7 MiB", "exchange", "7 MiB", "ring", "7 MiB"]),
        ((3, 9, 3, 4), "exchange", ["3 MiB", "exchange", "9 MiB", "ring", "4 MiB"]),
        ((7, 7, 7, 2), "ring", ["7 MiB", "ring", "2 MiB", "7 MiB", "exchange"]),
        ((3, 9, 3, 2), "exchange", ["3 MiB", "exchange", "3 times", "ring", "1.5 times"]),
        # 1.5 times less for 3 times the memory
        ((6, 9, 6, 2), "ring", ["9 MiB", "ring", "2 MiB", "6 MiB", "exchange"]),
        ((4, 8, 4, 2), "exchange", ["4 MiB", "exchange", "2 times", "ring", "2 times"]),  # as much less as more
        ((1, 8, 4, 2), "exchange", ["1 MiB", "exchange", "8 times", "ring", "2 times"]),  # a codec
    ],
)
def test_memory_is_weighed_against_bytes_and_one_sentence_says_why(sizes, name, facts) -> None:
    """What is received, and then what is held, by the schedule that was chosen and by the other."""
    choice = _choice_by_bytes(*(size << 20 for size in sizes))
    assert choice.name == name
    assert re.findall(r"[\d.]+ (?:MiB|times)|exchange|ring", choice.reason) == facts or not sizes[0]
    if not sizes[0]:
        assert choice.reason == "no rank needs a key of another, so nothing is sent"


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
    check_bytes_of_schedules(many)


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
        (_tokens, "_tokens_of_rules", None),
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
    how = {"head_dim": 3, "dtype": torch.float32, "batch": 2, "wire_vector_bytes": 7}
    choice = choose_schedule(many.twin.pattern, sharding, **many.sizes, **how)
    row, wire = 2 * 2 * 3 * 4, 2 * 2 * 7
    assert (choice.exchange_bytes, choice.exchange_memory) == (wire * exchanged, row * exchanged)
    assert (choice.ring_bytes, choice.ring_memory) == (wire * ringed, row * held)


@given(packed_cases(whole=True), st.data())
def test_run_time_patterns(packed: Packed, data):
    """Documents, lengths and marks: what any batch entry needs, and the pairs of all."""
    N = packed.num_keys
    pattern = packed.pattern.resolve(packed.pattern.given_tensors(), Extent(N, N))
    sharding = data.draw(shardings(N, max_ranks=7))
    needed = needed_by_rank(packed.counts.sum(0), sharding)
    counts = exchange_counts(pattern, sharding, num_heads=packed.num_heads, num_kv_heads=packed.num_heads)
    assert torch.equal(counts, minimum(needed, sharding))
    size = AttentionSize(N, packed.num_heads, 8, torch.float32, batch=packed.batch)
    rows = packed.counts.sum((0, 1, 3))
    expected = tuple(int(rows[sharding.positions(rank)].sum()) for rank in range(sharding.num_ranks))
    assert rank_loads(pattern, sharding, size).pairs == expected


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
                pattern, queries=sharding.ranges(target), keys=sharding.ranges(source), heads=heads, num_heads_global=4
            )
            for heads in (range(2), range(2, 4))
        ]
        expected = sum(len(keys) for ranges in needed for keys in ranges) if target != source else 0
        assert int(counts[target, source]) == expected


def test_run_time_values_count() -> None:
    """Documents that end with the shards need nothing from elsewhere; one document all."""
    apart, one = torch.arange(4).repeat_interleave(32), torch.zeros(128, dtype=torch.int64)
    choices = [choose_schedule(masks.documents(ids), Sharding(128, 4), **SIZES) for ids in (apart, one)]
    assert [choice.exchange_bytes for choice in choices] == [0, 3 * 32 * 2 * 2 * 8 * 2]
    with pytest.raises(ValueError, match="documents"):
        choose_schedule(masks.documents("documents"), Sharding(128, 4), **SIZES)
