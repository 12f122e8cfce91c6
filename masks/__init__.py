"""Attention patterns: values that say who attends to whom, their algebra, layouts and block masks."""

from ._block_mask import block_mask, layout
from ._bound import Bound
from ._cache import cache
from ._causal import causal
from ._describe import describe
from ._dilated import dilated
from ._json import from_json, to_json
from ._layout import Layout
from ._local_window import local_window
from ._longnet import longnet
from ._pattern import Mixture, Pattern
from ._per_head import per_head
from ._planner import recommended_layout

__all__ = [
    "Bound",
    "Layout",
    "Mixture",
    "Pattern",
    "block_mask",
    "cache",
    "causal",
    "describe",
    "dilated",
    "from_json",
    "layout",
    "local_window",
    "longnet",
    "per_head",
    "recommended_layout",
    "to_json",
]
