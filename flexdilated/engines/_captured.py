"""Tensors with requires_grad that a score_mod captures: found by a call, and replaced by others in later calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch_private import tree_map_only
from ._ops import tensors_in
from ._score_mod import ScoreMod, checked


class _Captured(TorchFunctionMode):
    """Torch-function mode that collects tensors with requires_grad that code inside it reads and did not create.

    `found` maps the id of each such tensor to the tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        for x in tensors_in([*args, *given.values()]):
            if x.requires_grad and id(x) not in self._made:
                self.found[id(x)] = x
        made = func(*args, **given)
        self._made |= {id(x): x for x in tensors_in([made])}
        return made


def captured_by(score_mod: ScoreMod, score: Tensor, pair: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors with requires_grad that score_mod captures, found by a call with (score, *pair).

    pair: batch entry, head, query and key of a pair that is allowed, as score_mod may fail for others.
    """
    with _Captured() as captured:
        torch.clone(checked(score_mod)(score, *pair))  # which reads the result: it may be a captured tensor itself
    return tuple(captured.found.values())


class _InPlaceOf(TorchFunctionMode):
    """Torch-function mode in which operations read other tensors in place of some: `table` maps ids to the others."""

    def __init__(self, table: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Tensor, self.other, (args, kwargs or {}))
        return func(*args, **kwargs)

    def other(self, x: Tensor) -> Tensor:
        return self._table.get(id(x), x)


def reading(score_mod: ScoreMod, captured: Sequence[Tensor], others: Sequence[Tensor]) -> ScoreMod:
    """Return the score_mod with `others` in place of the tensors that it captures.

    Gradients of leaves in place of captured tensors are those through each tensor alone, also if a captured tensor is a
    function of another one.
    """
    mode = _InPlaceOf({id(x): other for x, other in zip(captured, others, strict=True)})

    def read(score, b, h, q, k):
        with mode:
            found = score_mod(score, b, h, q, k)
        return mode.other(found)

    return read
