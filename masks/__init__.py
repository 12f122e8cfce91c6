"""Attention patterns: values that define the allowed (query, key) pairs, their algebra, layouts and block masks.

A new pattern is one more file in `patterns`, or a module of another package; docs/howto/own_patterns.md has an example.
tests/masks/core/test_boxes.py compares its bounds with its pairs; tests/attend/test_oracle.py compares outputs of
attention with it to float64.

    core        the types of patterns: Pattern, Mixture and Bound, algebra, boxes, ranges, checks
    patterns    the patterns, a file for each family
    recipes     patterns of published models
    extend      API for patterns in other packages
    text        JSON of patterns, and the parser of their expressions
    orders      orders of tokens: residue-major, tiled, placed
    blocks      block lists: the search for non-empty blocks by bounds on pair counts, and conversion to BlockMasks
    plan_cache  cache of plans and tables, in bounded memory
    planning    choice of the way to compute a pattern by its predicted cost; measured constants of a machine; BlockMask
    attended    keys that given queries attend to: for ranks, decoding, and eviction from a KV cache
    inspection  describe, explain, plot, show
"""

from typing import NoReturn as _NoReturn

from . import extend, recipes
from .core import EMPTY, FULL, PARTIAL, Bound, Mixture, Pattern, every, full, head_groups, per_head
from .core import no_such_name as _no_such_name
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
    grid_window,
    landmark_tokens,
    lengths,
    local_window,
    longnet,
    mask,
    neighborhood,
    per_sample,
    prefix_lm,
    random_blocks,
    same_document,
    selected_blocks,
    selected_keys,
    sparse,
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
    "extend",
    "first_tokens",
    "fixed",
    "from_json",
    "full",
    "global_tokens",
    "grid_window",
    "head_groups",
    "landmark_tokens",
    "layout",
    "lengths",
    "local_window",
    "longnet",
    "machine",
    "mask",
    "neighborhood",
    "parse",
    "per_head",
    "per_sample",
    "plot",
    "prefix_lm",
    "random_blocks",
    "recipes",
    "recommended_layout",
    "same_document",
    "selected_blocks",
    "selected_keys",
    "set_machine",
    "show",
    "snapped",
    "sparse",
    "strided",
    "to_json",
    "visible_keys",
]

# Names of patterns in other libraries, each with the call to write instead.
_OTHER_NAMES = {
    "sliding_window": "local_window(left=, right=)",
    "sliding_window_causal": "local_window(left=, right=0)",
    "causal_sliding_window": "local_window(left=, right=0)",
    "dilated_attention": "longnet(segment_lengths, dilation_rates)",
    "window": "local_window(left=, right=)",
    "local": "local_window(left=, right=)",
    "band": "local_window(left=, right=)",
    "dense": "every()",
    "all": "every()",
    "none": "every()",
    "noop": "every()",
    "sinks": "first_tokens(count)",
    "attention_sinks": "first_tokens(count)",
    "padding": "lengths(tensor) or visible_keys(mask)",
    "padding_mask": "lengths(tensor) or visible_keys(mask)",
    "key_padding_mask": "visible_keys(~key_padding_mask)",
    "attn_mask": "mask(allowed)",
    "dense_mask": "mask(allowed)",
    "cross_documents": "same_document(q_ids, k_ids)",
    "document": "documents(ids)",
    "packed": "documents(ids)",
    "block_sparse": "block_list(rows, block=)",
    "random": "random_blocks(num_tokens)",
    "prefix": "prefix_lm(prefix)",
    "block_causal": "blockwise(causal(), block)",
    "bigbird": "recipes.bigbird(...)",
    "longformer": "recipes.longformer(...)",
}


def __getattr__(name: str) -> _NoReturn:
    """Raise AttributeError for an unknown name; its text suggests what to write instead, if that is known."""
    raise AttributeError(_no_such_name(__name__, name, __all__, _OTHER_NAMES, "masks."))
