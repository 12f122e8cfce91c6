"""Attention patterns: values that say who attends to whom, their algebra, layouts and block masks."""

from . import recipes
from ._algebra import every
from ._block_list import block_list
from ._block_mask import block_mask, layout
from ._blockwise import blockwise
from ._bound import EMPTY, FULL, PARTIAL, Bound
from ._cache import cache
from ._causal import causal
from ._chunked import chunked
from ._custom import custom
from ._dilated import dilated
from ._dilated_window import dilated_window
from ._documents import documents
from ._fixed import fixed
from ._global_tokens import first_tokens, global_tokens
from ._json import from_json, to_json
from ._landmark_tokens import landmark_tokens
from ._layout import Layout
from ._lengths import lengths
from ._local_window import local_window
from ._longnet import longnet
from ._machine import BlockRates, Machine
from ._machine_in_use import machine, set_machine
from ._neighborhood import neighborhood
from ._parse import parse
from ._pattern import Mixture, Pattern
from ._per_head import head_groups, per_head
from ._planner import recommended_layout
from ._prefix_lm import prefix_lm
from ._random_blocks import random_blocks
from ._strided import strided
from ._visible_keys import visible_keys
from .inspection._describe import describe
from .inspection._explain import explain
from .inspection._plot import plot

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
    "strided",
    "to_json",
    "visible_keys",
]
