"""Block lists of patterns: search for the non-empty blocks by bounds on pair counts, and conversion to BlockMasks."""

from ._blocks import (
    LISTED_BYTES,
    UNKNOWN,
    Blocks,
    ListedBlocks,
    build_blocks,
    count_pairs,
    dense_masks,
    estimate_blocks,
    join_blocks,
    repeat_blocks,
)
from ._pair_search import Budget, PairCounts, bounded_pairs, even_places, pairs_of_queries, settle
from ._rule import BlockPlaces, Nodes, Rule, SlotRun, allowed_pairs, mask_classes, owners_and_places
from ._tables import PackedBlocks, table_bytes, to_block_mask
