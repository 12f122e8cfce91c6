"""Score functions for `attend(..., score_mod=)`: biases of distances, and capped scores."""

from __future__ import annotations

from math import log, prod
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .engines import ScoreMod
from .masks import Pattern
from .masks.core import advises, require_bool, require_finite, require_int
from .masks.patterns import numbered_pairs

__all__ = ["alibi", "compose", "entries", "relative", "slopes", "softcap", "t5"]

# H heads, R largest distance of a table, K buckets


def slopes(num_heads: int) -> Float[Tensor, " H"]:
    """Return ALiBi's slopes, one for each head: 2^(-8 / H), 2^(-16 / H), ..., 2^-8 if H is a power of two.

    For another H, they are the slopes for P heads, where P is the largest power of two below H, and then the first,
    third, fifth, ... of the slopes for 2 P heads, until there are H.
    Source: arXiv 2108.12409, section 3, and its code for other numbers of heads.

    Raises TypeError or ValueError unless num_heads is an integer of at least 1.

    >>> fd.biases.slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    require_int("num_heads", num_heads, minimum=1)
    lower = 1 << (num_heads.bit_length() - 1)
    first = 2.0 ** (-8 / lower * torch.arange(1, lower + 1))
    return torch.cat([first, 2.0 ** (-4 / lower * torch.arange(1, 2 * lower, 2))])[:num_heads]


@advises(how="write fd.biases.alibi(fd.biases.slopes(num_heads))")
def alibi(slopes: Float[Tensor, " H"]) -> ScoreMod:
    """Return a score_mod that subtracts slope times distance from each score, as in ALiBi, arXiv 2108.12409.

    slopes: one for each head of all devices, on the device of q; from `slopes`, or learned: they get a gradient.

    The distance is the absolute difference of the positions of query and key. Raises TypeError or ValueError unless
    slopes is a float tensor of one dim.

    >>> q, k, v = torch.randn(3, 1, 4, 64, 16)
    >>> bias = fd.biases.alibi(fd.biases.slopes(4))
    >>> fd.attend(q, k, v, masks.causal(), score_mod=bias).shape
    torch.Size([1, 4, 64, 16])
    """
    _require_table("slopes", slopes, 1)

    def score_mod(score, b, h, q_idx, k_idx):
        return score - slopes[h] * (q_idx - k_idx).abs()

    return score_mod


@advises(how="write fd.biases.entries(values, pattern), a value for each pair of masks.sparse or masks.selected_keys")
def entries(values: Float[Tensor, "..."], pattern: Pattern) -> ScoreMod:
    """Return a score_mod that adds a value to the score of each pair that a pattern lists, such as one for each edge.

    values: on the device of q; they get a gradient. For `masks.sparse(matrix)`: (E,) or (H, E), in the order of the E
        values of the matrix, entries of value 0 included. For `masks.selected_keys(table)` with a table (1, N, L):
        (N, L) or (H, N, L); with a table (B, 1, N, L): (B, N, L) or (B, H, N, L). H is the number of heads of all
        devices; without the dim H, or with H = 1, all heads share the values.
    pattern: the pattern that lists the pairs; `attend` may combine it with others, whose pairs get no value.

    `entries` reads the pairs: in a function that torch.compile compiles, the graph breaks here. The score_mod reads
    `values` in each call.

    Raises TypeError for other patterns, and for a matrix or table given by name; ValueError for values of another shape
    or no float dtype, for a pattern with more than one matrix or table, and if it lists a pair twice.

    >>> edges = torch.eye(64).to_sparse()
    >>> graph, weights = masks.sparse(edges), torch.zeros(4, 64, requires_grad=True)
    >>> q, k, v = torch.randn(3, 1, 4, 64, 16)
    >>> fd.attend(q, k, v, graph, score_mod=fd.biases.entries(weights, graph)).shape
    torch.Size([1, 4, 64, 16])
    """
    make: Any = torch.compiler.disable(_entries) if torch.compiler.is_compiling() else _entries
    return make(values, pattern)


def _entries(values: Tensor, pattern: Pattern) -> ScoreMod:
    table, numbers, shape = numbered_pairs(pattern)
    at = 1 if len(shape) == 3 else 0  # of a dim of heads; before it is that of batch entries
    given = tuple(values.shape) if isinstance(values, Tensor) else ()
    by_head = len(given) > len(shape)
    beside_heads = given[:at] + given[at + 1 :] if by_head else given
    if not isinstance(values, Tensor) or not values.is_floating_point() or beside_heads != shape:
        came = given if isinstance(values, Tensor) else repr(values)[:80]
        of_batch, of_pairs = (", ".join(map(str, each)) for each in (shape[:at], shape[at:]))
        with_heads = f"{of_batch}, heads" if at else "heads"
        raise ValueError(f"values must be floats of shape {shape}, or ({with_heads}, {of_pairs}); got {came}")
    if 0 in shape:
        return lambda score, b, h, q_idx, k_idx: score
    find, num_entries = table.finder(num_heads=1, device=values.device), table.entries
    # Of each pair, the index in the values of one batch entry. A view of values would not be compiled for CUDA.
    indices = torch.unravel_index(numbers.to(values.device) % prod(shape[at:]), shape[at:])

    def score_mod(score, b, h, q_idx, k_idx):
        # Where all entries share the pairs, places depend on positions alone: they are computed once for all heads.
        place, found = find(b if num_entries > 1 else 0, 0, q_idx, k_idx)
        lead = (b if num_entries > 1 else 0,) if at else ()
        lead = (*lead, h if given[at] > 1 else 0) if by_head else lead
        return torch.where(found, score + values[(*lead, *(each[place] for each in indices))], score)

    return score_mod


@advises(how="write fd.biases.relative(table), a bias for each head and distance")
def relative(table: Float[Tensor, "H 2R+1"]) -> ScoreMod:
    """Return a score_mod that adds to each score the bias of its head and its distance, k - q in positions.

    table: the biases, on the device of q; it gets a gradient. Column R + d is for distance d; distances below -R or
        above R have the bias of -R or R. Row h is for head h of all devices; a single row is for all heads.

    Raises TypeError or ValueError for another table.
    Source: Shaw et al., arXiv 1803.02155, with scalars as in T5.

    >>> q, k, v = torch.randn(3, 1, 4, 64, 16)
    >>> table = torch.zeros(4, 65, requires_grad=True)
    >>> fd.attend(q, k, v, masks.causal(), score_mod=fd.biases.relative(table)).shape
    torch.Size([1, 4, 64, 16])
    """
    _require_table("table", table, 2)
    if table.shape[1] % 2 == 0:
        came = f"got shape {tuple(table.shape)}"
        raise ValueError(f"table must have an odd number of columns, for distances -R to R; {came}")
    reach, shared = table.shape[1] // 2, len(table) == 1

    def score_mod(score, b, h, q_idx, k_idx):
        distance = (k_idx - q_idx).clamp(-reach, reach)
        return score + table[0 if shared else h, distance + reach]

    return score_mod


@advises(how="write fd.biases.t5(relative_attention_bias.weight, bidirectional=True)")
def t5(weight: Float[Tensor, "K H"], *, bidirectional: bool, max_distance: int = 128) -> ScoreMod:
    """Return a score_mod that adds to each score T5's relative position bias of its head and its distance's bucket.

    weight: weight of T5's `relative_attention_bias`, on the device of q; it gets a gradient. Each row is for a bucket:
        one small distance, or a range of larger ones. Ranges widen with the distance; the last has all from
        max_distance on. Column h is for head h of all devices.
    bidirectional: True, as in encoders: half of the buckets are for keys after the query. False: keys after the query
        have the bucket of distance 0.

    T5's scores are not scaled: pass scale=1.0 to `attend`. Raises TypeError or ValueError for invalid arguments.

    Source: arXiv 1910.10683, section 2.1.

    >>> q, k, v = torch.randn(3, 1, 4, 64, 16)
    >>> bias = fd.biases.t5(torch.randn(32, 4), bidirectional=True)
    >>> fd.attend(q, k, v, masks.every(), scale=1.0, score_mod=bias).shape
    torch.Size([1, 4, 64, 16])
    """
    _require_table("weight", weight, 2)
    num_buckets = len(weight)
    _check_buckets(num_buckets, bidirectional, max_distance)

    def score_mod(score, b, h, q_idx, k_idx):
        return score + weight[_bucket(k_idx - q_idx, num_buckets, bidirectional, max_distance), h]

    return score_mod


def _bucket(distance: Int64[Tensor, "..."], num_buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """Return T5's bucket, from 0 to num_buckets - 1, of each distance k - q."""
    later = 0
    if bidirectional:
        num_buckets //= 2
        later, distance = (distance > 0).long() * num_buckets, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    steps = (distance.clamp(min=exact).float() / exact).log() / log(max_distance / exact) * (num_buckets - exact)
    far = (exact + steps.long()).clamp(max=num_buckets - 1)
    return later + torch.where(distance < exact, distance, far)


def softcap(value: float) -> ScoreMod:
    """Return a score_mod that caps scores smoothly: value * tanh(score / value), as in Gemma 2, arXiv 2408.00118.

    value: bound on the absolute scores, finite and above 0. Raises TypeError or ValueError for any other.

    >>> q, k, v = torch.randn(3, 1, 4, 64, 16)
    >>> fd.attend(q, k, v, masks.causal(), score_mod=fd.biases.softcap(50.0)).shape
    torch.Size([1, 4, 64, 16])
    """
    value = require_finite("value", value)
    if value <= 0:
        raise ValueError(f"value must be above 0; got {value=}")

    def score_mod(score, b, h, q_idx, k_idx):
        return value * torch.tanh(score / value)

    return score_mod


def compose(*score_mods: ScoreMod) -> ScoreMod:
    """Return a score_mod that applies one or more score functions in turn, the first to the scaled score.

    Raises TypeError without arguments and for an argument that is no function.

    >>> cap = fd.biases.softcap(30.0)
    >>> both = fd.biases.compose(fd.biases.alibi(fd.biases.slopes(4)), cap)
    """
    if not score_mods or not all(map(callable, score_mods)):
        raise TypeError(f"compose needs score functions, such as softcap(30.0); got {score_mods!r:.80}")

    def score_mod(score, b, h, q_idx, k_idx):
        for each in score_mods:
            score = each(score, b, h, q_idx, k_idx)
        return score

    return score_mod


def _require_table(name: str, table: object, dims: int) -> None:
    if not isinstance(table, Tensor):
        heads = name == "slopes" and type(table) is int
        how = f": write fd.biases.slopes({table}), or a tensor with one for each head" if heads else ""
        raise TypeError(f"{name} must be a tensor; got {type(table).__name__}{how}")
    if table.dim() != dims or not table.is_floating_point() or 0 in table.shape:
        came = f"got {table.dtype} of shape {tuple(table.shape)}"
        raise ValueError(f"{name} must have a floating-point dtype and {dims} dims of at least 1; {came}")


def _check_buckets(num_buckets: int, bidirectional: object, max_distance: object) -> None:
    half = num_buckets // 2 if require_bool("bidirectional", bidirectional) else num_buckets
    if half < 2 or (bidirectional and num_buckets % 2):
        least = "an even number of at least 4" if bidirectional else "at least 2"
        raise ValueError(f"weight must have one row for each bucket, {least}; got {num_buckets}")
    require_int("max_distance", max_distance, minimum=half // 2 + 1)
