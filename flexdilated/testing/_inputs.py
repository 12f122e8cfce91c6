"""Test inputs for attention: lengths near multiples of a pattern's segments, kinds of values, memory layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from ..masks import Mixture, Pattern

# B batch, H query heads, G key/value heads, X either H or G, N tokens, D head dim

_NO_LENGTHS = ("seed", "head", "rows")


def edges_of(pattern: Pattern | Mixture) -> tuple[int, ...]:
    """Return lengths at whose multiples a pattern's rule may change, in ascending order, without duplicates.

    They are the numbers in `pattern.to_data()`, such as segment lengths, rates, strides and block sizes, but not seeds,
    heads and listed blocks; and lengths that follow from these, such as the width of a window. For a custom function
    only the period is known.
    """
    periods = {leaf.period() or 0 for leaf in pattern.leaves() if leaf.to_data()["kind"] == "custom"}
    return tuple(sorted((_edges_in_data(pattern.to_data()) | periods) - {0}))


def _edges_in_data(data: Mapping[str, Any]) -> set[int]:
    parts = [*data.get("parts", ()), *(data[name] for name in ("part", "spans") if name in data)]
    inner = set().union(*map(_edges_in_data, parts))
    several = (
        value if isinstance(value, list | tuple) else [value] for name, value in data.items() if name not in _NO_LENGTHS
    )
    own = {each for values in several for each in values if isinstance(each, int) and not isinstance(each, bool)}
    kind, block = data.get("kind"), data.get("block", 1)
    if kind in ("local_window", "dilated_window"):
        own.add((data["left"] + data["right"]) * data.get("rate", 1) + 1)
    if kind == "neighborhood":
        own |= set(accumulate(reversed(data["grid"]), mul))
    if kind == "block_list":
        own.add(block * len(data["rows"]))
    return own | inner | {block * edge for edge in inner}


# The last block of a kernel is whole at 128 tokens, and has a single token at 65 and 257.
LONG_LENGTHS = (65, 128, 257)
_BLOCKS = (64, 128, 256, 512, 1024)  # block sides of kernels; lengths are equal to these, or one more


def length_text(length: int) -> str:
    return "1 token" if length == 1 else f"{length} tokens"


def lengths_for(pattern: Pattern | Mixture, num_heads: int, *, max_tokens: int, examples: int) -> tuple[int, ...]:
    """Return up to `examples` lengths from 1 to max_tokens that the pattern accepts, in ascending order.

    The candidates are 1 to 5 and 7; max_tokens and one less; each block size of kernels and one more; and 1, 2 and 3
    times each of the pattern's `edges_of`, and one less or more. If the pattern accepts more than `examples` of these,
    evenly spaced ones are chosen. If it accepts none of these, the largest length that it accepts is chosen.

    Raises ValueError if the pattern accepts no length up to max_tokens.
    """
    edges = [edge for edge in edges_of(pattern) if 1 < edge <= max_tokens]
    around = {multiple * edge + step for edge in edges for multiple in (1, 2, 3) for step in (-1, 0, 1)}
    wanted = {1, 2, 3, 4, 5, 7, max_tokens - 1, max_tokens} | around
    wanted |= {block + step for block in _BLOCKS for step in (0, 1)}
    possible = [n for n in sorted(wanted) if 1 <= n <= max_tokens and accepts_length(pattern, num_heads, n)]
    if not possible:
        possible = [n for n in range(1, max_tokens + 1) if accepts_length(pattern, num_heads, n)][-1:]
    if not possible:
        raise ValueError(f"the pattern takes no length up to max_tokens; got {max_tokens=} and {pattern!r}")
    if len(possible) <= examples:
        return tuple(possible)
    places = torch.linspace(0, len(possible) - 1, examples).round().long().unique().tolist()
    return tuple(possible[place] for place in places)


def accepts_length(pattern: Pattern | Mixture, num_heads: int, num_tokens: int) -> bool:
    """Return True if the pattern can be bound to `num_tokens` queries and keys."""
    try:
        pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens)
    except ValueError:
        return False
    return True


# Kinds of values. Each length is tested with the first kind and, in rotation, a second one.
KINDS = ("ordinary values", "large scores", "equal keys", "zeros and -0.0", "one key far above the others")


def values(
    kind: str, num_heads: int, num_kv_heads: int, num_tokens: int, head_dim: int, *, batch: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return float64 (q, k, v) on the CPU: q (batch, num_heads, num_tokens, head_dim), k and v with num_kv_heads.

    kind: a text in KINDS, such as "large scores".
    seed: equal seeds give equal values.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = (
        torch.randn((batch, number, num_tokens, head_dim), generator=generator, dtype=torch.float64) for number in heads
    )
    if kind == "large scores":
        q = 30 * q
    elif kind == "equal keys":
        k = k[:, :, :1].expand_as(k).clone()
    elif kind == "zeros and -0.0":
        q, k = torch.zeros_like(q), -torch.zeros_like(k)
    elif kind == "one key far above the others":
        k[:, :, num_tokens // 2] *= 20
    return q, k, v


def _misaligned(x: Tensor) -> Tensor:
    """Return a copy of x, at an offset of five elements in a buffer, with gaps of three elements between vectors."""
    *sizes, D = x.shape
    buffer = x.new_full((5 + x[..., 0].numel() * (D + 3),), 7.0)
    room = buffer[5:].view(*sizes, D + 3)[..., :D]
    return room.copy_(x)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x.clone(memory_format=torch.contiguous_format),
    "tokens first": lambda x: x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2),
    "fused": lambda x: torch.stack([x.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2),
    "channels first": lambda x: x.mT.clone(memory_format=torch.contiguous_format).mT,
    "stacked": lambda x: torch.stack([x + 1, x, x - 1], -1)[..., 1],
    "every second": lambda x: torch.stack([x - 1, x], -1).flatten(-2)[..., 1::2],
    "expanded": lambda x: x[..., :1].expand_as(x),
    "misaligned": _misaligned,
}

MEMORY_LAYOUTS = tuple(_LAYOUTS)


def laid_out(x: Shaped[Tensor, "B X N D"], layout: str) -> Shaped[Tensor, "B X N D"]:
    """Return x, detached, with the strides of a memory layout; values are unchanged, except in layout "expanded".

    "heads first": contiguous. "tokens first": transposed from a contiguous (B, N, X, D), as a projection gives it.
    "fused": one of three tensors interleaved by token, as a fused projection of q, k and v gives it. "channels first":
    transposed from a contiguous (B, X, D, N), as a Conv1d gives it. "stacked": one of three tensors stacked along a
    last dim. "every second": every second channel. "expanded": the first channel, repeated with stride 0 in the memory
    of x. "misaligned": gaps between the vectors of tokens, at an odd offset. Raises ValueError for any other name.

    >>> testing.laid_out(torch.randn(1, 4, 256, 64), testing.MEMORY_LAYOUTS[1]).stride()
    (65536, 64, 256, 1)
    """
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, MEMORY_LAYOUTS))}; got {layout!r}")
    return _LAYOUTS[layout](x.detach())
