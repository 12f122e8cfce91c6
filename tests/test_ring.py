"""The ring: any number of ranks give what one gives, with what is needed sent and no more than two shards held."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flexdilated import masks
from flexdilated.distributed._sharding import Sharding
from tests import oracle
from tests.agreement import TIGHT
from tests.ranks import on_ranks
from tests.ring_cases import RingCase, least_bytes, ring_cases, run, tensors_for, together, whole_of

# A failure is shown as it was drawn: to shrink it takes a call of all ranks a step.
DRAWN = settings(max_examples=max(2, settings.default.max_examples // 12), phases=(Phase.reuse, Phase.generate))
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


@pytest.mark.parametrize("W", [2, 3, 4, 8])
@DRAWN
@given(data=st.data())
def test_many_ranks_are_one(W: int, data: st.DataObject):
    """Output, lse and every gradient, for drawn patterns, heads and shardings; several cases a call."""
    cases = data.draw(st.lists(ring_cases(W), min_size=4, max_size=6))
    for case, *shares in zip(cases, *on_ranks(W, run, cases), strict=True):
        assert_whole(case, shares)
