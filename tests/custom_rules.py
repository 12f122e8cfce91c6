"""Custom functions beside their dense rules, with and without classify: what drawn patterns include."""

from __future__ import annotations

import torch
from torch import Tensor

from flexdilated import masks
from flexdilated.masks import EMPTY, FULL, PARTIAL
from tests import oracle

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


def lattice(a: int, b: int, modulus: int):
    def mask_mod(b_, h, q, k):
        return (q * a + k * b) % modulus == 0

    return mask_mod


def window_by_head(widths: Tensor):
    def mask_mod(b, h, q, k):
        distance = q - k
        return (distance >= 0) & (distance < widths[h % len(widths)])

    return mask_mod


def classify_window(widths: Tensor):
    def classify(head, q_first, q_last, k_first, k_last):
        width = widths[head % len(widths)]
        empty = (q_last < k_first) | (q_first - k_last >= width)
        full = (q_first >= k_last) & (q_last - k_first < width)
        return torch.where(full, FULL, torch.where(empty, EMPTY, PARTIAL))

    return classify


def same_kind(kinds: Tensor):
    size = len(kinds)

    def mask_mod(b, h, q, k):
        return kinds[q % size] == kinds[k % size]

    return mask_mod


def lattice_rule(a: int, b: int, modulus: int) -> oracle.Rule:
    return lambda h, H, q, k: ((q[:, None] * a + k[None, :] * b).remainder(modulus) == 0).long()


def window_rule(widths: list[int]) -> oracle.Rule:
    return lambda h, H, q, k: oracle.local_window(widths[h % len(widths)] - 1, 0)(h, H, q, k)


def kind_rule(kinds: list[int]) -> oracle.Rule:
    """Position by position, from a list."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        of = [kinds[t % len(kinds)] for t in range(int(max(q.max(), k.max())) + 1)]
        return torch.tensor([[of[i] == of[j] for j in k.tolist()] for i in q.tolist()]).long()

    return rule


def lattices(a: int, b: int, modulus: int) -> tuple[masks.Pattern, oracle.Rule, tuple[int, ...]]:
    return masks.custom(lattice(a, b, modulus)), lattice_rule(a, b, modulus), (modulus,)


def windows(widths: list[int], *, classified: bool) -> tuple[masks.Pattern, oracle.Rule, tuple[int, ...]]:
    table = torch.tensor(widths)
    classify = classify_window(table) if classified else None
    period = 1 if classified else None
    return masks.custom(window_by_head(table), classify=classify, period=period), window_rule(widths), tuple(widths)


def kinds(values: list[int]) -> tuple[masks.Pattern, oracle.Rule, tuple[int, ...]]:
    return masks.custom(same_kind(torch.tensor(values)), period=len(values)), kind_rule(values), (len(values),)
