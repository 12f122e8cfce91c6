"""Hypothesis strategies for attention: patterns, lengths at the edges, sizes, tensors, packings, shards.

Values shrink towards simple ones: a causal pattern, one token, one head. Arguments `max_...` are upper bounds.
Needs hypothesis: pip install "flexdilated[testing]".
"""

from typing import Literal

try:
    import hypothesis as _hypothesis
except ImportError as error:
    raise ImportError(
        'flexdilated.testing.strategies needs hypothesis, which is not installed: pip install "flexdilated[testing]"'
    ) from error

from hypothesis import strategies as _st

from ..masks import Mixture, Pattern
from ..masks.core import require_int as _require_int
from ._drawn_inputs import (
    AttentionSizes,
    attention_inputs,
    attention_sizes,
    document_ids,
    document_lengths,
    lengths,
    shardings,
    tensors,
)
from ._drawn_patterns import WORDS as _WORDS
from ._drawn_patterns import Grammar as _Grammar
from ._drawn_patterns import run_time_compositions as _run_time_compositions
from ._drawn_patterns import whole_grids as _whole_grids
from ._inputs import edges_of

__all__ = [
    "AttentionSizes",
    "attention_inputs",
    "attention_sizes",
    "document_ids",
    "document_lengths",
    "edges_of",
    "lengths",
    "longnets",
    "mixtures",
    "neighborhoods",
    "patterns",
    "run_time_patterns",
    "set_patterns",
    "shardings",
    "tensors",
]
del _hypothesis


def patterns(
    *, num_heads: int = 1, max_number: int = 24, depth: int = 2, max_positions: int = 128, closures: bool = False
) -> _st.SearchStrategy[Pattern | Mixture]:
    """Strategy for patterns that can be bound to `num_heads` heads and to any number of tokens up to max_positions.

    They are set patterns, in which a pair counts at most once, and mixtures, in which it may count more often: windows,
    dilated and strided sets, chunks, global tokens and landmarks, random and listed blocks, grids, LongNets, and
    compositions of these. Bind them to at least as many keys as queries: with fewer keys a listed block may be out of
    range, which is an error (`attention_sizes(pattern)` avoids it).

    max_number: largest segment, stride, count and so on.
    depth: maximum number of nested `&`, `|`, `~`, `per_head`, `head_groups`, `blockwise`, `after` and `before`.
    max_positions: grids have at least this number of tokens.
    closures: also draw functions for `masks.custom`, which have no JSON.

    Patterns shrink towards `masks.causal()`.
    """
    return _Grammar(num_heads, max_number, max_positions, closures).patterns(depth)


def set_patterns(
    *, num_heads: int = 1, max_number: int = 24, depth: int = 2, max_positions: int = 128, closures: bool = False
) -> _st.SearchStrategy[Pattern]:
    """Strategy for set patterns, in which a pair counts at most once; no mixtures. Arguments as for `patterns`."""
    return _Grammar(num_heads, max_number, max_positions, closures).sets(depth)


def mixtures(
    *, num_heads: int = 1, max_number: int = 24, max_positions: int = 128, closures: bool = False
) -> _st.SearchStrategy[Pattern | Mixture]:
    """Strategy for mixtures, in which a pair may count several times: sums of patterns, and LongNets.

    A LongNet may be intersected with a set pattern, or moved by `after`. A LongNet of one branch is a set pattern.
    Arguments as for `patterns`.
    """
    return _Grammar(num_heads, max_number, max_positions, closures).mixtures()


def longnets(
    *,
    max_branches: int = 4,
    max_number: int = 24,
    heads: Literal["all", "grouped"] = "all",
    padding: bool = False,
) -> _st.SearchStrategy[Pattern | Mixture]:
    """Strategy for `masks.longnet` of 1 to max_branches branches, with both offset rules.

    Segment lengths are at most max_number, rates at most 7 and at most max_number; a rate need not divide its segment
    length.

    heads: as in `masks.longnet`; bind "grouped" ones to at least max_branches heads.
    padding: pass padding="zeros" to `masks.longnet`, which needs heads="all" and calls over whole sequences. `patterns`
        draws no patterns with padding.
    """
    return _Grammar(max_number=max_number).longnets(heads=heads, max_branches=max_branches, padding=padding)


def neighborhoods(*, max_tokens: int = 48) -> _st.SearchStrategy[Pattern]:
    """Strategy for `masks.neighborhood` on grids of 2 or 3 axes with up to max_tokens tokens.

    A pattern p binds to at most `prod(p.grid)` tokens.
    """
    return _whole_grids(_WORDS, _require_int("max_tokens", max_tokens, minimum=1))


def run_time_patterns(
    sizes: AttentionSizes, *, max_number: int = 24, closures: bool = False
) -> _st.SearchStrategy[Pattern | Mixture]:
    """Strategy for run-time patterns of a batch, alone or combined with patterns of `patterns`.

    The run-time patterns are `masks.documents(ids)`, `masks.same_document(q_ids, k_ids)`, `masks.lengths(lengths)`,
    `masks.visible_keys(visible)`, `masks.mask(allowed)`, `masks.sparse(matrix)` and
    `masks.selected_blocks(blocks, ...)`, combined by &, |, & ~ or `per_document`, and `per_sample` and `queries_from`
    of patterns. The tensors cover all positions of `sizes`, up to the last query and key. max_number, closures: as for
    `patterns`. Examples shrink towards `masks.causal() & masks.documents(ids)` with one document.
    """
    most = max(sizes.q_offset + sizes.num_queries, sizes.k_offset + sizes.num_keys)
    return _run_time_compositions(_Grammar(sizes.num_heads_global, max_number, most, closures), sizes, _WORDS)
