"""xFormers' attention biases, restated as dense masks, against what migration.md writes in their place.

Source: https://github.com/facebookresearch/xformers, `xformers/ops/fmha/attn_bias.py` before it moved to mslk, whose
`materialize` says what each bias is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flexdilated import masks
from tests.integrations.passes import counts

LENGTHS = [9, 1, 20]
IDS = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))


def band(num_queries: int, num_keys: int, left: int | None, right: int | None, bottom_right: bool = False) -> Tensor:
    """Keys from `left` before the query to `right` after it, both at their index or counted from the last ones."""
    shift = num_keys - num_queries if bottom_right else 0
    pairs = torch.ones(num_queries, num_keys, dtype=torch.bool)
    pairs = pairs if left is None else pairs.triu(shift - left)
    return pairs if right is None else pairs.tril(shift + right)


def block_diagonal(
    q_lengths: Sequence[int], k_lengths: Sequence[int], block: Callable[[int, int], Tensor] = torch.ones
) -> Tensor:
    """Block i holds `block(queries, keys)` of sequence i."""
    pairs = torch.zeros(sum(q_lengths), sum(k_lengths), dtype=torch.bool)
    edges = (pairwise(accumulate(each, initial=0)) for each in (q_lengths, k_lengths))
    for (top, bottom), (left, right) in zip(*edges, strict=True):
        pairs[top:bottom, left:right] = block(bottom - top, right - left)
    return pairs


def pairs(pattern: masks.Pattern, num_queries: int, num_keys: int, **offsets: int) -> Tensor:
    return counts(pattern, num_queries, num_keys, **offsets)[0] > 0


@pytest.mark.parametrize("sizes", [(1, 1), (12, 12), (5, 17), (17, 5)], ids=str)
def test_triangles_and_bands(sizes: tuple[int, int]) -> None:
    N, M = sizes
    last = {"q_offset": max(M - N, 0), "k_offset": max(N - M, 0)}
    assert torch.equal(pairs(masks.causal(), N, M), band(N, M, None, 0))
    assert torch.equal(pairs(masks.causal(), N, M, **last), band(N, M, None, 0, True))
    local = masks.local_window(left=4 - 1, right=0)  # make_local_attention(4)
    assert torch.equal(pairs(local, N, M, **last), band(N, M, 3, 0, True))
    both = masks.local_window(left=2, right=3)
    assert torch.equal(pairs(both, N, M, **last), band(N, M, 2, 3, True))


def test_packed_sequences() -> None:
    def of(block: Callable[[int, int], Tensor]) -> Tensor:
        return block_diagonal(LENGTHS, LENGTHS, block)

    documents = masks.documents(IDS)
    assert torch.equal(pairs(documents, 30, 30), block_diagonal(LENGTHS, LENGTHS))
    for bottom_right in (False, True):
        causal = of(lambda n, m, last=bottom_right: band(n, m, None, 0, last))
        assert torch.equal(pairs(masks.causal() & documents, 30, 30), causal)
        local = of(lambda n, m, last=bottom_right: band(n, m, 4, 0, last))
        assert torch.equal(pairs(masks.local_window(left=5 - 1, right=0) & documents, 30, 30), local)


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("q_lengths", [[2, 1, 3], [9, 1, 20]], ids=str)
def test_other_lengths_of_keys(page: SimpleNamespace, q_lengths: list[int], bottom_right: bool) -> None:
    N, M, k_lengths = sum(q_lengths), 40, [9, 5, 26]
    made = page.block_diagonal(q_lengths, k_lengths)
    assert torch.equal(pairs(made, N, M), block_diagonal(q_lengths, k_lengths))
    for lookback in (None, 1, 6):
        made = page.block_diagonal(q_lengths, k_lengths, causal=True, bottom_right=bottom_right, lookback=lookback)
        left = None if lookback is None else lookback - 1
        want = block_diagonal(q_lengths, k_lengths, lambda n, m, left=left: band(n, m, left, 0, bottom_right))
        assert torch.equal(pairs(made, N, M), want)
