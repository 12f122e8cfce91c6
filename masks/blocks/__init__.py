"""Blocks of pairs: a rule over slots, the search for blocks by bounds, tables of them."""

from ._blocks import (
    LISTED_BYTES,
    UNKNOWN,
    Blocks,
    ListedBlocks,
    build_blocks,
    count_pairs,
    estimate_blocks,
    evaluate,
    join_blocks,
    repeat_blocks,
)
from ._pair_search import Budget, PairCounts, bounded_pairs, even_places, pairs_of_queries, settle
from ._rule import Places, Rule, alike, allowed_pairs
from ._tables import PackedBlocks, table_bytes, to_block_mask
