"""Patterns, one file for each family."""

from ._after import After
from ._band import Band, Causal, LocalWindow, Strided, causal, dilated_window, local_window, strided
from ._block_list import BlockList, block_list
from ._blockwise import Blockwise, blockwise
from ._custom import custom
from ._dilated import OF_BRANCHES, Dilated, chunked, dilated, longnet
from ._grid import Axis, Rectangle, Rectangles, joined, select
from ._marked_tokens import GlobalTokens, MarkedTokens, first_tokens, fixed, global_tokens, landmark_tokens, prefix_lm
from ._neighborhood import Neighborhood, neighborhood
from ._per_document import PerDocument
from ._random_blocks import random_blocks
from .run_time import (
    PADDING,
    Documents,
    Given,
    KeySet,
    Lengths,
    Rows,
    RunTime,
    SelectedBlocks,
    Selection,
    Spans,
    Table,
    VisibleKeys,
    Windows,
    alike,
    as_written,
    blank,
    documents,
    lengths,
    missing,
    named,
    names,
    on_host,
    require_row,
    require_tables,
    require_values,
    run_time_leaves,
    selected_blocks,
    selection_of,
    tables,
    visible_keys,
)
