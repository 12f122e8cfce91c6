"""Which tokens reach which, by dense powers: what receptive fields are compared with."""

from itertools import pairwise

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


def assert_same(told: ReceptiveField, counts: Tensor) -> None:
    """Each followed token by itself, layer by layer; all of them where the field says that it is exact."""
    dense = fields(counts)
    for token, reached, finished in zip(told.tokens, told.reached, told.finished, strict=True):
        sizes = [int(field[token].sum()) for field in dense]
        grown = [after for before, after in pairwise(sizes) if after > before]
        assert list(reached) == (grown if finished else grown[: len(reached)])
    assert told.layers_at_least <= len(dense) - 1
    if told.exact:
        assert told.tokens == tuple(range(counts.shape[1]))
        assert told.layers_at_least == len(dense) - 1
        means = [(layers, float(field.double().sum(1).mean()), 0.0) for layers, field in enumerate(dense)]
        assert list(told.growth) == means[1:]
