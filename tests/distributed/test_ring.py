"""The ring: any number of ranks give what one gives, with what is needed sent and no more than two shards held."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flexdilated import attend, masks
from flexdilated.distributed.group._sharding import Sharding
from tests.support import oracle
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks
from tests.support.ring_cases import RingCase, least_bytes, ring_cases, run, tensors_for, together, whole_of

# A failure is shown as it was drawn: to shrink it takes a call of all ranks a step.
DRAWN = settings(max_examples=max(2, settings.default.max_examples // 20), phases=(Phase.reuse, Phase.generate))
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def assert_whole(case: RingCase, shares) -> None:
    """All ranks' results together are the definition's, and as many bytes were sent as the dense rule says."""
    for name, found, truth in zip(NAMES, together(case, shares), whole_of(case), strict=False):
        assert_close(found, truth, **TIGHT, msg=lambda text, name=name: f"{name} of {case}: {text}")
    for rank, share in enumerate(shares):
        others = [other for other in range(len(shares)) if other != rank]
        needed = sum(least_bytes(case, rank, other) for other in others)
        wanted = sum(least_bytes(case, other, rank) for other in others)
        moved = [side.get(role, 0) for role in ("keys", "gradients") for side in (share.received, share.sent)]
        # Keys go once in each pass.
        assert moved == [2 * needed, 2 * wanted, wanted, needed], f"bytes on rank {rank} of {case}"


@pytest.mark.parametrize("W", [2, 3, 5])
@DRAWN
@given(data=st.data())
def test_many_ranks_are_one(W: int, data: st.DataObject):
    """Output, lse and every gradient, for drawn patterns, heads and shardings; several cases a call."""
    cases = data.draw(st.lists(ring_cases(W), min_size=2, max_size=4))
    for case, *shares in zip(cases, *on_ranks(W, run, cases), strict=True):
        assert_whole(case, shares)


def third_keys(b, h, q, k):
    return (k % 3 == h % 3) & (k <= q)


def families() -> dict[str, tuple[masks.Pattern | masks.Mixture, torch.Tensor]]:
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
        "mixture": (masks.causal() + masks.strided(5), _counts(oracle.total(causal, oracle.strided(5)))),
        "block list": (masks.block_list(rows, block=8), _counts(oracle.block_list([rows], 8))),
        "custom": (masks.custom(third_keys), _counts(third)),
        "documents": (masks.causal() & masks.documents(ids), _counts(causal, ids)),
        "packed longnet": (
            ladder.per_document(masks.documents(ids)),
            torch.stack([_counts(oracle.per_document(longnet, row)) for row in ids]),
        ),
        "padding": (masks.visible_keys(seen), _counts(oracle.visible_keys(seen))),
        "selected": (beside, _counts(oracle.either(oracle.selected_blocks(chosen, (16, 8), 3), window))),
    }


def _counts(rule: oracle.Rule, ids: torch.Tensor | None = None) -> torch.Tensor:
    """(H, N, N), or (B, H, N, N) where documents are kept apart."""
    positions = torch.arange(48)
    if ids is None:
        return oracle.counts(rule, range(4), 4, positions, positions)
    return torch.stack([_counts(oracle.both(rule, oracle.documents(row))) for row in ids])


SHARDINGS = {
    2: [Sharding(48, 2, "zigzag"), Sharding(48, 2, shard_lengths=(48, 0))],
    3: [Sharding(48, 3), Sharding(48, 3, "zigzag", (30, 0, 18))],
    4: [Sharding(48, 4, "zigzag"), Sharding(48, 4, shard_lengths=(1, 40, 0, 7))],
    8: [Sharding(48, 8), Sharding(48, 8, "zigzag", (9, 9, 5, 5, 5, 5, 9, 1))],
}


@pytest.mark.parametrize("W", [2, 3, 4, 8])
def test_every_family_on_every_number_of_ranks(W: int):
    """With grouped heads, sinks, and a gradient through lse; in both orders, ragged, a rank with nothing."""
    tensors = tensors_for(4, 2, 48, B=2, D=4, sinks=True)
    kinds = list(families().values())[W // 2 % 2 :: 5 if W == 8 else 2]  # on two numbers, or more
    cases = [RingCase(*kind, SHARDINGS[W][place % 2], tensors) for place, kind in enumerate(kinds)]
    for case, *shares in zip(cases, *on_ranks(W, run, cases), strict=True):
        assert_whole(case, shares)


def on_one_rank(case: RingCase) -> tuple[torch.Tensor, ...]:
    """What `attend` makes of the whole."""
    leaves = [x.clone().requires_grad_() for x in case.tensors]
    out, lse = attend(*leaves, case.pattern, enable_gqa=True, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, case.cotangents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_does_not_grow_with_the_ranks(dtype: torch.dtype):
    """Against float64, many ranks are at most 1.1 times as far off as one, in output and gradients."""
    N = 192
    tensors = tensors_for(4, 2, N, D=32, dtype=dtype)
    counts = oracle.counts(oracle.causal(), range(4), 4, torch.arange(N), torch.arange(N))
    errors = {}
    for W in (1, 2, 4, 8):
        case = RingCase(masks.causal(), counts, Sharding(N, W, "zigzag"), tensors)
        found = on_one_rank(case) if W == 1 else together(case, [shares for (shares,) in on_ranks(W, run, [case])])
        errors[W] = [float((x - truth).square().mean().sqrt()) for x, truth in zip(found, whole_of(case), strict=True)]
    for W in (2, 4, 8):
        ratios = {name: many / one for name, many, one in zip(NAMES, errors[W], errors[1], strict=False)}
        del ratios["lse"]  # a sum of logarithms: it is rounded once a shard, to a few units in its last place
        assert max(ratios.values()) <= 1.1, (W, ratios)
