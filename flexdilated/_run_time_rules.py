"""The rules that run-time tensors make, read from an accelerator once for each state of the tensors."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ._call_key import CallKey
from .masks._pattern import Expression

_MOST = 64  # rules remembered; they hold a copy of their tensors

_lock = threading.RLock()  # a tensor may die, and be forgotten, anywhere


@dataclass(frozen=True, eq=False)
class _Read:
    """A rule, and the tensors it was read from as they were then."""

    tensors: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    rule: Expression

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        same = all(ref() is tensor for ref, tensor in zip(self.tensors, tensors, strict=True))
        return same and self.versions == _versions(tensors)


_reads: OrderedDict[Hashable, _Read] = OrderedDict()


def rules_of(key: CallKey, bindings: Sequence[Tensor]) -> Expression:
    """`key.rules(bindings)`; all layers of a model that pass the same tensors on an accelerator share one host read.

    A tensor that an operation of torch has changed in place is read again. CPU tensors, which NumPy and others can
    change unseen, are read at every call, and so are those that count no versions (of torch.inference_mode).
    """
    if all(_is_here(x) for x in bindings) or any(x.is_inference() for x in bindings):
        return key.rules(bindings)
    name = (key.pattern, key.extent, *map(id, bindings))
    with _lock:
        found = _reads.get(name)
        if found is not None and found.is_of(bindings):
            _reads.move_to_end(name)
            return found.rule
    versions = _versions(bindings)  # before they are read: what changes meanwhile is read again
    rule = key.rules(bindings)
    with _lock:
        _reads[name] = _Read(tuple(weakref.ref(x, lambda _: _forget(name)) for x in bindings), versions, rule)
        _reads.move_to_end(name)
        while len(_reads) > _MOST:
            _reads.popitem(last=False)
    return rule


def _forget(name: Hashable) -> None:
    with _lock:
        found = _reads.get(name)
        # Another tensor may live at the address by now, and be remembered under it.
        if found is not None and any(ref() is None for ref in found.tensors):
            del _reads[name]


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(x._version for x in tensors)


def _is_here(x: Tensor) -> bool:
    return x.device.type == "cpu"
