"""The attention modules of a model, as the files of the libraries describe them, and what convert did with each."""

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


@dataclass(frozen=True)
class Replaced:
    """An attention module that attends by a pattern: its name in the model, its kind, its heads, the pattern."""

    name: str
    kind: str
    num_heads: int
    pattern: Pattern | Mixture


@dataclass(frozen=True)
class Left:
    """An attention module that computes what it did: its name in the model, its kind, and why it was left."""

    name: str
    kind: str
    reason: str


_IN_PLACE = "convert(model, pattern) changes the model in place, so go on with the model"


@dataclass(frozen=True)
class Report:
    """What `convert` replaced and what it left, in the order of `model.named_modules()`; printed as two tables."""

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]

    def __call__(self, *args: object, **named: object) -> NoReturn:
        """Raise TypeError: it is no model."""
        raise TypeError(f"a report of convert is no model: {_IN_PLACE}")

    if not TYPE_CHECKING:  # a checker is to find names that are not there

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
