"""Which calls are computed from a table of selected blocks as it is, and what is left to be planned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from ..masks.core import Expression
from ..masks.patterns import Selection, names, selection_of
from ..masks.text import read_text
from ._call_key import CallKey


def selection_in(key: CallKey) -> Selection | None:
    """How the call's pattern is parted, where tokens come in order and the keys from where a block begins."""
    found = parted(key.pattern) if not key.placement and key.rate == 1 else None
    return None if found is None or key.k_offset % found.leaf.block[1] else found


@lru_cache(maxsize=256)
def parted(text: str) -> Selection | None:
    """How a pattern with selected blocks is parted, if it has one table that can be."""
    return selection_of(read_text(text)) if '"kind":"selected_blocks"' in text else None


def without_table(key: CallKey, selection: Selection, bindings: Sequence[Tensor]) -> tuple[CallKey, list[Tensor]]:
    """The call of the pairs that need no table, and its run-time tensors."""
    assert selection.others is not None
    return key._replace(pattern=selection.others.text), tensors_of(key, selection.others, bindings)


def tensors_of(key: CallKey, part: Expression, bindings: Sequence[Tensor]) -> list[Tensor]:
    """Those run-time tensors of a call that a part of its pattern names, in the order of their names."""
    tensors = dict(zip(names(read_text(key.pattern)), bindings, strict=True))
    return [tensors[name] for name in names(part)]
