"""Patterns whose tensors come with a call: documents, lengths, visible keys."""

from ._documents import Documents, documents
from ._lengths import Lengths, lengths
from ._run_time import (
    Given,
    Rows,
    RunTime,
    Table,
    alike,
    as_written,
    blank,
    named,
    names,
    run_time_leaves,
    tables,
    without_values,
)
from ._run_time_checks import missing, require_values
from ._spans import PADDING, Spans
from ._visible_keys import KeySet, VisibleKeys, visible_keys
from ._window_list import Windows
