"""Attention patterns: values that say who attends to whom, their algebra, layouts and block masks.

A new pattern is one more file in `patterns`; docs/contributing/adding_a_pattern.md writes one, and what it touches;
tests/masks/core/test_boxes.py holds its bounds to its pairs, tests/engines/test_tiles.py what is computed with it to
float64.

    core        what every pattern is made of: Pattern, Mixture and Bound, algebra, boxes, ranges, checks
    patterns    the patterns, a file for each family; run_time: with tensors of a call; custom: from functions
    recipes     patterns of published models
    text        JSON, expressions, printing
    orders      orders of tokens: residue-major, tiled, placed
    blocks      a rule over slots, the search for blocks by bounds, block tables
    plan_cache  what was built is kept, in bounded memory
    planning    options, costs, the choice, BlockMask; lowering: branches as terms; machine: constants for costs
    needs       which keys some queries need: ranks, decoding, what a cache may drop
    inspection  describe, explain, plot, show
"""

from . import recipes
from .core import EMPTY, FULL, PARTIAL, Bound, Mixture, Pattern, every, full, head_groups, per_head
from .inspection import describe, explain, plot, show
from .orders import Layout
from .patterns import PerDocument as _PerDocument
from .patterns import (
    block_list,
    blockwise,
    causal,
    chunked,
    custom,
    dilated,
    dilated_window,
    documents,
    first_tokens,
    fixed,
    global_tokens,
    landmark_tokens,
    lengths,
    local_window,
    longnet,
    neighborhood,
    prefix_lm,
    random_blocks,
    selected_blocks,
    strided,
    visible_keys,
)
from .plan_cache import cache
from .planning import BlockRates, Machine, block_mask, layout, machine, recommended_layout, set_machine, snapped
from .text import from_json, parse, to_json

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "BlockRates",
    "Bound",
    "Layout",
    "Machine",
    "Mixture",
    "Pattern",
    "block_list",
    "block_mask",
    "blockwise",
    "cache",
    "causal",
    "chunked",
    "custom",
    "describe",
    "dilated",
    "dilated_window",
    "documents",
    "every",
    "explain",
    "first_tokens",
    "fixed",
    "from_json",
    "full",
    "global_tokens",
    "head_groups",
    "landmark_tokens",
    "layout",
    "lengths",
    "local_window",
    "longnet",
    "machine",
    "neighborhood",
    "parse",
    "per_head",
    "plot",
    "prefix_lm",
    "random_blocks",
    "recipes",
    "recommended_layout",
    "selected_blocks",
    "set_machine",
    "show",
    "snapped",
    "strided",
    "to_json",
    "visible_keys",
]
