"""LiveBytes: how many bytes of tensors are alive while code runs, and the most at once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Hidden:
    """Bytes of an operator that shows only its results.

    `work` are alive while it runs, besides its inputs; `kept` stay as long as its last result does.
    """

    work: int
    kept: int = 0


class LiveBytes(TorchDispatchMode):
    """Counts each storage that an operation returns, from then until it is freed; views cost nothing.

    `live` and `peak` are in bytes. What a kernel allocates inside is not seen, but for operators in `hidden`.
    Over fake tensors, which have sizes and no memory, the counts are those of a real run.
    """

    def __init__(self, *held: Tensor, hidden: Mapping[object, Hidden] | None = None) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._hidden = hidden or {}
        self._known: dict[int, int] = {}
        for x in held:
            self._hold(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        hidden = self._hidden.get(func)
        if hidden is not None:
            self.peak = max(self.peak, self.live + hidden.work)
        results = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.device.type != "meta"]
        for x in tensors:
            self._hold(x)
        if hidden is not None and hidden.kept:
            self._count(hidden.kept)
            weakref.finalize(tensors[-1].untyped_storage(), self._count, -hidden.kept).atexit = False
        return results

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def _hold(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self._count(storage.nbytes())
            weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self._count(-self._known.pop(key))

    def _count(self, number: int) -> None:
        self.live += number
        self.peak = max(self.peak, self.live)


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the tensors' elements."""
    return sum(x.numel() * x.element_size() for x in tensors)


def fake_tensors() -> FakeTensorMode:
    """A mode in which tensors have sizes and no memory; real ones may take part."""
    return FakeTensorMode(allow_non_fake_inputs=True)
