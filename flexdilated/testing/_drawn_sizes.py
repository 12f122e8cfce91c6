"""Sizes that hypothesis draws: lengths at the edges, heads that share keys, queries over other keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from ..masks import Mixture, Pattern
from ..masks.core._check import require_int
from ._any_of import any_of
from ._edges import edges_of


def lengths(
    around: Pattern | Mixture | Iterable[int] = (), *, max_tokens: int = 48, blocks: Iterable[int] = ()
) -> st.SearchStrategy[int]:
    """Numbers of tokens: any, one less, as many or one more than a multiple of an edge, and the smallest and largest.

    around: edges, or a pattern, whose numbers they are (`edges_of`). blocks: more of them, such as the side of blocks.
    Half of the lengths lie around edges. They shrink towards 1.
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
    """The sizes of one call: q (batch, num_heads, num_queries, head_dim), k and v (batch, num_kv_heads, num_keys, ...).

    Query i stands at position q_offset + i, key j at k_offset + j. The heads are those from head_offset on of
    num_heads_global; 0 stands for no more heads than these.
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
        """q_offset, k_offset, head_offset and num_heads_global: keywords of `attend` and of a pattern's `bind`."""
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
    """Sizes with grouped heads: num_kv_heads divides num_heads. They shrink towards one of everything.

    around and blocks: as for `lengths`. num_heads: the pattern's, not any number up to max_heads.
    self_attention=False: queries may be fewer or more than keys, and both stand anywhere up to max_tokens; where
    `around` is a pattern, it can be bound to them. all_heads=False: the tensors may hold some of the heads only, as on
    one device of many.
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
    offsets = draw(anywhere), draw(any_of(st.sampled_from([0, 5]), anywhere))
    moved = replace(sizes, num_queries=queries, q_offset=offsets[0], k_offset=offsets[1])
    if not isinstance(around, Pattern | Mixture):
        return moved
    tensors = {"num_heads": here, "num_queries": queries, "num_keys": keys}
    return moved if in_range(lambda: around.bind(**tensors, **moved.places)) else sizes


def in_range(bind: Callable[[], object]) -> bool:
    """Whether a pattern can be bound, as far as it names blocks: those of a list may lie beyond the keys."""
    try:
        bind()
    except ValueError as error:
        if "block_list is out of range" not in str(error):
            raise
        return False
    return True
