"""What the catalogue's expressions name beside `masks`: document ids, a length, marks, rows, a function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexdilated import masks


def document_ids(num_tokens: int) -> Tensor:
    """Documents packed one after the other, of 128 to 4096 tokens; in short sequences, of 7 to half of them."""
    longest = min(4096, num_tokens // 2)
    lengths = longest * 32 ** -torch.rand(num_tokens, generator=_seeded())  # log-uniform
    lengths = lengths.long().clamp(min=7)
    count = int((lengths.cumsum(0) < num_tokens).sum()) + 1
    return torch.arange(count).repeat_interleave(lengths[:count])[:num_tokens]


def real_tokens(num_tokens: int) -> Tensor:
    """The length of a sequence of which about a seventh is padding."""
    return torch.tensor(num_tokens - num_tokens // 7)


def key_marks(num_tokens: int) -> Tensor:
    """Passages padded to 2048 tokens each, of which at least half are real; in short sequences, to a quarter."""
    size = min(2048, num_tokens // 4)
    lengths = torch.randint(size // 2, size + 1, (-(-num_tokens // size), 1), generator=_seeded())
    return (torch.arange(size) < lengths).flatten()[:num_tokens]


def block_rows(num_tokens: int, *, block: int) -> list[list[int]]:
    """A table such as a router makes: its own block, the one before, the first, and two others before it."""
    rows, generator = -(-num_tokens // block), _seeded()
    chosen = (torch.rand(rows, 2, generator=generator) * torch.arange(rows)[:, None]).long()
    return [sorted({0, max(0, row - 1), row, *others}) for row, others in enumerate(chosen.tolist())]


def widening(width: int) -> Callable[..., Tensor]:
    """Each head sees twice as many keys before the query as the head before it, the first `width`."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < width * 2**h)

    return mask_mod


def boxes_of_widening(width: int) -> Callable[..., Tensor]:
    """What boxes of `widening` hold."""

    def classify(head: Tensor, q_first: Tensor, q_last: Tensor, k_first: Tensor, k_last: Tensor) -> Tensor:
        reach = width * 2**head
        empty = (q_last < k_first) | (q_first - k_last >= reach)
        full = (q_first >= k_last) & (q_last - k_first < reach)
        return torch.where(full, masks.FULL, torch.where(empty, masks.EMPTY, masks.PARTIAL))

    return classify


def names_for(num_tokens: int) -> dict[str, Any]:
    """The names that an expression over this many tokens may use."""
    return {
        "masks": masks,
        "recipes": masks.recipes,
        "num_tokens": num_tokens,
        "ids": document_ids(num_tokens),
        "length": real_tokens(num_tokens),
        "marks": key_marks(num_tokens),
        "block_rows": block_rows,
        "widening": widening,
        "boxes_of_widening": boxes_of_widening,
    }


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
