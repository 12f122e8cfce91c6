"""Patterns whose tensors come with a call: documents, lengths, visible keys, selected blocks."""

from ._documents import PADDING, Documents, Lengths, Spans, documents, lengths
from ._run_time import (
    Given,
    Rows,
    RunTime,
    Table,
    alike,
    as_written,
    blank,
    missing,
    named,
    names,
    on_host,
    require_values,
    run_time_leaves,
    tables,
)
from ._selected_blocks import SelectedBlocks, require_row, require_tables, selected_blocks
from ._selection import Selection, selection_of
from ._visible_keys import KeySet, VisibleKeys, visible_keys
from ._window_list import Windows
