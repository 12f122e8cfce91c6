"""Patterns whose tensors come with a call: documents, lengths, visible keys, selected blocks."""

from ._documents import PADDING, Documents, Lengths, Spans, documents, lengths
from ._run_time import (
    Given,
    Rows,
    RunTime,
    Table,
    Windows,
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
from ._selected_blocks import SelectedBlocks, Selection, require_row, require_tables, selected_blocks, selection_of
from ._visible_keys import KeySet, VisibleKeys, visible_keys
