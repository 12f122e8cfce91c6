"""The rule of a call over a whole sequence, as every rank knows it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..engines._call_key import CallKey
from ..masks.core._pattern import Expression
from ..masks.text._json import read_text


def whole_rule(pattern: str, bindings: Sequence[Tensor], num_tokens: int) -> Expression:
    """The pattern, in JSON, with the values of its run-time tensors in place; these come in the order of their names.

    They are read at each call: nothing tells that a tensor has not changed but its values.
    """
    if not bindings:
        return read_text(pattern)
    # Of a call only its pattern and its extent make the rule.
    return CallKey(pattern, 1, 1, num_tokens, num_tokens, 0, 0, 0, 1, 1, ()).rules(bindings)
