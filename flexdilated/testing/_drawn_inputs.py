"""Hypothesis strategies for sizes, tensors, packings and shards, with edge cases and values that overflow a softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..distributed import Sharding
from ..masks import Mixture, Pattern
from ..masks.core import require_bool, require_int
from ._inputs import MEMORY_LAYOUTS, edges_of, laid_out

_ORDERS: list[Literal["contiguous", "zigzag"]] = ["contiguous", "zigzag"]


@st.composite
def any_of(draw: st.DrawFn, *strategies: st.SearchStrategy) -> Any:
    """Strategy that draws from one of these strategies; one that is given twice is twice as likely.

    `one_of` would drop repetitions. Give the simplest strategy first: hypothesis shrinks towards it.
    """
    return draw(draw(st.sampled_from(strategies)))


def lengths(
    around: Pattern | Mixture | Iterable[int] = (), *, max_tokens: int = 48, blocks: Iterable[int] = ()
) -> st.SearchStrategy[int]:
    """Strategy for numbers of tokens from 1 to max_tokens, half of them near edges, if any. They shrink towards 1.

    around: edges, which are lengths at whose multiples a result may change; or a pattern, to use its `edges_of`.
    blocks: further edges, such as block sizes.

    Numbers near an edge are 1 to 4 times the edge, or one less or more. The other half are 1, max_tokens or any number.
    """
    require_int("max_tokens", max_tokens, minimum=1)
    own = edges_of(around) if isinstance(around, Pattern | Mixture) else tuple(around)
    edges = {require_int("an edge", edge, minimum=1) for edge in (*own, *blocks)}
    special = {edge * times + step for edge in edges for times in range(1, 5) for step in (-1, 0, 1)}
    listed, anything = sorted(length for length in special if 1 <= length <= max_tokens), st.integers(1, max_tokens)
    near = st.sampled_from(listed) if listed else anything
    return any_of(anything, near, near, st.sampled_from([1, 1, 1, 1, max_tokens]))


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of one attention call: q (batch, num_heads, num_queries, head_dim), k and v with num_kv_heads and num_keys.

    Query i has position q_offset + i, key j has position k_offset + j. The heads are num_heads of num_heads_global,
    starting at head_offset; num_heads_global=0 is replaced by head_offset + num_heads.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: int
    head_dim: int
    q_offset: int = 0
    k_offset: int = 0
    head_offset: int = 0
    num_heads_global: int = 0

    def __post_init__(self) -> None:
        if not self.num_heads_global:
            object.__setattr__(self, "num_heads_global", self.head_offset + self.num_heads)

    @property
    def places(self) -> dict[str, int]:
        """Keywords of `attend` and of a pattern's `bind`: q_offset, k_offset, head_offset and num_heads_global."""
        names = ("q_offset", "k_offset", "head_offset", "num_heads_global")
        return {name: getattr(self, name) for name in names}


@st.composite
def attention_sizes(
    draw: st.DrawFn,
    around: Pattern | Mixture | Iterable[int] = (),
    *,
    num_heads: int | None = None,
    max_heads: int = 4,
    max_batch: int = 2,
    max_tokens: int = 48,
    blocks: Iterable[int] = (),
    self_attention: bool = True,
    all_heads: bool = True,
) -> AttentionSizes:
    """Strategy for `AttentionSizes` whose num_kv_heads divides num_heads. Drawn sizes shrink towards 1.

    around, blocks: as in `lengths`, for the numbers of queries and of keys.
    num_heads: fixed number of heads on all devices; None: any up to max_heads.
    self_attention: False: numbers of queries and keys may differ, with offsets up to max_tokens, unless a listed block
        or a grid position of the pattern `around` would then be out of range.
    all_heads: False: the tensors may have only some of the heads, as on one of several devices.
    """
    total = draw(st.integers(1, max_heads)) if num_heads is None else require_int("num_heads", num_heads, minimum=1)
    keys = draw(lengths(around, max_tokens=max_tokens, blocks=blocks))
    first, here = 0, total
    if not all_heads and draw(st.integers(0, 2)):
        first = draw(st.integers(0, total - 1))
        here = draw(st.integers(1, total - first))
    groups = draw(st.sampled_from([number for number in range(1, here + 1) if here % number == 0]))
    batch, head_dim = draw(st.integers(1, max_batch)), draw(st.sampled_from([1, 3, 8, 16]))
    sizes = AttentionSizes(batch, here, groups, keys, keys, head_dim, 0, 0, first, total)
    if self_attention or draw(st.integers(0, 2)) == 0:
        return sizes
    queries, anywhere = draw(lengths(around, max_tokens=max_tokens, blocks=blocks)), st.integers(0, max_tokens)
    offsets = draw(anywhere), draw(any_of(st.sampled_from([0, min(5, max_tokens)]), anywhere))
    moved = replace(sizes, num_queries=queries, q_offset=offsets[0], k_offset=offsets[1])
    if not isinstance(around, Pattern | Mixture):
        return moved
    tensors = {"num_heads": here, "num_queries": queries, "num_keys": keys}
    return moved if in_range(lambda: around.bind(**tensors, **moved.places)) else sizes


def in_range(bind: Callable[[], object]) -> bool:
    """Return True if `bind` raises nothing, False if it raises the ValueError of a block or grid position out of range.

    Other errors are raised.
    """
    try:
        bind()
    except ValueError as error:
        if not any(
            text in str(error) for text in ("block_list must name blocks below", "queries and keys must be within")
        ):
            raise
        return False
    return True


# The first is the simplest. "ties": equal numbers, so equal scores; "large": scores whose exp overflows.
_VALUES = ("ordinary", "ties", "zeros", "large", "tiny", "one far above")
_SEEDS = st.integers(0, 1 << 16)


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    values: Sequence[str] = _VALUES,
    requires_grad: bool = False,
) -> Tensor:
    """Strategy for tensors of this shape and dtype on the CPU.

    values: kinds to draw from, in order of simplicity: "ordinary" (normal), "ties" (-1, 0 and 1), "zeros" (0.0 and
        -0.0), "large" (times 100), "tiny" (times 1e-4) and "one far above" (one element is 1e4).

    Raises ValueError for another kind. For any shape hypothesis draws only a kind and a seed, which shrink towards the
    first kind and seed 0.
    """
    require_bool("requires_grad", requires_grad)
    _require_kinds(values)
    kind, seed = draw(st.sampled_from(list(values))), draw(_SEEDS)
    generator = torch.Generator("cpu").manual_seed(seed)
    return _tensor_of_kind(shape, kind, generator).to(dtype).requires_grad_(requires_grad)


def _tensor_of_kind(shape: Sequence[int], kind: str, generator: torch.Generator) -> Tensor:
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    if kind == "ties":
        x = x.round().clamp(-1, 1)
    elif kind == "zeros":
        x = torch.where(x < 0, -0.0, 0.0).double()
    elif kind == "large":
        x = x * 100
    elif kind == "tiny":
        x = x * 1e-4
    elif kind == "one far above" and x.numel():
        x.view(-1)[int(torch.randint(x.numel(), (), generator=generator))] = 1e4
    return x


@st.composite
def attention_inputs(
    draw: st.DrawFn,
    sizes: AttentionSizes,
    *,
    dtype: torch.dtype = torch.float32,
    values: Sequence[str] = _VALUES,
    layouts: Sequence[str] = MEMORY_LAYOUTS,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Strategy for (q, k, v) of these sizes: q (B, H, N, D), k and v (B, G, M, D), on the CPU.

    Each tensor has its own kind of values, drawn from `values` as in `tensors`, and its own memory layout, drawn from
    `layouts`, names for `flexdilated.testing.laid_out`. Both shrink towards the first. All three tensors come from one
    seed.
    """
    _require_kinds(values)
    seed = draw(_SEEDS)
    generator = torch.Generator("cpu").manual_seed(seed)

    def one(heads: int, tokens: int) -> Tensor:
        shape = (sizes.batch, heads, tokens, sizes.head_dim)
        x = _tensor_of_kind(shape, draw(st.sampled_from(list(values))), generator).to(dtype)
        return laid_out(x, draw(st.sampled_from(list(layouts)))).requires_grad_(requires_grad)

    queries, keys = (sizes.num_heads, sizes.num_queries), (sizes.num_kv_heads, sizes.num_keys)
    return one(*queries), one(*keys), one(*keys)


def _require_kinds(values: Sequence[str]) -> None:
    if not values or any(value not in _VALUES for value in values):
        raise ValueError(f"values must be some of {', '.join(map(repr, _VALUES))}; got {values!r}")


@st.composite
def document_lengths(draw: st.DrawFn, num_tokens: int, *, max_documents: int = 5) -> tuple[int, ...]:
    """Strategy for the lengths of 1 to max_documents documents: each at least 1, with the sum `num_tokens`.

    Examples shrink towards one document.
    """
    require_int("num_tokens", num_tokens, minimum=1)
    most = min(require_int("max_documents", max_documents, minimum=1), num_tokens)
    cuts = draw(st.sets(st.integers(1, num_tokens - 1), max_size=most - 1)) if most > 1 else set()
    return tuple(after - before for before, after in pairwise([0, *sorted(cuts), num_tokens]))


@st.composite
def document_ids(
    draw: st.DrawFn, num_tokens: int, *, batch: int = 1, max_documents: int = 5, padding: bool = True
) -> Tensor:
    """Strategy for int64 tensors (batch, num_tokens) for `masks.documents`: the document 0, 1, ... of each position.

    padding: also draw sequences that end with padding, of id -1.

    Examples shrink towards one document in every sequence.
    """
    require_int("batch", batch, minimum=1)
    rows = []
    for _ in range(batch):
        held = draw(document_lengths(num_tokens, max_documents=max_documents))
        row = torch.repeat_interleave(torch.arange(len(held)), torch.tensor(held))
        hidden = draw(st.integers(0, num_tokens)) if padding and draw(st.booleans()) else 0
        row[num_tokens - hidden :] = -1
        rows.append(row)
    return torch.stack(rows)


@st.composite
def shardings(
    draw: st.DrawFn, num_tokens: int, *, max_ranks: int = 4, num_ranks: int | None = None, ragged: bool = True
) -> Sharding:
    """Strategy for shardings of `num_tokens` over 1 to max_ranks ranks, in order "contiguous" or "zigzag".

    num_ranks: fixed number of ranks; None: any up to max_ranks.
    ragged: also draw shards of unequal lengths, also empty ones; False: shard lengths as equal as possible.

    Examples shrink towards one rank and equal contiguous shards.
    """
    require_int("num_tokens", num_tokens, minimum=1)
    ranks = draw(st.integers(1, max_ranks)) if num_ranks is None else require_int("num_ranks", num_ranks, minimum=1)
    order = draw(st.sampled_from(_ORDERS))
    if not ragged or not draw(st.booleans()):
        return Sharding(num_tokens, ranks, order)
    cuts = draw(st.lists(st.integers(0, num_tokens), min_size=ranks - 1, max_size=ranks - 1))
    return Sharding(
        num_tokens, ranks, order, [after - before for before, after in pairwise([0, *sorted(cuts), num_tokens])]
    )
