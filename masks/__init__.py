"""Attention patterns: values that say who attends to whom, their algebra, layouts and block masks.

A new pattern is one more file among the first below. docs/adding_a_pattern.md writes one and names all that it touches;
tests/test_boxes.py holds its bounds to its pairs, and tests/test_tiles.py what is computed with it to float64.

    patterns            _causal _local_window _dilated_window _dilated _longnet _strided _fixed _chunked _global_tokens
                        _landmark_tokens _prefix_lm _random_blocks _block_list _neighborhood _custom recipes
    made of others      _composite _algebra _per_head; _blockwise _per_document
    known at run time   _documents _lengths _visible_keys, which become _spans and tables of _run_time;
                        _run_time_checks
    what each is        _pattern _reason _check; with sizes: _bound
    counting pairs      _box _box_parts _distances _diagonals _exact_pairs _query_pairs _block_table
    grids of tokens     _grid _grid_window _grid_reach
    custom functions    _function_snapshot _function_checks _classify
    as text             _json _plain_json _canonical _spelling _written_branches _parse
    who sees which key  _needs _needs_by_boxes _needs_by_distance _asked _narrowed _reach _row _ranges _range_union
    orders of tokens    _layout _tiling _tiled _placement
    blocks              _rule _blocks _quadtree _class_pairs _cover _tables _packed_blocks _block_mask
    ways to compute     _planner _options _estimate _cost _choice _placed _plan_text
    what is computed    _term _lower _compact _nested _windows _window_list _one_sequence _tiled_terms _split_causal
                        _weights
    constants           _machine _machine_in_use _machine_file _machine_key
    kept results        _ambient _cache _cache_store _cache_limits _cache_pins _cache_watch _cache_stats
    words               _debug_log _bytes_text _tokens_text
    looking at patterns inspection
"""

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
