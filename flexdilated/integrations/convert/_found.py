"""Attention modules found in a model, and the report of `convert`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from tabulate import tabulate
from torch import nn

from ...masks import Mixture, Pattern
from ...masks.core import shortened
from ._replaced_class import Converted, original_class


@dataclass(frozen=True, eq=False)
class Found:
    """An attention module: its name in the model, the module, and how it can be converted.

    inner: the module whose class is replaced by `by`; None if it cannot be converted. refused: the reason for that, or
    "". cross: why it is cross-attention, which needs a pattern chosen by name; "" for self-attention. around: enclosing
    modules that must be converted with it.
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
        """Library and original class, such as torch.MultiheadAttention."""
        return class_name(original_class(self.module))


def class_name(of: type) -> str:
    """Library and class name, without the modules between."""
    return f"{of.__module__.partition('.')[0]}.{of.__qualname__}"


def ancestors(name: str, model: nn.Module) -> list[nn.Module]:
    """Modules that contain the one of this name, outermost first."""
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))] if name else []


@dataclass(frozen=True)
class Replaced:
    """A converted attention module: its name in the model, kind, number of heads, and pattern."""

    name: str
    kind: str
    num_heads: int
    pattern: Pattern | Mixture


@dataclass(frozen=True)
class Left:
    """An attention module that was not converted: its name in the model, kind, and the reason."""

    name: str
    kind: str
    reason: str


_IN_PLACE = "convert(model, pattern) changes the model in place, so go on with the model"


@dataclass(frozen=True)
class Report:
    """Modules that `convert` replaced or left, in the order of `model.named_modules()`; prints as two tables."""

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]

    def __call__(self, *args: object, **named: object) -> NoReturn:
        """Raise TypeError, as a report is no model."""
        raise TypeError(f"a report of convert is no model: {_IN_PLACE}")

    if not TYPE_CHECKING:  # type checkers must still find missing names

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"a report of convert has no {name}: {_IN_PLACE}")

    def __str__(self) -> str:
        done = [(each.name, each.kind, each.num_heads, shortened(repr(each.pattern))) for each in self.replaced]
        rest = [(each.name, each.kind, each.reason) for each in self.left]
        tables = []
        if done:
            tables.append(tabulate(done, ("replaced", "kind", "heads", "pattern"), disable_numparse=True))
        if rest:
            tables.append(tabulate(rest, ("left", "kind", "why"), disable_numparse=True))
        return "\n\n".join(tables) or "no attention module"
