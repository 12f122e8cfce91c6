"""How much memory a forward pass needs beside naive attention, which forms queries x keys."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks

from ._claims import NAIVE_MEMORY, TOKEN_BYTES
from ._memory import peak_bytes
from ._problem import Size
from ._result import Row
from .peer_dense import dense_attention

_SEGMENTS, _RATES = (1024, 2048, 4096), (1, 2, 4)
_WARM_UP_TOKENS = 64


def measure(size: Size) -> list[Row]:
    """Peak memory against naive attention, and by token."""
    _check()
    ours, naive = (peak_bytes(prepare, size) for prepare in (_dilated_pass, _naive_pass))
    scores = 4 * size.num_heads * size.num_tokens**2
    less = NAIVE_MEMORY.row(
        100 * (1 - ours / max(1, naive)),
        peak_bytes=ours,
        naive_peak_bytes=naive,
        percent_less_than_naive_scores_alone=100 * (1 - ours / scores),
    )
    return [less, TOKEN_BYTES.row(ours / size.num_tokens / 1024, peak_bytes=ours)]


def _check() -> None:
    """Naive attention is dense attention."""
    q, k, v = _draw(Size(_WARM_UP_TOKENS, num_heads=2))
    assert_close(_naive(q, k, v), dense_attention(causal=False)(q, k, v), rtol=1e-4, atol=1e-5)


def _dilated_pass(size: Size) -> Callable[[], object]:
    pattern = masks.longnet(_SEGMENTS, _RATES, heads="grouped")
    return _pass(lambda q, k, v: fd.attend(q, k, v, pattern), size)


def _naive_pass(size: Size) -> Callable[[], object]:
    return _pass(_naive, size)


@torch.no_grad()
def _pass(attention: Callable[[Tensor, Tensor, Tensor], Tensor], size: Size) -> Callable[[], object]:
    attention(*_draw(replace(size, num_tokens=_WARM_UP_TOKENS)))

    @torch.no_grad()
    def work() -> object:
        return attention(*_draw(size))

    return work


def _draw(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, size.num_heads, size.num_tokens, size.head_dim) for _ in range(3))
    return q, k, v


def _naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v
