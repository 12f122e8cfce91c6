"""A module's class, exchanged for a subclass whose forward attends by a pattern, and back.

Why the class, and neither an instance attribute `forward` nor a new child: the module stays the same object, so hooks,
parameters, names in the `state_dict` and references to it hold, and so does isinstance. torch.compile guards on a
module's type, so that a compiled model takes notice. FSDP's `fully_shard` exchanges classes as well, and the two stack.
A `forward` in the instance's `__dict__` is bound to one object, which copies and pickles must untangle; a new child
loses hooks and references. And a property of the subclass hides an attribute of the instance without touching it, so
that all is given back by the class: the one thing added is `_flexdilated`, which deepcopy and pickle carry.
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
    """What a module was given: its name in the model, its pattern, and whether that was chosen for this module."""

    name: str
    pattern: Pattern | Mixture
    by_name: bool


class Converted(nn.Module):
    """Stands before a module's own class. `kind` is the subclass of this one that does."""

    original: ClassVar[type[nn.Module]]
    kind: ClassVar[type[Converted]]
    _flexdilated: Given | None

    def extra_repr(self) -> str:
        own = super().extra_repr()
        if self._flexdilated is None:
            return own
        return ", ".join(each for each in (own, shortened(repr(self._flexdilated.pattern))) if each)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Classes that are made when a model is converted have no name by which pickle could find them."""
        return _empty, (self.kind, self.original), self.__getstate__()


def _empty(kind: type[Converted], original: type[nn.Module]) -> nn.Module:
    subclass = _subclass(kind, original)
    return subclass.__new__(subclass)


@cache
def _subclass(kind: type[Converted], original: type[nn.Module]) -> type[Converted]:
    names = {"__module__": kind.__module__, "original": original, "kind": kind, "__doc__": original.__doc__}
    return type(f"Converted{original.__name__}", (kind, original), names)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, or that which was replaced."""
    return module.original if isinstance(module, Converted) else type(module)


def replace_class(module: nn.Module, kind: type[Converted], given: Given | None = None) -> None:
    """Let a module that is not converted behave as `kind` says."""
    module.__class__ = _subclass(kind, type(module))
    object.__setattr__(module, "_flexdilated", given)


def check_restorable(name: str, module: nn.Module) -> None:
    """Raise ValueError for a module whose class was replaced once more since."""
    if isinstance(module, Converted) and type(module) is not _subclass(module.kind, module.original):
        raise ValueError(
            f"{name} was given another class, {type(module).__name__}, after it was converted: give attention back, or "
            "another pattern, before fully_shard and its like"
        )


def restore_class(module: nn.Module) -> None:
    """The module as it was before it was converted, where it was."""
    if isinstance(module, Converted):
        del module._flexdilated
        object.__setattr__(module, "__class__", module.original)
