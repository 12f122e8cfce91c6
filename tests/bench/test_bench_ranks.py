"""The benchmark's rows on many ranks: their own rules, their processes, and what they would see."""

import pytest
import torch

from bench import ranks
from bench._jobs import Size
from bench._rules import LONGNET_5, LongNet, longnet_n
from bench._run import MEASURES
from bench.ranks import Heads, keys_of_queries, least_received, shard_ranges
from flexdilated.distributed import Sharding

ODD = LongNet("odd", (1, 100, 333, 50), (1, 3, 7, 60))  # rates that divide nothing, one above its segment
SPECS = [longnet_n(4096).shrunk(32), LONGNET_5.shrunk(64).as_causal(), ODD, ODD.as_causal()]


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
def test_marks_are_those_of_the_dense_rule(spec, order) -> None:
    num_tokens = 480
    branches = spec.masks(torch.arange(num_tokens), num_tokens=num_tokens, num_heads=4)
    for num_ranks in (2, 4, 8):
        shards = shard_ranges(num_tokens, num_ranks, order)
        for rank, shard in enumerate(shards):
            held = Sharding(num_tokens, num_ranks, order=order).positions(rank)
            assert held.tolist() == [token for piece in shard for token in piece]
        for heads in (Heads(4, 4), Heads(4, 2), Heads(4, 1)):
            wanted = []
            for shard in shards:
                rows = torch.cat([torch.arange(piece.start, piece.stop) for piece in shard])
                seen = torch.stack([branch[:, rows].any(1) for branch in branches]).any(0)
                by_kv_head = seen.view(heads.num_kv_heads, -1, num_tokens).any(1)
                by_kv_head[:, rows] = False
                wanted.append(int(by_kv_head.sum()))
            assert least_received(spec, num_tokens, shards, heads) == wanted
    for num_tokens in (100, 1000) if spec.causal else ():
        masks = spec.masks(torch.arange(num_tokens), num_tokens=num_tokens, num_heads=5)
        assert torch.equal(sum(mask.sum((0, 2)) for mask in masks), keys_of_queries(spec, num_tokens, 5))


def test_a_plan_that_sends_or_counts_otherwise_shows(monkeypatch) -> None:
    case = longnet_n(65536).shrunk(16), 4096, 8, (Heads(4, 2),)
    counts = ranks.token_counts
    assert ranks.counted_row(*case).measured == 1
    more = lambda *args, **kw: {"exchange": counts(*args, **kw)["exchange"] + 1}  # noqa: E731
    monkeypatch.setattr(ranks, "token_counts", more)
    row = ranks.counted_row(*case)
    assert row.measured > 1
    assert not row.met
    work = ranks.work_of_ranks
    monkeypatch.setattr(ranks, "work_of_ranks", lambda *args, **kw: work(*args, **kw) + 1)
    with pytest.raises(AssertionError, match="the library's count must be that of the rule"):
        list(ranks.work_balance(**MEASURES["work_balance"].small))


@pytest.mark.slow
def test_a_wrong_gradient_shows(monkeypatch) -> None:
    """Ranks are forked from a server of their own: what they return is changed here.

    Of fewer tokens, errors differ by more than the bound's tenth with the processor's vectors alone.
    """
    small = {**MEASURES["rank_accuracy"].small, "size": Size(512, num_heads=4, head_dim=8)}
    taken = []
    take = ranks.take_steps
    monkeypatch.setattr(ranks, "take_steps", lambda *args: taken.append(take(*args)) or taken[-1])
    rows = ranks.rank_accuracy(**small)
    assert [row.measure.partition(",")[0] for row in rows] == list(small["dtypes"])
    assert rows[0].met
    taken[0][0].tensors["dk"] *= 1.0001  # of float32
    monkeypatch.setattr(ranks, "take_steps", lambda *args: taken[0])
    wrong = ranks.rank_accuracy(**small)[0]
    assert wrong.measured > 100
    assert not wrong.met


@pytest.mark.slow
def test_a_ring_holds_two_shards_where_all_are_needed() -> None:
    for row in ranks.ring_memory(**MEASURES["ring_memory"].small):
        assert row.measured == 2
