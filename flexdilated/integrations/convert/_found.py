"""An attention module of a model, as the files of the libraries describe it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ._replaced_class import Converted, original_class


@dataclass(frozen=True, eq=False)
class Found:
    """An attention module: its name in the model, its class, and what can become of it.

    inner: the module whose class is replaced by `by`; None where `refused` says why none can be. cross: why its keys
    are not its queries' sequence, so that it is left unless a pattern is chosen for it; "" for self-attention.
    around: modules that must change with it.
    """

    name: str
    module: nn.Module
    num_heads: int = 0
    inner: nn.Module | None = None
    by: type[Converted] = Converted
    refused: str = ""
    cross: str = ""
    around: tuple[tuple[nn.Module, type[Converted]], ...] = ()

    @property
    def kind(self) -> str:
        """The class as its library exports it, such as torch.nn.MultiheadAttention."""
        return class_name(original_class(self.module))


def class_name(of: type) -> str:
    """The library and the class, without the modules between."""
    return f"{of.__module__.partition('.')[0]}.{of.__qualname__}"


def ancestors(name: str, model: nn.Module) -> list[nn.Module]:
    """The modules that hold the one of this name, outermost first."""
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))] if name else []
