"""Attention patterns: values that say who attends to whom, their algebra, layouts and block masks.

A new pattern is one more file in `patterns`. docs/adding_a_pattern.md writes one and names all that it touches;
tests/test_boxes.py holds its bounds to its pairs, and tests/test_tiles.py what is computed with it to float64.

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
from .core._algebra import every
from .core._bound import EMPTY, FULL, PARTIAL, Bound
from .core._pattern import Mixture, Pattern
from .core._per_head import head_groups, per_head
from .inspection import describe, explain, plot, show
from .orders._layout import Layout
from .patterns._band import causal, dilated_window, local_window, strided
from .patterns._block_list import block_list
from .patterns._blockwise import blockwise
from .patterns._dilated import chunked, dilated, longnet
from .patterns._marked_tokens import first_tokens, fixed, global_tokens, landmark_tokens, prefix_lm
from .patterns._neighborhood import neighborhood
from .patterns._per_document import PerDocument as _PerDocument  # noqa: F401  read from JSON, printed, made by a method
from .patterns._random_blocks import random_blocks
from .patterns.custom._custom import custom
from .patterns.run_time._documents import documents
from .patterns.run_time._lengths import lengths
from .patterns.run_time._visible_keys import visible_keys
from .plan_cache._cache import cache
from .planning._block_mask import block_mask, layout
from .planning._planner import recommended_layout
from .planning.machine._machine import BlockRates, Machine
from .planning.machine._machine_in_use import machine, set_machine
from .text._json import from_json, to_json
from .text._parse import parse

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
    "set_machine",
    "show",
    "strided",
    "to_json",
    "visible_keys",
]
