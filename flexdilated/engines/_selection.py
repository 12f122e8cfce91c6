"""Splits a call with a table of selected blocks into the table's pairs and a planned remainder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from ..masks.core import Expression
from ..masks.patterns import Selection, names, selection_of
from ..masks.text import read_text
from ._call_key import CallKey


def selection_in(key: CallKey) -> Selection | None:
    """Split of the call's pattern; None unless tokens are in order and the first key begins a block."""
    found = parted(key.pattern) if not key.placement and key.rate == 1 else None
    return None if found is None or key.k_offset % found.leaf.block[1] else found


@lru_cache(maxsize=256)
def parted(text: str) -> Selection | None:
    """Split of a pattern with selected blocks; None if it has no table that can be separated."""
    return selection_of(read_text(text)) if '"kind":"selected_blocks"' in text else None


def without_table(key: CallKey, selection: Selection, bindings: Sequence[Tensor]) -> tuple[CallKey, list[Tensor]]:
    """(key, bindings) of the call for the pairs that need no table."""
    assert selection.others is not None
    return key._replace(pattern=selection.others.text), tensors_of(key, selection.others, bindings)


def tensors_of(key: CallKey, part: Expression, bindings: Sequence[Tensor]) -> list[Tensor]:
    """Run-time tensors of a call that `part` names, sorted by name."""
    tensors = dict(zip(names(read_text(key.pattern)), bindings, strict=True))
    return [tensors[name] for name in names(part)]
