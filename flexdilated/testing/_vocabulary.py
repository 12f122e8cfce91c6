"""What drawn patterns are written with. Another module with the same names draws the same in its own values.

So a test may draw each pattern together with a rule of its own for it: constructors that return pairs of the two, and
pairs that have &, |, ~, + and per_document.
"""

from ..masks import (
    block_list,
    blockwise,
    causal,
    chunked,
    dilated,
    dilated_window,
    documents,
    every,
    first_tokens,
    fixed,
    global_tokens,
    head_groups,
    landmark_tokens,
    lengths,
    local_window,
    longnet,
    neighborhood,
    per_head,
    prefix_lm,
    random_blocks,
    strided,
    visible_keys,
)
from ._drawn_closures import custom_kinds, custom_lattice, custom_windows

__all__ = [
    "block_list",
    "blockwise",
    "causal",
    "chunked",
    "custom_kinds",
    "custom_lattice",
    "custom_windows",
    "dilated",
    "dilated_window",
    "documents",
    "every",
    "first_tokens",
    "fixed",
    "global_tokens",
    "head_groups",
    "landmark_tokens",
    "lengths",
    "local_window",
    "longnet",
    "neighborhood",
    "per_head",
    "prefix_lm",
    "random_blocks",
    "strided",
    "visible_keys",
]
