"""Replace a module's class by a subclass whose forward attends by a pattern, and restore it.

Reasons to replace the class, not an instance attribute `forward` or a child module: the object is preserved, so hooks,
parameters, names in the `state_dict`, references and isinstance stay valid. torch.compile guards on a module's type, so
a compiled model is recompiled. FSDP's `fully_shard` replaces classes too, and both can be combined. A `forward` in the
instance's `__dict__` is bound to one object, which breaks copies and pickles; a new child loses hooks and references. A
property of the subclass hides an attribute of the instance without changing it, so restoring the class restores all:
the only added attribute is `_flexdilated`, which deepcopy and pickle preserve.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from torch import nn

from ...masks import Mixture, Pattern
from ...masks.core import shortened


@dataclass(frozen=True)
class Given:
    """Settings of a converted module: its name in the model, its pattern; `by_name`: a function chose the pattern."""

    name: str
    pattern: Pattern | Mixture
    by_name: bool


class Converted(nn.Module):
    """Base of converted modules' classes, before their original class. `kind`: the subclass of Converted in use."""

    original: ClassVar[type[nn.Module]]
    kind: ClassVar[type[Converted]]
    _flexdilated: Given | None

    def extra_repr(self) -> str:
        own = super().extra_repr()
        if self._flexdilated is None:
            return own
        return ", ".join(each for each in (own, shortened(repr(self._flexdilated.pattern))) if each)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by (kind, original), as pickle cannot find dynamic classes by name."""
        return _empty, (self.kind, self.original), self.__getstate__()


def _empty(kind: type[Converted], original: type[nn.Module]) -> nn.Module:
    subclass = _subclass(kind, original)
    return subclass.__new__(subclass)


@cache
def _subclass(kind: type[Converted], original: type[nn.Module]) -> type[Converted]:
    names = {"__module__": kind.__module__, "original": original, "kind": kind, "__doc__": original.__doc__}
    return type(f"Converted{original.__name__}", (kind, original), names)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Class of the module before conversion."""
    return module.original if isinstance(module, Converted) else type(module)


def replace_class(module: nn.Module, kind: type[Converted], given: Given | None = None) -> None:
    """Convert an unconverted module to a subclass of `kind` and its class."""
    module.__class__ = _subclass(kind, type(module))
    object.__setattr__(module, "_flexdilated", given)


def check_restorable(name: str, module: nn.Module) -> None:
    """Raise ValueError for a module whose class was replaced after conversion."""
    if isinstance(module, Converted) and type(module) is not _subclass(module.kind, module.original):
        raise ValueError(
            f"{name} was given another class, {type(module).__name__}, after it was converted: give attention back, or "
            "another pattern, before fully_shard and its like"
        )


def restore_class(module: nn.Module) -> None:
    """Undo the conversion of a module, if it was converted."""
    if isinstance(module, Converted):
        del module._flexdilated
        object.__setattr__(module, "__class__", module.original)
