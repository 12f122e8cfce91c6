"""Which tokens reach which, by dense powers: what receptive fields are compared with."""

import torch
from torch import Tensor

from flexdilated.masks.inspection._receptive_field import ReceptiveField


def fields(counts: Tensor) -> list[Tensor]:
    """Which tokens reach which after 0, 1, 2, ... layers, as dense booleans, until nothing is new; counts (H, N, N)."""
    once = (counts > 0).any(0) | torch.eye(counts.shape[1], dtype=torch.bool)
    found = [torch.eye(counts.shape[1], dtype=torch.bool)]
    while not torch.equal(found[-1], further := (found[-1].float() @ once.float()) > 0):
        found.append(further)
    return found


def first(pairs: Tensor) -> tuple[int, ...] | None:
    return tuple(pairs.nonzero()[0].tolist()) if bool(pairs.any()) else None


def assert_same(told: ReceptiveField, counts: Tensor) -> None:
    dense = fields(counts)
    never, later = ~dense[-1], torch.ones_like(dense[-1]).triu(1)
    assert told.layers == len(dense) - 1
    assert told.growth[-1][0] == told.layers
    assert all(pairs == int(dense[layers].sum()) for layers, pairs in told.growth)
    assert told.pairs == int(dense[-1].sum())
    assert told.slowest == (first(dense[-1] & ~dense[-2]) if told.layers else None)
    assert (told.never_earlier, told.never_later) == (int((never & later.mT).sum()), int((never & later).sum()))
    assert (told.first_never_earlier, told.first_never_later) == (first(never & later.mT), first(never & later))
