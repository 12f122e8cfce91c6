"""What one attention call holds in memory: the engine's own code, run over tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..engines import CallKey
from ..masks.core import Expression, require_int
from ..masks.patterns import names
from ._live_bytes import LiveBytes, fake_tensors, nbytes
from ._memory_flex import flex_attention_of
from ._memory_tiles import tiles_attention_of

# B batch, H query heads, G key/value heads, N tokens, D head dim

# Beyond, every part grows in proportion to the tokens: whole tensors do, and what is gathered at once has a bound.
LARGEST_RUN = 1 << 20
_SAME_ENDING = 1 << 15  # what a segment cut short at the end costs is the same for tokens that differ by this

Attention = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v) -> (out, lse)


@dataclass(frozen=True)
class AttentionSize:
    """Sizes of a self-attention call. `tokens_outermost`: (B, N, H, D) in memory, as a projection leaves them."""

    num_tokens: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    batch: int = 1
    num_kv_heads: int | None = None
    tokens_outermost: bool = False

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of one call; each peak is of all that is alive, the call's inputs included.

    queries: q, and as many out. keys: k and v together. lse: that of every row. kept: what training keeps from the
    forward for the backward, q, k, v, out and lse included. inference_peak: a forward that keeps nothing.
    forward_peak: one that keeps. backward_peak: from the gradient of out to those of q, k and v. tables: the plan's
    lists, which stay in the cache and are in no peak.
    """

    queries: int
    keys: int
    lse: int
    kept: int
    inference_peak: int
    forward_peak: int
    backward_peak: int
    tables: int

    @property
    def inputs(self) -> int:
        """q, k and v."""
        return self.queries + self.keys

    @property
    def shown(self) -> int:
        """q, k, v, out and lse."""
        return self.inputs + self.queries + self.lse

    @property
    def training_peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    def at(self, num_tokens: int, other: AttentionMemory, tokens: tuple[int, int]) -> AttentionMemory:
        """On the line through this and another, which are at these two numbers of tokens."""
        share = (num_tokens - tokens[0]) / (tokens[1] - tokens[0])
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return AttentionMemory(**{name: round(a + share * (b - a)) for name, (a, b) in pairs.items()})


def attention_memory(pattern: Expression, size: AttentionSize, *, device: str = "cpu") -> AttentionMemory:
    """Memory of `attend` on this kind of device with its default engine: tiles on "cpu", flex elsewhere.

    Up to 1,048,576 tokens the engine's code runs once at that size, over tensors without memory, and all that it
    holds is counted; beyond, parts go on growing as they do up to there. What kernels allocate inside is not counted:
    on CPU a few MB a thread. Nothing is computed, and no accelerator is needed.
    Raises ValueError for a pattern that needs run-time tensors, and for what does not bind.
    """
    missing = names(pattern)
    if missing:
        raise ValueError(f"a pattern's memory is known with its values; got one that needs {', '.join(missing)}")
    require_int("num_tokens", size.num_tokens, minimum=1)
    if size.num_tokens <= LARGEST_RUN:
        return _dry_run(pattern, size, device)
    ending = size.num_tokens % _SAME_ENDING
    tokens = LARGEST_RUN // 2 + ending, LARGEST_RUN + ending
    smaller, larger = (_dry_run(pattern, replace(size, num_tokens=number), device) for number in tokens)
    return smaller.at(size.num_tokens, larger, tokens)


def _dry_run(pattern: Expression, size: AttentionSize, device: str) -> AttentionMemory:
    pattern.check_heads(size.num_heads)
    heads, tokens = (size.num_heads, size.kv_heads), (size.num_tokens, size.num_tokens)
    key = CallKey(pattern.text, *heads, *tokens, 0, 0, 0, size.num_heads, 1, ())
    if device == "cpu":
        key_bytes = 2 * size.batch * size.head_dim * size.dtype.itemsize
        attention, tables = tiles_attention_of(key, pattern, key_bytes=key_bytes)
    else:
        attention, tables = flex_attention_of(key, pattern, device=device)
    with fake_tensors():
        q, k, v = (_empty(heads, size) for heads in (size.num_heads, size.kv_heads, size.kv_heads))
    # Outside of the mode: what the engine does with its tables alone is done, as it decides by their values.
    return _measure(attention, q, k, v, tables)


def _measure(attention: Attention, q: Tensor, k: Tensor, v: Tensor, tables: int) -> AttentionMemory:
    with torch.no_grad(), LiveBytes(q, k, v) as inference:
        out, lse = attention(q, k, v)
    rows = nbytes(lse)
    del out, lse
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with LiveBytes(q, k, v) as training:
        out, _ = attention(*leaves)
        forward_peak, kept = training.peak, training.live
        training.restart()
        torch.autograd.grad(out, leaves, torch.empty_like(out))
    peaks = inference.peak, forward_peak, training.peak
    return AttentionMemory(nbytes(q), nbytes(k, v), rows, kept, *peaks, tables)


def _empty(heads: int, size: AttentionSize) -> Tensor:
    shape = size.batch, heads, size.num_tokens, size.head_dim
    if size.tokens_outermost:
        return torch.empty(shape[0], shape[2], shape[1], shape[3], dtype=size.dtype).transpose(1, 2)
    return torch.empty(shape, dtype=size.dtype)
