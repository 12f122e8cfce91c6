"""Custom functions that tests use by name, and dense rules of those that are drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support import oracle

TABLE = torch.tensor([3, 1, 2, 1, 3, 2])
WIDTH = 5


def by_global(b, h, q, k):
    return (q - k < WIDTH) & (q >= k)


def diagonal(b, h, q, k):
    return q == k


def window(width):
    def mask_mod(b, h, q, k):
        return q - k < width

    return mask_mod


def lattice_rule(a: int, b: int, modulus: int) -> oracle.Rule:
    return lambda h, H, q, k: ((q[:, None] * a + k[None, :] * b).remainder(modulus) == 0).long()


def window_rule(widths: Sequence[int]) -> oracle.Rule:
    return lambda h, H, q, k: oracle.local_window(widths[h % len(widths)] - 1, 0)(h, H, q, k)


def kind_rule(kinds: Sequence[int]) -> oracle.Rule:
    """Position by position, from a list."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        of = [kinds[t % len(kinds)] for t in range(int(max(q.max(), k.max())) + 1)]
        return torch.tensor([[of[i] == of[j] for j in k.tolist()] for i in q.tolist()]).long()

    return rule
