"""Rules of block masks by name, edits of their lists, and keys in pages, as torch's tests of FlexAttention have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_own
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, and_masks, noop_mask, or_masks

from flexdilated import flex_attention as own

from ._functions import Reads, Size, documents, integer, per_entry, plain

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values

RULES: dict[str, tuple[Reads, tuple[int | None, int | None]]] = {
    "causal": (plain(lambda b, h, q, k: q >= k), (None, None)),
    "inverse causal": (plain(lambda b, h, q, k: q <= k), (None, None)),
    "all": (plain(noop_mask), (None, None)),
    "nothing": (plain(lambda b, h, q, k: q < 0), (None, None)),
    "half of the queries": (plain(lambda b, h, q, k: q < 48), (2, 1)),
    "half of the keys": (plain(lambda b, h, q, k: k < 48), (None, None)),
    "window": (plain(lambda b, h, q, k: (q - k).abs() <= 20), (None, None)),
    "causal window": (plain(lambda b, h, q, k: (q >= k) & (q <= k + 32)), (1, None)),
    "beyond a window": (plain(lambda b, h, q, k: (q >= k) & (q - k > 32)), (None, None)),
    "prefix": (plain(lambda b, h, q, k: (k < 25) | (q >= k)), (1, 1)),
    "first and last keys": (plain(lambda b, h, q, k: (k < 8) | (k >= 80)), (None, None)),
    "dilated": (plain(lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0)), (None, None)),
    "grid window": (
        plain(lambda b, h, q, k: ((q // 12 - k // 12).abs() <= 1) & ((q % 12 - k % 12).abs() <= 1)),
        (None, None),
    ),
    "intersection": (plain(and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k <= 30)), (1, 1)),
    "empty intersection": (plain(and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q < k)), (1, 1)),
    "union": (plain(or_masks(lambda b, h, q, k: q == k, lambda b, h, q, k: k < 9)), (2, 4)),
    "by head": (plain(lambda b, h, q, k: (q + h) % 3 != k % 3), (None, 4)),
    "by batch entry": (plain(lambda b, h, q, k: (q >= k) & (b % 2 == 0)), (2, None)),
    "by both": (plain(lambda b, h, q, k: (q >= k) & ((h + b) % 2 == 0)), (2, 4)),
    "lists for all, though alike": (plain(lambda b, h, q, k: q >= k), (2, 4)),
    "documents": (Reads(lambda d: lambda b, h, q, k: d[q] == d[k], values=(documents,)), (None, None)),
    "causal in documents": (
        Reads(lambda d: lambda b, h, q, k: (d[q] == d[k]) & (q >= k), values=(documents,)),
        (None, None),
    ),
    "clamped documents": (
        Reads(lambda d: lambda b, h, q, k: d[q.clamp(0, len(d) - 1)] == d[k.clamp(0, len(d) - 1)], values=(documents,)),
        (None, None),
    ),
    "documents of each entry": (
        Reads(
            lambda d: lambda b, h, q, k: d[b, q] == d[b, k],
            values=(lambda n: torch.stack([documents(n), documents(n) // 2]),),
        ),
        (2, 1),
    ),
    "offset of each entry": (
        Reads(lambda o: lambda b, h, q, k: q + o[b] * 16 >= k, values=(lambda n: torch.arange(8),)),
        (2, None),
    ),
    "padding": (Reads(lambda n: lambda b, h, q, k: (q < n[b]) & (k < n[b]), values=(per_entry,)), (2, None)),
    "padding, by partial": (
        Reads(
            lambda n: partial(lambda b, h, q, k, lengths: (q < lengths[b]) & (k < lengths[b]), lengths=n),
            values=(per_entry,),
        ),
        (2, None),
    ),
    "queries of each entry": (
        Reads(
            lambda t: lambda b, h, q, k: ~t[b, q],
            values=(lambda n: (torch.arange(2 * n.queries) % 3 == 0).view(2, -1),),
        ),
        (2, None),
    ),
    "a table of pairs": (
        Reads(
            lambda t: lambda b, h, q, k: t[b, h.new_zeros(h.shape), q, k],
            values=(lambda n: torch.ones(2, 1, n.queries, n.keys, dtype=torch.bool).tril(),),
        ),
        (2, None),
    ),
    "kinds of heads": (
        Reads(
            lambda t: lambda b, h, q, k: (t[h] == 1) | (q - k).abs().le(9),
            values=(lambda n: torch.tensor([0, 1, 0, 1]),),
        ),
        (None, 4),
    ),
    "a width that is read": (
        Reads(lambda w: lambda b, h, q, k: (q - k).abs() < w, values=(integer(17.5),)),
        (None, None),
    ),
    "by batch entry, lists for one": (plain(lambda b, h, q, k: (q + k + b) % 3 != 0), (None, None)),
    "by head, lists for one": (plain(lambda b, h, q, k: (q + k + h) % 3 != 0), (None, None)),
}
CAUSAL = RULES["causal"][0]


def _with_rule(mask: BlockMask, rule: Any) -> BlockMask:
    mask.mask_mod = rule
    return mask


def _without_queries_lists(mask: BlockMask, size: Size) -> BlockMask:
    mask.q_num_blocks = mask.q_indices = mask.full_q_num_blocks = mask.full_q_indices = None
    return mask


def _listed(partial_blocks: list[list[int]], full: list[list[int]] | None = None) -> Callable[..., BlockMask]:
    """Blocks of each of three rows of blocks, by number."""

    def lists(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        filled = torch.tensor([[*row, *[0] * (3 - len(row))] for row in rows], dtype=torch.int32)
        return torch.tensor([len(row) for row in rows], dtype=torch.int32)[None, None], filled[None, None]

    def edit(mask: BlockMask, size: Size) -> BlockMask:
        more = (None, None) if full is None else lists(full)
        lengths = size.queries, size.keys
        return BlockMask.from_kv_blocks(*lists(partial_blocks), *more, 32, mask.mask_mod, lengths)

    return edit


def _reversed(mask: BlockMask, size: Size) -> BlockMask:
    """The blocks of each row in reverse."""
    at = (mask.kv_num_blocks[..., None] - 1 - torch.arange(mask.kv_indices.shape[-1])).clamp(min=0)
    mask.kv_indices = mask.kv_indices.gather(-1, at.long())
    return mask


def _filled_by_minus_one(mask: BlockMask, size: Size) -> BlockMask:
    free = torch.arange(mask.kv_indices.shape[-1]) >= mask.kv_num_blocks[..., None]
    mask.kv_indices = mask.kv_indices.masked_fill(free, -1)
    return mask


def _no_full_blocks(mask: BlockMask, size: Size) -> BlockMask:
    mask.full_kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
    return mask


def _first_block_only(mask: BlockMask, size: Size) -> BlockMask:
    mask.kv_num_blocks = mask.kv_num_blocks.clamp(max=1)
    return mask


def of_tokens(maker: Callable[..., BlockMask], queries: int, keys: int) -> Callable[..., BlockMask]:
    """A maker of masks that are for these numbers of queries and keys, whichever the call has."""
    return lambda rule, B, H, N, M, **how: maker(rule, B, H, queries, keys, **how)


def _cropped(mask: BlockMask, size: Size) -> BlockMask:
    return mask._adjust(size.queries, size.keys)


EDITS: dict[str, dict[str, Any]] = {
    "from partial blocks": {"edit": _listed([[0], [0, 1], [0, 1, 2]])},
    "from partial and full blocks": {"edit": _listed([[0], [1], [2]], [[], [0], [0, 1]])},
    "some blocks left out": {"edit": _listed([[0], [], [2]], [[], [0], []])},
    "full blocks beyond the rule": {"edit": _listed([[0], [1], [2]], [[1, 2], [0], [0]])},
    "partial blocks, all allowed": {"edit": _listed([[0], [0, 1], [2]]), "rule": plain(noop_mask)},
    "no blocks": {"edit": _listed([[], [], []])},
    "a block twice": {"edit": _listed([[0, 0], [1], [2]])},
    "a block partial and full": {"edit": _listed([[0], [0, 1], [2]], [[], [0], [0, 1]])},
    "unsorted": {"edit": _listed([[0], [1, 0], [2, 0, 1]])},
    "reversed": {"edit": _reversed, "rule": RULES["window"][0]},
    "filled by -1": {"edit": _filled_by_minus_one},
    "no full blocks any more": {"edit": _no_full_blocks},
    "first partial block of each row": {"edit": _first_block_only, "rule": RULES["window"][0]},
    "without lists of the queries": {"edit": _without_queries_lists},
    "moved": {"edit": lambda mask, size: mask.to("cpu")},
    "full blocks as partial ones": {"maker": partial(own.create_block_mask, separate_full_blocks=False)},
    "full blocks as partial ones, by torch": {
        "maker": partial(torch_own.create_block_mask, separate_full_blocks=False)
    },
    "first entry": {"edit": lambda mask, size: _with_rule(mask[:1], mask.mask_mod), "lists": (2, 4)},
    "a head of all": {"edit": lambda mask, size: _with_rule(mask[:, 1:2], mask.mask_mod), "lists": (2, 4)},
    "a row of blocks": {
        "edit": lambda mask, size: _with_rule(mask[:, :, :1], mask.mask_mod)._adjust(32, 96),
        "size": Size(queries=32),
        "maker": of_tokens(own.create_block_mask, 96, 96),
    },
    "another rule": {"edit": lambda mask, size: _with_rule(mask, RULES["dilated"][0].make())},
    "cropped": {
        "edit": _cropped,
        "maker": of_tokens(torch_own.create_block_mask, 160, 160),
    },
    "cropped, both sides": {
        "edit": _cropped,
        "size": Size(queries=64, keys=96),
        "maker": of_tokens(torch_own.create_block_mask, 160, 160),
    },
    "cropped within a block": {
        "edit": _cropped,
        "size": Size(queries=70, keys=90),
        "maker": of_tokens(own.create_block_mask, 160, 160),
    },
}

# Keys and values in pages: entries of a batch share one long row of them.


@cache
def _pages() -> PagedAttention:
    """12 pages of 32 tokens, of which two entries took three each by turns."""
    pages = PagedAttention(12, 32, 2, device="cpu")
    for lengths in ((20, 90), (50, 96), (96, 96)):
        for entry, length in enumerate(lengths):
            pages.reserve(torch.tensor(entry), torch.tensor(length))
    return pages


def paged(score: Reads) -> Reads:
    return Reads(lambda *read: _pages().get_score_mod(score.make(*read)), *score[1:])


def _in_pages(rule: Any, B: int | None, H: int | None, N: int, M: int, **how: Any) -> BlockMask:
    """The mask of 96 tokens over all pages."""
    logical = torch_own.create_block_mask(rule, 2, 1, N, 96, **how)
    return _pages().convert_logical_block_mask(logical)


PAGED: Mapping[str, Any] = {"maker": _in_pages, "edit": lambda mask, size: mask}
