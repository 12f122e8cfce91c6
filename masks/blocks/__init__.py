"""Blocks of pairs: a rule over slots, the search for blocks by bounds, tables of them."""

from ._blocks import (
    LISTED_BYTES,
    UNKNOWN,
    Blocks,
    PackedBlocks,
    build_blocks,
    count_pairs,
    evaluate,
    join_blocks,
    repeat_blocks,
)
from ._diagonals import settle_by_diagonals
from ._estimate import ListedBlocks, estimate_blocks
from ._pair_search import Budget, PairCounts, bounded_pairs, even_places, settle
from ._query_pairs import pairs_of_queries
from ._rule import Places, Rule, alike, allowed_pairs
from ._tables import table_bytes, to_block_mask
