"""Patterns, one file for each family."""

from ._band import Band, Causal, LocalWindow, Strided, causal, dilated_window, local_window, strided
from ._block_list import BlockList, block_list
from ._custom import custom, digest_of_mask_mod, pattern_of_block_mask, rules_of_mask_mod
from ._dilated import OF_BRANCHES, Dilated, chunked, dilated, longnet
from ._from_block_mask import block_lists, partial_and_full_blocks
from ._grid import Axis, Rectangle, Rectangles, joined, select
from ._grid_window import GridWindow, grid_window
from ._key_rows import KeyRows, require_tables
from ._marked_tokens import GlobalTokens, MarkedTokens, first_tokens, fixed, global_tokens, landmark_tokens, prefix_lm
from ._mask import MaskTable, mask
from ._neighborhood import Neighborhood, neighborhood
from ._on_grid import OnGrid
from ._per_sample import per_sample, rules_of_entries, without_start
from ._random_blocks import random_blocks
from ._renumbered import After, Before, Blockwise, PerDocument, blockwise, keys_in_blocks
from ._run_time import (
    CarriedTensor,
    HeldRows,
    RunTime,
    Table,
    Windows,
    as_written,
    blank,
    carrying,
    missing,
    named,
    names,
    of_tensor,
    on_host,
    require_values,
    run_time_leaves,
    tables,
)
from ._same_document import same_document
from ._selected_blocks import SelectedBlocks, require_row, selected_blocks, selected_keys
from ._sparse import Sparse, SparseTable, is_sparse, sparse
from ._table_split import TableSplit, lists_keys, numbered_pairs, table_split
from ._token_values import PADDING, Documents, KeySet, Lengths, Spans, VisibleKeys, documents, lengths, visible_keys
